"""What a store holds: its checkpoints, and the bytes that each has for itself or shares. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chunkstore import errors, roots
from chunkstore.checkpoint import Checkpoint
from chunkstore.roots import State
from chunkstore.store import Store


@dataclass(frozen=True)
class Sizes:
    """The bytes of a checkpoint: of all its memory, of what is zeros, and of its chunks, each counted once."""

    memory_bytes: int
    zero_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Listed:
    """A checkpoint that a store knows; `sizes` and `ranks` are None unless it is complete."""

    id: str
    path: str
    created: str
    state: State
    detail: str
    ranks: int | None
    sizes: Sizes | None


def list_checkpoints(store: Store) -> list[Listed]:
    """Return every checkpoint that the store knows, by path; raises `Damaged` if the list cannot be read."""
    listed = []
    for item in roots.find_all(store):
        checkpoint = item.checkpoint
        ranks, sizes = (len(checkpoint.inner_pids), sizes_of(checkpoint)) if checkpoint is not None else (None, None)
        listed.append(Listed(item.root.id, item.root.path, item.root.created, item.state, item.detail, ranks, sizes))
    return listed


def sizes_of(checkpoint: Checkpoint) -> Sizes:
    """Return the bytes of a checkpoint; raises `Damaged` if its files are."""
    chunks = list(checkpoint.all_chunks())
    return Sizes(
        memory_bytes=sum(chunk.size_bytes for chunk in chunks),
        zero_bytes=sum(chunk.size_bytes for chunk in chunks if chunk.hash is None),
        stored_bytes=sum(chunk.size_bytes for chunk in checkpoint.stored_chunks().values()),
    )


@dataclass(frozen=True)
class Shown:
    """One rank of a checkpoint: allocations, and bytes as in `Sizes`, with its chunks counted once."""

    inner_pid: int
    allocations: int
    sizes: Sizes


def show(checkpoint: Checkpoint) -> list[Shown]:
    """Return what each rank of a checkpoint has; raises `Damaged` if its files are."""
    shown = []
    for rank in checkpoint.ranks():
        chunks = [chunk for allocation in rank.allocations for chunk in allocation.chunks]
        sizes = Sizes(
            memory_bytes=sum(chunk.size_bytes for chunk in chunks),
            zero_bytes=sum(chunk.size_bytes for chunk in chunks if chunk.hash is None),
            stored_bytes=sum({chunk.hash: chunk.size_bytes for chunk in chunks if chunk.hash is not None}.values()),
        )
        shown.append(Shown(rank.inner_pid, len(rank.allocations), sizes))
    return shown


@dataclass(frozen=True)
class Used:
    """The stored bytes that a checkpoint alone needs, and those that other checkpoints need too."""

    id: str
    path: str
    unique_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Usage:
    """What a store's chunks are for. What no complete checkpoint needs may belong to a save under way."""

    checkpoints: tuple[Used, ...]
    stored_bytes: int
    unneeded_bytes: int
    temporary_bytes: int
    unread: tuple[str, ...]  # directories of checkpoints that are not complete, and not counted


def usage(store: Store) -> Usage:
    """Return which bytes of a store belong to which checkpoint; raises `Damaged` if it cannot be listed."""
    found = roots.find_all(store)
    complete = [(item.root, item.checkpoint.stored_chunks()) for item in found if item.checkpoint is not None]
    owners = Counter(name for _, chunks in complete for name in chunks)
    used = []
    for root, chunks in complete:
        unique = sum(chunk.size_bytes for name, chunk in chunks.items() if owners[name] == 1)
        used.append(Used(root.id, root.path, unique, sum(chunk.size_bytes for chunk in chunks.values()) - unique))
    try:
        entries = list(store.chunks.entries())
        temporary = store.chunks.unfinished_bytes()
    except OSError as error:
        raise errors.unreadable("cannot list the chunks of", store.path, error) from error
    return Usage(
        checkpoints=tuple(used),
        stored_bytes=sum(entry.size_bytes for entry in entries),
        unneeded_bytes=sum(entry.size_bytes for entry in entries if entry.hash not in owners),
        temporary_bytes=temporary,
        unread=tuple(item.root.path for item in found if item.checkpoint is None),
    )
