"""Roots: which checkpoints a store knows, and in what state each is found.

A root is recorded before the first chunk of a save may be collected, and dropped when the checkpoint is removed. Owns
`roots/` and the judgement whether the chunks of a checkpoint are needed. When in doubt they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from chunkstore import errors, format
from chunkstore.checkpoint import Checkpoint, read_save_id
from chunkstore.format import FormatError, Root
from chunkstore.io import Files
from chunkstore.store import Store


class State(str, Enum):
    """What is found where a root points."""

    COMPLETE = "complete"
    SAVING = "saving"  # a living process is writing it
    ABORTED = "aborted"  # its writer ended before the checkpoint existed, or a removal was cut off
    UNREACHABLE = "unreachable"  # not there, unreadable, or another checkpoint than the one recorded


@dataclass(frozen=True)
class Found:
    """A root and what was found. `checkpoint` is set if it is complete, `detail` if it is unreachable.

    `hidden` tells that something lies there which cannot be looked at: it is not gone.
    """

    root: Root
    recorded_ns: int
    state: State
    checkpoint: Checkpoint | None = None
    detail: str = ""
    hidden: bool = False


_GONE = (errno.ENOENT, errno.ENOTDIR)
_ODD = (errno.EMEDIUMTYPE, errno.ELOOP)  # no regular file: see `Files.open`


def _name(id: str) -> str:
    return f"{format.ROOTS}/{id}.json"


def root_file(store: Store, id: str) -> str:
    """Return the path of a root's record."""
    return os.path.join(store.path, _name(id))


def is_recorded(store: Store, id: str) -> bool:
    """Tell whether the store has a record of a root."""
    return store.place.exists(_name(id))


def record(store: Store, root: Root) -> None:
    """Write a root, so that it survives a power cut; raises OSError."""
    store.place.write(_name(root.id), root.encode(), replace=True)


def drop(store: Store, id: str) -> None:
    """Remove a root's record, if there is one; raises OSError."""
    store.place.remove(_name(id))


def drop_all(store: Store, ids: Sequence[str]) -> None:
    """Remove records of roots, all or none.

    Raises `WriteFailed` if none was removed, OSError if those that were could not be written again.
    """
    removed: dict[str, bytes] = {}
    try:
        for id in ids:
            with contextlib.suppress(OSError):  # there is none, or none that could be written again
                removed[id] = store.place.read(_name(id))
            drop(store, id)
    except OSError as error:
        for id, content in removed.items():
            if not is_recorded(store, id):
                store.place.write(_name(id), content, replace=True)
        raise errors.write_failed("cannot drop a root in", store.path, error) from error


def require_removable(store: Store, ids: Sequence[str]) -> None:
    """Refuse records in whose place a directory lies, before anything else is removed; raises `Damaged`."""
    for path in (root_file(store, id) for id in ids):
        if os.path.isdir(path) and not os.path.islink(path):
            error = OSError(errno.EISDIR, "a directory lies there")
            raise errors.unreadable("cannot remove", path, error)


def find_all(store: Store) -> list[Found]:
    """Return every root with its state, ordered by path.

    Raises `Damaged` if the list of roots cannot be read; a single record that is damaged counts as unreachable.
    """
    found = []
    try:
        for name, recorded_ns in store.place.list(format.ROOTS):
            id, suffix = os.path.splitext(os.path.basename(name))
            if suffix == ".json":
                with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
                    found.append(_find(store, id, recorded_ns))
    except OSError as error:
        raise errors.unreadable("cannot read the roots in", store.path, error) from error
    return sorted(found, key=lambda item: item.root.path)


def _find(store: Store, id: str, recorded_ns: int) -> Found:
    try:
        root = Root.decode(store.place.read(_name(id)))
        if root.id != id:
            raise FormatError(f"it is the record of {root.id}")
    except FormatError as error:
        return _no_record(store, id, recorded_ns, f"the root's record is damaged: {error}")
    except OSError as error:
        if error.errno not in _ODD:
            raise
        return _no_record(store, id, recorded_ns, f"the root's record cannot be read: {error.strerror}")
    found = examine(store, root, recorded_ns)
    if found.state is State.UNREACHABLE and not is_recorded(store, id):
        raise FileNotFoundError  # a removal dropped it meanwhile: nothing is missed there
    return found


def _no_record(store: Store, id: str, recorded_ns: int, detail: str) -> Found:
    return Found(Root(id, root_file(store, id), ""), recorded_ns, State.UNREACHABLE, detail=detail)


def examine(store: Store, root: Root, recorded_ns: int) -> Found:
    """Look at a root's directory. Never raises for what it finds there."""
    files = store.files
    save = os.path.join(root.path, format.SAVE_FILE)
    # The lock is looked at before the manifest: a save that ends in between is found complete.
    saving = _ours(store, root, save) and files.is_locked(save)
    hidden = False
    try:
        checkpoint = Checkpoint.open(root.path, files=files)
        if checkpoint.id == root.id and checkpoint.manifest.store.id == store.id:
            checkpoint.load()
            return Found(root, recorded_ns, State.COMPLETE, checkpoint)
        detail = f"another checkpoint ({checkpoint.id}) lies there"
    except errors.NotAStore as error:
        detail = str(error.facts["detail"])
        if saving:
            return Found(root, recorded_ns, State.SAVING)
        if _ours(store, root, save):
            return Found(root, recorded_ns, State.ABORTED)
        if (number := _look(files, save)) not in (0, *_GONE):
            detail, hidden = f"{save} cannot be read: {os.strerror(number)}", True
    except errors.StoreError as error:
        detail = str(error)
        hidden = error.facts.get("errno", "") not in ("", *(errno.errorcode[number] for number in _GONE))
    return Found(root, recorded_ns, State.UNREACHABLE, detail=detail, hidden=hidden)


def _look(files: Files, path: str) -> int:
    """Return the error number with which a file cannot be opened, 0 if it can."""
    try:
        with files.opened(path):
            return 0
    except OSError as error:
        return error.errno or 0


def _ours(store: Store, root: Root, save: str) -> bool:
    """Tell whether the save that is under way in a root's directory is the recorded one.

    An empty directory proves nothing: it may be a mount point whose filesystem is not mounted.
    """
    try:
        return read_save_id(store.files, save) == root.id
    except (OSError, FormatError):
        return False


def with_path(store: Store, directory: str | os.PathLike[str]) -> list[Found]:
    """Return the roots of a directory."""
    paths = {os.path.abspath(directory), os.path.realpath(directory)}
    return [item for item in find_all(store) if item.root.path in paths]


def forget(
    store: Store, directory: str | os.PathLike[str], check: Callable[[Sequence[str]], None] | None = None
) -> list[Root]:
    """Drop the roots of a checkpoint that is gone for good, so that its chunks can be collected; returns them.

    `check` is called with the ids before anything changes, and raises what keeps them.
    Raises `StillThere` if the checkpoint can be read, `Unreachable` if nobody can tell what lies there, `NotAStore` if
    the store knows none there, `Damaged` where a directory lies in a record's place.
    """
    found = with_path(store, directory)
    if not found:
        found = [item for item in find_all(store) if item.root.path == root_file(store, os.fspath(directory))]
    gone = [item for item in found if item.state in (State.UNREACHABLE, State.ABORTED)]
    if found and not gone:
        raise errors.StillThere(path=os.fspath(directory))
    if not gone:
        detail = f"store {store.path} knows no checkpoint there"
        raise errors.NotAStore(path=os.fspath(directory), detail=detail, advice="list what it knows")
    for item in gone:
        if item.hidden:
            advice = "it is not gone. Let it be read, or remove or unmount it, then forget it"
            raise errors.Unreachable(path=item.root.path, detail=item.detail, advice=advice)
    ids = [item.root.id for item in gone]
    require_removable(store, ids)
    if check is not None:
        check(ids)
    try:
        drop_all(store, ids)
    except OSError as error:
        raise errors.write_failed("cannot drop a root in", store.path, error) from error
    return [item.root for item in gone]


def adopt(store: Store, directory: str | os.PathLike[str]) -> Root:
    """Record a checkpoint where it lies now, after its directory was moved.

    Raises `NotAStore`, `WrongStore`, `Damaged`, `WriteFailed`.
    """
    checkpoint = Checkpoint.open(directory, files=store.files)
    checkpoint.require_store(store)
    root = Root(checkpoint.id, os.path.realpath(directory), checkpoint.manifest.created)
    try:
        record(store, root)
    except OSError as error:
        raise errors.write_failed("cannot record a root in", store.path, error) from error
    return root
