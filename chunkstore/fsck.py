"""Checking a store: every chunk against its name, every checkpoint against the chunks that it needs; and repair.

Owns what counts as clean, and the record of the last clean check, by which saves know which chunks to believe. Reads
only, but for that record and for chunks that it repairs from another store.
"""

from __future__ import annotations

import mmap
from collections.abc import Container
from dataclasses import dataclass, replace

from chunkstore import errors, format, roots
from chunkstore.checkpoint import Checkpoint
from chunkstore.chunks import check_content
from chunkstore.format import Chunk
from chunkstore.roots import Found, State
from chunkstore.store import Store
from chunkstore.transfer import THREADS, Report, Tally, each

_MISSING = "it is missing"


@dataclass(frozen=True)
class Bad:
    """A chunk that is damaged, missing or unreadable: why, which checkpoints need it, and whether it was repaired."""

    hash: str
    detail: str
    checkpoints: tuple[str, ...]  # their directories
    repaired: bool = False


@dataclass(frozen=True)
class Checked:
    """What a check found. `bad` names chunks, `unreachable` the roots of which nothing could be said, with reasons."""

    chunks: int
    bytes: int
    bad: tuple[Bad, ...]
    unreachable: tuple[tuple[str, str], ...]
    aborted: tuple[str, ...]  # directories of saves that never ended
    unneeded_chunks: int
    unneeded_bytes: int
    temporary_bytes: int

    @property
    def clean(self) -> bool:
        """Tell whether every chunk is intact now, and every checkpoint complete."""
        return not self.unreachable and all(bad.repaired for bad in self.bad)


def check(
    store: Store, *, repair_from: Store | None = None, threads: int = THREADS, report: Report | None = None
) -> Checked:
    """Read and hash every chunk of a store; with `repair_from`, take what is damaged or missing from that store.

    May run beside saves and collections. One bad checkpoint does not keep the others from being checked. Raises
    `Damaged` only if the store's directories cannot be read, `WriteFailed` if a repair cannot be written.
    """
    try:
        begun_ns: int | None = store.place.clock_ns()
    except OSError:
        begun_ns = None  # a read-only mount: checked, and not recorded
    found = roots.find_all(store)
    needed: dict[str, Chunk] = {}
    for item in found:
        if item.checkpoint is not None:
            needed.update(item.checkpoint.stored_chunks())
    try:
        entries = {entry.hash: entry for entry in store.chunks.entries()}
        temporary = store.chunks.unfinished_bytes()
    except OSError as error:
        raise errors.unreadable("cannot list the chunks of", store.path, error) from error
    chunks = [needed.get(name) or Chunk(name, entry.size_bytes) for name, entry in entries.items()]
    chunks += [chunk for name, chunk in needed.items() if name not in entries]  # missing, or no file
    problems = _check_all(store, chunks, needed, threads, report)
    bad = _judge(store, problems, found)
    if repair_from is not None:
        buffer = memoryview(mmap.mmap(-1, store.chunk_size_bytes))
        bad = [_repair(store, repair_from, item, needed.get(item.hash), buffer) for item in bad]
    unneeded = [entry for entry in entries.values() if entry.hash not in needed]
    checked = Checked(
        chunks=len(entries),
        bytes=sum(entry.size_bytes for entry in entries.values()),
        bad=tuple(bad),
        unreachable=tuple((item.root.path, item.detail) for item in found if item.state is State.UNREACHABLE),
        aborted=tuple(item.root.path for item in found if item.state is State.ABORTED),
        unneeded_chunks=len(unneeded),
        unneeded_bytes=sum(entry.size_bytes for entry in unneeded),
        temporary_bytes=temporary,
    )
    if checked.clean and begun_ns is not None:
        _record_clean(store, begun_ns)
    return checked


def check_checkpoint(
    store: Store, checkpoint: Checkpoint, *, threads: int = THREADS, report: Report | None = None
) -> tuple[Bad, ...]:
    """Read and hash the chunks of one checkpoint in the store, past the cache; returns those that are bad.

    Raises `WrongStore`, and `Damaged` if the checkpoint's own files are.
    """
    checkpoint.require_store(store)
    needed = checkpoint.stored_chunks()
    problems = _check_all(store, list(needed.values()), needed, threads, report)
    return tuple(Bad(name, detail, (checkpoint.path,)) for name, detail in sorted(problems.items()))


def _check_all(
    store: Store, chunks: list[Chunk], needed: Container[str], threads: int, report: Report | None
) -> dict[str, str]:
    """Return by hash what is wrong. A chunk that nobody needs may vanish meanwhile."""
    problems: dict[str, str] = {}
    tally = Tally(chunks, None, report)

    def look(chunk: Chunk, buffer: memoryview) -> tuple[Chunk, str | None]:
        return chunk, _problem(store, chunk, buffer)

    for chunk, problem in each(chunks, look, store.chunk_size_bytes, threads):
        name = str(chunk.hash)
        if problem is not None and (name in needed or problem != _MISSING):
            problems[name] = problem
        tally.passed(chunk.size_bytes)
    return problems


def _problem(store: Store, chunk: Chunk, buffer: memoryview) -> str | None:
    if not 0 < chunk.size_bytes <= len(buffer):
        return f"it has {chunk.size_bytes} bytes"
    try:
        store.chunks.read(chunk, buffer)
        check_content(chunk, buffer, store.hash, store.path)
    except errors.ChunkMissing:
        return _MISSING
    except errors.Damaged as error:
        return str(error.facts["detail"])
    return None


def _judge(store: Store, problems: dict[str, str], found: list[Found]) -> list[Bad]:
    """Name the checkpoints that need what is bad, but for those that were removed meanwhile."""
    owners: dict[str, list[str]] = {name: [] for name in problems}
    for item in found:
        mine = item.checkpoint.stored_chunks().keys() & problems.keys() if item.checkpoint is not None else set()
        if mine and roots.is_recorded(store, item.root.id):
            for name in mine:
                owners[name].append(item.root.path)
    return [
        Bad(name, detail, tuple(owners[name]))
        for name, detail in sorted(problems.items())
        if owners[name] or detail != _MISSING
    ]


def _repair(store: Store, other: Store, bad: Bad, chunk: Chunk | None, buffer: memoryview) -> Bad:
    """Write a bad chunk again with the content that the other store has, if that is intact."""
    try:
        entry = other.chunks.lookup(bad.hash)
        if entry is None:
            return bad
        wanted = chunk or Chunk(bad.hash, entry.size_bytes)
        if wanted.size_bytes > len(buffer):
            return bad
        view = buffer[: wanted.size_bytes]
        other.chunks.read(wanted, view)
        check_content(wanted, view, store.hash, other.path)
    except errors.Damaged as error:
        return replace(bad, detail=f"{bad.detail}; {other.path} has it damaged too ({error.facts.get('detail')})")
    store.chunks.write(wanted, view, replace=True)
    return replace(bad, repaired=True)


def _record_clean(store: Store, begun_ns: int) -> None:
    content = format.encode(format.FSCK, {"store": store.id, "clean_ns": begun_ns})
    try:
        store.place.write(format.FSCK_FILE, content, replace=True)
    except OSError as error:
        store.files.tell(f"{store.path}: the clean check could not be recorded: {error}")
