"""A store: chunks kept under the hash of their content, by `put`, and given back by `get`.

Owns opening and making a store, deduplication, and when an existing chunk is believed. Must not know what the bytes
are, or which checkpoints need them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from chunkstore import errors, format, objects
from chunkstore.cache import Cache
from chunkstore.chunks import Entry, State, check_content, chunk_of
from chunkstore.format import CHUNK_SIZE_BYTES, Chunk, FormatError, StoreFacts
from chunkstore.hashing import DEFAULT_HASH, address_of, hash_by_name
from chunkstore.io import Files, Room
from chunkstore.place import Directory, Place, is_url, refuse_own

_TRIES = 5


class Verify(str, Enum):
    """Which existing chunks `put` compares with the bytes at hand before it relies on them."""

    ALL = "all"
    NEW = "new"  # those published after the store's last clean fsck
    NONE = "none"  # only their size is looked at


class How(str, Enum):
    """What `put` did with a content."""

    ZERO = "zero"  # all zeros: stored nowhere
    NEW = "new"
    KNOWN = "known"  # it was there
    REPAIRED = "repaired"  # it was there, damaged, and was replaced


class Source(str, Enum):
    """Where `get` found a content."""

    ZERO = "zero"
    CACHE = "cache"
    STORE = "store"


@dataclass(frozen=True)
class Put:
    """The answer of `put`. `cached` tells whether the chunk lies in the cache now, None without a cache."""

    chunk: Chunk
    how: How
    cached: bool | None = None


class Store:
    """An open store, with the cache in front of it, if there is one.

    Guarantees: when `put` returns, the chunk survives a power cut; a content is never written over by another; `get`
    returns the bytes that were put, or raises. `put` and `get` may be called from any number of threads, and leave the
    GIL for everything that takes long. A store keeps no buffer of a chunk's size: memory is the caller's.
    """

    def __init__(self, place: Place, facts: StoreFacts, files: Files, verify_existing: Verify) -> None:
        self.place = place
        self.path = place.path
        self.facts = facts
        self.files = files
        self.hash = hash_by_name(facts.hash, place.path)
        self.chunks = place.chunks(self.hash)
        self.cache: Cache | None = None
        self.cache_error: errors.StoreError | None = None  # why there is none though one was named
        self._verify = verify_existing
        self._sure: set[str] = set()  # written or compared since the last save began
        self._clean_ns: int | None = None  # None: not looked up yet
        self._busy: set[str] = set()
        self._turn = threading.Condition()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        cache: str | os.PathLike[str] | None = None,
        verify_existing: Verify = Verify.NEW,
        files: Files | None = None,
    ) -> Store:
        """Open a store; writes nothing to it, so that a read-only mount will do for loads.

        `cache` is the directory of a cache for it, made if missing; if that fails it is told, and there is none.
        Raises `NotAStore`, `Unreachable`, `UnknownVersion`, `NoHash`, `WrongStore` (the cache belongs to another) and
        `Damaged`.
        """
        files = files or Files()
        place = _place(path, files)
        document = os.path.join(place.path, format.STORE_FILE)
        try:
            facts = StoreFacts.decode(place.read(format.STORE_FILE))
        except (FileNotFoundError, NotADirectoryError):
            detail = f"there is no {format.STORE_FILE}"
            raise errors.NotAStore(path=place.path, detail=detail, advice=place.absent) from None
        except OSError as error:
            raise errors.not_opened(place.path, document, error) from error
        except FormatError as error:
            raise format.not_decoded(document, format.STORE, error) from None
        store = cls(place, facts, files, verify_existing)
        if cache is not None:
            store.use_cache(cache)
        return store

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        hash: str = DEFAULT_HASH,
        chunk_size_bytes: int = CHUNK_SIZE_BYTES,
        cache: str | os.PathLike[str] | None = None,
        verify_existing: Verify = Verify.NEW,
        files: Files | None = None,
    ) -> Store:
        """Make a store, or open the one that lies there; of several makers at once, all open the same.

        The parent directory must exist. Raises `Incompatible` if the store there has another hash or chunk size,
        `NotAStore` if other files lie there, `WriteFailed`, and what `open` raises.
        """
        files = files or Files()
        place = _place(path, files)
        if chunk_size_bytes <= 0:
            raise ValueError("chunk_size_bytes must be positive")
        facts = StoreFacts(secrets.token_hex(16), chunk_size_bytes, hash)
        digest = hash_by_name(hash, place.path)
        try:
            if not place.exists(format.STORE_FILE):
                place.make(digest)
                place.write(format.STORE_FILE, facts.encode())
        except OSError as error:
            raise errors.write_failed("cannot make a store in", place.path, error) from error
        store = cls.open(path, cache=cache, verify_existing=verify_existing, files=files)
        for what, theirs, ours in (
            ("hash", store.facts.hash, hash),
            ("chunk size", store.facts.chunk_size_bytes, chunk_size_bytes),
        ):
            if theirs != ours:
                raise errors.Incompatible(path=place.path, what=what, theirs=theirs, ours=ours)
        return store

    def use_cache(self, path: str | os.PathLike[str], make: bool = True) -> None:
        """Put the cache in this directory in front of the store; if that fails it is told.

        One that is missing is made, unless only what it holds is wanted. Once made it belongs to this store: whoever
        has more to check does that first. Raises `WrongStore`, `UnknownVersion`, `NoHash`.
        """
        try:
            refuse_own(self.path, os.fspath(path))
            self.cache = Cache.open(os.fspath(path), self.facts, self.files, self.hash, make)
        except (errors.WriteFailed, errors.Damaged, errors.NotAStore) as error:
            self.cache_error = error
            self.files.tell(f"there is no cache: {error}")

    @property
    def id(self) -> str:
        """Return the store's id."""
        return self.facts.id

    @property
    def chunk_size_bytes(self) -> int:
        """Return the most bytes that a chunk has."""
        return self.facts.chunk_size_bytes

    # --- writing

    def begin_save(self) -> None:
        """Believe no longer what an earlier save through this object wrote or compared, but a newer check."""
        self._sure = set()
        self._clean_ns = None

    def put(self, data: memoryview) -> Put:
        """Keep a content of at most `chunk_size_bytes`; it is durable when the call returns.

        Fastest with page-aligned memory, which goes to the disk as it lies. The bytes must not change meanwhile.
        Raises `WriteFailed`; then nothing was published that was not intact.
        """
        if not 0 < data.nbytes <= self.chunk_size_bytes:
            raise ValueError(f"{data.nbytes} bytes are no chunk of this store")
        data = _as_bytes(data)
        chunk = chunk_of(data, self.hash)
        if chunk.hash is None:
            return Put(chunk, How.ZERO)
        with self._alone(chunk.hash):
            how = self._keep(chunk, chunk.hash, data)
            return Put(chunk, how, self.cache.keep(chunk, data) if self.cache else None)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Let one thread at a time work on a content: ranks often hold the same, and one write is enough."""
        with self._turn:
            self._turn.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            with self._turn:
                self._busy.discard(name)
                self._turn.notify_all()

    def _keep(self, chunk: Chunk, name: str, data: memoryview) -> How:
        for _ in range(_TRIES):
            entry = self.chunks.lease(name)
            if entry is None:
                if self.chunks.write(chunk, data):
                    self._sure.add(name)
                    return How.NEW
                continue  # another writer was quicker
            state = self._judge(entry, chunk, data)
            if state is State.OTHER:
                raise errors.HashCollision(path=self.path, hash=name)
            if state is State.DAMAGED:
                self.chunks.write(chunk, data, replace=True)
                self._sure.add(name)
                self.files.tell(f"chunk {name} in {self.path} was damaged and has been written again")
                return How.REPAIRED
            if state is State.SOUND:
                self.chunks.settle(name)
                self._sure.add(name)
                return How.KNOWN
        detail, advice = f"chunk {name} comes and goes", "see who removes chunks there"
        raise errors.WriteFailed(what="cannot write to", path=self.path, detail=detail, advice=advice)

    def _judge(self, entry: Entry, chunk: Chunk, data: memoryview) -> State:
        """Tell what an existing chunk is, as closely as `verify_existing` asks."""
        if entry.size_bytes != chunk.size_bytes:
            return self.chunks.compare(chunk, data)
        if self._verify is Verify.NONE or (entry.hash in self._sure and self._verify is Verify.NEW):
            return State.SOUND
        if self._verify is Verify.NEW and entry.published_ns < self._last_clean_ns():
            return State.SOUND
        return self.chunks.compare(chunk, data)

    def _last_clean_ns(self) -> int:
        """Return when the store's last clean fsck began, by the store's clock; 0 if there was none."""
        if self._clean_ns is None:
            self._clean_ns = read_clean_ns(self)
        return self._clean_ns

    # --- reading

    def get(self, chunk: Chunk, into: memoryview, verify: bool = True) -> Source:
        """Fill the start of `into` with a chunk's content, from the cache if it is there.

        With `verify`, the content is hashed and compared with the chunk's name. Writes nothing to the store, and adds
        nothing to the cache. Raises `ChunkMissing`, `ChunkDamaged` or another `Damaged`; `into` is then undefined.
        """
        if chunk.size_bytes > into.nbytes:
            raise ValueError(f"{into.nbytes} bytes are too few for a chunk of {chunk.size_bytes}")
        view = _as_bytes(into)[: chunk.size_bytes]
        if chunk.hash is None:
            ctypes.memset(address_of(view), 0, len(view))
            return Source.ZERO
        if self.cache is not None and self.cache.fetch(chunk, view, verify):
            return Source.CACHE
        self.read_from_store(chunk, view, verify)
        return Source.STORE

    def read_from_store(self, chunk: Chunk, view: memoryview, verify: bool = True) -> None:
        """Fill a view of a stored chunk's size, past the cache; otherwise as `get`."""
        self.chunks.read(chunk, view)
        if verify:
            check_content(chunk, view, self.hash, self.path)

    # --- room

    def room(self) -> Room:
        """Return how much room there is for this user; raises `WriteFailed` if nobody can tell."""
        return self.place.room()

    def require_room(self, size_bytes: int, chunks: int) -> None:
        """Raise `NoRoom` if `size_bytes` in `chunks` new chunks would not fit; what is known already needs none."""
        self.room().require(self.path, size_bytes, chunks)


def _as_bytes(view: memoryview) -> memoryview:
    if not view.c_contiguous:
        raise ValueError("the memory is not in one piece")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _place(path: str | os.PathLike[str], files: Files) -> Place:
    if is_url(os.fspath(path)):
        return objects.Bucket(os.fspath(path), files.waits)
    return Directory(os.path.abspath(path), files)


def read_clean_ns(store: Store) -> int:
    """Return when the store's last clean fsck began, by the store's clock; 0 if there was none or nobody can tell."""
    try:
        body = format.decode(format.FSCK, store.place.read(format.FSCK_FILE))
    except (OSError, FormatError):
        return 0
    value = body.get("clean_ns")
    return value if isinstance(value, int) and body.get("store") == store.id else 0
