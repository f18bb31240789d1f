"""Chunks by the hundred: read, checked or copied by several threads through a buffer each, with progress and a rate.

Owns prefetching into a cache and copying a checkpoint to another store. Memory: one buffer of a chunk's size a thread.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from chunkstore import errors
from chunkstore.checkpoint import Checkpoint
from chunkstore.format import Allocation, Chunk
from chunkstore.place import refuse_own
from chunkstore.save import Save
from chunkstore.store import How, Put, Store

THREADS = 4

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Progress:
    """How far a transfer is; the first of one says that nothing is done."""

    done_chunks: int
    total_chunks: int
    done_bytes: int
    total_bytes: int


Report = Callable[[Progress], None]


def each(items: Iterable[_T], work: Callable[[_T, memoryview], _R], buffer_bytes: int, threads: int) -> Iterator[_R]:
    """Yield `work(item, buffer)` for each item, in order; the buffer is page-aligned and the thread's own.

    Only a few items are taken ahead of the caller, so that a slow caller slows the work. The first exception ends it.
    """
    local = threading.local()

    def task(item: _T) -> _R:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(mmap.mmap(-1, buffer_bytes))
        return work(item, local.buffer)

    pending: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="chunkstore") as pool:
        try:
            for item in items:
                pending.append(pool.submit(task, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


class Limiter:
    """Keeps a transfer below a rate, in bytes a second; None is no limit."""

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if rate is not None and rate <= 0:
            raise ValueError("the rate must be positive")
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._next = clock()

    def passed(self, size_bytes: int) -> None:
        """Wait until the bytes that passed so far are within the rate; time that was not used is not saved up."""
        if self._rate is not None:
            self._next = max(self._next, self._clock()) + size_bytes / self._rate
            self._sleep(max(0.0, self._next - self._clock()))


@dataclass(frozen=True)
class Prefetched:
    """What a prefetch found in the cache and what it copied, in chunks and bytes."""

    present_chunks: int
    present_bytes: int
    copied_chunks: int
    copied_bytes: int


def prefetch(
    store: Store,
    checkpoint: Checkpoint,
    *,
    threads: int = THREADS,
    limiter: Limiter | None = None,
    report: Report | None = None,
) -> Prefetched:
    """Copy the chunks of a checkpoint that the store's cache lacks into it, each checked against its hash.

    Can be cut off at any time and repeated: what is there is not copied again. Raises `WrongStore`, `NoRoom`, `Damaged`
    for a chunk that the store does not have intact, `WriteFailed` where the cache takes no more.
    """
    cache = store.cache
    if cache is None:
        raise store.cache_error or ValueError("the store was opened without a cache")
    checkpoint.require_store(store)
    chunks = list(checkpoint.stored_chunks().values())
    missing = [chunk for chunk in chunks if not cache.has(chunk)]
    tally = Tally(missing, limiter, report)
    cache.chunks.files.room(cache.path).require(cache.path, tally.total_bytes, tally.total_chunks)

    def copy(chunk: Chunk, buffer: memoryview) -> Chunk:
        view = buffer[: chunk.size_bytes]
        store.read_from_store(chunk, view)
        cache.add(chunk, view)
        return chunk

    for chunk in each(missing, copy, store.chunk_size_bytes, threads):
        tally.passed(chunk.size_bytes)
    total = sum(chunk.size_bytes for chunk in chunks)
    return Prefetched(len(chunks) - len(missing), total - tally.total_bytes, len(missing), tally.total_bytes)


class Tally:
    """Counts the chunks that passed, reports them, and keeps the rate."""

    def __init__(self, chunks: list[Chunk], limiter: Limiter | None, report: Report | None) -> None:
        self.total_chunks = len(chunks)
        self.total_bytes = sum(chunk.size_bytes for chunk in chunks)
        self._limiter = limiter
        self._report = report
        self._done_chunks = self._done_bytes = 0
        self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            self._report(Progress(self._done_chunks, self.total_chunks, self._done_bytes, self.total_bytes))

    def passed(self, size_bytes: int) -> None:
        """Count one chunk."""
        self._done_chunks += 1
        self._done_bytes += size_bytes
        self._tell()
        if self._limiter is not None:
            self._limiter.passed(size_bytes)


@dataclass(frozen=True)
class Copied:
    """A copied checkpoint, and what became of its stored chunks, in bytes."""

    checkpoint: Checkpoint
    new_bytes: int
    known_bytes: int


def copy_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    target: Store,
    directory: str | os.PathLike[str],
    *,
    threads: int = THREADS,
    limiter: Limiter | None = None,
    report: Report | None = None,
) -> Copied:
    """Copy a checkpoint with its chunks to another store, as a new checkpoint in `directory`.

    Every chunk is checked on the way. Each store may use its own hash; their chunk sizes must be equal. Raises
    `Incompatible`, `WrongStore`, `NoRoom`, `Damaged` for the one store, `WriteFailed` for the other; then there is no
    new checkpoint.
    """
    checkpoint.require_store(store)
    if store.chunk_size_bytes != target.chunk_size_bytes:
        sizes = {"theirs": target.chunk_size_bytes, "ours": store.chunk_size_bytes}
        raise errors.Incompatible(path=target.path, what="chunk size", **sizes)
    refuse_own(store.path, os.fspath(directory))
    chunks = checkpoint.stored_chunks()
    _require_room(target, list(chunks.values()), store.facts.hash)
    tally = Tally(list(chunks.values()), limiter, report)

    def copy(item: tuple[str, Chunk], buffer: memoryview) -> tuple[str, Put]:
        name, chunk = item
        store.get(chunk, buffer)
        return name, target.put(buffer[: chunk.size_bytes])

    with Save.begin(target, directory, checkpoint.manifest.facts) as save:
        puts: dict[str, Put] = {}
        for name, put in each(chunks.items(), copy, store.chunk_size_bytes, threads):
            puts[name] = put
            tally.passed(put.chunk.size_bytes)
        for rank in checkpoint.ranks():
            save.add_rank(rank.inner_pid, rank.facts)
            for allocation in rank.allocations:
                save.add(rank.inner_pid, _renamed(allocation, puts))
        copied = save.commit()
    new = sum(put.chunk.size_bytes for put in puts.values() if put.how is not How.KNOWN)
    return Copied(copied, new, tally.total_bytes - new)


def _require_room(target: Store, chunks: list[Chunk], digest: str) -> None:
    """Raise `NoRoom` if what a store lacks would not fit; where its hash is another one, nobody knows what that is."""
    room = target.room()
    if target.facts.hash == digest and not room.takes(sum(chunk.size_bytes for chunk in chunks), len(chunks)):
        lacking = [chunk for chunk in chunks if target.chunks.lookup(str(chunk.hash)) is None]
        room.require(target.path, sum(chunk.size_bytes for chunk in lacking), len(lacking))


def _renamed(allocation: Allocation, puts: dict[str, Put]) -> Allocation:
    chunks = tuple(puts[chunk.hash].chunk if chunk.hash is not None else chunk for chunk in allocation.chunks)
    return Allocation(
        allocation.device, allocation.address, allocation.size_bytes, chunks, allocation.properties, allocation.access
    )
