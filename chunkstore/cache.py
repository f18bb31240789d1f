"""A cache of chunks near the reader: filled by saves and by prefetching, never by loads.

Owns reading through, writing through, and collecting by last use. A cache is never needed: whatever fails in it is
told, and the store serves instead. Must not know checkpoints.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from chunkstore import errors, format
from chunkstore.chunks import ChunkDirectory, Entry, check_content
from chunkstore.format import Chunk, FormatError, StoreFacts
from chunkstore.hashing import Hash, hash_by_name
from chunkstore.io import Files, LocksUnsupported
from chunkstore.place import Directory, refuse_foreign

STALE_TEMPORARY_S = 3600.0


class Cache:
    """A cache of one store. Methods may be called from any thread; only `add` raises for a cache that fails."""

    def __init__(self, path: str, facts: StoreFacts, files: Files, digest: Hash) -> None:
        self.path = path
        self.facts = facts
        self.chunks = ChunkDirectory(path, files, digest)
        self._files = files
        self._hash = digest
        self._bypassed = False
        self._failed = 0  # chunks that lay there and were not to be had
        self._guard = threading.Lock()

    @classmethod
    def open(cls, path: str, store: StoreFacts, files: Files, digest: Hash, make: bool = True) -> Cache:
        """Open the cache at `path` for a store; with `make`, one that is missing is made (its parent must exist).

        Raises `WrongStore` if it belongs to another store, `NotAStore` if other files lie there.
        """
        path = os.path.abspath(path)
        try:
            cache = cls.find(path, files)
        except errors.NotAStore:
            if not make:
                raise
            cls._make(path, store, files, digest)
            cache = cls.find(path, files)
        cache.require(store)
        return cache

    @classmethod
    def find(cls, path: str | os.PathLike[str], files: Files | None = None) -> Cache:
        """Open the cache at `path`, whichever store's it is.

        Raises `NotAStore` if there is none, `UnknownVersion`, `NoHash`, `Damaged`, `WriteFailed`.
        """
        files = files or Files()
        path = os.path.abspath(path)
        if os.path.lexists(os.path.join(path, format.STORE_FILE)):
            # Whoever took it for a cache would collect chunks that checkpoints need.
            raise errors.NotAStore(path=path, detail="it is a store", advice="name a cache, a directory of its own")
        document = os.path.join(path, format.CACHE_FILE)
        try:
            facts = StoreFacts.decode(files.read_document(document), format.CACHE)
        except FileNotFoundError:
            detail = f"there is no {format.CACHE_FILE}"
            raise errors.NotAStore(path=path, detail=detail, advice="name a cache, or mount it") from None
        except OSError as error:
            raise errors.of_cache(errors.write_failed("cannot use the cache", path, error)) from error
        except FormatError as error:
            raise errors.of_cache(format.not_decoded(document, format.CACHE, error)) from None
        return cls(path, facts, files, hash_by_name(facts.hash, path))

    @staticmethod
    def _make(path: str, store: StoreFacts, files: Files, digest: Hash) -> None:
        try:
            files.make_directory(path)
            refuse_foreign(files, path, format.CACHE_FILE)
            ChunkDirectory(path, files, digest).make()
            files.write_document(os.path.join(path, format.CACHE_FILE), store.encode(format.CACHE))
        except OSError as error:
            raise errors.of_cache(errors.write_failed("cannot use the cache", path, error)) from error

    def require(self, store: StoreFacts | None) -> None:
        """Raise `WrongStore` if it is not a cache of this store; None is one that is not made yet."""
        if self.facts != store:
            raise errors.WrongStore(
                path=self.path, theirs=self.facts.id, store="the store named", ours=store.id if store else "a new one",
                advice="name another cache, or none",
            )  # fmt: skip

    def has(self, chunk: Chunk) -> bool:
        """Tell whether a chunk lies there with its full size."""
        try:
            entry = self.chunks.lookup(str(chunk.hash))
        except errors.Damaged:
            return False
        return entry is not None and entry.size_bytes == chunk.size_bytes

    def fetch(self, chunk: Chunk, into: memoryview, verify: bool = True) -> bool:
        """Fill `into` with a chunk; returns False if the cache does not have it intact.

        What is damaged is removed, so that the next save or prefetch brings it again. Nothing is added.
        """
        try:
            self.chunks.read(chunk, into, use=True)
            if verify:
                check_content(chunk, into, self._hash, self.path)
        except errors.ChunkMissing:
            return False
        except errors.ChunkDamaged as error:
            self._drop(chunk)
            self._tell_first(f"{errors.of_cache(error)}. The cache drops it")
            return False
        except errors.Damaged as error:
            self._tell_first(f"{errors.of_cache(error)}. The store is read instead")
            return False
        return True

    def _tell_first(self, what: str) -> None:
        with self._guard:
            self._failed += 1
            first = self._failed == 1
        if first:
            self._files.tell(what)

    def tell_failed(self) -> None:
        """Tell how many chunks `fetch` found damaged or could not read, where the first was not the only one."""
        with self._guard:
            failed, self._failed = self._failed, 0
        if failed > 1:
            self._files.tell(
                f"{failed} chunks in all of cache {self.path} were damaged or could not be read; the store was read"
            )

    def _drop(self, chunk: Chunk) -> None:
        try:
            self._files.system.unlink(self.chunks.file_of(str(chunk.hash)))
        except OSError:
            pass  # a cache that is mounted read-only keeps it; the next reader finds it damaged again

    def keep(self, chunk: Chunk, data: memoryview) -> bool:
        """Add a chunk; returns whether it lies there now. After a failure the cache is bypassed, and that is told."""
        if self._bypassed:
            return False
        try:
            self.add(chunk, data)
        except errors.StoreError as error:
            with self._guard:  # many threads find a disk full at once
                first, self._bypassed = not self._bypassed, True
            if first:
                self._files.tell(f"the cache is bypassed from here on: {error}")
            return False
        return True

    def add(self, chunk: Chunk, data: memoryview) -> None:
        """Add a chunk, or mark it as used now if it lies there; raises `WriteFailed`."""
        try:
            entry = self.chunks.lease(str(chunk.hash))
            if entry is None or entry.size_bytes != chunk.size_bytes:
                self.chunks.write(chunk, data, replace=entry is not None)  # what has the name otherwise is cut short
        except errors.StoreError as error:
            raise errors.of_cache(error) from error


@dataclass(frozen=True)
class Collected:
    """What a collection removed (or would remove), and what is left, in chunks and bytes."""

    removed_chunks: int
    removed_bytes: int
    kept_chunks: int
    kept_bytes: int
    in_use_chunks: int  # that would have gone, but were being read or used again
    temporary_bytes: int  # left by writers that died


def collect(cache: Cache, limit_bytes: int, dry_run: bool = False) -> Collected:
    """Remove the least recently used chunks until at most `limit_bytes` are left; never one that is being read.

    What is being written counts, too: it takes room, and will be a chunk.
    Raises `WriteFailed` if the cache cannot be read or changed, `NoLocks` if its filesystem has no locks.
    """
    place = Directory(cache.path, cache.chunks.files)
    try:
        with place.collecting():
            now_ns = place.clock_ns()
            temporary = cache.chunks.reap(now_ns - int(STALE_TEMPORARY_S * 1e9), dry_run)
            unfinished = cache.chunks.unfinished_bytes() - (temporary if dry_run else 0)
            entries = sorted(cache.chunks.entries(), key=lambda entry: entry.used_ns)
            chosen = _oldest(entries, limit_bytes - unfinished)
            used = {entry.hash: entry.used_ns for entry in chosen}
            names = list(used)
            removed = chosen if dry_run else cache.chunks.remove(names, lambda entry: entry.used_ns == used[entry.hash])
    except OSError as error:
        raise errors.of_cache(collection_failed(cache.path, error)) from error
    removed_bytes = sum(entry.size_bytes for entry in removed)
    return Collected(
        removed_chunks=len(removed),
        removed_bytes=removed_bytes,
        kept_chunks=len(entries) - len(removed),
        kept_bytes=sum(entry.size_bytes for entry in entries) - removed_bytes,
        in_use_chunks=len(chosen) - len(removed),
        temporary_bytes=temporary,
    )


def _oldest(entries: list[Entry], limit_bytes: int) -> list[Entry]:
    """Return those that have to go, least recently used first."""
    excess = sum(entry.size_bytes for entry in entries) - limit_bytes
    chosen = []
    for entry in entries:
        if excess <= 0:
            break
        chosen.append(entry)
        excess -= entry.size_bytes
    return chosen


def collection_failed(path: str, error: OSError) -> errors.StoreError:
    """Return the error for a collection that could not go on; what was removed until then was not needed."""
    if isinstance(error, LocksUnsupported):
        return errors.NoLocks(path=path, detail=error.strerror)
    return errors.write_failed("cannot collect in", path, error)
