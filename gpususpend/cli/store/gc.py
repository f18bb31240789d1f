"""nvsnap-gpu-suspend store gc."""

from __future__ import annotations

import click

from gpususpend.cli import options, storing
from gpususpend.defaults import GRACE_S


@click.command("gc", short_help="Remove the chunks that no checkpoint needs.")
@storing.store_argument
@click.option(
    "--grace", "grace_s", type=options.Seconds(above_zero=False), default=GRACE_S, show_default=True, metavar="SECONDS",
    help="Keep what was stored or used within this time.",
)  # fmt: skip
@storing.dry_run_option
@storing.store_options
def command(store_path: str, grace_s: float, dry_run: bool, common: storing.Common) -> None:
    """Remove from STORE what no checkpoint needs: chunks, files of dead writers, records of dead saves.

    Safe beside saves and loads.  Refused while a checkpoint that STORE knows cannot be read: mount or repair it, or
    `store forget` it if it is gone for good.

    \b
    Example:
      nvsnap-gpu-suspend store gc --dry-run /mnt/store
      nvsnap-gpu-suspend store gc /mnt/store
    """
    with common.reporting("store gc") as report, common.working(report) as work:
        from chunkstore import Store, gc
        from gpususpend.progress import readable_bytes

        swept = gc.collect(Store.open(store_path, files=work.files), grace_s=grace_s, dry_run=dry_run)
        report.extra |= {"dry_run": dry_run, "collected": vars(swept)}
        report.lines += [
            f"{swept.removed_chunks} chunks {storing.removed(dry_run)} ({readable_bytes(swept.removed_bytes)})",
            f"{swept.needed_chunks} are needed by {swept.checkpoints} checkpoints "
            f"({readable_bytes(swept.needed_bytes)})",
            f"{swept.young_chunks} are not needed yet: within the grace, or of a save under way "
            f"({readable_bytes(swept.young_bytes)})",
            *storing.leftovers(swept.temporary_bytes, dry_run),
            *(
                f"{path}: a save that never ended, its record {storing.removed(dry_run)}"
                for path in swept.dropped_roots
            ),
        ]
