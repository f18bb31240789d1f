"""nvsnap-gpu-suspend store copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpususpend.cli import storing

if TYPE_CHECKING:
    from chunkstore import Files, Store

STATE = "there is no new checkpoint; what was copied serves the same command if no collection takes it before"


@click.command("copy", short_help="Copy a checkpoint with its chunks to another store.")
@storing.store_argument
@storing.directory_argument
@storing.place_argument("target_path", "TARGET")
@storing.path_argument("new_directory", "NEWDIR")
@click.option(
    "--hash", "hash_name", type=click.Choice(["xxh3-128", "blake3"]), help="Hash of TARGET.  [default: that of STORE]"
)
@storing.threads_option
@storing.limit_option
@storing.store_options
def command(
    store_path: str, directory: str, target_path: str, new_directory: str, hash_name: str | None, threads: int,
    limit: int | None, common: storing.Common,
) -> None:  # fmt: skip
    """Copy the checkpoint in DIR from STORE to the store TARGET, as a new checkpoint in NEWDIR.

    TARGET and NEWDIR are made if they are missing.  Every chunk is checked on the way, and only what TARGET lacks is
    written.  If it fails or is ended, there is no new checkpoint, and what was copied serves the next attempt.

    \b
    Example:
      nvsnap-gpu-suspend store copy /mnt/store /mnt/ckpt/llama /backup/store /backup/ckpt/llama
    """
    with common.reporting("store copy") as report, common.working(report) as work:
        from chunkstore import Checkpoint, Store
        from chunkstore.place import refuse_own
        from chunkstore.save import check_directory
        from chunkstore.transfer import copy_checkpoint
        from gpususpend.progress import readable_bytes

        checkpoint = Checkpoint.open(directory, files=work.files)
        store = Store.open(store_path, files=work.files)
        checkpoint.require_store(store)
        checkpoint.load()
        refuse_own(store.path, new_directory)
        check_directory(work.files, new_directory, target_path)
        target = _target(target_path, store, hash_name, work.files)
        copied = copy_checkpoint(
            store, checkpoint, target, new_directory,
            threads=threads, limiter=work.limiter(limit, STATE), report=work.told("copy", STATE),
        )  # fmt: skip
        report.extra["copied"] = {
            "id": copied.checkpoint.id, "path": copied.checkpoint.path,
            "new_bytes": copied.new_bytes, "known_bytes": copied.known_bytes,
        }  # fmt: skip
        report.lines.append(
            f"{copied.checkpoint.path}: {readable_bytes(copied.new_bytes)} written, "
            f"{readable_bytes(copied.known_bytes)} were there"
        )


def _target(path: str, source: Store, hash_name: str | None, files: Files) -> Store:
    """Open the target, or make it like the source."""
    from chunkstore import Store
    from chunkstore.errors import NotAStore

    if hash_name is None:
        try:
            return Store.open(path, files=files)
        except NotAStore:
            hash_name = source.facts.hash
    return Store.create(path, hash=hash_name, chunk_size_bytes=source.chunk_size_bytes, files=files)
