"""nvsnap-gpu-suspend cache-gc."""

from __future__ import annotations

import click

from gpususpend.cli import options, storing


@click.command("cache-gc", short_help="Make a cache smaller.")
@storing.path_argument("cache_path", "CACHE")
@click.argument("size", type=options.size, metavar="SIZE")
@storing.dry_run_option
@storing.store_options
def command(cache_path: str, size: int, dry_run: bool, common: storing.Common) -> None:
    """Remove the least recently used chunks from CACHE until at most SIZE is left; never one that is being read.

    SIZE is such as 200GiB, 1.5TiB or 500GB; a bare number counts GiB.  Whatever is removed is still in the store.

    \b
    Example:
      nvsnap-gpu-suspend cache-gc /nvme/cache 200GiB
      nvsnap-gpu-suspend cache-gc --dry-run /nvme/cache 0
    """
    with common.reporting("cache-gc") as report, common.working(report) as work:
        from chunkstore import Cache, cache
        from gpususpend.progress import readable_bytes

        done = cache.collect(Cache.find(cache_path, work.files), size, dry_run)
        report.extra |= {"dry_run": dry_run, "collected": vars(done)}
        report.lines.append(
            f"{done.removed_chunks} chunks {storing.removed(dry_run)} ({readable_bytes(done.removed_bytes)}), "
            f"{done.kept_chunks} stay ({readable_bytes(done.kept_bytes)})"
        )
        if done.in_use_chunks:
            report.lines.append(f"{done.in_use_chunks} of these were to go, and are in use")
        report.lines += storing.leftovers(done.temporary_bytes, dry_run)
