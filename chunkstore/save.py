"""Saving a checkpoint: begin, add allocations whose chunks are in the store, commit.

Owns the order in which things reach the disk, so that at any moment a power cut leaves either a whole checkpoint or
none: the root, chunks, rank files, and the manifest last, by one rename. Removal, the same backwards, is here too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from chunkstore import errors, format, roots
from chunkstore.checkpoint import Checkpoint, read_save_id
from chunkstore.format import Allocation, FormatError, Manifest, Rank, RankFile, Root
from chunkstore.io import TEMPORARY_SUFFIX, Files, LocksUnsupported
from chunkstore.place import refuse_own
from chunkstore.store import Store

LOCK_WAIT_S = 2.0  # a collector looks at the lock for a moment


class Save:
    """A save under way. As a context manager it aborts unless it was committed.

    Chunks that `Store.put` returned after `begin` are safe from collectors until the commit, and then for as long as
    the checkpoint exists. Methods may be called from any thread.
    """

    def __init__(self, store: Store, path: str, id: str, lock_fd: int, facts: Mapping[str, Any], made: bool) -> None:
        self.store = store
        self.path = path
        self.id = id
        self.created = format.now()
        self._lock_fd: int | None = lock_fd
        self._facts = facts
        self._made = made  # the directory was not there
        self._published = False  # the manifest may be there, and is this save's
        self._guard = threading.Lock()
        self._allocations: dict[int, list[Allocation]] = {}
        self._rank_facts: dict[int, Mapping[str, Any]] = {}

    @classmethod
    def begin(cls, store: Store, directory: str | os.PathLike[str], facts: Mapping[str, Any] | None = None) -> Save:
        """Begin a checkpoint in a directory, which is made if it is missing (its parent must exist).

        `facts` are JSON values of the caller's for the manifest. What a save that died left there is cleared away.
        Raises `CheckpointExists`, `Busy` if another save is writing there, `NotAStore` for a directory that will not
        do, `WriteFailed`.
        """
        path = os.path.realpath(directory)
        id = secrets.token_hex(16)
        check_directory(store.files, path, store.path, store.cache.path if store.cache is not None else "")
        store.begin_save()
        try:
            made = store.files.make_directory(path)
            fd = lock_directory(store.files, path)
        except OSError as error:
            raise errors.write_failed("cannot begin a checkpoint in", path, error) from error
        save = cls(store, path, id, fd, facts or {}, made)
        try:
            save._take_over(fd)
            save._mark(fd)
        except OSError as error:
            raise errors.write_failed("cannot begin a checkpoint in", path, error) from error
        return save

    def _take_over(self, fd: int) -> None:
        """Clear away what a save that died left in the locked directory; `save.lock` stays as it is if that fails."""
        files = self.store.files
        try:
            _refuse_existing(files, self.path)
            try:
                id = read_save_id(files, self._file(format.SAVE_FILE))
            except FormatError:  # empty, or cut off: then its root was never recorded
                pass
            else:
                roots.drop(self.store, id)
            _clear(files, self.path, manifest=False)
        except BaseException:
            self._unlock(finished=files.system.fstat(fd).st_size == 0)
            raise

    def _mark(self, fd: int) -> None:
        """Say whose the directory is, before the store hears of it.

        A root that leads to a directory without this file leads to a filesystem that is not mounted.
        """
        try:
            mark_directory(self.store.files, self.path, fd, self.id)
            self._record_root()
        except BaseException:
            self.abort()
            raise

    def _record_root(self) -> None:
        roots.record(self.store, Root(self.id, self.path, self.created))

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def add_rank(self, inner_pid: int, facts: Mapping[str, Any] | None = None) -> None:
        """Add a rank, or the caller's facts (JSON values) to one."""
        self._require_open(inner_pid)
        with self._guard:
            self._allocations.setdefault(inner_pid, [])
            self._rank_facts[inner_pid] = facts or {}

    def add(self, inner_pid: int, allocation: Allocation) -> None:
        """Add an allocation of a rank, whose chunks `Store.put` returned since `begin`."""
        self._require_open(inner_pid)
        format.require_whole(allocation, self.store.chunk_size_bytes)
        with self._guard:
            self._allocations.setdefault(inner_pid, []).append(allocation)

    def _require_open(self, inner_pid: int) -> None:
        if self._lock_fd is None:
            raise ValueError("this save has ended")
        if inner_pid <= 0:
            raise ValueError(f"{inner_pid} is no pid")

    def commit(self) -> Checkpoint:
        """Make the checkpoint exist, and return it.

        Raises `WriteFailed`, and then aborts: there is no checkpoint, and what was there before is as it was.
        """
        if self._lock_fd is None:
            raise ValueError("this save has ended")
        try:
            return self._commit()
        except errors.CheckpointExists:
            self._unlock()  # another writer's, where there are no locks: not ours to clear
            raise
        except OSError as error:
            self.abort()
            raise errors.write_failed("cannot write the checkpoint", self.path, error) from error
        except BaseException:
            self.abort()
            raise

    def _commit(self) -> Checkpoint:
        files = self.store.files
        ranks = [
            Rank(pid, tuple(items), self._rank_facts.get(pid, {})) for pid, items in sorted(self._allocations.items())
        ]
        if not roots.is_recorded(self.store, self.id):
            self._record_root()  # somebody removed the record
        self._require_chunks(ranks)
        written = []
        for rank in ranks:
            content = rank.encode(self.store.chunk_size_bytes)
            files.write_document(self._file(format.rank_file(rank.inner_pid)), content, replace=True)
            written.append(RankFile(rank.inner_pid, len(content), format.checksum(content)))
        manifest = Manifest(self.id, self.created, self.store.facts, tuple(written), dict(self._facts))
        self._published = True
        if not files.write_document(self._file(format.MANIFEST_FILE), manifest.encode()):
            raise errors.CheckpointExists(path=self.path, id="(of another writer)")
        self._unlock(finished=True)
        return Checkpoint(self.path, manifest, files)

    def _require_chunks(self, ranks: list[Rank]) -> None:
        """Lease every chunk once more, and see that the store has it, before anybody relies on it."""
        every = (chunk for rank in ranks for item in rank.allocations for chunk in item.chunks)
        chunks = {chunk.hash: chunk for chunk in every if chunk.hash is not None}
        for (name, chunk), entry in zip(chunks.items(), self.store.chunks.lease_all([*chunks]), strict=True):
            if entry is None or entry.size_bytes != chunk.size_bytes:
                raise errors.WriteFailed(
                    what="cannot write the checkpoint", path=self.path,
                    detail=f"chunk {name} is no longer in {self.store.path}", advice="save again",
                )  # fmt: skip

    def abort(self) -> None:
        """End the save without a checkpoint. Chunks stay until a collection. Raises nothing."""
        if self._lock_fd is None:
            return
        files = self.store.files
        try:
            _clear(files, self.path, manifest=self._published)
            roots.drop(self.store, self.id)
        except OSError as error:
            # The mark stays, by which a collector knows that the save has ended.
            files.tell(f"{self.path}: the leftovers of a save could not be removed: {error}")
            self._unlock()
        else:
            self._unlock(finished=True)
            if self._made:
                with contextlib.suppress(OSError):  # other files lie there
                    files.system.rmdir(self.path)

    def _unlock(self, finished: bool = False) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is None:
            return
        try:
            if finished:
                self.store.files.system.unlink(self._file(format.SAVE_FILE))
        except OSError:
            pass  # beside a manifest it means nothing
        finally:
            self.store.files.system.close(fd)

    def __enter__(self) -> Save:
        """Return the save."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless committed."""
        self.abort()


def check_directory(files: Files, path: str, store: str, cache: str = "") -> None:
    """Refuse a directory of which it can be told before a save that it will not do; the store need not be there yet.

    `store` and `cache` are their paths; no cache is empty. Raises `CheckpointExists`, `NotAStore`, `Damaged`.
    """
    if os.path.realpath(path).strip("/") == "":
        raise errors.NotAStore(path=path, detail="it is the root of all files", advice="name a directory of its own")
    refuse_own(store, path)
    if cache:
        refuse_own(cache, path, "cache")
    _refuse_existing(files, path)
    _refuse_unmakable(files, path)


def _refuse_existing(files: Files, path: str) -> None:
    if os.path.lexists(os.path.join(path, format.MANIFEST_FILE)):
        raise errors.CheckpointExists(path=path, id=Checkpoint.open(path, files=files).id)


def _refuse_unmakable(files: Files, path: str) -> None:
    """Refuse what is no directory and where none can be made: a store would be made in vain."""
    parent = os.path.dirname(os.path.abspath(path))
    try:
        try:
            facts = files.system.stat(path)
        except FileNotFoundError:
            facts = files.system.stat(parent)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise errors.NotAStore(
            path=path, detail=f"{parent} is not there" if missing else error.strerror,
            advice="mount what it is on, or make it" if missing else "name a directory",
        ) from error  # fmt: skip
    if not stat.S_ISDIR(facts.st_mode):
        raise errors.NotAStore(path=path, detail=os.strerror(errno.ENOTDIR), advice="name a directory")


def lock_directory(files: Files, path: str) -> int:
    """Lock a checkpoint's directory for a change; returns the descriptor with the lock. Raises OSError, `Busy`."""
    lock = os.path.join(path, format.SAVE_FILE)
    while True:
        fd = files.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            with contextlib.suppress(LocksUnsupported):
                files.wait_for_lock(fd, lock, True, LOCK_WAIT_S, "another save or removal works on this checkpoint")
            with contextlib.suppress(FileNotFoundError):
                if files.system.stat(lock).st_ino == files.system.fstat(fd).st_ino:
                    return fd
        except BaseException:
            files.system.close(fd)
            raise
        files.system.close(fd)  # its holder removed it: lock the next one


def mark_directory(files: Files, path: str, fd: int, id: str) -> None:
    """Write into a locked directory's `save.lock` which checkpoint is being made or removed; raises OSError."""
    content = format.encode(format.SAVE, {"id": id})
    files.system.truncate(fd, 0)
    files.write_small(fd, content, os.path.join(path, format.SAVE_FILE))
    files.sync_directory(path)


def _clear(files: Files, path: str, manifest: bool) -> None:
    """Remove what a save writes, the manifest first, if that too; `save.lock` stays. Raises OSError."""
    names = [name for name in files.system.list(path) if _is_written(name)]
    names = [name for name in names if manifest or name != format.MANIFEST_FILE]
    for name in sorted(names, key=lambda name: name != format.MANIFEST_FILE):
        with contextlib.suppress(FileNotFoundError):
            files.system.unlink(os.path.join(path, name))
        if name == format.MANIFEST_FILE:
            files.sync_directory(path)


def _is_written(name: str) -> bool:
    stem, suffix = os.path.splitext(name)
    if suffix == ".tmp":
        return format.is_chunk_name(stem, 16)
    return name != format.SAVE_FILE and format.is_checkpoint_file(name)


def remove(
    store: Store, directory: str | os.PathLike[str], check: Callable[[Sequence[str]], None] | None = None
) -> list[str]:
    """Remove a checkpoint (also what a save left that died); its chunks go with the next collection. Returns its ids.

    `check` is called with the ids before anything changes, and raises what keeps them.
    Raises `NotAStore` if there is none, `WrongStore` if another store holds it, `Damaged`, `Busy`, `WriteFailed`.
    """
    files, path = store.files, os.path.realpath(directory)
    ids = _ids_to_remove(store, path)
    roots.require_removable(store, ids)
    if check is not None:
        check(ids)
    try:
        fd = lock_directory(files, path)
        try:
            # From here on a collector takes it for a save that was given up, even if this is cut off.
            mark_directory(files, path, fd, ids[0])
            _let_go(store, path, ids)
            _clear(files, path, manifest=True)
            files.system.unlink(os.path.join(path, format.SAVE_FILE))
        finally:
            files.system.close(fd)
    except OSError as error:
        raise errors.write_failed("cannot remove the checkpoint", path, error) from error
    with contextlib.suppress(OSError):  # other files lie there
        files.system.rmdir(path)
    return ids


def _let_go(store: Store, path: str, ids: Sequence[str]) -> None:
    """Drop the roots of a locked and marked directory; its manifest is then gone, but for a leftover to be cleared.

    The manifest is set aside first, since one without a root promises chunks that a collection takes. Where the store
    keeps the roots the manifest comes back, and all is as it was. Raises OSError, `WriteFailed`.
    """
    files, manifest = store.files, os.path.join(path, format.MANIFEST_FILE)
    aside = os.path.join(path, f"{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    there = os.path.lexists(manifest)  # a save that died has left none
    if there:
        files.system.rename(manifest, aside)
    try:
        try:
            files.sync_directory(path)
        except OSError as error:
            raise errors.write_failed("cannot remove the checkpoint", path, error) from error
        roots.drop_all(store, ids)
    except errors.WriteFailed:
        if there:
            files.system.rename(aside, manifest)
            files.sync_directory(path)
            files.system.unlink(os.path.join(path, format.SAVE_FILE))
        raise


def discard(store: Store, directory: str | os.PathLike[str], id: str) -> None:
    """Remove the checkpoint of that id, whole or begun, if the directory holds it: another one there stays.

    Raises as `remove`.
    """
    path = os.path.realpath(directory)
    try:
        found = Checkpoint.open(path, files=store.files).id
    except errors.NotAStore:
        try:
            found = read_save_id(store.files, os.path.join(path, format.SAVE_FILE))
        except (OSError, FormatError):
            return
    if found == id:
        remove(store, path)


def _ids_to_remove(store: Store, path: str) -> list[str]:
    known = [item.root.id for item in roots.with_path(store, path)]
    try:
        checkpoint = Checkpoint.open(path, files=store.files)
        checkpoint.require_store(store)
        return [checkpoint.id, *(id for id in known if id != checkpoint.id)]
    except errors.NotAStore:
        with contextlib.suppress(OSError, FormatError):
            id = read_save_id(store.files, os.path.join(path, format.SAVE_FILE))
            return [id, *(other for other in known if other != id)]
        raise
    except errors.DocumentDamaged:
        if not known:
            raise
        return known
