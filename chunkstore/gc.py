"""Collecting what no checkpoint needs. Safe beside saves, loads and another collector.

Owns the rule: a chunk goes if no recorded checkpoint names it, and it was neither published nor leased since the grace
began, nor since the oldest save under way began. All times are those of the store's filesystem. Where it cannot be told
what a recorded checkpoint needs, nothing goes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from chunkstore import errors, roots
from chunkstore.cache import STALE_TEMPORARY_S, collection_failed
from chunkstore.roots import Found, State
from chunkstore.store import Store

GRACE_S = 24 * 3600.0


@dataclass(frozen=True)
class Swept:
    """What a collection removed (or would remove), and what it kept, in chunks and bytes."""

    checkpoints: int
    needed_chunks: int
    needed_bytes: int
    young_chunks: int  # needed by nobody yet: within the grace, or of a save under way
    young_bytes: int
    removed_chunks: int
    removed_bytes: int
    temporary_bytes: int  # left by writers that died
    dropped_roots: tuple[str, ...]  # directories of saves that never ended


def collect(store: Store, *, grace_s: float = GRACE_S, dry_run: bool = False) -> Swept:
    """Remove the chunks that no checkpoint needs, the leftovers of dead writers, and the roots of dead saves.

    Raises `UnreachableRoots`, `Busy` if another collector is at work, `NoLocks`, `WriteFailed`. Whatever it raises,
    what was removed until then was not needed.
    """
    try:
        with store.place.collecting():
            return _collect(store, grace_s, dry_run)
    except OSError as error:
        raise collection_failed(store.path, error) from error


def take_back(store: Store, names: Collection[str]) -> int:
    """Remove what a save that failed has written, but for what others need by now; returns the bytes.

    The rules are those of `collect` without a grace. Raises as `collect`.
    """
    try:
        with store.place.collecting():
            judged = _judge(store, 0.0)
            names = [name for name in names if name not in judged.needed]
            removed = store.chunks.remove(names, lambda entry: entry.used_ns < judged.cutoff_ns)
            return sum(entry.size_bytes for entry in removed)
    except OSError as error:
        raise collection_failed(store.path, error) from error


@dataclass(frozen=True)
class _Judged:
    """What a collection goes by: a chunk that nobody needs goes if it was last used before the cutoff."""

    now_ns: int
    grace_ns: int
    cutoff_ns: int
    found: list[Found]
    needed: dict[str, int]


def _judge(store: Store, grace_s: float) -> _Judged:
    # The clock is read before the roots: a save whose root is not seen below begins, and leases, after this moment.
    now_ns = store.place.clock_ns()
    found = roots.find_all(store)
    lost = [item for item in found if item.state is State.UNREACHABLE]
    if lost:
        names = "; ".join(f"{item.root.path} ({item.detail})" for item in lost)
        raise errors.UnreachableRoots(path=store.path, roots=names)
    grace_ns = now_ns - int(grace_s * 1e9)
    cutoff_ns = min([grace_ns, *(item.recorded_ns for item in found if item.state is State.SAVING)])
    return _Judged(now_ns, grace_ns, cutoff_ns, found, _needed(found))


def _collect(store: Store, grace_s: float, dry_run: bool) -> Swept:
    judged = _judge(store, grace_s)
    found, needed, cutoff_ns = judged.found, judged.needed, judged.cutoff_ns
    dropped = [item for item in found if item.state is State.ABORTED and item.recorded_ns < judged.grace_ns]
    entries = [entry for entry in store.chunks.entries() if entry.hash not in needed]
    old = [entry for entry in entries if entry.used_ns < cutoff_ns]
    removed = old
    if not dry_run:
        removed = store.chunks.remove([entry.hash for entry in old], lambda entry: entry.used_ns < cutoff_ns)
        for item in dropped:
            roots.drop(store, item.root.id)
    removed_bytes = sum(entry.size_bytes for entry in removed)
    return Swept(
        checkpoints=sum(item.state is State.COMPLETE for item in found),
        needed_chunks=len(needed),
        needed_bytes=sum(needed.values()),
        young_chunks=len(entries) - len(removed),
        young_bytes=sum(entry.size_bytes for entry in entries) - removed_bytes,
        removed_chunks=len(removed),
        removed_bytes=removed_bytes,
        temporary_bytes=store.chunks.reap(judged.now_ns - int(STALE_TEMPORARY_S * 1e9), dry_run),
        dropped_roots=tuple(item.root.path for item in dropped),
    )


def _needed(found: list[Found]) -> dict[str, int]:
    """Return the chunks that complete checkpoints name, with their sizes."""
    needed: dict[str, int] = {}
    for item in found:
        if item.checkpoint is not None:
            needed.update({name: chunk.size_bytes for name, chunk in item.checkpoint.stored_chunks().items()})
    return needed
