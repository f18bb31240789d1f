"""nvsnap-gpu-suspend store ls."""

from __future__ import annotations

from dataclasses import asdict

import click

from gpususpend.cli import storing


@click.command("ls", short_help="List the checkpoints that a store knows.")
@storing.store_argument
@storing.store_options
def command(store_path: str, common: storing.Common) -> None:
    """List the checkpoints that STORE knows, with what is found in their directories.

    A checkpoint is complete, saving (somebody is writing it), aborted (its writer died) or unreachable.

    \b
    Example:
      nvsnap-gpu-suspend store ls /mnt/store
    """
    with common.reporting("store ls") as report, common.working(report) as work:
        from chunkstore import Store
        from chunkstore.report import list_checkpoints
        from gpususpend.report import table

        store = Store.open(store_path, files=work.files)
        found = list_checkpoints(store)
        report.extra |= {"store": storing.store_data(store), "checkpoints": [asdict(item) for item in found]}
        rows = [
            (item.path, item.state.value, item.created, item.ranks or "-", *storing.size_cells(item.sizes))
            for item in found
        ]
        report.lines += table(rows, ("CHECKPOINT", "STATE", "CREATED", "RANKS", *storing.SIZE_HEADS))
        report.lines += [f"{item.path}: {item.detail}" for item in found if item.detail]
