"""Ranks that share a multicast object, as NCCL and PyTorch set one up: rank 0 makes it, the others import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, running

SIZE = 4 * MIB
NEW = {"SIMCUDA_DRIVER_VERSION": "610.5"}
"""What a simulated driver says that can make multicast objects again."""


@dataclass
class Seat:
    """One rank's part: its handle of the object, its own memory, and where it has mapped the object."""

    worker: Worker
    device: int
    team: int
    memory: dict[str, int]
    address: int = 0

    def bind(self, form: str = "mem") -> None:
        """Bind the rank's memory at the beginning, in one of the four ways."""
        handle, address = self.memory["handle"], self.memory["address"]
        calls: dict[str, tuple[str, tuple[Any, ...]]] = {
            "mem": ("multicast_bind", (self.team, 0, handle, 0, SIZE)),
            "mem_v2": ("multicast_bind_for", (self.team, self.device, 0, handle, 0, SIZE)),
            "addr": ("multicast_bind_at", (self.team, 0, address, SIZE)),
            "addr_v2": ("multicast_bind_at_for", (self.team, self.device, 0, address, SIZE)),
        }
        name, arguments = calls[form]
        self.worker.do(name, *arguments)

    def map(self) -> None:
        """Map the object."""
        self.address = self.worker.map_block(self.team, SIZE)["address"]


@dataclass
class Team:
    """The ranks, and what their memory must hold."""

    seats: list[Seat]

    @property
    def pids(self) -> list[int]:
        """Return the pids."""
        return [seat.worker.pid for seat in self.seats]

    def check(self, seed: int) -> None:
        """Let every rank in turn store through the object, in all ways; all ranks' memory must hold it."""
        for turn, seat in enumerate(self.seats):
            value = seed + 16 * turn
            seat.worker.write(seat.address + 8 * turn, [value, value + 1])
            seat.worker.memset_d32(seat.address + MIB, value + 2, 1000)
            seat.worker.kernel("gs_iota", [seat.address + SIZE - 4096, 1024, value + 3])
            seat.worker.stream_write_value(0, seat.address + 2 * MIB, value + 4)
            seat.worker.ctx_sync()
            for other in self.seats:
                begin = other.memory["address"]
                assert other.worker.read(begin + 8 * turn, 2) == [value, value + 1]
                assert other.worker.read(begin + 2 * MIB) == [value + 4]
                assert other.worker.read(begin + MIB, 1000) == [value + 2] * 1000
                assert other.worker.read(begin + SIZE - 4096, 1024) == list(range(value + 3, value + 3 + 1024))

    def hold(self, seed: int) -> None:
        """Give every rank's memory a content of its own, to be checked by `held`."""
        for number, seat in enumerate(self.seats):
            seat.worker.fill(seat.memory["address"], SIZE, seed + number)

    def held(self) -> None:
        """Check that content."""
        for seat in self.seats:
            seat.worker.check()


def make_team(workers: Sequence[Worker], devices: Sequence[int], *, count: int = 0, join: bool = True) -> Team:
    """Let the first rank make an object, the others import it, and all add their devices; nothing is bound yet.

    `count` is the number of devices that the object is for, by default one a rank; without `join` none is added.
    """
    first = workers[0]
    team = first.multicast_create(SIZE, count or len(workers))
    seats = [Seat(first, devices[0], team, first.block(SIZE, ordinal=devices[0]))]
    for worker, device in zip(workers[1:], devices[1:], strict=True):
        number = first.mem_export(team)
        there = first.hand(number, worker)
        seats.append(Seat(worker, device, worker.mem_import(there), worker.block(SIZE, ordinal=device)))
        worker.close_fd(there)
        first.close_fd(number)
    for seat in seats if join else ():
        seat.worker.multicast_add(seat.team, seat.device)
    return Team(seats)


def bound_team(start: Callable[[int], Worker], count: int, form: str = "mem", map_first: bool = False) -> Team:
    """Start ranks, one on each device, that have bound and mapped an object, in one of the two orders."""
    team = make_team([start(rank) for rank in range(count)], list(range(count)))
    for step in (Seat.map, Seat.bind) if map_first else (Seat.bind, Seat.map):
        for seat in team.seats:
            step(seat, form) if step is Seat.bind else step(seat)
    return team


def cycle(tool: Tool, team: Team) -> None:
    """Suspend and resume all ranks."""
    tool.suspend(*team.pids).expect(0)
    tool.resume(*team.pids).expect(0)
    running(tool)
