"""Things a worker does all the time in a thread of its own while it is suspended and resumed.

Each loop checks itself: it keeps the count of its rounds, and what it finds wrong goes to `errors` and ends it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.programs import calls, content

Launch = Callable[..., calls.Result]
BLOCK_WORDS = 4096
NOT_INITIALIZED = 3
RELAY_S = 60.0
MAP_FIXED_NOREPLACE = 0x100000
MAP_FAILED = ctypes.c_void_p(-1).value


class Loop:
    """A thread that runs one round after another, `pause_s` between them, until it is stopped or finds an error."""

    def __init__(self, kind: str, context: int, rounds: Iterator[None], pause_s: float = 0) -> None:
        self.kind = kind
        self._pause_s = pause_s
        self.count = 0
        self.errors: list[str] = []
        self._context = context
        self._rounds = rounds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"loop-{kind}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            calls.need(calls.ctx_set(self._context), "set the context")
            for _ in self._rounds:
                self.count += 1
                if self._stop.wait(self._pause_s):
                    break
            self._rounds.close()  # type: ignore[attr-defined]
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def state(self) -> dict[str, Any]:
        """Return the count of rounds and what was found wrong."""
        return {"count": self.count, "errors": list(self.errors), "alive": self._thread.is_alive()}

    def stop(self, timeout_s: float) -> dict[str, Any]:
        """Stop after the current round; `alive` stays true when it does not end in time."""
        self._stop.set()
        self._thread.join(timeout_s)
        return self.state()


def _memory(size: int = BLOCK_WORDS * 4) -> int:
    return int(calls.need(calls.alloc(size), "allocate"))


def _same(found: content.Words, wanted: content.Words, what: str) -> None:
    places = np.flatnonzero(found != wanted)
    if places.size:
        at = int(places[0])
        raise AssertionError(f"{what}: word {at} is {found[at]:#x}, not {wanted[at]:#x}; {places.size} words are wrong")


def launches(launch: Launch, form: str = "plain") -> Iterator[None]:
    """Add ones to a block by a kernel each round; the sum is checked every 32 rounds and at the end."""
    stream = calls.need(calls.stream_create(), "stream")
    total, ones = _memory(), _memory()
    content.write(total, np.zeros(BLOCK_WORDS, np.uint32))
    content.write(ones, np.ones(BLOCK_WORDS, np.uint32))
    done = 0
    try:
        while True:
            calls.need(launch("gs_add", [total, ones, BLOCK_WORDS], stream=stream, form=form), "launch")
            done += 1
            if done % 32 == 0:
                calls.need(calls.stream_sync(stream), "sync")
                _same(content.read(total, BLOCK_WORDS), np.full(BLOCK_WORDS, done, np.uint32), "launches")
            yield
    finally:
        calls.need(calls.stream_sync(stream), "sync")
        _same(content.read(total, BLOCK_WORDS), np.full(BLOCK_WORDS, done, np.uint32), "launches")


# Stays mapped when a loop has ended: its last graphs may still write there.
_registered: list[mmap.mmap] = []


def graphs(launch: Launch) -> Iterator[None]:
    """Replay a graph of copies, a memset and a kernel; each replay adds five to a block, shown in registered memory."""
    stream = calls.need(calls.stream_create(), "stream")
    total, fives, scratch = _memory(), _memory(), _memory()
    shown = mmap.mmap(-1, BLOCK_WORDS * 4)
    _registered.append(shown)
    there = ctypes.addressof(ctypes.c_char.from_buffer(shown))
    calls.need(calls.host_register(there, BLOCK_WORDS * 4), "register")
    content.write(total, np.zeros(BLOCK_WORDS, np.uint32))
    calls.need(calls.capture_begin(stream, 1), "capture")
    calls.need(calls.memset_d32(scratch, 5, BLOCK_WORDS, stream), "memset")
    calls.need(calls.copy_dtod(fives, scratch, BLOCK_WORDS * 4, stream), "copy")
    calls.need(launch("gs_add", [total, fives, BLOCK_WORDS], stream=stream), "launch")
    calls.need(calls.copy_dtoh(there, total, BLOCK_WORDS * 4, stream), "copy to registered memory")
    graph = calls.need(calls.capture_end(stream), "capture")
    executable = calls.need(calls.graph_instantiate(graph), "instantiate")
    done = 0
    while True:
        calls.need(calls.graph_launch(executable, stream), "graph launch")
        done += 1
        if done % 16 == 0:
            calls.need(calls.stream_sync(stream), "sync")
            wanted = np.full(BLOCK_WORDS, 5 * done, np.uint32)
            _same(content.read(total, BLOCK_WORDS), wanted, "graph replay")
            _same(np.frombuffer(shown, np.uint32), wanted, "graph replay, in registered memory")
        yield


def captures(launch: Launch) -> Iterator[None]:
    """Record a graph each round, in the mode that lets other threads do what they like, and give it away again."""
    stream = calls.need(calls.stream_create(), "stream")
    block = _memory()
    calls.need(launch("gs_fill", [block, 1, 1], stream=stream), "launch")  # loads the module, which a capture forbids
    calls.need(calls.stream_sync(stream), "sync")
    while True:
        calls.need(calls.capture_begin(stream, 1), "capture")
        calls.need(launch("gs_fill", [block, 1, 1], stream=stream), "launch")
        calls.need(calls.graph_destroy(calls.need(calls.capture_end(stream), "capture")), "destroy the graph")
        yield


def copies(launch: Launch, stream: bool = False) -> Iterator[None]:
    """Copy a new pattern in and out each round, synchronously or in a stream."""
    del launch
    block, other = _memory(), _memory()
    in_stream = calls.need(calls.stream_create(), "stream") if stream else None
    seed = 0
    while True:
        seed += 1
        wanted = content.pattern([seed], BLOCK_WORDS)
        found = np.zeros(BLOCK_WORDS, np.uint32)
        size = wanted.nbytes
        calls.need(calls.copy_htod(block, content.address_of(wanted), size, in_stream), "copy in")
        calls.need(calls.copy_dtod(other, block, size, in_stream), "copy across")
        calls.need(calls.copy_dtoh(content.address_of(found), other, size, in_stream), "copy out")
        if in_stream is not None:
            calls.need(calls.stream_sync(in_stream), "sync")
        _same(found, wanted, "copies")
        yield


def allocations(launch: Launch, sizes: tuple[int, ...] = (256, 5000, 1 << 20, 3 << 20)) -> Iterator[None]:
    """Allocate, fill, compare and free blocks of several sizes."""
    del launch
    seed = 0
    while True:
        held = [(calls.need(calls.alloc(size), "allocate"), size) for size in sizes]
        for address, size in held:
            seed += 1
            content.write(address, content.pattern([seed], size // 4))
        for offset, (address, size) in enumerate(held):
            wanted = content.pattern([seed - len(held) + 1 + offset], size // 4)
            _same(content.read(address, size // 4), wanted, "allocations")
            calls.need(calls.free(address), "free")
        yield


def fed_kernels(launch: Launch) -> Iterator[None]:
    """Launch kernels that end only after another thread's copy, as NCCL's proxy feeds running kernels."""
    stream, feed = calls.need(calls.stream_create(), "stream"), calls.need(calls.stream_create(), "stream")
    flag = _memory(4096)
    content.write(flag, np.zeros(1, np.uint32))
    context = calls.need(calls.ctx_current(), "context")
    asked = threading.Semaphore(0)
    words = np.zeros(1, np.uint32)

    def feeder() -> None:
        calls.need(calls.ctx_set(context), "set the context")
        while True:
            asked.acquire()
            # The kernel is surely waiting by now, also when the launch gate has closed behind it.
            time.sleep(0.002)
            words[0] += 1
            calls.need(calls.copy_htod(flag, content.address_of(words), 4, feed), "feed")
            calls.need(calls.stream_sync(feed), "feed")

    threading.Thread(target=feeder, name="loop-feeder", daemon=True).start()
    turn = 0
    while True:
        turn += 1
        calls.need(launch("gs_wait_flag", [flag, turn], stream=stream), "launch")
        asked.release()
        calls.need(calls.stream_sync(stream), "sync")
        yield


def lockstep(launch: Launch, mine: int, theirs: int, start: int = 0) -> Iterator[None]:
    """Meet a peer each round: write the round into its flag, wait for the own flag. Both ranks have to run this."""
    stream = calls.need(calls.stream_create(), "stream")
    turn = start
    while True:
        turn += 1
        calls.need(launch("gs_fill", [theirs, 1, turn], stream=stream), "launch")
        calls.need(launch("gs_wait_flag", [mine, turn], stream=stream), "launch")
        calls.need(calls.stream_sync(stream), "sync")
        yield


def all_reduce(launch: Launch, rank: int, own: int, theirs: int, mine_flag: int, their_flag: int,
               words: int = BLOCK_WORDS) -> Iterator[None]:
    """Add up what both ranks have written this round, through memory of each other; every sum is compared.

    Kernels wait for the peer's twice a round: until it has written, and until it has read. Both ranks have to run this.
    """
    stream, sums = calls.need(calls.stream_create(), "stream"), _memory(words * 4)
    turn = 0
    while True:
        turn += 1
        written, read = 2 * turn - 1, 2 * turn
        for name, arguments in (
            ("gs_fill", [own, words, turn * (rank + 1)]),
            ("gs_fill", [their_flag, 1, written]), ("gs_wait_flag", [mine_flag, written]),
            ("gs_allreduce_step", [sums, own, theirs, words]),
            ("gs_fill", [their_flag, 1, read]), ("gs_wait_flag", [mine_flag, read]),
        ):  # fmt: skip
            calls.need(launch(name, arguments, stream=stream), "launch")
        calls.need(calls.stream_sync(stream), "sync")
        _same(content.read(sums, words), np.full(words, 3 * turn, np.uint32), f"all-reduce {turn}")
        yield


def values(launch: Launch, mine: int, theirs: int, turns: int, start: int = 0) -> Iterator[None]:
    """Meet a peer each round without a kernel: the streams write and wait for values."""
    del launch
    stream = calls.need(calls.stream_create(), "stream")
    for turn in range(start + 1, start + turns + 1):
        calls.need(calls.stream_write_value(stream, theirs, turn), "write")
        calls.need(calls.stream_wait_value(stream, mine, turn), "wait")
        if turn % 3 == 0:
            calls.need(calls.stream_sync(stream), "sync")
        yield
    calls.need(calls.stream_sync(stream), "sync")


def steps(launch: Launch, mine: int, theirs: list[int], rank: int, seed: int, first: int, turns: int) -> Iterator[None]:
    """Work in step with other ranks for some turns: kernels of its own, then flags from each rank to every other.

    `theirs` has the address of every rank's flags by rank, the own one included; flag number `rank` of each is ours,
    and the word behind the flags is for kernels that wait for nobody.  All ranks are given the same `seed`, which
    says how many kernels a turn has and when its end is waited for; `first` is above all turns before.
    """
    same, own = random.Random(seed), random.Random(f"{seed}.{rank}")
    stream = calls.need(calls.stream_create(), "stream")
    try:
        for turn in range(first, first + turns):
            for _ in range(same.randrange(4)):
                calls.need(launch("gs_fill", [mine + 4 * len(theirs), 1, turn], stream=stream), "launch")
            if own.random() < 0.3:
                time.sleep(own.uniform(0, 0.003))
            for peer, address in enumerate(theirs):
                if peer != rank:
                    calls.need(launch("gs_fill", [address + 4 * rank, 1, turn], stream=stream), "launch")
            for peer in range(len(theirs)):
                if peer != rank:
                    calls.need(launch("gs_wait_flag", [mine + 4 * peer, turn], stream=stream), "launch")
            if same.random() < 0.4:
                calls.need(calls.stream_sync(stream), "sync")
            yield
    finally:
        calls.need(calls.stream_sync(stream), "sync")
        calls.need(calls.stream_destroy(stream), "destroy the stream")


def relayed(turn: int, rank: int) -> content.Words:
    """Return what a block of `relay` holds, which was zero, once this rank's work of this turn is done."""
    word = 0
    for step in range(2 * turn + rank + 1):
        word = (2 * word if step % 2 else word + 1) & 0xFFFFFFFF
    return np.full(BLOCK_WORDS, word, np.uint32)


def relay(launch: Launch, link: int, mine: int, theirs: int, block: int, flags: list[int], rank: int, seed: int,
          first: int, turns: int, entangled: bool) -> Iterator[None]:
    """Work on a block in turn with another process, handing it on by events: rank 0 begins and adds, rank 1 doubles.

    Who has recorded its event `mine` writes a byte to the socket `link`; who reads it has its stream wait for `theirs`.
    If `entangled`, some of the work waits, before the record, for a kernel that the peer launches only once its stream
    waits for that record.  `flags` are the own word for this and the peer's; both ranks are given the same `seed`, and
    a `first` that is above all turns before.
    """
    own = random.Random(f"{seed}.{rank}")
    stream, side = calls.need(calls.stream_create(), "stream"), calls.need(calls.stream_create(), "stream")
    ones = _memory()
    content.write(ones, np.ones(BLOCK_WORDS, np.uint32))

    def needs(who: int, turn: int) -> bool:
        return entangled and random.Random(f"{seed}.{who}.{turn}").random() < 0.6

    def receive(turn: int) -> None:
        if not peer.recv(1):
            raise AssertionError("the peer is gone")
        calls.need(calls.stream_wait_event(stream, theirs), "wait for the peer's event")
        if needs(1 - rank, turn):
            time.sleep(own.uniform(0, 0.003))
            calls.need(launch("gs_fill", [flags[1], 1, first + turn], stream=side), "launch")

    with socket.socket(fileno=os.dup(link)) as peer:
        peer.settimeout(RELAY_S)
        for turn in range(turns):
            if rank == 1 or turn > 0:
                receive(turn - 1 + rank)
            calls.need(launch("gs_add", [block, block if rank else ones, BLOCK_WORDS], stream=stream), "launch")
            if needs(rank, turn):
                calls.need(launch("gs_wait_flag", [flags[0], first + turn], stream=stream), "launch")
            elif own.random() < 0.3:
                calls.need(calls.stream_sync(stream), "sync")
                _same(content.read(block, BLOCK_WORDS), relayed(turn, rank), f"relay, turn {turn}")
            calls.need(calls.event_record(mine, stream), "record the own event")
            peer.send(b".")
            yield
        if rank == 0:
            receive(turns - 1)
            calls.need(calls.stream_sync(stream), "sync")
            _same(content.read(block, BLOCK_WORDS), relayed(turns - 1, 1), "relay, at its end")
        for one in (side, stream):
            calls.need(calls.stream_sync(one), "sync")
            calls.need(calls.stream_destroy(one), "destroy the stream")
    calls.need(calls.free(ones), "free")


def host_memory(launch: Launch, address: int, size: int) -> Iterator[None]:
    """Read and write one word of every page from the CPU, with no call of the driver at all."""
    del launch
    words = content.host_view(address, size // 4)[:: 4096 // 4]
    turn = np.uint32(0)
    words[:] = turn
    while True:
        _same(words.copy(), np.full(words.size, turn, np.uint32), "host memory")
        turn += np.uint32(1)
        words[:] = turn
        yield


def mapper(launch: Launch, ranges: list[list[int]]) -> Iterator[None]:
    """Ask the kernel for the very addresses of `ranges` ([address, size] each); it must never have one to give."""
    del launch
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    while True:
        for address, size in ranges:
            for at in range(address, address + size, 1 << 20):
                got = libc.mmap(at, 4096, mmap.PROT_READ, fixed, -1, 0)
                if got != MAP_FAILED or ctypes.get_errno() != errno.EEXIST:
                    raise AssertionError(f"the address {at:#x} of a suspended process was free")
        yield


def reserver(launch: Launch, ranges: list[list[int]]) -> Iterator[None]:
    """Ask the driver for the very addresses of `ranges`; it must always give others."""
    del launch
    while True:
        for address, size in ranges:
            got = calls.need(calls.mem_reserve(size, 0, address), "reserve")
            if got < address + size and address < got + size:
                raise AssertionError(f"the driver gave the addresses of {address:#x} away")
            calls.need(calls.mem_address_free(got, size), "free the range")
        yield


def host_functions(launch: Launch) -> Iterator[None]:
    """Let the driver call back into the process between two kernels."""
    stream = calls.need(calls.stream_create(), "stream")
    total = _memory()
    seen = [0]

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def called(_: object) -> None:
        seen[0] += 1

    pointer = ctypes.cast(called, ctypes.c_void_p).value
    done = 0
    while True:
        calls.need(launch("gs_fill", [total, BLOCK_WORDS, done], stream=stream), "launch")
        calls.need(calls.host_function(stream, pointer), "host function")
        calls.need(calls.stream_sync(stream), "sync")
        done += 1
        if seen[0] != done:
            raise AssertionError(f"{seen[0]} calls back after {done} host functions")
        yield


def imports(launch: Launch) -> Iterator[None]:
    """Import memory of this process's own again and again, ask about each fresh handle, and give it up."""
    del launch
    handle = calls.need(calls.mem_create(2 << 20), "create")
    fd = calls.need(calls.mem_export(handle), "export")
    while True:
        for _ in range(50):
            fresh = calls.need(calls.mem_import(fd), "import")
            calls.need(calls.mem_properties(fresh), "properties of a fresh handle")
            calls.need(calls.mem_release(fresh), "release")
        yield


def forks(launch: Launch) -> Iterator[None]:
    """Fork a child that launches, copies and ends: no gate holds it, and the driver has nothing for it."""
    stream, memory = calls.need(calls.stream_create(), "stream"), _memory()
    while True:
        child = os.fork()
        if child == 0:
            answers = {launch("gs_add", [memory, memory, 1], stream=stream).code, calls.memset_d8(memory, 0, 1).code}
            os._exit(0 if answers == {NOT_INITIALIZED} else 1)
        status = os.waitpid(child, 0)[1]
        if status != 0:
            raise AssertionError(f"a forked child ended with status {status}")
        yield


KINDS: dict[str, Callable[..., Iterator[None]]] = {
    one.__name__: one
    for one in (imports, launches, graphs, captures, copies, allocations, fed_kernels, lockstep, all_reduce, values,
                steps, relay, host_memory, mapper, reserver, host_functions, forks)
}
