"""nvsnap-gpu-suspend store forget."""

from __future__ import annotations

import click

from gpususpend.cli import storing


@click.command("forget", short_help="Give up a checkpoint that is gone for good.")
@storing.store_argument
@storing.directory_argument
@storing.store_options
def command(store_path: str, directory: str, common: storing.Common) -> None:
    """Give up the checkpoint in DIR, which is gone for good: `store gc` then takes the chunks that it alone needed.

    Refused for a checkpoint that can be read: remove that one.  DIR is the path that `store ls` shows.

    \b
    Example:
      nvsnap-gpu-suspend store forget /mnt/store /mnt/lost-disk/llama
    """
    with common.reporting("store forget") as report, common.working(report) as work:
        from chunkstore import Store, roots

        gone = roots.forget(Store.open(store_path, files=work.files), directory)
        report.extra["forgotten"] = [vars(root) for root in gone]
        report.lines += [f"forgot checkpoint {root.id} at {root.path}" for root in gone]
