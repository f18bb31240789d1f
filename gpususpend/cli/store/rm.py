"""nvsnap-gpu-suspend store rm."""

from __future__ import annotations

import click

from gpususpend.cli import options, storing


@click.command("rm", short_help="Remove a checkpoint.")
@storing.store_argument
@storing.directory_argument
@options.state_dir_option
@storing.store_options
def command(store_path: str, directory: str, state_dir: str | None, common: storing.Common) -> None:
    """Remove the checkpoint in DIR, also what a save left there that died.

    Its chunks stay in STORE until the next `store gc`.  Other files in DIR stay.
    Refused while a suspended group needs it, or a process under the shim does not say whether it does.

    \b
    Example:
      nvsnap-gpu-suspend store rm /mnt/store /mnt/ckpt/old
    """
    with common.reporting("store rm") as report, common.working(report) as work:
        from chunkstore import Store, save

        store = Store.open(store_path, files=work.files)
        ids = save.remove(store, directory, storing.unneeded(state_dir, directory, work))
        report.extra["removed"] = ids
        report.lines += [f"removed checkpoint {id}" for id in ids]
