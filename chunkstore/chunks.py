"""Chunks in a directory: `chunks/ab/<hash>` and `tmp/`, of a store and of a cache alike.

Owns how one chunk is published, found, leased, read and removed. Must not know checkpoints, or which chunks are needed.

Two times of a chunk's file carry meaning, both by the filesystem's own clock: the modification time is when it was
published, and never changes; the access time is when it was last used. Leasing sets the second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import NamedTuple, Protocol

from chunkstore import errors
from chunkstore.format import CHUNKS, SWEEP_LOCK, TEMPORARY, Chunk, is_chunk_name
from chunkstore.hashing import Hash, is_zero, same
from chunkstore.io import Files, LocksUnsupported

_BATCH = 64  # removals of one thread for which the lock is held
_THREADS = 4  # of a removal: the disk's journal and its directories are waited for in each
_UNREADABLE = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.EMEDIUMTYPE}


class Entry(NamedTuple):
    """A chunk as its directory shows it; a cache has a hundred thousand of them, so each must be made quickly."""

    hash: str
    size_bytes: int  # -1: something else than a file lies there
    published_ns: int
    used_ns: int


class State(Enum):
    """What a chunk is found to be."""

    SOUND = "sound"
    DAMAGED = "damaged"
    MISSING = "missing"
    OTHER = "other"  # intact, but not the bytes at hand: two contents with one hash


class Backend(Protocol):
    """Where chunks lie: a directory, for a store and for a cache; an object store can be another.

    Where nothing else is said, methods raise `WriteFailed` or `Damaged`.
    """

    path: str

    def lookup(self, name: str) -> Entry | None:
        """Return what is known of a chunk without reading it."""

    def lease(self, name: str) -> Entry | None:
        """Mark a chunk as used now, so that no collector takes it; returns None if it is not there."""

    def lease_all(self, names: Sequence[str]) -> list[Entry | None]:
        """Lease many chunks, each as `lease` does, in order."""
        return [self.lease(name) for name in names]

    def settle(self, name: str) -> None:
        """Wait until a chunk that another writer published survives a power cut."""

    def read(self, chunk: Chunk, into: memoryview, use: bool = False) -> None:
        """Fill `into`, of the chunk's size; raises `ChunkMissing` or `Damaged`. The content is not checked.

        With `use`, the chunk counts as used now, and no collector removes it meanwhile, as far as it can be marked.
        """

    def compare(self, chunk: Chunk, data: memoryview) -> State:
        """Compare a chunk with the bytes that it should hold."""

    def write(self, chunk: Chunk, data: memoryview, replace: bool = False) -> bool:
        """Publish a chunk so that it survives a power cut; returns False if it was there and `replace` is not given."""

    def remove(self, names: Sequence[str], still: Callable[[Entry], bool]) -> list[Entry]:
        """Remove those chunks for which `still` holds at that moment and that nobody reads; returns the removed."""

    def entries(self) -> Iterator[Entry]:
        """Yield every chunk, in no order; raises OSError."""

    def reap(self, before_ns: int, dry_run: bool = False) -> int:
        """Remove what writers that died left before a time; returns the bytes."""

    def unfinished_bytes(self) -> int:
        """Return the bytes of everything that is being written, or was when its writer died; raises OSError."""


class ChunkDirectory(Backend):
    """The backend that is a directory. What it writes is on the disk when the call returns."""

    def __init__(self, path: str, files: Files, digest: Hash) -> None:
        self.path = path
        self.files = files
        self._hash = digest
        self._chunks = os.path.join(path, CHUNKS)
        self._temporary = os.path.join(path, TEMPORARY)
        self._sweep = os.path.join(path, SWEEP_LOCK)
        self._keeps_access_times: bool | None = None  # not looked at yet

    def make(self) -> None:
        """Make the directories that hold chunks, where they are missing; raises OSError.

        All of them at once, so that no writer publishes a chunk in a directory whose own name could be lost.
        """
        self.files.make_directory(self._temporary)
        self.files.make_directory(self._chunks)
        for number in range(256):
            with contextlib.suppress(FileExistsError):
                self.files.system.mkdir(os.path.join(self._chunks, f"{number:02x}"))
        self.files.sync_directory(self._chunks)

    def file_of(self, name: str) -> str:
        """Return the path of a chunk's file."""
        return os.path.join(self._chunks, name[:2], name)

    def lookup(self, name: str) -> Entry | None:
        """Return what is known of a chunk without reading it."""
        try:
            return _entry(name, self.files.system.stat(self.file_of(name)))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.unreadable("cannot look at", self.file_of(name), error) from error

    def lease(self, name: str) -> Entry | None:
        """Mark a chunk as used now; returns None if it is not there.

        The lock makes it certain that a collector that found the chunk unused a moment ago looks again.
        """
        path = self.file_of(name)
        try:
            with self._sweep_lock(exclusive=False), self.files.opened(path) as fd:
                self._mark_used(fd)
                return _entry(name, self.files.system.fstat(fd))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EMEDIUMTYPE and error.filename == path:
                return Entry(name, -1, 0, 0)
            raise errors.write_failed("cannot lease", path, error) from error

    def _mark_used(self, fd: int) -> None:
        """Set the access time, or where the filesystem keeps none both times: then the chunk counts as a new one."""
        if self._keeps_access_times is None:
            self._keeps_access_times = self.files.keeps_access_times(self._temporary)
        if self._keeps_access_times:
            self.files.system.mark_used(fd)
        else:
            self.files.system.mark_published(fd)

    @contextlib.contextmanager
    def _sweep_lock(self, exclusive: bool) -> Iterator[None]:
        """Hold the lock between leases and removals; where there are no locks, a lease goes without."""
        with contextlib.ExitStack() as stack:
            try:
                what = "leases and removals hold its lock for too long"
                stack.enter_context(self.files.locked(self._sweep, exclusive, what=what))
            except LocksUnsupported:
                if exclusive:
                    raise
            yield

    def settle(self, name: str) -> None:
        """Wait until a chunk that another writer published survives a power cut.

        That writer may be between giving it the name and syncing the directory.
        """
        directory = os.path.dirname(self.file_of(name))
        try:
            self.files.sync_directory(directory)
        except OSError as error:
            raise errors.write_failed("cannot sync", directory, error) from error

    def read(self, chunk: Chunk, into: memoryview, use: bool = False) -> None:
        """Fill `into`, of the chunk's size; the content is not checked."""
        name = str(chunk.hash)
        path = self.file_of(name)
        try:
            with self.files.peeked(path) as fd:
                if use:
                    with contextlib.suppress(OSError):  # no locks, or not ours to mark: it is read all the same
                        self.files.system.try_lock(fd, False)
                        self.files.system.mark_used(fd)
                self._read(fd, chunk, into, path)
        except FileNotFoundError:
            raise errors.ChunkMissing(hash=name, path=self.path, advice=errors.REPAIR) from None
        except OSError as error:
            raise errors.unreadable("cannot read", path, error) from error

    def _read(self, fd: int, chunk: Chunk, into: memoryview, path: str) -> None:
        size = self.files.system.fstat(fd).st_size
        count = self.files.read_all(fd, into[: chunk.size_bytes], path) if size == chunk.size_bytes else size
        if count != chunk.size_bytes:
            detail = f"{count} bytes instead of {chunk.size_bytes}"
            raise errors.ChunkDamaged(hash=chunk.hash, path=self.path, detail=detail, advice=errors.REPAIR)

    def compare(self, chunk: Chunk, data: memoryview) -> State:
        """Compare a chunk with the bytes that it should hold, through a small buffer."""
        path = self.file_of(str(chunk.hash))
        try:
            with self.files.peeked(path) as fd:
                if self.files.system.fstat(fd).st_size == len(data):
                    done = 0
                    for piece in self.files.pieces(fd, path):
                        if not same(piece, data[done : done + len(piece)]):
                            break
                        done += len(piece)
                    if done == len(data):
                        return State.SOUND
            with self.files.peeked(path) as fd:
                intact = self._hash.digest(self.files.pieces(fd, path)) == chunk.hash
            return State.OTHER if intact else State.DAMAGED
        except FileNotFoundError:
            return State.MISSING
        except OSError as error:
            if error.errno in _UNREADABLE:
                return State.DAMAGED
            raise errors.unreadable("cannot read", path, error) from error

    def write(self, chunk: Chunk, data: memoryview, replace: bool = False) -> bool:
        """Publish a chunk: content first, then its name, then the directory, each on the disk before the next.

        Returns False if the name is taken; only the repair of a chunk just found damaged replaces.
        """
        path = self.file_of(str(chunk.hash))
        directory = os.path.dirname(path)
        try:
            with self.files.temporary(self._temporary, data) as (fd, temporary):
                try:
                    fresh = self.files.publish(temporary, path, replace)
                except FileNotFoundError:
                    self.make()  # a copy of a store may lack its empty directories
                    fresh = self.files.publish(temporary, path, replace)
                if fresh:
                    self.files.system.mark_published(fd)
            if fresh:
                self.files.sync_directory(directory)
            return fresh
        except OSError as error:
            raise errors.write_failed("cannot write", path, error) from error

    def remove(self, names: Sequence[str], still: Callable[[Entry], bool]) -> list[Entry]:
        """Remove those chunks for which `still` holds at that moment and that nobody reads; raises OSError."""

        def batch(some: Sequence[str]) -> list[Entry]:
            return [entry for name in some if (entry := self._remove(name, still)) is not None]

        batches = [names[start : start + _BATCH] for start in range(0, len(names), _BATCH)]
        removed: list[Entry] = []
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="remove") as pool:
            for start in range(0, len(batches), _THREADS):
                with self._sweep_lock(exclusive=True):
                    for found in list(pool.map(batch, batches[start : start + _THREADS])):
                        removed += found
        return removed

    def _remove(self, name: str, still: Callable[[Entry], bool]) -> Entry | None:
        path, system = self.file_of(name), self.files.system
        flags = os.O_RDWR | os.O_NOFOLLOW  # NFS gives an exclusive lock only on what is open for writing
        with contextlib.suppress(FileNotFoundError), self.files.opened(path, flags) as fd:  # another has removed it
            entry = _entry(name, system.fstat(fd))
            if still(entry) and system.try_lock(fd, True):
                system.unlink(path)
                return entry
        return None

    def entries(self) -> Iterator[Entry]:
        """Yield every chunk, in no order; raises OSError. Files of other names are passed over."""
        for folder in sorted(self.files.system.list(self._chunks)):
            if len(folder) == 2:
                for name, status in self.files.system.scan(os.path.join(self._chunks, folder)):
                    if is_chunk_name(name, self._hash.digits) and name.startswith(folder):
                        yield _entry(name, status)

    def unfinished_bytes(self) -> int:
        """Return the bytes of everything that is being written, or was when its writer died; raises OSError."""
        return sum(status.st_size for _, status in self.files.system.scan(self._temporary))

    def reap(self, before_ns: int, dry_run: bool = False) -> int:
        """Remove temporary files last written before a time whose writer does not live; returns their bytes."""
        total = 0
        for name, status in list(self.files.system.scan(self._temporary)):
            path = os.path.join(self._temporary, name)
            if status.st_mtime_ns < before_ns and not self.files.is_locked(path):
                total += status.st_size
                if not dry_run:
                    with contextlib.suppress(FileNotFoundError):
                        self.files.system.unlink(path)
        return total


def _entry(name: str, status: os.stat_result) -> Entry:
    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return Entry(name, size, status.st_mtime_ns, max(status.st_mtime_ns, status.st_atime_ns))


def chunk_of(data: memoryview, digest: Hash) -> Chunk:
    """Return the chunk that a content is."""
    return Chunk(None if is_zero(data) else digest.digest(iter([data])), len(data))


def check_content(chunk: Chunk, data: memoryview, digest: Hash, path: str) -> None:
    """Raise `ChunkDamaged` if a content that was read does not have the hash that names it."""
    if digest.digest(iter([data[: chunk.size_bytes]])) != chunk.hash:
        detail = "its content does not have the hash that names it"
        raise errors.ChunkDamaged(hash=chunk.hash, path=path, detail=detail, advice=errors.REPAIR)
