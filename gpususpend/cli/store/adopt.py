"""nvsnap-gpu-suspend store adopt."""

from __future__ import annotations

import click

from gpususpend.cli import storing


@click.command("adopt", short_help="Tell a store where a checkpoint lies that was moved.")
@storing.store_argument
@storing.directory_argument
@storing.store_options
def command(store_path: str, directory: str, common: storing.Common) -> None:
    """Record in STORE that the checkpoint lies in DIR now, after its directory was moved or renamed.

    \b
    Example:
      mv /mnt/ckpt/llama /mnt/archive/llama
      nvsnap-gpu-suspend store adopt /mnt/store /mnt/archive/llama
    """
    with common.reporting("store adopt") as report, common.working(report) as work:
        from chunkstore import Store, roots

        root = roots.adopt(Store.open(store_path, files=work.files), directory)
        report.extra["adopted"] = vars(root)
        report.lines.append(f"checkpoint {root.id} is recorded at {root.path}")
