"""Two workers that work on one block in turn and hand it on by interprocess events: the loop `relay` on both sides."""

from __future__ import annotations

import socket
import time

from tests.programs.client import Worker
from tests.programs.crossing import INTERPROCESS
from tests.programs.loops import BLOCK_WORDS

FLAG_BYTES = 4096


class Relay:
    """Owns what the two share: a block, a flag of each, an event of each, and a socket between them."""

    def __init__(self, first: Worker, second: Worker) -> None:
        self.workers = (first, second)
        self._turns = 1  # above those of all runs before
        self._loops: list[int] = []
        self._block = first.alloc(4 * BLOCK_WORDS)
        self._blocks = (self._block, second.ipc_open(first.ipc_get(self._block)))
        own = [worker.alloc(FLAG_BYTES) for worker in self.workers]
        for worker, address in zip(self.workers, own, strict=True):
            worker.write(address, [0])
        there = [self.workers[1 - at].ipc_get(own[1 - at]) for at in range(2)]
        self._flags = [[own[at], worker.ipc_open(there[at])] for at, worker in enumerate(self.workers)]
        events = [worker.event_create(INTERPROCESS) for worker in self.workers]
        handles = [worker.event_ipc_get(event) for worker, event in zip(self.workers, events, strict=True)]
        self._events = [(events[at], worker.event_ipc_open(handles[1 - at])) for at, worker in enumerate(self.workers)]
        ends = socket.socketpair()
        self._links = [worker.take_fd(end.fileno()) for worker, end in zip(self.workers, ends, strict=True)]
        for end in ends:
            end.close()

    def start(self, seed: int, turns: int, *, entangled: bool = True) -> None:
        """Begin to hand the block to and fro, as the seed says; entangled: with kernels that wait for the peer."""
        self.workers[0].memset_d32(self._block, 0, BLOCK_WORDS)
        self.workers[0].ctx_sync()
        self.workers[0].ctx_sync()
        self._loops = [
            worker.loop_start("relay", link=self._links[at], mine=self._events[at][0], theirs=self._events[at][1],
                              block=self._blocks[at], flags=self._flags[at], rank=at, seed=seed, first=self._turns,
                              turns=turns, entangled=entangled)
            for at, worker in enumerate(self.workers)
        ]
        self._turns += turns

    def turns_done(self) -> int:
        """Return how many turns the slower side has done; what one found wrong is raised."""
        states = [worker.loop_state(number) for worker, number in zip(self.workers, self._loops, strict=True)]
        assert not any(state["errors"] for state in states), states
        return min(int(state["count"]) for state in states)

    def finish(self, timeout_s: float = 60) -> None:
        """Wait until both have ended by themselves; what one found wrong is raised."""
        until = time.monotonic() + timeout_s
        for worker, number in zip(self.workers, self._loops, strict=True):
            while (state := worker.loop_state(number))["alive"]:
                assert time.monotonic() < until, f"pid {worker.pid} does not come to an end: {state}"
                time.sleep(0.002)
            assert not state["errors"], f"pid {worker.pid}: {state['errors']}"
