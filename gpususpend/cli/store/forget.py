"""nvsnap-gpu-suspend store forget."""

from __future__ import annotations

import click

from gpususpend.cli import options, storing


@click.command("forget", short_help="Give up a checkpoint that is gone for good.")
@storing.store_argument
@storing.directory_argument
@options.state_dir_option
@storing.store_options
def command(store_path: str, directory: str, state_dir: str | None, common: storing.Common) -> None:
    """Give up the checkpoint in DIR, which is gone for good: `store gc` then takes the chunks that it alone needed.

    Refused for a checkpoint that can be read: remove that one.  DIR is the path that `store ls` shows.

    \b
    Example:
      nvsnap-gpu-suspend store forget /mnt/store /mnt/lost-disk/llama
    """
    with common.reporting("store forget") as report, common.working(report) as work:
        from chunkstore import Store, roots

        store = Store.open(store_path, files=work.files)
        gone = roots.forget(store, directory, storing.unneeded(state_dir, directory, work))
        report.extra["forgotten"] = [vars(root) for root in gone]
        report.lines += [f"forgot checkpoint {root.id} at {root.path}" for root in gone]
