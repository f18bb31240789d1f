"""Multicast objects through suspend and resume: stores reach every rank's memory before and after.

On the simulated driver only, which says that it is of branch 610.
"""

from __future__ import annotations

import collections
import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, Background, running
from tests.sim.multicast import NEW, SIZE, Seat, Team, bound_team, make_team
from tests.sim.shim_control import GRANULE, Group, Refused, ask, used_bytes
from tests.sim.test_suspend_states import UP, killed

Start = Callable[..., Worker]
StartRank = Callable[[int], Worker]
Run = Callable[..., Background]
pytestmark = [pytest.mark.machine(driver="sim", devices=3), pytest.mark.usefixtures("own_network")]

INVALID_VALUE = 1
FORMS = ["mem", "mem_v2", "addr", "addr_v2"]


@pytest.fixture
def start(start_worker: Start) -> StartRank:
    """A function that starts a rank under a driver that can make multicast objects again."""
    return lambda device: start_worker(device, env=NEW)


def cycle(tool: Tool, team: Team) -> None:
    """Suspend and resume all ranks."""
    tool.suspend(*team.pids).expect(0)
    tool.resume(*team.pids).expect(0)
    running(tool)


def test_FR19_two_ranks_through_three_cycles(start: StartRank, tool: Tool) -> None:
    """The memory keeps its content, and the object its addresses."""
    team = bound_team(start, 2)
    team.check(1)
    team.hold(50)
    before = [seat.worker.snapshot() for seat in team.seats]
    used = [used_bytes(seat.worker) for seat in team.seats]
    for round in range(3):
        cycle(tool, team)
        team.held()
        assert [seat.worker.snapshot() for seat in team.seats] == before
        assert [used_bytes(seat.worker) for seat in team.seats] == used
        team.check(100 * round)
        team.hold(51 + round)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("map_first", [False, True])
def test_every_way_to_bind(start: StartRank, form: str, map_first: bool) -> None:
    """Both orders, by handle and by address, with and without a device named; three ranks."""
    team = bound_team(start, 3, form, map_first)
    with Group(seat.worker for seat in team.seats) as group:
        for round in range(2):
            team.hold(5 + round)
            group.cycle()
            team.held()
            team.check(10 + round)
    for seat in team.seats:
        seat.worker.multicast_unbind(seat.team, seat.device, 0, SIZE)


def test_depth_pages(start: StartRank, tool: Tool) -> None:
    """Without a checkpoint of the driver it is the same."""
    team = bound_team(start, 2)
    for round in range(2):
        team.hold(1 + round)
        tool.suspend(*team.pids, options=("--depth", "pages")).expect(0)
        tool.resume(*team.pids).expect(0)
        team.held()
        team.check(round)


def test_under_traffic(start: StartRank, tool: Tool) -> None:
    """Two ranks in step, each waiting for what the other stores through the object; suspended five times."""
    team = bound_team(start, 2)
    first, second = team.seats
    loops = []
    for number, seat in enumerate(team.seats):
        seat.worker.memset_d32(seat.memory["address"], 0, 64)
        mine = seat.memory["address"] + 64 * (1 - number)
        loops.append(seat.worker.loop_start("lockstep", mine=mine, theirs=seat.address + 64 * number))
    for _ in range(5):
        cycle(tool, team)
    before = [seat.worker.loop_state(loop)["count"] for seat, loop in zip(team.seats, loops, strict=True)]
    time.sleep(0.3)
    for seat, loop, count in zip(team.seats, loops, before, strict=True):
        state = seat.worker.loop_state(loop)
        assert state["errors"] == [] and state["alive"] and state["count"] > count, state
    assert first.worker.alive() and second.worker.alive()


def test_several_devices_in_one_process_and_parts_of_memory(start: StartRank, tool: Tool) -> None:
    """Two devices here and one there; halves bound crosswise, by address and by handle; two objects."""
    one, two = start(0), start(2)
    blocks = [one.block(SIZE, ordinal=device) for device in (0, 1)] + [two.block(SIZE, ordinal=2)]
    for block, device in zip(blocks, (0, 1, 2), strict=True):
        (two if device == 2 else one).mem_access(block["address"], SIZE, [["device", device, 3]])
    addresses = []
    for number in range(2):
        mine = one.multicast_create(2 * MIB, 3)
        theirs = two.mem_import(one.hand(one.mem_export(mine), two))
        for device in (1, 0):
            one.multicast_add(mine, device)
        two.multicast_add(theirs, 2)
        inside = 2 * MIB * (1 - number)
        one.multicast_bind(mine, 0, blocks[0]["handle"], inside, 2 * MIB)
        one.multicast_bind_at_for(mine, 1, 0, blocks[1]["address"] + inside, 2 * MIB)
        two.multicast_bind_at(theirs, 0, blocks[2]["address"] + inside, 2 * MIB)
        addresses.append((one.map_block(mine, 2 * MIB)["address"], two.map_block(theirs, 2 * MIB)["address"]))
    for round in range(3):
        for number, (here, there) in enumerate(addresses):
            inside = 2 * MIB * (1 - number)
            one.memset_d32(here, 16 * round + number, 16)
            two.memset_d32(there + MIB, 16 * round + number + 8, 16)
            for block in blocks:
                worker = two if block is blocks[2] else one
                assert worker.read(block["address"] + inside, 16) == [16 * round + number] * 16
                assert worker.read(block["address"] + inside + MIB, 16) == [16 * round + number + 8] * 16
        tool.suspend(one.pid, two.pid).expect(0)
        tool.resume(one.pid, two.pid).expect(0)


def test_binds_keep_memory_that_is_not_mapped(start: StartRank, tool: Tool) -> None:
    """The application has let go of handle and mapping; the object still stores there, and shows it to a later bind."""
    team = bound_team(start, 2)
    first = team.seats[0]
    held = first.worker.mem_info()[0]
    extra = first.worker.mem_create(SIZE)
    first.worker.multicast_unbind(first.team, 0, 0, SIZE)
    first.worker.multicast_bind(first.team, 0, extra, 0, SIZE)
    first.worker.mem_release(extra)
    assert first.worker.mem_info()[0] == held - SIZE
    cycle(tool, team)
    assert first.worker.mem_info()[0] == held - SIZE
    second = team.seats[1]
    second.worker.write(second.address, [77])
    assert second.worker.read(second.memory["address"]) == [77]
    cycle(tool, team)
    first.worker.multicast_unbind(first.team, 0, 0, SIZE)
    assert first.worker.mem_info()[0] == held
    first.bind()
    team.check(3)


def test_memory_of_a_pool(start: StartRank, tool: Tool) -> None:
    """The driver keeps the memory, and the bind is made again at its address."""
    worker = start(0)
    team = worker.multicast_create(SIZE, 1, 0)
    worker.multicast_add(team, 0)
    memory = worker.alloc_async(SIZE)
    worker.multicast_bind_at(team, 0, memory, SIZE)
    address = worker.map_block(team, SIZE)["address"]
    for round in range(2):
        worker.memset_d32(address, round, 8)
        assert worker.read(memory, 8) == [round] * 8
        tool.suspend(worker.pid).expect(0)
        tool.resume(worker.pid).expect(0)
    worker.memset_d32(address, 9, 8)
    assert worker.read(memory, 8) == [9] * 8


def test_memory_of_cumemalloc_is_refused_as_natively(start: StartRank) -> None:
    worker = start(0)
    team = worker.multicast_create(SIZE, 1)
    worker.multicast_add(team, 0)
    assert worker.code("multicast_bind_at", team, 0, worker.alloc(SIZE), SIZE) == INVALID_VALUE


def test_b18_access_to_the_mapping(start: StartRank, tool: Tool) -> None:
    """B18: grants of two calls for two devices both hold afterwards; one that was taken back stays away."""
    one = start(0)
    team = one.multicast_create(SIZE, 3)
    for device in (0, 1, 2):
        one.multicast_add(team, device)
    for device in (0, 1, 2):
        block = one.block(SIZE, ordinal=device, access=[["device", 0, 3]])
        one.multicast_bind(team, 0, block["handle"], 0, SIZE)
    address = one.map_block(team, SIZE, access=[["device", 0, 3], ["device", 2, 3]])["address"]
    one.mem_access(address, SIZE, [["device", 1, 3]])
    one.mem_access(address, SIZE, [["device", 2, 0]])
    for _ in range(2):
        tool.suspend(one.pid).expect(0)
        tool.resume(one.pid).expect(0)
        assert [one.mem_get_access(address, "device", device) for device in (0, 1, 2)] == [3, 3, 0]


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


# Who is there when


@pytest.mark.parametrize("form", ["mem", "addr"])
@pytest.mark.parametrize("waits", [0, 1], ids=["maker", "importer"])
def test_a_bind_that_waits_is_suspended_too(start: StartRank, tool: Tool, form: str, waits: int) -> None:
    """Pitfall 4: it blocks until the last device was added, which is after a suspend and a resume."""
    team = make_team([start(0), start(1)], [0, 1], join=False)
    early, late = team.seats[waits], team.seats[1 - waits]
    early.worker.multicast_add(early.team, early.device)
    arguments = (early.memory["handle"], 0, SIZE) if form == "mem" else (early.memory["address"], SIZE)
    bind = early.worker.job("multicast_bind" if form == "mem" else "multicast_bind_at", early.team, 0, *arguments)
    mapping = early.worker.job("map_block", early.team, SIZE)
    assert early.worker.job_answer(bind, 0.3) is None and early.worker.job_answer(mapping) is None
    for _ in range(2):
        cycle(tool, team)
        assert early.worker.job_answer(bind, 0.2) is None and early.worker.job_answer(mapping) is None
    late.worker.multicast_add(late.team, late.device)
    assert early.worker.job_answer(bind, 10) == [0, None]
    answer = early.worker.job_answer(mapping, 10)
    assert answer is not None and answer[0] == 0
    early.address = answer[1]["address"]
    late.bind()
    late.map()
    team.check(1)
    cycle(tool, team)
    team.check(2)


def test_late_importer(start: StartRank, tool: Tool) -> None:
    """A descriptor that was kept through a cycle still leads to the object, with the devices of the others."""
    one, two = start(0), start(1)
    first = make_team([one], [0], count=2).seats[0]
    kept = two.mem_import(one.hand(one.mem_export(first.team), two))
    two.mem_release(kept)
    number = one.hand(one.mem_export(first.team), two)
    tool.suspend(one.pid, two.pid).expect(0)
    tool.resume(one.pid, two.pid).expect(0)
    second = Seat(two, 1, two.mem_import(number), two.block(SIZE, ordinal=1))
    two.multicast_add(second.team, 1)
    team = Team([first, second])
    for seat in team.seats:
        seat.bind()
        seat.map()
    third = start(2)
    late = third.mem_import(two.hand(number, third))
    assert third.code("multicast_add", late, 2) == INVALID_VALUE, "its devices are complete"
    pids = [one.pid, two.pid, third.pid]
    for round in range(2):
        team.check(round)
        tool.suspend(*pids).expect(0)
        tool.resume(*pids).expect(0)
    team.check(5)


def test_its_own_import(start: StartRank, tool: Tool) -> None:
    """PyTorch: the rank that makes the object imports its own descriptor and lets the first handle go."""
    team = make_team([start(0), start(1)], [0, 1], join=False)
    first, second = team.seats
    again = first.worker.mem_import(first.worker.mem_export(first.team))
    first.worker.mem_release(first.team)
    first.team = again
    for seat in team.seats:
        seat.worker.multicast_add(seat.team, seat.device)
    for seat in (second, first):
        seat.bind()
        seat.map()
    for round in range(3):
        team.check(round)
        cycle(tool, team)
    team.check(9)


def test_handles_that_were_released(start: StartRank, tool: Tool) -> None:
    """The mapping alone keeps the object."""
    team = bound_team(start, 2)
    for seat in team.seats:
        seat.worker.mem_release(seat.team)
    for round in range(2):
        team.hold(4)
        cycle(tool, team)
        team.held()
        team.check(round)


def test_a_maker_that_is_gone(start: StartRank, tool: Tool) -> None:
    """One that has no device in it: those that use the object agree on who makes it from now on."""
    maker = start(0)
    made = maker.multicast_create(SIZE, 2)
    seats = []
    for device in (1, 2):
        worker = start(device)
        team = worker.mem_import(maker.hand(maker.mem_export(made), worker))
        worker.multicast_add(team, device)
        seats.append(Seat(worker, device, team, worker.block(SIZE, ordinal=device)))
    team = Team(seats)
    for seat in seats:
        seat.bind()
        seat.map()
    maker.kill()
    for round in range(3):
        team.check(round)
        cycle(tool, team)
    team.check(9)


def test_a_maker_that_did_not_answer(start: StartRank, tool: Tool, machine: Setting) -> None:
    """It was stopped while another imported and added a device; it is told at the suspend, also if that fails."""
    one, two = start(0), start(1)
    with Group([one]) as group:
        group.cycle()  # so that epochs differ
    team = make_team([one], [0], count=2)
    with Group([one]) as group:
        group.cycle()
    number = one.hand(one.mem_export(team.seats[0].team), two)
    one.halt()
    handle = two.mem_import(number)
    job = two.job("multicast_add", handle, 1)
    assert two.job_answer(job, 3) is None
    one.go_on()
    assert two.job_answer(job, 10) == [0, None]
    team.seats.append(Seat(two, 1, handle, two.block(SIZE, ordinal=1)))
    for seat in team.seats:
        seat.bind()
        seat.map()
    machine.inject("cuMulticastUnbind 1 2", two.pid)
    tool.suspend(*team.pids).expect(4)
    machine.inject("")
    team.check(1)
    for round in range(2):
        cycle(tool, team)
        team.check(round)


def test_half_of_a_team_is_refused(start: StartRank, tool: Tool) -> None:
    team = bound_team(start, 2)
    answer = tool.suspend(team.pids[0]).expect(3)
    assert answer.json["error"]["facts"]["missing"] == [team.pids[1]], answer
    team.check(1)


# What goes wrong


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
HARMLESS = {"cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2", "cuMemAddressFree", "cuStreamDestroy_v2", "cuStreamQuery"}
"""Calls whose failure a verb may survive (test_shim_faults)."""


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

        def run(step: str) -> None:
            group.all(step, **({"timeout_ms": 2000} if step in ("seal", "remap", "unseal") else {}))

        def up_to_verb() -> None:
            group.arenas()
            group.quiesce()
            for step in VERBS[: VERBS.index(verb)]:
                run(step)

        up_to_verb()
        begin = trace.stat().st_size
        run(verb)
        with trace.open() as lines:
            lines.seek(begin)
            words = [line.split() for line in lines]
        counts = collections.Counter(parts[0] for parts in words if len(parts) == 3 and int(parts[2]) == victim.pid)
        group.resume()
        assert ("cuMulticastUnbind" in counts) == (verb == "release"), "in a stop it would be late"
        survived = []
        for name, nth in [(one, nth) for one in sorted(counts) for nth in range(1, counts[one] + 1)]:
            team.hold(nth)
            up_to_verb()
            machine.inject(f"{name} {nth} 2", victim.pid)
            try:
                run(verb)
                survived.append(name)
            except Refused as refusal:
                assert refusal.code in ("cuda", "deadline", "gone"), (name, nth, refusal)
            machine.inject("", victim.pid)
            group.resume()
            team.held()
            team.check(nth)
        print(verb, dict(counts), "survived", survived)
        assert not set(survived) - HARMLESS


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
