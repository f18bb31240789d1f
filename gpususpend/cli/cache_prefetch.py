"""nvsnap-gpu-suspend cache-prefetch."""

from __future__ import annotations

import click

from gpususpend.cli import storing

STATE = "what was copied stays in the cache, and the same command goes on from there"


@click.command("cache-prefetch", short_help="Copy a checkpoint's chunks from a store into a cache.")
@storing.store_argument
@storing.directory_argument
@storing.path_argument("cache_path", "CACHE")
@storing.threads_option
@storing.limit_option
@storing.store_options
def command(
    store_path: str, directory: str, cache_path: str, threads: int, limit: int | None, common: storing.Common
) -> None:
    """Copy what the checkpoint in DIR needs and CACHE lacks from STORE into CACHE, each chunk checked on the way.

    CACHE is made if it is missing.  Can be ended and repeated at any time: what is there is not copied again.

    \b
    Example:
      nvsnap-gpu-suspend cache-prefetch /mnt/store /mnt/ckpt/llama /nvme/cache
      nvsnap-gpu-suspend cache-prefetch --limit 500MiB/s /mnt/store /mnt/ckpt/llama /nvme/cache
    """
    with common.reporting("cache-prefetch") as report, common.working(report) as work:
        from chunkstore import Checkpoint, Store
        from chunkstore.transfer import prefetch
        from gpususpend.progress import readable_bytes

        checkpoint = Checkpoint.open(directory, files=work.files)
        store = Store.open(store_path, files=work.files)
        checkpoint.require_store(store)
        checkpoint.load()
        store.use_cache(cache_path)
        limiter = work.limiter(limit, STATE)
        done = prefetch(store, checkpoint, threads=threads, limiter=limiter, report=work.told("prefetch", STATE))
        report.already = done.copied_chunks == 0
        report.extra["prefetched"] = vars(done)
        report.lines.append(
            f"{done.copied_chunks} chunks copied ({readable_bytes(done.copied_bytes)}), "
            f"{done.present_chunks} were there ({readable_bytes(done.present_bytes)})"
        )
