"""One rank of the demo: holds GPU memory, shares it, computes through its peers' memory, and checks every byte.

Started as ``python -m gpususpend.demo.rank FD`` with the shim preloaded; obeys the messages on the socket FD, one at a
time. Between two messages nothing is decided here, so the demo's barriers lie between messages.

What every word must hold is a closed formula of the step count, computed by numpy at the check: a lane's published
words grow by `delta` a step, every rank adds the sum over all ranks to `total`, and adds its `delta` to the inbox of
the next rank, in that rank's memory. A byte lost once is therefore wrong in every later check.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver

from gpususpend.demo import cuda, wire
from gpususpend.demo.cuda import CudaError, Device, Shared, call

WORD = 4
PAGE = 4096
MIB = 1 << 20
SCRATCH_BYTES = 3 * MIB + 512
SMALL_SIZES = [1, 3, 64, 255, 256, 257, 1000, 4096, 70_000, 300_000, MIB, MIB + 1]
SMALL_LANE_WORDS = 250
PIECE_WORDS = 16 * MIB  # of the large allocation, compared at a time: host memory stays small

Words = np.ndarray[Any, np.dtype[np.uint32]]


class Mismatch(Exception):
    """Memory does not hold what it must; the message says which and where."""


def iota(nwords: int, start: int) -> Words:
    """Return `start`, `start` + 1, … as 32-bit words that wrap."""
    words: Words = np.arange(nwords, dtype=np.uint32) + np.uint32(start & 0xFFFFFFFF)
    return words


def times(words: Words, factor: int) -> Words:
    """Return `words` times `factor`, wrapping."""
    product: Words = words * np.uint32(factor & 0xFFFFFFFF)
    return product


def compare(what: str, found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> int:
    """Return the number of bytes compared. Raises Mismatch that names the first wrong place."""
    wrong = np.flatnonzero(found != wanted)
    if wrong.size:
        at = int(wrong[0])
        first = f"first at {at}: {found[at]} instead of {wanted[at]}"
        raise Mismatch(f"{what}: {wrong.size} of {wanted.size} differ, {first}")
    return wanted.nbytes


@dataclass
class Lane:
    """One shared allocation of this rank, those of its peers, and the private memory it computes in.

    The allocation holds `nwords` published words and then `nwords` words of inbox.
    """

    name: str
    number: int
    nwords: int
    own: int
    shared: Shared | None  # where it is shared as a POSIX fd; by CUDA IPC otherwise
    delta: int
    sum: int
    total: int
    all_ranks: list[int] = field(default_factory=list)  # published words, by rank, this one included

    @property
    def size_bytes(self) -> int:
        """The bytes that are shared."""
        return 2 * self.nwords * WORD

    def first_published(self, rank: int) -> Words:
        """Return the published words of `rank` before the first step."""
        return iota(self.nwords, (rank + 1) * 1_000_003 + self.number * 7_919)

    def step(self, rank: int) -> Words:
        """Return what `rank` adds to its published words in each step."""
        return iota(self.nwords, (rank + 1) * 65_537 + self.number)


class Rank:
    """The memory of one rank and what it does with it."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.steps = 0
        self.lanes: list[Lane] = []
        self.small: list[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]] = []
        self.kept_fds: list[int] = []
        self.ipc_handles: dict[str, bytes] = {}
        self.graph: Any = None

    def look(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Say how many devices there are, and whether they reach each other's memory."""
        call(driver.cuInit, 0)
        count = call(driver.cuDeviceGetCount)
        return {"devices": count, "reach": cuda.all_reach_each_other(range(count))}

    def allocate(self, message: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Allocate on the given device and fill; answer with an fd and IPC handles that share the lanes."""
        self.device = Device(message["device"])
        words = message["lane_words"]
        self.lanes = [
            self._make_lane("fd", 0, words, by_fd=True),
            self._make_lane("ipc", 1, words),
            self._make_lane("small ipc", 2, SMALL_LANE_WORDS),
        ]
        self.ballast_words = message["ballast_words"]
        self.ballast = self.device.allocate(self.ballast_words * WORD)
        self.device.launch("gs_iota", self.ballast_words, self.ballast, self.ballast_words, self.rank * 77)
        self._fill_small()
        self.checksum = self.device.allocate(8)
        self.host = mmap.mmap(-1, PAGE)
        self.host_address = ctypes.addressof(ctypes.c_char.from_buffer(self.host))
        call(driver.cuMemHostRegister, self.host_address, PAGE, 0)
        self.device.synchronize()
        # Kept open, as real ranks keep theirs: a suspend has to deal with it.
        self.kept_fds = [cuda.export_fd(lane.shared) for lane in self.lanes if lane.shared]
        self.ipc_handles = {lane.name: cuda.ipc_handle(lane.own) for lane in self.lanes if not lane.shared}
        return {"ipc": {name: handle.hex() for name, handle in self.ipc_handles.items()}}, self.kept_fds

    def _make_lane(self, name: str, number: int, nwords: int, by_fd: bool = False) -> Lane:
        size = 2 * nwords * WORD
        shared = self.device.create_shared(size) if by_fd else None
        own = shared.address if shared else self.device.allocate(size)
        delta, sum_, total = (self.device.allocate(nwords * WORD) for _ in range(3))
        lane = Lane(name, number, nwords, own, shared, delta, sum_, total)
        self.device.launch("gs_iota", nwords, lane.own, nwords, int(lane.first_published(self.rank)[0]))
        self.device.launch("gs_iota", nwords, lane.delta, nwords, int(lane.step(self.rank)[0]))
        for address in (lane.own + nwords * WORD, lane.sum, lane.total):
            call(driver.cuMemsetD32Async, address, 0, nwords, self.device.stream)
        return lane

    def _fill_small(self) -> None:
        draw = np.random.default_rng(self.rank)
        for size in SMALL_SIZES:
            content = draw.integers(0, 256, size, np.uint8)
            address = self.device.allocate(size)
            call(driver.cuMemcpyHtoD, address, content.ctypes.data, size)
            self.small.append((address, content))

    def connect(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Map the lanes of all peers, given their IPC handles by rank and their fds in the order of the ranks."""
        waiting = iter(fds)
        for lane in self.lanes:
            lane.all_ranks = []
            for rank in range(self.ranks):
                if rank == self.rank:
                    lane.all_ranks.append(lane.own)
                elif lane.shared:
                    lane.all_ranks.append(self.device.import_shared(next(waiting), lane.shared.size_bytes).address)
                else:
                    lane.all_ranks.append(cuda.ipc_open(bytes.fromhex(message["ipc"][str(rank)][lane.name])))
        self.graph = self.device.capture(self._reduce)
        return {}

    def publish(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """First half of a step: change what peers will read. Allocates and frees on the way, as real ranks do."""
        scratch = self.device.allocate(SCRATCH_BYTES)
        for lane in self.lanes:
            self.device.launch("gs_add", lane.nwords, lane.own, lane.delta, lane.nwords)
        call(driver.cuMemsetD8Async, scratch, 7, SCRATCH_BYTES, self.device.stream)
        self.device.synchronize()
        call(driver.cuMemFree, scratch)
        return {}

    def reduce(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Second half: sum over all ranks through their memory, by launches and by the captured graph in turn."""
        if self.steps % 2:
            call(driver.cuGraphLaunch, self.graph, self.device.stream)
        else:
            self._reduce()
        self.device.synchronize()
        self.steps += 1
        return {"steps": self.steps}

    def _reduce(self) -> None:
        stream, launch = self.device.stream, self.device.launch
        for lane in self.lanes:
            n = lane.nwords
            launch("gs_allreduce_step", n, lane.sum, lane.all_ranks[0], lane.all_ranks[1], n)
            for published in lane.all_ranks[2:]:
                launch("gs_add", n, lane.sum, published, n)
            launch("gs_add", n, lane.total, lane.sum, n)
            following = lane.all_ranks[(self.rank + 1) % self.ranks]
            launch("gs_add", n, following + n * WORD, lane.delta, n)
        call(driver.cuMemsetD32Async, self.checksum, 0, 2, stream)
        launch("gs_checksum", self.lanes[0].nwords, self.lanes[0].total, self.lanes[0].nwords, self.checksum)
        call(driver.cuMemcpyDtoHAsync, self.host_address, self.checksum, 8, stream)

    def check(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Compare every byte with the CPU's reference. Raises Mismatch."""
        checked = sum(self._check_lane(lane) for lane in self.lanes)
        for at in range(0, self.ballast_words, PIECE_WORDS):
            nwords = min(PIECE_WORDS, self.ballast_words - at)
            found_words = self.device.read(self.ballast + at * WORD, nwords)
            checked += compare(f"large allocation from word {at} on", found_words, iota(nwords, self.rank * 77 + at))
        for address, content in self.small:
            found = np.empty_like(content)
            call(driver.cuMemcpyDtoH, found.ctypes.data, address, content.nbytes)
            checked += compare(f"small allocation of {content.nbytes} bytes", found, content)
        for lane in self.lanes:
            if lane.name in self.ipc_handles and cuda.ipc_handle(lane.own) != self.ipc_handles[lane.name]:
                raise Mismatch(f"{lane.name}: the IPC handle of the allocation has changed")
        return {"checked_bytes": checked, "steps": self.steps}

    def _check_lane(self, lane: Lane) -> int:
        n, k, everyone = lane.nwords, self.steps, range(self.ranks)
        sum_of_first = sum((lane.first_published(r) for r in everyone), iota(n, 0) * 0)
        sum_of_steps = sum((lane.step(r) for r in everyone), iota(n, 0) * 0)
        total = times(sum_of_first, k) + times(sum_of_steps, k * (k + 1) // 2)
        wanted = {
            "published": (lane.own, lane.first_published(self.rank) + times(lane.step(self.rank), k)),
            "inbox": (lane.own + n * WORD, times(lane.step((self.rank - 1) % self.ranks), k)),
            "delta": (lane.delta, lane.step(self.rank)),
            "sum": (lane.sum, sum_of_first + times(sum_of_steps, k) if k else sum_of_first * 0),
            "total": (lane.total, total),
        }
        for rank in everyone:  # what the peers' memory holds, seen from here
            wanted[f"published by rank {rank}"] = (
                lane.all_ranks[rank], lane.first_published(rank) + times(lane.step(rank), k)
            )  # fmt: skip
        checked = 0
        for what, (address, words) in wanted.items():
            checked += compare(f"lane {lane.name}, {what}", self.device.read(address, n), words)
        if lane is self.lanes[0] and k:
            found = np.frombuffer(self.host[:8], np.uint64)
            checked += compare("checksum in registered host memory", found, np.array([total.sum(dtype=np.uint64)]))
        return checked

    def finish(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Free what a program would free, to show that what was re-created can be; the rest ends with us."""
        random.Random(self.rank).shuffle(self.small)
        for address, _ in self.small:
            call(driver.cuMemFree, address)
        for lane in self.lanes:
            for rank, address in enumerate(lane.all_ranks):
                if rank != self.rank and not lane.shared:
                    call(driver.cuIpcCloseMemHandle, address)
            for address in (lane.delta, lane.sum, lane.total):
                call(driver.cuMemFree, address)
        call(driver.cuMemHostUnregister, self.host_address)
        for fd in self.kept_fds:
            os.close(fd)
        return {}


def serve(channel: socket.socket, rank: Rank) -> None:
    """Obey messages until the demo closes the channel."""
    verbs: dict[str, Callable[..., Any]] = {
        verb: getattr(rank, verb) for verb in ("look", "allocate", "connect", "publish", "reduce", "check", "finish")
    }
    with contextlib.suppress(wire.Closed):  # also while an answer is on its way: another rank has failed
        while True:
            message, fds = wire.receive(channel)
            outgoing: list[int] = []
            try:
                answer = verbs[message["do"]](message, fds)
                if isinstance(answer, tuple):
                    answer, outgoing = answer
            except (CudaError, Mismatch) as error:
                answer = {"error": str(error)}
            for fd in fds:
                os.close(fd)
            wire.send(channel, answer, outgoing)


def main() -> None:
    """Run the rank whose channel, number and group size stand on the command line."""
    fd, rank, ranks = (int(argument) for argument in sys.argv[1:])
    serve(socket.socket(fileno=fd), Rank(rank, ranks))


if __name__ == "__main__":
    main()
