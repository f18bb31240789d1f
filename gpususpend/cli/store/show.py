"""nvsnap-gpu-suspend store show."""

from __future__ import annotations

from dataclasses import asdict

import click

from gpususpend.cli import storing


@click.command("show", short_help="Show what is in a checkpoint.")
@storing.directory_argument
@storing.store_options
def command(directory: str, common: storing.Common) -> None:
    """Show the ranks of the checkpoint in DIR and what they take.

    MEMORY is the size of the allocations, ZEROS how much of it is zeros, STORED the chunks of it, each counted once.

    \b
    Example:
      nvsnap-gpu-suspend store show /mnt/ckpt/llama
    """
    with common.reporting("store show") as report, common.working(report) as work:
        from chunkstore import Checkpoint
        from chunkstore.report import show, sizes_of
        from gpususpend.report import table

        checkpoint = Checkpoint.open(directory, files=work.files)
        manifest, ranks, sizes = checkpoint.manifest, show(checkpoint), sizes_of(checkpoint)
        report.extra["checkpoint"] = {
            "id": manifest.id, "path": checkpoint.path, "created": manifest.created, "kind": manifest.kind,
            "store": vars(manifest.store), "facts": manifest.facts, "sizes": vars(sizes),
            "ranks": [asdict(rank) for rank in ranks],
        }  # fmt: skip
        report.lines.append(
            f"checkpoint {manifest.id} ({manifest.kind}) of {manifest.created}, "
            f"in store {manifest.store.id} ({manifest.store.hash})"
        )
        rows = [(str(rank.inner_pid), rank.allocations, *storing.size_cells(rank.sizes)) for rank in ranks]
        rows.append(("all", sum(rank.allocations for rank in ranks), *storing.size_cells(sizes)))
        report.lines += table(rows, ("RANK", "ALLOCATIONS", *storing.SIZE_HEADS))
