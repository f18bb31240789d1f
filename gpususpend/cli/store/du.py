"""nvsnap-gpu-suspend store du."""

from __future__ import annotations

from dataclasses import asdict

import click

from gpususpend.cli import storing


@click.command("du", short_help="Show which checkpoints use how much of a store.")
@storing.store_argument
@storing.store_options
def command(store_path: str, common: storing.Common) -> None:
    """Show the bytes in STORE that each checkpoint alone needs, and those that it shares with others.

    Removing a checkpoint and then collecting frees its unique bytes.

    \b
    Example:
      nvsnap-gpu-suspend store du /mnt/store
    """
    with common.reporting("store du") as report, common.working(report) as work:
        from chunkstore import Store
        from chunkstore.report import usage
        from gpususpend.progress import readable_bytes
        from gpususpend.report import table

        store = Store.open(store_path, files=work.files)
        found = usage(store)
        report.extra |= {"store": storing.store_data(store), "usage": asdict(found)}
        rows = [
            (item.path, readable_bytes(item.unique_bytes), readable_bytes(item.shared_bytes))
            for item in found.checkpoints
        ]
        report.lines += table(rows, ("CHECKPOINT", "UNIQUE", "SHARED"))
        report.lines.append(
            f"all chunks: {readable_bytes(found.stored_bytes)}; of these no complete checkpoint needs "
            f"{readable_bytes(found.unneeded_bytes)}; unfinished files: {readable_bytes(found.temporary_bytes)}"
        )
        report.lines += [f"{path}: not a complete checkpoint, not counted" for path in found.unread]
