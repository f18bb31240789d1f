"""nvsnap-gpu-suspend store rm."""

from __future__ import annotations

import click

from gpususpend.cli import storing


@click.command("rm", short_help="Remove a checkpoint.")
@storing.store_argument
@storing.directory_argument
@storing.store_options
def command(store_path: str, directory: str, common: storing.Common) -> None:
    """Remove the checkpoint in DIR, also what a save left there that died.

    Its chunks stay in STORE until the next `store gc`.  Other files in DIR stay.

    \b
    Example:
      nvsnap-gpu-suspend store rm /mnt/store /mnt/ckpt/old
    """
    with common.reporting("store rm") as report, common.working(report) as work:
        from chunkstore import Store, save

        ids = save.remove(Store.open(store_path, files=work.files), directory)
        report.extra["removed"] = ids
        report.lines += [f"removed checkpoint {id}" for id in ids]
