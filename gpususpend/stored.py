"""The memory of a group in a checkpoint of a store: every piece through the ring of its shim, to a chunk or back.

Owns the order of a save (begin, pieces, commit) and of a load, and what becomes of a checkpoint whose suspend fails.
Must not know how chunks are kept, or the other steps of a suspend.  Loads the store: import this late.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from chunkstore import CHUNK_SIZE_BYTES, Allocation, Checkpoint, Chunk, Files, How, Room, Save, Store, Verify
from chunkstore.cache import Cache
from chunkstore.errors import Damaged, Incompatible, NotAStore, Refused, StoreError, WriteFailed
from chunkstore.format import MANIFEST_FILE
from chunkstore.gc import take_back
from chunkstore.hashing import DEFAULT_HASH
from chunkstore.place import is_url, lies_in, refuse_own
from chunkstore.save import check_directory, discard
from gpususpend import errors, openfiles, phases, system
from gpususpend.answers import Answers
from gpususpend.control import number
from gpususpend.deadline import Deadline
from gpususpend.defaults import RING_BYTES
from gpususpend.group import Rank
from gpususpend.journal import StorePlaces
from gpususpend.phases import Span
from gpususpend.preflight import Plan
from gpususpend.progress import exact_bytes, readable_bytes
from gpususpend.ring import LEAST_PLACES, STEP_BYTES, Place, Ring, bytes_for, place_bytes, places_for
from gpususpend.session import Session, StoreOptions
from gpususpend.storage import problem, translated

T = TypeVar("T")
P = TypeVar("P")
Row = Mapping[str, str]
FULL = ("ENOSPC", "EDQUOT")
_OURS = re.compile(r"\.recovered(-\d+)?$")


class _GivenUp(Exception):
    """Another piece has failed: the failure of that one is to be told."""


class StoredMemory:
    """Where the memory of a session's group is kept, while one command saves or loads it."""

    def __init__(self, session: Session, places: StorePlaces, options: StoreOptions) -> None:
        self.places = places
        self.bytes: Counter[str] = Counter()  # by what the store did with it, or where it had it
        self._session = session
        self._options = options
        self._answers = Answers(session.context.interrupts, session.limits.store_grace_s)
        self._files = Files(session.context.tools.system(), session.context.warn, self._answers.waits)
        self._store: Store | None = None
        self._save: Save | None = None
        self._checkpoint: Checkpoint | None = None
        self._written: set[str] = set()  # chunks that the store did not have before this save
        self._todo: dict[int, list[tuple[dict[str, str], Chunk]]] = {}  # what a load brings to each rank, by pid
        self._rings: dict[int, Ring] = {}
        self._places: dict[int, int] = {}
        self._failure: BaseException | None = None  # ends the step for all
        self._patience: Deadline | None = None  # with what is under way then
        self._copies: list[Span] = []  # of the step that is on; appended to by many threads, which is atomic
        self._counting = threading.Lock()

    # Before anything changes

    def check(self, plans: Mapping[int, Plan]) -> None:
        """Refuse places that lie in each other, or cannot take what is planned; raises StoreProblem, NotBegun."""
        session = self._session
        with self._answers.asking(session.limits.copy_timeout_s, session.context.interrupts.check_begin):
            try:
                self._check_places()
                with contextlib.suppress(NotAStore):  # then it is made
                    self._store = self._open()
                    self._require_usable(self._store)
                self._check_cache()
                self._check_room([plan.arena_bytes for plan in plans.values()])
            except StoreError as error:
                raise _as_refusal(error) from error

    def _check_places(self) -> None:
        """Refuse a checkpoint's directory that will not do, and what lies in the state directory, or has that inside.

        What lies there and is no record would be warned of by every command, and a collection would remove records.
        """
        places, state = self.places, self._session.context.directory.path
        check_directory(self._files, places.directory, places.store, places.cache)
        refuse_own(places.store, state)
        if places.cache:
            refuse_own(places.cache, state, "cache")
        for path in (places.store, places.directory, places.cache):
            if path and not is_url(path) and lies_in(path, state):
                detail = f"it lies in state directory {state}"
                raise NotAStore(path=path, detail=detail, advice="name another directory")

    def _open(self) -> Store:
        return Store.open(
            self.places.store, files=self._files, verify_existing=Verify(self._options.verify_existing)
        )

    def _check_cache(self) -> None:
        """Refuse another store's cache before anything is made; what else is wrong with one is told in time."""
        if self.places.cache:
            with contextlib.suppress(WriteFailed, Damaged, NotAStore):
                found = Cache.find(self.places.cache, self._files)
                found.require(self._store.facts if self._store is not None else None)

    def _use_cache(self, store: Store, make: bool) -> None:
        """Put the cache in front of the store, once nothing else can be refused: one that is made belongs to it."""
        if self.places.cache and store.cache is None and store.cache_error is None:
            store.use_cache(self.places.cache, make)

    def _require_usable(self, store: Store) -> None:
        """Refuse a store of another hash than was asked for, or whose chunks do not fit where a shim page-locks."""
        if store.chunk_size_bytes > STEP_BYTES:
            ours = f"at most {STEP_BYTES}"
            raise Incompatible(path=store.path, what="chunk size", theirs=store.chunk_size_bytes, ours=ours)
        wanted = self._options.hash
        if wanted is not None and store.facts.hash != wanted:
            raise Incompatible(path=store.path, what="hash", theirs=store.facts.hash, ours=wanted)

    def _check_room(self, sizes: Sequence[int]) -> None:
        """Refuse a filesystem without room, and tell of one that may have too little.

        How much of the memory is zeros or in the store already, nobody knows before it was read.
        """
        need, chunks, path = sum(sizes), sum(-(-size // self.chunk_bytes) for size in sizes), self.places.store
        room = self._room()
        if self._options.require_room:
            room.require(path, need, chunks)
        if room.takes(need, chunks):
            return
        known: list[int] = []
        if self._store is not None:
            with contextlib.suppress(OSError):
                known += (entry.size_bytes for entry in self._store.chunks.entries())
        # Hopeless where all that the store has is needed again, and there is not a chunk's room for each process.
        ranks = [min(size, self.chunk_bytes) for size in sizes if size]
        room.require(path, max(0, min(need - sum(known), sum(ranks))), max(0, min(chunks - len(known), len(ranks))))
        if not room.takes(need - sum(known), chunks - len(known)):
            free = readable_bytes(room.bytes) if room.bytes is not None else "any number of bytes"
            inodes = "" if room.inodes is None else f", {room.inodes} inodes"
            self._session.context.warn(
                f"{path} has no room for all of {readable_bytes(need)} of memory in {chunks} chunks: free are "
                f"{free}{inodes}. Zeros, and what it has already, need none; if it does not fit, everything runs on"
            )

    def _room(self) -> Room:
        if self._store is not None:
            return self._store.room()
        return Room(None, None) if is_url(self.places.store) else self._files.room(os.path.dirname(self.places.store))

    @property
    def chunk_bytes(self) -> int:
        """Return the size into which memory is cut."""
        if self._checkpoint is not None:
            return self._checkpoint.manifest.store.chunk_size_bytes
        return self._store.chunk_size_bytes if self._store is not None else CHUNK_SIZE_BYTES

    # Rings

    def rings(self, needs: Mapping[int, int]) -> dict[int, int]:
        """Return the bytes of the rings that ranks still lack, by pid; `needs` are the bytes that each has to move.

        Raises RingTooSmall where less was asked for than can be done with.
        """
        ranks, asked = len(self._session.group.ranks), self._options.ring_bytes
        least = ranks * LEAST_PLACES * place_bytes(self.chunk_bytes)
        if asked is not None and asked < least:
            raise errors.RingTooSmall(
                ring=exact_bytes(asked), count=ranks, places=LEAST_PLACES, least=exact_bytes(least),
                size=exact_bytes(place_bytes(self.chunk_bytes)),
            )  # fmt: skip
        ring_bytes = RING_BYTES if asked is None else asked
        places = {
            pid: places_for(self.chunk_bytes, ranks, ring_bytes, need)
            for pid, need in needs.items()
            if need and pid not in self._rings
        }
        self._places |= places
        openfiles.reserve(ranks + sum(self._places.values()))  # a place's thread has a chunk open, and its directory
        return {pid: bytes_for(count, place_bytes(self.chunk_bytes)) for pid, count in places.items()}

    def take_rings(self, fds: Mapping[int, int]) -> None:
        """Map the rings that the shims have got."""
        for pid, fd in fds.items():
            self._rings[pid] = Ring(fd, self._places[pid], place_bytes(self.chunk_bytes))

    def drop_rings(self) -> None:
        """Unmap the rings: the shims have given them up."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self._places.clear()

    def _through_ring(self, rank: Rank, pieces: Sequence[P], move: Callable[[P, Place], T]) -> list[T]:
        """Run `move` for every piece, as many at a time as the ring has places; return what it gave, in order."""
        if not pieces:
            return []
        ring, moved = self._rings[rank.pid], {}
        todo, turn = enumerate(pieces), threading.Lock()

        def work() -> None:
            try:
                with ring.place() as place, translated():
                    while True:
                        with turn:
                            found = next(todo, None)
                        if found is None or self._failure is not None:
                            return
                        moved[found[0]] = move(found[1], place)
            except BaseException as failure:
                self._failure = failure

        # Daemons: one that a store never lets go of must not keep the command from its end.
        threads = [threading.Thread(target=work, name=f"piece-{rank.pid}", daemon=True) for _ in range(ring.places)]
        try:
            for thread in threads:
                system.start(thread)
        except errors.SystemCall as failure:
            self._failure = failure
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._failure is not None:
            raise _GivenUp
        return [moved[index] for index in range(len(pieces))]

    def _each(self, step: str, work: Callable[[Rank, Deadline], None], total_bytes: int = 0) -> None:
        """Run `work` for all ranks, as a step of its own; raises what failed first."""
        session, deadline = self._session, Deadline(self._session.limits.copy_timeout_s)
        self._failure = self._patience = None
        before = self.bytes.total()

        def one(rank: Rank) -> None:
            try:
                work(rank, deadline)
            except _GivenUp:
                pass
            except BaseException as failure:
                self._failure = failure
                raise

        def look(pids: list[int]) -> None:
            session.waiting(pids, self.bytes.total() - before)
            if pids:
                self._turn_back_in_time(step, pids, deadline)

        ranks = session.group.ranks
        with session.timed(step, len(ranks), total_bytes) as phase:
            self._copies = phase.copies
            slots = phases.parallel(ranks, one, look)
            phase.took(slots)
            phase.bytes = self.bytes.total() - before
            phases.results(step, slots)
            if self._failure is not None:
                raise self._failure

    def _turn_back_in_time(self, step: str, pids: Sequence[int], deadline: Deadline) -> None:
        """End a step that a signal or its deadline ends; raises what failed if the store does not let go of it.

        A filesystem whose server has gone may hold a thread for ever: then that is left there, and the workload is not.
        """
        session = self._session
        try:
            if session.interruptible:
                session.context.interrupts.check(step)
            if deadline.passed():
                raise errors.DeadlinePassed(
                    step=step, pid=pids[0], seconds=deadline.seconds, detail="not all of its memory is through"
                )
        except errors.StepFailed as late:
            self._failure = self._failure or late
        if self._failure is None:
            return
        if self._patience is None:
            self._patience = Deadline(session.limits.store_grace_s)
        if self._patience.passed():
            self._answers.hangs = True
            for rank in session.group:
                if rank.pid in pids:
                    rank.hang_up()  # whoever is left there may still use that connection
            raise self._failure

    def _count(self, word: str, size: int) -> None:
        with self._counting:
            self.bytes[word] += size

    def _pieces(self, rank: Rank, deadline: Deadline) -> list[dict[str, str]]:
        return rank.listing("pieces", deadline, bytes=self.chunk_bytes)

    # Down

    def begin(self) -> None:
        """Begin the checkpoint, and write down where it will be.

        Nothing of the workload has changed yet, so that everything that fails is a refusal: raises StoreRefused.
        """
        session, record = self._session, self._session.record
        facts = {
            "depth": record.depth.value, "driver": record.driver, "simulated": record.simulated, "origin": record.origin
        }  # fmt: skip
        with self._answers.asking(session.limits.copy_timeout_s, lambda: session.context.interrupts.check("save")):
            try:
                if self._store is None:
                    self._store = self._open_or_make()
                self._save = Save.begin(self._store, self.places.directory, facts)
                self._use_cache(self._store, make=True)
            except StoreError as error:
                raise _as_refusal(error) from error
        self.places = replace(self.places, directory=self._save.path, checkpoint=self._save.id)
        session.note(stored=self.places)

    def _open_or_make(self) -> Store:
        try:
            return self._open()
        except NotAStore:
            Store.create(self.places.store, hash=self._options.hash or DEFAULT_HASH, files=self._files)
            return self._open()

    def save(self) -> None:
        """Save everything that the shims are to release, and make the checkpoint exist.

        Raises what fails first; then there is no checkpoint, and all memory is where it was.
        """
        assert self._save is not None
        session = self._session
        self.bytes.clear()
        self._each("save", self._save_rank, session.arena_total)
        heed = (lambda: session.context.interrupts.check("commit")) if session.interruptible else None
        with session.timed("commit", 1), self._answers.asking(session.limits.copy_timeout_s, heed), translated():
            self._checkpoint = self._save.commit()
            self._save = None

    def _save_rank(self, rank: Rank, deadline: Deadline) -> None:
        store, save = self._store, self._save
        assert store is not None and save is not None
        turn = threading.Lock()  # a connection carries one request at a time

        def out(row: Row, place: Place) -> Chunk:
            with turn:
                self._ask(rank, "copy-out", row, place, deadline)
            size = number(dict(row), "bytes")
            put = store.put(place.memory[:size])
            self._count(put.how.value, size)
            if put.how is How.NEW:
                self._written.add(str(put.chunk.hash))  # from many threads, which is atomic
            return put.chunk

        rows = self._pieces(rank, deadline)
        chunks = self._through_ring(rank, rows, out)
        save.add_rank(rank.member.inner_pid, {"nonce": rank.member.nonce, "comm": rank.member.comm})
        for allocation in _allocations(rows, chunks):
            save.add(rank.member.inner_pid, allocation)

    def _ask(self, rank: Rank, verb: str, row: Row, place: Place, deadline: Deadline) -> None:
        """Have one piece copied; a rank's pieces one after the other."""
        begun, size = time.monotonic(), number(dict(row), "bytes")
        rank.ask(verb, deadline, timeout_ms=phases.timeout_ms(deadline), piece=row["piece"], at=place.at)
        self._copies.append(Span(rank.pid, verb, begun, time.monotonic() - begun, size))

    def abandon(self, cause: errors.GpushareError | None = None) -> None:
        """Leave no checkpoint behind, since all memory is where it was.  What cannot be removed is told.

        Chunks stay, for the next attempt, but where the save has filled a disk.
        """
        if self._answers.hangs:
            self._session.context.warn(f"the store does not answer; the next save in {self.places.directory} clears it")
            self._save = None
            return
        with self._answers.asking(self._session.limits.store_grace_s):
            self._clear_away(cause)

    def _clear_away(self, cause: errors.GpushareError | None) -> None:
        if self._save is not None:
            self._save.abort()
            self._save = None
            if cause is not None and cause.facts.get("errno") in FULL:
                self._give_back_room()
            return
        if not self.places.checkpoint:
            return
        try:
            discard(self._store or self._open(), self.places.directory, self.places.checkpoint)
        except StoreError as error:
            self._session.context.warn(f"the checkpoint of a suspend that turned back was not removed: {error}")

    def _give_back_room(self) -> None:
        assert self._store is not None
        try:
            take_back(self._store, self._written)
        except StoreError as error:
            self._session.context.warn(f"what was saved until the disk was full stays until a collection: {error}")

    # Up

    def open(self, needed: Mapping[int, str]) -> None:
        """Open the checkpoint that ranks need, by pid, before anything changes.

        Raises StoreProblem, OtherCheckpoint, OtherCache, NotBegun.
        """
        session = self._session
        heed = session.context.interrupts.check_begin if self._store is None else None  # later, much has changed
        with self._answers.asking(session.limits.copy_timeout_s, heed), translated():
            self._store = self._store or self._open()
            checkpoint = Checkpoint.open(self.places.directory, files=self._files)
            checkpoint.require_store(self._store)
            for pid, id in needed.items():
                if id != checkpoint.id:
                    raise errors.OtherCheckpoint(
                        pid=pid, needed=id, directory=self.places.directory, found=checkpoint.id
                    )
            checkpoint.load()
        self._use_cache_to_load(self._store)
        self._checkpoint = checkpoint

    def _use_cache_to_load(self, store: Store) -> None:
        """Use the cache, or do without it, but refuse one that the command names and that cannot be this store's."""
        try:
            self._use_cache(store, make=False)
        except Refused as error:
            named = self._options.named
            if named is not None and named.cache:
                raise errors.OtherCache(said=str(error)) from error
            self._session.context.warn(f"there is no cache: {error}")
            store.cache_error = error

    def to_pass(self, pids: Collection[int]) -> dict[int, int]:
        """Return by pid the bytes that have to pass through a ring: what is not zeros of the opened checkpoint."""
        assert self._checkpoint is not None
        inner = {rank.pid: rank.member.inner_pid for rank in self._session.group.ranks}
        with translated():
            return {
                pid: sum(
                    chunk.size_bytes
                    for allocation in self._checkpoint.rank(inner[pid]).allocations
                    for chunk in allocation.chunks
                    if chunk.hash is not None
                )
                for pid in pids
            }

    def load(self) -> None:
        """Have all shims make their memory again, and give it the content it had: zeros on the GPU, then the others."""
        self.bytes.clear()
        self._todo.clear()
        self._each("create", self._create)
        zero, other = self._sizes()
        if zero:
            self._each("zeros", self._set_zeros, zero)
        try:
            self._each("load", self._load_rank, other)
        finally:
            if self._store is not None and self._store.cache is not None:
                self._store.cache.tell_failed()

    def _sizes(self) -> tuple[int, int]:
        """Return the bytes of zeros that are to be brought back, and of everything else."""
        chunks = [chunk for items in self._todo.values() for _, chunk in items]
        zero = sum(chunk.size_bytes for chunk in chunks if chunk.hash is None)
        return zero, sum(chunk.size_bytes for chunk in chunks) - zero

    @staticmethod
    def _missing(rank: Rank, deadline: Deadline) -> int:
        """Have a shim make its memory again; return the bytes of content that it still lacks."""
        return rank.ask("load", deadline, timeout_ms=phases.timeout_ms(deadline)).number("missing_bytes")

    def _create(self, rank: Rank, deadline: Deadline) -> None:
        if not self._missing(rank, deadline):
            return
        chunks, items = self._chunks_of(rank), []
        for row in self._pieces(rank, deadline):
            if number(row, "missing"):
                chunk = chunks.get((row["object"], number(row, "offset")))
                if chunk is None or chunk.size_bytes != number(row, "bytes"):
                    detail = f"the checkpoint does not have object {row['object']} as it is"
                    raise errors.StepFailed(step="load", pid=rank.pid, detail=detail)
                items.append((row, chunk))
        self._todo[rank.pid] = items

    def _set_zeros(self, rank: Rank, deadline: Deadline) -> None:
        """Set what is zeros on the GPU, so many pieces at once as follow each other."""
        todo = self._todo.get(rank.pid, [])
        zeros = [(number(row, "piece"), chunk.size_bytes) for row, chunk in todo if chunk.hash is None]
        for first, count, size in _runs(zeros):
            if self._failure is not None:
                raise _GivenUp
            begun = time.monotonic()
            rank.ask("clear", deadline, timeout_ms=phases.timeout_ms(deadline), piece=first, count=count)
            self._copies.append(Span(rank.pid, "clear", begun, time.monotonic() - begun, size))
            self._count("zero", size)

    def _load_rank(self, rank: Rank, deadline: Deadline) -> None:
        store = self._store
        assert store is not None
        turn = threading.Lock()

        def back(item: tuple[dict[str, str], Chunk], place: Place) -> None:
            row, chunk = item
            source = store.get(chunk, place.memory, verify=self._options.verify)
            with turn:
                self._ask(rank, "copy-in", row, place, deadline)
            self._count(source.value, chunk.size_bytes)

        items = self._todo.get(rank.pid, [])
        self._through_ring(rank, [item for item in items if item[1].hash is not None], back)
        if items and self._missing(rank, deadline):
            raise errors.StepFailed(step="load", pid=rank.pid, detail="memory is missing after all was copied in")

    def _chunks_of(self, rank: Rank) -> dict[tuple[str, int], Chunk]:
        """Return the chunks of a rank's memory, by object and offset."""
        assert self._checkpoint is not None
        found = {}
        with translated():
            items = self._checkpoint.rank(rank.member.inner_pid).allocations
        for allocation in items:
            for index, chunk in enumerate(allocation.chunks):
                found[str(allocation.properties.get("object")), index * self.chunk_bytes] = chunk
        return found

    def close(self) -> None:
        """Unmap the rings; a save that was not committed leaves nothing."""
        self.drop_rings()
        if self._save is not None and not self._answers.hangs:
            with self._answers.asking(self._session.limits.store_grace_s):
                self._save.abort()
        self._save = None


def beside(places: StorePlaces) -> StorePlaces:
    """Return where the next checkpoint of a group goes: the same directory, or one beside if that holds a checkpoint.

    That one is of before, perhaps a dump needs it: it stays.
    """
    stem, path, number = _OURS.sub("", places.directory), places.directory, 1
    while os.path.lexists(os.path.join(path, MANIFEST_FILE)):
        path = f"{stem}.recovered" + (f"-{number}" if number > 1 else "")
        number += 1
    return replace(places, directory=path, checkpoint="")


def _as_refusal(error: StoreError) -> errors.StoreProblem:
    """Return what a store raised before anything of the workload has changed: also a failed write is a refusal then."""
    told = problem(error)
    return errors.StoreRefused(**told.facts) if isinstance(told, errors.StoreNotWritten) else told


def _runs(pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield where pieces (number and bytes, by number) follow each other: the first, how many, and their bytes."""
    begun = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or pieces[end][0] != pieces[end - 1][0] + 1:
            run = pieces[begun:end]
            yield run[0][0], len(run), sum(size for _, size in run)
            begun = end


def _allocations(rows: Sequence[Row], chunks: Sequence[Chunk]) -> list[Allocation]:
    """Return the allocations that pieces make up; the first piece of each says what it is."""
    by_object: dict[str, list[tuple[int, Row, Chunk]]] = {}
    for row, chunk in zip(rows, chunks, strict=True):
        by_object.setdefault(row["object"], []).append((number(dict(row), "offset"), row, chunk))
    return [_allocation(sorted(items, key=lambda item: item[0])) for items in by_object.values()]


def _allocation(items: Sequence[tuple[int, Row, Chunk]]) -> Allocation:
    facts = dict(items[0][1])
    properties: dict[str, Any] = {
        "object": facts["object"], "handle_types": number(facts, "handle_types"), "flags": number(facts, "flags")
    }  # fmt: skip
    return Allocation(
        device=facts.get("device", ""), address=number(facts, "addr"), size_bytes=number(facts, "size"),
        chunks=tuple(chunk for _, _, chunk in items), properties=properties,
        access=tuple(_access(word) for word in facts.get("access", "").split(",") if word),
    )  # fmt: skip


def _access(word: str) -> dict[str, int]:
    kind, id, flags = (int(part) for part in word.split(":"))
    return {"type": kind, "id": id, "flags": flags}
