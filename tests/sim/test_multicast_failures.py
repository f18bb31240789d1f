"""Multicast objects when something goes wrong: rollbacks, killed commands, failing calls, ranks that die, any order."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim.conftest import Background, running
from tests.sim.multicast import NEW, bound_team, cycle, make_team
from tests.sim.shim_control import GRANULE, HARMLESS, Faults, Group, Refused, ask
from tests.sim.test_suspend_states import UP, killed

Start = Callable[..., Worker]
StartRank = Callable[[int], Worker]
Run = Callable[..., Background]
pytestmark = [pytest.mark.machine(driver="sim", devices=3), pytest.mark.usefixtures("own_network")]



@pytest.fixture
def start(start_worker: Start) -> StartRank:
    """A function that starts a rank under a driver that can make multicast objects again."""
    return lambda device: start_worker(device, env=NEW)


class Walk:
    """Ranks that do anything with two objects, and a model of what their memory must hold.

    A word of each granule counts: a store through an object changes it in all memory that is bound there.
    """

    GRANULES = 3

    def __init__(self, start: StartRank, seed: int) -> None:
        self.dice = random.Random(seed)
        self.workers = [start(device) for device in range(3)]
        self.teams: list[list[int]] = []
        size = self.GRANULES * GRANULE
        self.blocks = [worker.block(size, ordinal=device) for device, worker in enumerate(self.workers)]
        self.words = [[0] * self.GRANULES for _ in self.workers]
        for worker, block in zip(self.workers, self.blocks, strict=True):
            worker.memset_d32(block["address"], 0, size // 4)
            worker.ctx_sync()
        for _ in range(2):
            first, *others = self.workers
            made = first.multicast_create(size, 3)
            handles = [made] + [one.mem_import(first.hand(first.mem_export(made), one)) for one in others]
            for device, (worker, handle) in enumerate(zip(self.workers, handles, strict=True)):
                worker.multicast_add(handle, device)
            self.teams.append(handles)
        self.bound: list[list[dict[int, int]]] = [[{} for _ in self.workers] for _ in self.teams]
        self.mapped: list[list[int]] = [[0] * len(self.workers) for _ in self.teams]
        self.value = 0
        for team in range(2):
            for rank in range(3):
                self.map(team, rank)
                for _ in range(self.GRANULES):
                    self.bind(team, rank)

    def step(self) -> None:
        """Do one thing."""
        team, rank = self.dice.randrange(2), self.dice.randrange(3)
        kinds = [self.bind, self.unbind, self.map, self.unmap, self.store]
        self.dice.choices(kinds, [6, 1, 2, 1, 8])[0](team, rank)

    def bind(self, team: int, rank: int) -> None:
        """Bind a granule to a free place, in any of the four ways."""
        worker, handle, block = self.workers[rank], self.teams[team][rank], self.blocks[rank]
        free = [place for place in range(self.GRANULES) if place not in self.bound[team][rank]]
        if not free:
            return
        place, source = self.dice.choice(free), self.dice.randrange(self.GRANULES)
        inside = source * GRANULE
        where = (place * GRANULE, block["handle"], inside, GRANULE)
        there = (place * GRANULE, block["address"] + inside, GRANULE)
        name, arguments = self.dice.choice([
            ("multicast_bind", (handle, *where)), ("multicast_bind_for", (handle, rank, *where)),
            ("multicast_bind_at", (handle, *there)), ("multicast_bind_at_for", (handle, rank, *there)),
        ])  # fmt: skip
        worker.do(name, *arguments)
        self.bound[team][rank][place] = source

    def unbind(self, team: int, rank: int) -> None:
        """Undo a bind."""
        if self.bound[team][rank]:
            place = self.dice.choice(sorted(self.bound[team][rank]))
            self.workers[rank].multicast_unbind(self.teams[team][rank], rank, place * GRANULE, GRANULE)
            del self.bound[team][rank][place]

    def map(self, team: int, rank: int) -> None:
        """Map an object."""
        if not self.mapped[team][rank]:
            size = self.GRANULES * GRANULE
            self.mapped[team][rank] = self.workers[rank].map_block(self.teams[team][rank], size)["address"]

    def unmap(self, team: int, rank: int) -> None:
        """Unmap it."""
        if self.mapped[team][rank]:
            size = self.GRANULES * GRANULE
            self.workers[rank].mem_unmap(self.mapped[team][rank], size)
            self.workers[rank].mem_address_free(self.mapped[team][rank], size)
            self.mapped[team][rank] = 0

    def store(self, team: int, rank: int) -> None:
        """Store one word where all have memory."""
        whole = [place for place in range(self.GRANULES) if all(place in bound for bound in self.bound[team])]
        if not whole or not self.mapped[team][rank]:
            return
        place = self.dice.choice(whole)
        self.value += 1
        self.workers[rank].write(self.mapped[team][rank] + place * GRANULE, [self.value])
        for other in range(len(self.workers)):
            self.words[other][self.bound[team][other][place]] = self.value

    def check(self) -> None:
        """Compare all memory with the model."""
        for worker, block, words in zip(self.workers, self.blocks, self.words, strict=True):
            assert [worker.read(block["address"] + at * GRANULE)[0] for at in range(self.GRANULES)] == words


@pytest.mark.parametrize("seed", range(4))
def test_anything_between_cycles(start: StartRank, seed: int) -> None:
    """Binds, maps and stores in any order, with cycles between, and rollbacks from where only some have got."""
    walk = Walk(start, seed)
    with Group(walk.workers) as group:
        for _ in range(12):
            for _ in range(20):
                walk.step()
            walk.check()
            group.arenas()
            group.quiesce()
            for verb in ("release", "seal", "load", "remap")[: walk.dice.randrange(5)]:
                group.all(verb)
            for verb in ("release", "seal")[: walk.dice.randrange(3)]:
                for pid in walk.dice.sample(group.pids, 1):
                    with contextlib.suppress(Refused):  # not from every phase
                        ask(pid, verb)
            group.resume()
            walk.check()
    assert walk.value > 20


@pytest.mark.parametrize("rule", ["cuCheckpointProcessLock 2 600", "cuCheckpointProcessCheckpoint 2 304"])
def test_rollback_of_a_suspend(start: StartRank, tool: Tool, machine: Setting, rule: str) -> None:
    """After everything was taken apart and before anything was."""
    team = bound_team(start, 2)
    team.hold(1)
    machine.inject(rule)
    tool.suspend(*team.pids).expect(4)
    machine.inject("")
    running(tool)
    team.held()
    team.check(1)
    cycle(tool, team)
    team.check(2)


@pytest.mark.parametrize("step", ["release", "seal", "lock", "checkpoint", "freeze", "load", "remap", "unseal", "bind",
                                  "check", "open"])
def test_a_command_that_is_killed(start: StartRank, tool: Tool, step: str) -> None:
    """At every step after the object was taken apart, and before it is whole: recover makes it whole."""
    team = bound_team(start, 2)
    team.hold(1)
    if step in UP:
        tool.suspend(*team.pids).expect(0)
    killed(tool, step, "resume" if step in UP else "suspend", *team.pids)
    tool.run("recover", "--driver", "sim", "--to", "running").expect(0)
    running(tool)
    team.held()
    team.check(1)
    cycle(tool, team)
    team.check(2)


VERBS = ("release", "seal", "load", "remap", "unseal", "bind", "check")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("number", [0, 1], ids=["maker", "importer"])
def test_b20_every_call_fails_once(start_worker: Start, machine: Setting, tmp_path: Path, verb: str,
                                   number: int) -> None:
    """B20: each call of one verb fails in one rank; the way back leads to an object that stores everywhere."""
    trace = tmp_path / "trace"
    team = bound_team(lambda device: start_worker(device, env=NEW | {"SIMCUDA_TRACE": str(trace)}), 2, "addr_v2")
    victim = team.seats[number].worker
    kept = [seat.worker.mem_export(seat.memory["handle"]) for seat in team.seats]
    assert len(kept) == 2, "memory whose descriptors are known is released otherwise than other memory"
    with Group(seat.worker for seat in team.seats) as group:
        faults = Faults(group, machine, trace, victim, VERBS[: VERBS.index(verb) + 1])
        faults.count()
        assert ("cuMulticastUnbind" in faults.counts) == (verb == "release"), "in a stop it would be late"

        def after(number: int) -> None:
            team.held()
            team.check(number)

        faults.fail_each(team.hold, after, HARMLESS)


def test_gates_stay_closed_without_all_devices(start: StartRank) -> None:
    """Bind before all have been added again is refused and can be repeated; nobody waits in the driver."""
    team = make_team([start(0), start(1)], [0, 1])
    for seat in team.seats:
        seat.bind()
    with Group(seat.worker for seat in team.seats) as group:
        group.suspend()
        group.all("load")
        first, second = (seat.worker.pid for seat in team.seats)
        ask(first, "remap")
        with pytest.raises(Refused) as refused:
            ask(first, "bind")
        assert refused.value.code == "team"
        with pytest.raises(Refused) as refused:
            ask(first, "open")
        assert refused.value.code == "phase"
        ask(second, "remap")
        group.unseal()
        with pytest.raises(Refused) as refused:
            ask(first, "open")
        assert refused.value.code == "phase"
        group.all("bind")
        group.all("check")
        group.all("arena", bytes=0)
        group.all("open")
    for seat in team.seats:
        seat.map()
    team.check(4)


def test_a_rank_that_dies_while_suspended(start: StartRank, tool: Tool) -> None:
    """Exit 5; the others have an object for their devices, in this cycle and the next."""
    team = bound_team(start, 3)
    tool.suspend(*team.pids).expect(0)
    dead = team.seats.pop(1)
    dead.worker.kill()
    answer = tool.resume(*team.pids).expect(5)
    assert answer.json["error"]["facts"]["lost"] == [dead.worker.pid]
    running(tool)
    team.check(1)
    cycle(tool, team)
    team.check(2)


def test_a_rank_that_dies_in_a_resume(start: StartRank, tool: Tool, background: Run, machine: Setting) -> None:
    """After the object was made for all devices, and before its own is added: made once more."""
    team = bound_team(start, 3)
    tool.suspend(*team.pids).expect(0)
    dead = team.seats.pop(1)
    machine.inject("cuMulticastAddDevice 1 kill", dead.worker.pid)
    answer = background("resume", *team.pids).end().expect(5)
    assert answer.json["error"]["facts"]["lost"] == [dead.worker.pid]
    machine.inject("")
    running(tool)
    team.check(1)
    cycle(tool, team)
    team.check(2)


def test_a_maker_that_dies_while_suspended(start: StartRank, tool: Tool) -> None:
    """Exit 5, which names who misses something, as for memory that is lost."""
    team = bound_team(start, 3)
    tool.suspend(*team.pids).expect(0)
    team.seats[0].worker.kill()
    answer = tool.resume(*team.pids).expect(5)
    assert set(answer.json["error"]["facts"]["lost"]) == set(team.pids), answer
