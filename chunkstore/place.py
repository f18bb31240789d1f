"""Where a store lies: its documents (`store.json`, `fsck.json`, `roots/ID.json`), and the way to its chunks.

Owns `Place`, what a store asks of the thing that keeps it, the place that is a directory, and what a URL looks like;
the place that a URL names is in `objects.py`.
Must not know what documents say. Names of documents are relative, such as `roots/ID.json`.
"""

from __future__ import annotations

import contextlib
import os
import re
from contextlib import AbstractContextManager
from typing import Protocol

from chunkstore import errors, format
from chunkstore.chunks import Backend, ChunkDirectory
from chunkstore.hashing import Hash
from chunkstore.io import Files, Room

_OWN_NAMES = {format.CHUNKS, format.ROOTS, format.TEMPORARY, format.SWEEP_LOCK, "lost+found"}

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_OBJECT_STORES = {"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"}


def scheme(path: str) -> str:
    """Return the scheme of a URL, nothing for a path."""
    found = _URL.match(path)
    return found[1] if found else ""


def is_url(path: str) -> bool:
    """Tell whether a path names an object store."""
    return scheme(path) in _OBJECT_STORES


def refuse_foreign(files: Files, path: str, document: str) -> None:
    """Refuse to make a store or a cache where other files lie; `document` is what makes it one.

    Raises `NotAStore`, OSError.
    """
    foreign = [name for name in files.system.list(path) if name not in _OWN_NAMES and not name.endswith(".tmp")]
    if foreign and document not in foreign:
        detail = f"other files lie there ({', '.join(sorted(foreign)[:3])})"
        raise errors.NotAStore(path=path, detail=detail, advice="name an empty directory or a new one")


def lies_in(path: str, folder: str) -> bool:
    """Tell whether a path is a folder's or leads below it; neither need be there."""
    return f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder).rstrip('/')}/")


def owner_of(path: str) -> str:
    """Return in what a file at the path would lie, such as `store /x`, or nothing.

    Whatever lies below a store or a cache counts, and a checkpoint that is being saved, or has lost its manifest.
    """
    folder = above = os.path.dirname(os.path.realpath(path))
    with contextlib.suppress(OSError):  # one that may not be listed
        if any(format.is_checkpoint_file(name) for name in os.listdir(folder)):
            return f"checkpoint {folder}"
    while True:
        for kind, document in (("store", format.STORE_FILE), ("cache", format.CACHE_FILE)):
            if os.path.lexists(os.path.join(above, document)):
                return f"{kind} {above}"
        if above == os.path.dirname(above):
            return ""
        above = os.path.dirname(above)


def refuse_own(owner: str, path: str, kind: str = "store") -> None:
    """Refuse a directory that is a store or a cache, or in which these remove files, or take every file for a root.

    `owner` is the path of that store or cache, which need not be there yet. Raises `NotAStore`.
    """
    if is_url(owner):
        return
    itself = os.path.realpath(owner) == os.path.realpath(path)
    own = [os.path.join(owner, name) for name in (format.CHUNKS, format.ROOTS, format.TEMPORARY)]
    if itself or any(lies_in(path, one) for one in own):
        what = f"it is {kind} {owner} itself" if itself else f"it belongs to {kind} {owner}"
        raise errors.NotAStore(path=path, detail=what, advice="name a directory of its own, beside that")


class Place(Protocol):
    """A directory or an object store. Where nothing else is said, methods raise OSError."""

    path: str
    absent: str  # what to do where no store lies here

    def make(self, digest: Hash) -> None:
        """Make what a store needs to lie here; raises `NotAStore` if other files do."""

    def chunks(self, digest: Hash) -> Backend:
        """Return the chunks here, of a store that uses this hash."""

    def read(self, name: str) -> bytes:
        """Return the content of a document; raises FileNotFoundError if there is none."""

    def write(self, name: str, content: bytes, replace: bool = False) -> bool:
        """Write a document, durably and in one step; returns False if there was one and `replace` is not given."""

    def exists(self, name: str) -> bool:
        """Tell whether there is such a document."""

    def remove(self, name: str) -> None:
        """Remove a document, durably, if there is one."""

    def list(self, folder: str) -> list[tuple[str, int]]:
        """Return the documents in a folder: names, and when they were written, in ns by the clock here."""

    def clock_ns(self) -> int:
        """Return the time by the clock that stamps what is written here."""

    def collecting(self) -> AbstractContextManager[object]:
        """Keep other collectors out; raises `Busy`, and `LocksUnsupported` where nobody can be kept out."""

    def room(self) -> Room:
        """Return the free room; raises `WriteFailed`."""


class Directory(Place):
    """The place that is a directory."""

    absent = "name a store, or mount it"

    def __init__(self, path: str, files: Files) -> None:
        self.path = path
        self._files = files

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def make(self, digest: Hash) -> None:
        """Make the directories of a store; the parent must exist. Raises `NotAStore` if other files lie there."""
        self._files.make_directory(self.path)
        refuse_foreign(self._files, self.path, format.STORE_FILE)
        ChunkDirectory(self.path, self._files, digest).make()
        self._files.make_directory(self._file(format.ROOTS))

    def chunks(self, digest: Hash) -> Backend:
        """Return the chunks here, of a store that uses this hash."""
        return ChunkDirectory(self.path, self._files, digest)

    def read(self, name: str) -> bytes:
        """Return the content of a document; raises FileNotFoundError if there is none."""
        return self._files.read_document(self._file(name))

    def write(self, name: str, content: bytes, replace: bool = False) -> bool:
        """Write a document, durably and in one step; returns False if there was one and `replace` is not given."""
        return self._files.write_document(self._file(name), content, replace)

    def exists(self, name: str) -> bool:
        """Tell whether there is such a document."""
        return os.path.lexists(self._file(name))

    def remove(self, name: str) -> None:
        """Remove a document, durably, if there is one."""
        path = self._file(name)
        try:
            self._files.system.unlink(path)
        except OSError:
            if os.path.lexists(path):  # a read-only filesystem refuses to remove even what is not there
                raise
        self._files.sync_directory(os.path.dirname(path))  # raises where the whole store has vanished

    def list(self, folder: str) -> list[tuple[str, int]]:
        """Return the documents in a folder: names, and when they were written, in ns by the clock here.

        Also what has the name of one and is no regular file: it may stand for one that somebody needs.
        """
        system, found = self._files.system, []
        for name in sorted(os.path.join(folder, entry) for entry in system.list(self._file(folder))):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append((name, system.lstat(self._file(name)).st_mtime_ns))
        return found

    def clock_ns(self) -> int:
        """Return the time by the clock that stamps what is written here."""
        return self._files.clock_ns(self._file(format.TEMPORARY))

    def collecting(self) -> AbstractContextManager[object]:
        """Keep other collectors out; raises `Busy`, and `LocksUnsupported` where nobody can be kept out."""
        return self._files.locked(self._file(format.COLLECTOR_LOCK), True, "another collector is at work", wait_s=0.0)

    def room(self) -> Room:
        """Return the free room; raises `WriteFailed`."""
        return self._files.room(self.path)
