"""What can go wrong with a store, in four kinds; a caller maps a kind to its exit code.

`Refused`: nothing was changed. `WriteFailed`: a save cannot go on and is rolled back. `Damaged`: something that was
saved is damaged, missing or cannot be read; nothing was changed, and the same call can be repeated after a repair.
`Busy`: as `Refused`, and the same call works later. Each message says what failed, where, and what to do next.
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar


class StoreError(Exception):
    """Base of every error of this package: `facts` by name, `code` for machines, `next_action` as in the reports."""

    code: ClassVar[str] = "store"
    next_action: ClassVar[str] = "operator"  # retry | cold-start | operator
    template: ClassVar[str] = "{what}"

    def __init__(self, **facts: object) -> None:
        self.facts: dict[str, object] = facts
        super().__init__(self.template.format(**facts))


class Refused(StoreError):
    """Refused before anything was changed."""

    code = "refused"


class Busy(Refused):
    """Another process is at work; the call can be repeated when it has ended."""

    code = "busy"
    next_action = "retry"
    template = "{path}: {what}; wait for it and try again"


class WriteFailed(StoreError):
    """Bytes could not be kept."""

    code = "write-failed"
    template = "{what} {path}: {detail}; {advice}"


class Damaged(StoreError):
    """What was saved is damaged, incomplete or unreadable."""

    code = "damaged"
    template = "{what} {path}: {detail}; {advice}"


# --- refused


class NotAStore(Refused):
    """There is no store (or no cache, no checkpoint) at the path."""

    code = "not-a-store"
    template = "{path}: {detail}; {advice}"


class Unreachable(Refused):
    """Nobody can tell what lies at the path: no access, no server, no network."""

    code = "unreachable"
    template = "{path} cannot be reached: {detail}; {advice}"


class UnknownVersion(Refused):
    """Written by a version of the format that is not known here."""

    code = "unknown-version"
    template = "{path} has format '{theirs}', this version reads '{ours}'; use the version that wrote it"


class WrongStore(Refused):
    """A cache or a checkpoint belongs to another store than the one that was named."""

    code = "wrong-store"
    template = "{path} belongs to store {theirs}, not to {store} ({ours}); {advice}"


class NoHash(Refused):
    """The store's hash is not known, or its package is not installed."""

    code = "no-hash"
    template = "{path}: hash '{hash}' cannot be computed here: {detail}"


class CheckpointExists(Refused):
    """The directory holds a checkpoint already; a checkpoint is never written over."""

    code = "checkpoint-exists"
    template = "{path} holds checkpoint {id} already; name another directory, or remove that checkpoint first"


class UnreachableRoots(Refused):
    """Checkpoints that the store knows cannot be read, so that nobody can tell which chunks they need."""

    code = "unreachable-roots"
    template = (
        "{path}: nothing was collected, since what these checkpoints need cannot be read: {roots}; "
        "mount or repair them, or forget those that are gone for good"
    )


class StillThere(Refused):
    """A checkpoint was to be forgotten that can be read."""

    code = "still-there"
    template = "{path} holds a readable checkpoint (or a save in progress); remove it instead of forgetting it"


class NoRoom(Refused):
    """The filesystem has too little room for what is to be saved."""

    code = "no-room"
    template = "{path} has {free} {unit} free, {need} are needed; free some, or name a place with more room"


class NoLocks(Refused):
    """There are no locks, so that a collector could not tell what is in use."""

    code = "no-locks"
    template = (
        "{path}: nothing can be collected without file locks ({detail}); "
        "collect on the machine that holds the disk, if there is one"
    )


class NoClient(Refused):
    """The package that speaks to object stores is not installed."""

    code = "no-client"
    template = "{path}: object stores need the package obstore; pip install 'gpushare[object-store]'"


class Incompatible(Refused):
    """The store is made otherwise than was asked for."""

    code = "incompatible"
    template = "{path} has {what} {theirs}, not {ours}; name a store with {what} {ours}, or leave that out"


# --- damaged


class ChunkMissing(Damaged):
    """A chunk that a checkpoint needs is not there."""

    code = "chunk-missing"
    template = "chunk {hash} is missing from {path}; {advice}"


class ChunkDamaged(Damaged):
    """The content of a chunk does not match its name."""

    code = "chunk-damaged"
    template = "chunk {hash} in {path} is damaged: {detail}; {advice}"


class DocumentDamaged(Damaged):
    """A file that describes a store or a checkpoint does not say what was written."""

    code = "document-damaged"
    template = "{path} is damaged: {detail}; {advice}"


class HashCollision(WriteFailed):
    """Two different contents have one hash: the new one cannot be stored under it."""

    code = "hash-collision"
    template = (
        "{path}: chunk {hash} holds other bytes with the same hash, each intact; nothing was stored. "
        "Use a store with --hash blake3"
    )


REPAIR = "look with fsck, repair from another store that has it, then try again"

_ADVICE = {
    errno.ENOSPC: "free space there (collect garbage, remove checkpoints), or name another store",
    errno.EDQUOT: "the quota is used up: raise it, free space, or name another store",
    errno.EROFS: "the filesystem is mounted read-only: mount it for writing, or name another store",
    errno.EFBIG: "let this process write larger files (ulimit -f), or name another store",
    errno.ENOMEM: "free memory, or allow this process more (ulimit -v, ulimit -d, its cgroup), then try again",
    errno.EMFILE: "let this process open more files (ulimit -n), then try again",
    errno.EIO: "the device failed: look at the kernel's log, then check the store with fsck",
    errno.EACCES: "use the user that owns the store",
    errno.EPERM: "use the user that owns the store",
    errno.ENOTDIR: "name a directory",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EMEDIUMTYPE: "see who made it, and remove it",
    errno.EISDIR: "see who made it, and remove it",
    errno.ELOOP: "a symbolic link lies there, which is not followed: see who made it, and remove it",
}
_CACHE_ADVICE = {
    errno.ENOSPC: "free space there (cache-gc), or name another cache or none",
    errno.EDQUOT: "the quota is used up: raise it, free space (cache-gc), or name another cache or none",
    errno.EROFS: "the filesystem is mounted read-only: mount it for writing, or name another cache or none",
    errno.EFBIG: "let this process write larger files (ulimit -f), or name another cache or none",
    errno.EIO: "the device failed: look at the kernel's log, and name another cache or none",
    errno.EACCES: "use the user that owns the cache, or name another cache or none",
    errno.EPERM: "use the user that owns the cache, or name another cache or none",
}
_ONLY_A_CACHE = "it is only a cache, and nothing is lost with it"
_VANISHED = (errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO)
_ADVICE |= dict.fromkeys(_VANISHED, "see that it is still mounted")


def _facts(what: str, path: str, error: OSError) -> dict[str, object]:
    number = error.errno or 0
    advice = _ADVICE.get(number, "see the cause, then try again")
    detail = error.strerror or str(error)
    return {"what": what, "path": path, "detail": detail, "errno": errno.errorcode.get(number, ""), "advice": advice}


def of_cache(error: StoreError) -> StoreError:
    """Return an error that befell a cache with the advice for one: nobody needs what is in it."""
    number = getattr(errno, str(error.facts.get("errno") or "-"), 0)
    if number:
        advice = _CACHE_ADVICE.get(number)
    elif isinstance(error, DocumentDamaged):
        advice = f"{_ONLY_A_CACHE}: remove it, or name another one or none"
    else:
        advice = _ONLY_A_CACHE if isinstance(error, Damaged) else None
    return type(error)(**{**error.facts, "advice": advice}) if advice else error


def write_failed(what: str, path: str | os.PathLike[str], error: OSError) -> WriteFailed:
    """Return the error for a write that failed: `what` as in 'cannot write'."""
    return WriteFailed(**_facts(what, os.fspath(path), error))


def unreadable(what: str, path: str | os.PathLike[str], error: OSError) -> Damaged:
    """Return the error for something saved that cannot be read."""
    return Damaged(**_facts(what, os.fspath(path), error))


_NO_ACCESS = {
    errno.EREMOTEIO: "check credentials, region, endpoint and network, then try again",
    errno.EACCES: "use the user that owns the store",
    errno.EPERM: "use the user that owns the store",
}
_NO_PATH = {errno.ELOOP, errno.ENAMETOOLONG}


def not_opened(path: str, document: str, error: OSError) -> StoreError:
    """Return the error for a store whose first document cannot be read: no access says nothing of what lies there."""
    advice = _NO_ACCESS.get(error.errno or 0)
    if error.errno in _NO_PATH and not os.path.exists(path):
        advice = "name a directory"
    if advice is None:
        return unreadable("cannot read", document, error)
    return Unreachable(path=path, detail=error.strerror or str(error), advice=advice)
