"""A store in an object store (S3, GCS, Azure), through the package obstore, which is loaded when the first is opened.

Owns the way there: requests, parallel ranges, and the end of the wait for an answer. Retries with backoff,
credentials and the checksums of requests are the client's. An object appears whole or not at all: nothing has to be
synced, and a chunk that is there was written whole. There are no locks, so saves and loads work, and nothing can be
collected.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from chunkstore import errors, format
from chunkstore.chunks import Backend, Entry, State
from chunkstore.format import Chunk, is_chunk_name
from chunkstore.hashing import Hash, same
from chunkstore.io import LocksUnsupported, Room
from chunkstore.place import Place

PIECE_BYTES = 8 << 20
RANGES = 8  # of one chunk at a time
LOOKS = 16  # for many chunks at a time
REQUEST_TIMEOUT = "180s"  # of one request: a chunk is written by one
RETRIES = 10  # with backoff, for three minutes at most
LOOK_S = 0.1  # between two looks whether an answer is still waited for
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")  # S3, Azure, GCS
_WRITTEN_WHOLE_NS = -1  # before any check of the store: what is there need not be compared again

T = TypeVar("T")


@contextlib.contextmanager
def _requests(path: str) -> Iterator[None]:
    """Turn the client's errors into OSError; of their text, the first line is for people."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _first_line(error), path) from error
    except (BaseError, ValueError) as error:
        if any(word in str(error) for word in _NO_BUCKET):  # a listing's answer, which the client does not tell apart
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket", path) from error
        raise OSError(errno.EREMOTEIO, _first_line(error), path) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


@dataclass(frozen=True)
class Client:
    """The client of one object store: the package's functions, what they work on, and whether to wait any longer."""

    calls: Any
    store: Any
    waits: Callable[[], bool]

    def ask(self, path: str, request: Callable[[], T]) -> T:
        """Return what a request returns; raises OSError if it fails, or its answer is not waited for any more.

        A call of the client's hears no signal and no deadline, and a server that has gone deaf holds it for minutes:
        so it is made in a thread of its own. That is a daemon, which keeps no command from its end.
        """
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=work, name="chunkstore-request", daemon=True).start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error), path) from error
        while not wait([answer], LOOK_S).done:
            if not self.waits():
                raise OSError(errno.EREMOTEIO, "it does not answer", path)
        with _requests(path):
            return answer.result()


def _ns(time: datetime) -> int:
    return int(time.timestamp() * 1e9)


def _refuse_credentials(url: str) -> None:
    """Raise `Unreachable` for a URL with more than a place in it: the client passes over that, and here it is shown."""
    parts = urlsplit(url)
    is_account = parts.scheme.startswith("abfs")  # abfss://CONTAINER@ACCOUNT…
    if parts.query or parts.fragment or parts.password is not None or (parts.username is not None and not is_account):
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        detail = "its URL has a user, a password, a query or a fragment"
        advice = "leave those out: credentials come from the environment alone"
        raise errors.Unreachable(path=place, detail=detail, advice=advice)


class Bucket(Place):
    """The place that is a prefix in an object store's bucket, such as s3://bucket/prefix."""

    absent = "see that the bucket is there, and name the prefix of a store in it"

    def __init__(self, url: str, waits: Callable[[], bool]) -> None:
        self.path = url.rstrip("/")
        try:
            import obstore
            import obstore.store
        except ImportError:
            raise errors.NoClient(path=self.path) from None
        # Options that are given to the client hide the environment's, of which this one matters: servers without TLS.
        options = {"timeout": REQUEST_TIMEOUT, "allow_http": os.environ.get("AWS_ALLOW_HTTP") == "true"}
        retries = {"max_retries": RETRIES}
        try:
            with _requests(self.path):
                _refuse_credentials(self.path)
                store = obstore.store.from_url(self.path, client_options=options, retry_config=retries)
        except OSError as error:
            raise errors.not_opened(self.path, self.path, error) from error
        self._client = Client(obstore, store, waits)

    def _ask(self, name: str, request: Callable[[Any, Any], T]) -> T:
        client = self._client
        return client.ask(f"{self.path}/{name}" if name else self.path, lambda: request(client.calls, client.store))

    def make(self, digest: Hash) -> None:
        """Raise `NotAStore` if other objects lie there, or if there is no such bucket."""
        try:
            found = self._ask("", lambda calls, store: calls.list_with_delimiter(store))
        except FileNotFoundError:
            advice = "make it, or name one that is there"
            raise errors.NotAStore(path=self.path, detail="there is no such bucket", advice=advice) from None
        names = [item["path"] for item in found["objects"]] + [name.strip("/") for name in found["common_prefixes"]]
        foreign = sorted(set(names) - {format.CHUNKS, format.ROOTS, format.STORE_FILE, format.FSCK_FILE})
        if foreign:
            detail = f"other objects lie there ({', '.join(foreign[:3])})"
            raise errors.NotAStore(path=self.path, detail=detail, advice="name a prefix that nothing else uses")

    def chunks(self, digest: Hash) -> Backend:
        """Return the chunks here, of a store that uses this hash."""
        return ObjectChunks(self.path, self._client, digest)

    def read(self, name: str) -> bytes:
        """Return the content of a document; raises FileNotFoundError if there is none."""
        return self._ask(name, lambda calls, store: bytes(calls.get(store, name).bytes()))

    def write(self, name: str, content: bytes, replace: bool = False) -> bool:
        """Write a document in one step; returns False if there was one and `replace` is not given."""
        return _put(self._client, self.path, name, content, replace)

    def exists(self, name: str) -> bool:
        """Tell whether there is such a document."""
        try:
            self._ask(name, lambda calls, store: calls.head(store, name))
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a document, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(name, lambda calls, store: calls.delete(store, name))

    def list(self, folder: str) -> list[tuple[str, int]]:
        """Return the documents in a folder: names, and when they were written, in ns by the clock here."""
        found = self._ask(folder, lambda calls, store: calls.list_with_delimiter(store, folder))
        return sorted((item["path"], _ns(item["last_modified"])) for item in found["objects"])

    def clock_ns(self) -> int:
        """Raise OSError: there is no clock to ask without writing."""
        raise OSError(errno.EOPNOTSUPP, "an object store has no clock to ask", self.path)

    def collecting(self) -> AbstractContextManager[object]:
        """Raise `LocksUnsupported`."""
        raise _no_locks(self.path)

    def room(self) -> Room:
        """Return that there is no limit."""
        return Room(None, None)


class ObjectChunks(Backend):
    """Chunks as objects, `chunks/ab/HASH` below the store's prefix. May be used from any thread."""

    def __init__(self, path: str, client: Client, digest: Hash) -> None:
        self.path = path
        self._client = client
        self._hash = digest

    def lookup(self, name: str) -> Entry | None:
        """Return what is known of a chunk without reading it."""
        client = self._client
        try:
            return _entry(client.ask(f"{self.path}/{_key(name)}", lambda: client.calls.head(client.store, _key(name))))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.unreadable("cannot look at", f"{self.path}/{_key(name)}", error) from error

    def lease(self, name: str) -> Entry | None:
        """Return what is known of a chunk: nobody collects here, so there is nothing to mark."""
        return self.lookup(name)

    def lease_all(self, names: Sequence[str]) -> list[Entry | None]:
        """Lease many chunks at a time: each is a way to the server and back."""
        with ThreadPoolExecutor(LOOKS, thread_name_prefix="chunkstore-look") as pool:
            return list(pool.map(self.lease, names))

    def settle(self, name: str) -> None:
        """Do nothing: what is there is durable."""

    def read(self, chunk: Chunk, into: memoryview, use: bool = False) -> None:
        """Fill `into`, of the chunk's size, by several requests at a time; the content is not checked."""
        starts = range(0, chunk.size_bytes, PIECE_BYTES)
        try:
            if len(starts) == 1:
                self._read_piece(chunk, into, 0)
                return
            with ThreadPoolExecutor(min(RANGES, len(starts)), thread_name_prefix="chunkstore-range") as pool:
                for future in [pool.submit(self._read_piece, chunk, into, start) for start in starts]:
                    future.result()
        except FileNotFoundError:
            raise errors.ChunkMissing(hash=chunk.hash, path=self.path, advice=errors.REPAIR) from None
        except OSError as error:
            raise errors.unreadable("cannot read", f"{self.path}/{_key(str(chunk.hash))}", error) from error

    def _read_piece(self, chunk: Chunk, into: memoryview, start: int) -> None:
        end = min(start + PIECE_BYTES, chunk.size_bytes)
        piece, size_bytes = self._get(str(chunk.hash), start, end)
        if size_bytes != chunk.size_bytes:
            detail = f"{size_bytes} bytes instead of {chunk.size_bytes}"
            raise errors.ChunkDamaged(hash=chunk.hash, path=self.path, detail=detail, advice=errors.REPAIR)
        into[start:end] = piece

    def _get(self, name: str, start: int, end: int) -> tuple[memoryview, int]:
        """Return a range of a chunk's bytes, and the size of the whole."""
        client = self._client

        def request() -> tuple[memoryview, int]:
            answer = client.calls.get(client.store, _key(name), options={"range": (start, end)})
            return memoryview(answer.bytes()).cast("B"), int(answer.meta["size"])

        return client.ask(f"{self.path}/{_key(name)}", request)

    def compare(self, chunk: Chunk, data: memoryview) -> State:
        """Compare a chunk with the bytes that it should hold, a piece at a time."""
        name = str(chunk.hash)
        entry = self.lookup(name)
        if entry is None:
            return State.MISSING
        try:
            if entry.size_bytes == len(data):
                done = 0
                for piece in self._pieces(entry):
                    if not same(piece, data[done : done + len(piece)]):
                        break
                    done += len(piece)
                if done == len(data):
                    return State.SOUND
            return State.OTHER if self._hash.digest(self._pieces(entry)) == name else State.DAMAGED
        except FileNotFoundError:
            return State.MISSING
        except OSError as error:
            raise errors.unreadable("cannot read", f"{self.path}/{_key(name)}", error) from error

    def _pieces(self, entry: Entry) -> Iterator[memoryview]:
        for start in range(0, entry.size_bytes, PIECE_BYTES):
            yield self._get(entry.hash, start, min(start + PIECE_BYTES, entry.size_bytes))[0]

    def write(self, chunk: Chunk, data: memoryview, replace: bool = False) -> bool:
        """Publish a chunk by one request; returns False if it was there and `replace` is not given."""
        name = _key(str(chunk.hash))
        try:
            return _put(self._client, self.path, name, data, replace)
        except OSError as error:
            raise errors.write_failed("cannot write", f"{self.path}/{name}", error) from error

    def remove(self, names: Sequence[str], still: Callable[[Entry], bool]) -> list[Entry]:
        """Raise `LocksUnsupported`: nobody can tell whether a chunk is about to be relied on."""
        raise _no_locks(self.path)

    def entries(self) -> Iterator[Entry]:
        """Yield every chunk, in no order; raises OSError. Objects of other names are passed over."""
        batches = iter(self._client.calls.list(self._client.store, format.CHUNKS, chunk_size=1000))
        while (batch := self._client.ask(f"{self.path}/{format.CHUNKS}", lambda: next(batches, None))) is not None:
            for item in batch:
                name = item["path"].rpartition("/")[2]
                if is_chunk_name(name, self._hash.digits) and item["path"] == _key(name):
                    yield _entry(item)

    def reap(self, before_ns: int, dry_run: bool = False) -> int:
        """Return 0: an object that was not written whole is nowhere."""
        return 0

    def unfinished_bytes(self) -> int:
        """Return 0, as `reap` does."""
        return 0


def _key(name: str) -> str:
    return f"{format.CHUNKS}/{name[:2]}/{name}"


def _entry(item: Any) -> Entry:
    name = item["path"].rpartition("/")[2]
    return Entry(name, int(item["size"]), _WRITTEN_WHOLE_NS, _ns(item["last_modified"]))


def _put(client: Client, path: str, name: str, content: bytes | memoryview, replace: bool) -> bool:
    """Write an object by one request, so that it can be refused where the name is taken."""
    from obstore.exceptions import AlreadyExistsError

    def request() -> bool:
        try:
            mode = "overwrite" if replace else "create"
            client.calls.put(client.store, name, content, mode=mode, use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    return client.ask(f"{path}/{name}", request)


def _no_locks(path: str) -> LocksUnsupported:
    return LocksUnsupported(errno.ENOLCK, "an object store has none", path)
