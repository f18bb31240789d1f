"""Multicast objects through suspend and resume: stores reach every rank's memory before and after.

On the simulated driver only, which says that it is of branch 610.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, more
from tests.sim.multicast import NEW, SIZE, bound_team, cycle
from tests.sim.shim_control import Group, used_bytes

Start = Callable[..., Worker]
StartRank = Callable[[int], Worker]
pytestmark = [pytest.mark.machine(driver="sim", devices=3), pytest.mark.usefixtures("own_network")]

INVALID_VALUE = 1
FORMS = ["mem", "mem_v2", "addr", "addr_v2"]


@pytest.fixture
def start(start_worker: Start) -> StartRank:
    """A function that starts a rank under a driver that can make multicast objects again."""
    return lambda device: start_worker(device, env=NEW)


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
        seat.worker.ctx_sync()
        mine = seat.memory["address"] + 64 * (1 - number)
        loops.append(seat.worker.loop_start("lockstep", mine=mine, theirs=seat.address + 64 * number))
    for _ in range(5):
        cycle(tool, team)
    for seat, loop in zip(team.seats, loops, strict=True):
        more(seat.worker, loop)
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
            one.ctx_sync()
            two.memset_d32(there + MIB, 16 * round + number + 8, 16)
            two.ctx_sync()
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
        worker.ctx_sync()
        assert worker.read(memory, 8) == [round] * 8
        tool.suspend(worker.pid).expect(0)
        tool.resume(worker.pid).expect(0)
    worker.memset_d32(address, 9, 8)
    worker.ctx_sync()
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
