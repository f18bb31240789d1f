"""Multicast objects and who is there when: ranks that come late, makers that go, imports of one's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim.multicast import NEW, SIZE, Seat, Team, bound_team, cycle, make_team
from tests.sim.shim_control import Group

Start = Callable[..., Worker]
StartRank = Callable[[int], Worker]
pytestmark = [pytest.mark.machine(driver="sim", devices=3), pytest.mark.usefixtures("own_network")]

INVALID_VALUE = 1


@pytest.fixture
def start(start_worker: Start) -> StartRank:
    """A function that starts a rank under a driver that can make multicast objects again."""
    return lambda device: start_worker(device, env=NEW)


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
    assert early.worker.job_answer(bind, 60) == [0, None]
    answer = early.worker.job_answer(mapping, 60)
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
    assert two.job_answer(job, 60) == [0, None]
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
