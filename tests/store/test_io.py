"""Reads and writes that come short, fail, or are refused with direct I/O.

A behaviour is a string, one letter a call: `r` goes through, `s` moves one block, `o` an odd number of bytes, `E` fails
with EIO, `0` moves nothing; `I` fails with EINVAL and `N` with EOPNOTSUPP if the call is direct. The last letter stands
for all further calls.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from chunkstore import Files, How, Store, errors
from chunkstore.hashing import address_of
from chunkstore.io import ALIGNMENT
from chunkstore.system import System
from tests.store.tools import SIZE, Faulty, chunk_file, content, error, files_of, memory

CODES = {"E": errno.EIO, "I": errno.EINVAL, "N": errno.EOPNOTSUPP}


class Behaving(Faulty):
    """A system whose `call` behaves as a string says, for transfers of more than a document's size."""

    def __init__(self, call: str, behaviour: str) -> None:
        super().__init__(self._before)
        self.calls = 0
        self._call, self._behaviour = call, behaviour

    def _before(self, name: str, *arguments: Any) -> int | None:
        if name != self._call or len(arguments[1]) < ALIGNMENT:
            return None
        letter = self._behaviour[min(self.calls, len(self._behaviour) - 1)]
        self.calls += 1
        if letter == "E" or (letter in CODES and fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT):
            raise error(CODES[letter])
        letter = "r" if letter in CODES else letter
        count = {"r": len(arguments[1]), "s": ALIGNMENT, "o": 777, "0": 0}[letter]
        fd, view, offset = arguments
        if count == 0:
            return 0
        if count % ALIGNMENT:  # the real call, without the flag that would refuse it
            with open(f"/proc/self/fd/{fd}", "r+b" if self._call == "write" else "rb", buffering=0) as file:
                file.seek(offset)
                return file.write(view[:count]) if self._call == "write" else file.readinto(view[:count])
        real = os.pwrite if self._call == "write" else lambda fd, view, offset: os.preadv(fd, [view], offset)
        return real(fd, view[:count], offset)


def with_behaviour(store: Store, call: str, behaviour: str, told: list[str] | None = None) -> Store:
    """Open a store anew over a system that behaves so."""
    notify = None if told is None else told.append
    return Store.open(store.path, files=Files(Behaving(call, behaviour), notify))


SIZES = [ALIGNMENT, SIZE, SIZE - 1, 3 * ALIGNMENT + 5]


@pytest.mark.parametrize("behaviour", ["r", "s", "o", "ro", "so", "sor", "oso", "rsIr", "I", "N", "Ir", "sIo"])
def test_fr62_writes_are_completed(store: Store, behaviour: str) -> None:
    for size in SIZES:
        put = with_behaviour(store, "write", behaviour).put(memory(content(size, size)))
        assert put.how is How.NEW
        assert chunk_file(store, put.chunk).read_bytes() == content(size, size)
    assert not os.listdir(Path(store.path) / "tmp")


@pytest.mark.parametrize("behaviour", ["r", "s", "o", "ro", "so", "sor", "oso", "rsIr", "I", "N", "Ir", "sIo"])
@pytest.mark.parametrize("shift", [0, 1])
def test_fr62_reads_are_completed(store: Store, behaviour: str, shift: int) -> None:
    for size in SIZES:
        chunk = store.put(memory(content(size, size))).chunk
        into = memory(SIZE + shift)
        with_behaviour(store, "read", behaviour).get(chunk, into[shift:])
        assert bytes(into[shift : shift + size]) == content(size, size)
        assert with_behaviour(store, "read", behaviour).put(memory(content(size, size))).how is How.KNOWN


@pytest.mark.parametrize("behaviour", ["E", "sE", "0", "s0", "oE", "IE"])
def test_fr62_failed_write_keeps_nothing(store: Store, behaviour: str) -> None:
    with pytest.raises(errors.WriteFailed, match="kernel's log"):
        with_behaviour(store, "write", behaviour).put(memory(content(1)))
    assert not os.listdir(Path(store.path) / "tmp")
    assert not list((Path(store.path) / "chunks").glob("*/*"))
    assert store.put(memory(content(1))).how is How.NEW


@pytest.mark.parametrize(
    ("behaviour", "what"), [("E", errors.Damaged), ("sE", errors.Damaged), ("0", errors.ChunkDamaged)]
)
def test_failed_read_is_damage(store: Store, behaviour: str, what: type[Exception]) -> None:
    chunk = store.put(memory(content(1))).chunk
    with pytest.raises(what, match=str(chunk.hash)):
        with_behaviour(store, "read", behaviour).get(chunk, memory(SIZE))
    store.get(chunk, memory(SIZE))


@pytest.mark.parametrize("letter", ["I", "N"])
@pytest.mark.parametrize("call", ["write", "read"])
def test_b26_fr58_refused_direct_io_is_given_up_once_for_the_filesystem(store: Store, call: str, letter: str) -> None:
    first = store.put(memory(content(1))).chunk
    told: list[str] = []
    later = with_behaviour(store, call, letter + "r", told)
    direct: list[bool] = []
    real = later.files.system.set_direct
    later.files.system.__dict__["set_direct"] = lambda fd, on: (direct.append(on), real(fd, on))[1]
    for _ in range(3):
        later.get(first, memory(SIZE))
    for number in (2, 3, 4):
        assert later.put(memory(content(number))).how is How.NEW
    assert direct == [True, False] if call == "read" else direct[-2:] == [True, False]
    assert [line.count("refuses direct I/O") for line in told] == [1]


@pytest.mark.parametrize("call", ["write", "read"])
def test_short_transfer_is_no_refusal_of_direct_io(disk_path: Path, call: str) -> None:
    """What is left of that file goes through the page cache, since no block begins there; other files do not."""
    store = Store.create(disk_path / "store", chunk_size_bytes=SIZE)
    chunk = store.put(memory(content(1))).chunk
    told: list[str] = []
    later = with_behaviour(store, call, "or", told)
    later.get(chunk, memory(SIZE))
    assert chunk_file(store, later.put(memory(content(2))).chunk).read_bytes() == content(2)
    assert not told


def test_direct_io_is_used_with_aligned_addresses_lengths_and_offsets(disk_path: Path) -> None:
    calls: list[tuple[str, int, int, int]] = []

    def note(name: str, *arguments: Any) -> None:
        if name in ("write", "read") and fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT:
            calls.append((name, address_of(arguments[1]), len(arguments[1]), arguments[2]))

    store = Store.create(disk_path / "store", chunk_size_bytes=SIZE, files=files_of(note))
    for shift, size in ((0, SIZE), (1, SIZE), (0, 5000), (8, 100)):
        room = memory(size + shift)
        room[shift:] = content(size + shift, size)
        store.get(store.put(room[shift:]).chunk, memory(SIZE + 1)[1:])
    if store.files._buffered:
        pytest.skip("the filesystem of temporary files has no direct I/O")
    assert {name for name, *_ in calls} == {"write", "read"}
    assert not [call for call in calls if any(number % ALIGNMENT for number in call[1:])]


@pytest.mark.parametrize(("memory_bytes", "offset_bytes"), [(512, 512), (0, 0), (4096, 16384)])
def test_fr59_at_least_a_page_and_what_the_filesystem_demands(
    store: Store, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, offset_bytes: int
) -> None:
    lengths: list[int] = []
    real = System.write

    def write(self: System, fd: int, data: memoryview, offset: int) -> int:
        lengths.append(len(data))
        return real(self, fd, data, offset)

    monkeypatch.setattr(System, "alignments", lambda self, fd: (memory_bytes, offset_bytes))
    monkeypatch.setattr(System, "write", write)
    chunk = store.put(memory(content(1, 20000))).chunk
    block = max(4096, memory_bytes, offset_bytes)
    assert sum(lengths) == -(-20000 // block) * block
    assert not [length for length in lengths if length % block]
    assert chunk_file(store, chunk).read_bytes() == content(1, 20000)


def test_fr59_demands_that_no_buffer_meets(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a whole extent of some megabytes: then the page cache is used."""
    told: list[str] = []
    monkeypatch.setattr(System, "alignments", lambda self, fd: (4096, 4 << 20))
    store = Store.create(disk_path / "store", chunk_size_bytes=SIZE, files=Files(notify=told.append))
    chunk = store.put(memory(content(1))).chunk
    store.get(chunk, into := memory(SIZE))
    assert bytes(into) == content(1)
    assert [line.count("direct I/O") for line in told] == [1], told


def test_b03_taken_temporary_name_is_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall 45: another client of a shared store may have any name, and a link may lie there."""
    taken = Path(store.path) / "tmp" / "taken.tmp"
    taken.write_bytes(b"another writer's")
    (taken.parent / "link.tmp").symlink_to(taken)
    names = iter(["taken", "link", "free", "free2"])
    monkeypatch.setattr("secrets.token_hex", lambda size: next(names))
    assert store.put(memory(content(1))).how is How.NEW
    assert taken.read_bytes() == b"another writer's"


def test_b03_many_writers_of_one_chunk(store: Store) -> None:
    """Each its own store object: they meet on the disk only."""
    stores = [Store.open(store.path) for _ in range(8)]
    start = threading.Barrier(len(stores))
    hows: list[How] = []

    def put(opened: Store) -> None:
        start.wait()
        hows.append(opened.put(memory(content(1))).how)

    threads = [threading.Thread(target=put, args=(opened,)) for opened in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(hows) == [How.KNOWN] * 7 + [How.NEW]
    assert not os.listdir(Path(store.path) / "tmp")


def test_threads_of_one_store_write_a_content_once(store: Store) -> None:
    """Also if all come while the first is at it: each waits for that one, or has written, too, before it is through."""
    writes: list[str] = []
    waiting: list[str] = []
    others = 7

    class Turn(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.append("")
            return super().wait(timeout)

    def note(name: str, *arguments: Any) -> None:
        if name == "datasync":
            writes.append(name)
            while len(waiting) < others and len(writes) == 1:
                pass

    shared = Store.open(store.path, files=files_of(note))
    shared._turn = Turn()
    threads = [threading.Thread(target=lambda: shared.put(memory(content(1)))) for _ in range(others + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writes) == 1


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_filesystem_without_hard_links(store: Store, code: int) -> None:
    def no_links(name: str, *arguments: Any) -> None:
        if name == "link":
            raise error(code)

    later = Store.open(store.path, files=files_of(no_links))
    put = later.put(memory(content(1)))
    assert put.how is How.NEW
    assert later.put(memory(content(1))).how is How.KNOWN
    assert not later.chunks.write(put.chunk, memory(content(1))), "it replaced a chunk"
    assert not os.listdir(Path(store.path) / "tmp")


def test_lock_has_a_deadline(store: Store) -> None:
    path = str(Path(store.path) / "sweep.lock")
    with store.files.locked(path, True, "somebody sweeps"):
        with pytest.raises(errors.Busy, match="somebody sweeps"):
            with store.files.locked(path, False, "somebody sweeps", wait_s=0.01):
                pytest.fail("two held it")


def test_durable_order_of_a_new_chunk(store: Store) -> None:
    """Content, then name, then directory: each on the disk before the next."""
    calls: list[str] = []

    def note(name: str, *arguments: Any) -> None:
        if name in ("write", "truncate", "datasync", "link", "sync", "unlink"):
            calls.append(name)

    later = Store.open(store.path, files=files_of(note))
    later.put(memory(content(1)))
    assert calls == ["write", "datasync", "link", "unlink", "sync"]
    again = Store.open(store.path, files=files_of(note))
    again.put(memory(content(2)))
    again.put(memory(content(1)))  # the first lease also looks whether access times are kept
    calls.clear()
    again.put(memory(content(1)))
    assert calls == ["sync"], "an existing chunk is not written, and its directory is synced for its writer"
