"""Multicast objects of the simulated driver, without the shim: stores reach every GPU, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker, WorkerTimeout
from tests.programs.setting import Setting
from tests.sim.conftest import MIB
from tests.sim.multicast import SIZE, bound_team, make_team
from tests.sim.test_simcuda_machine import FULL, cycle

Start = Callable[..., Worker]
pytestmark = pytest.mark.machine(driver="sim", devices=3)

INVALID_VALUE, INVALID_DEVICE, ILLEGAL_ADDRESS, NOT_SUPPORTED = 1, 101, 700, 801


@pytest.fixture
def start(start_worker: Start) -> Callable[[int], Worker]:
    """A function that starts a worker without the shim."""
    return lambda device: start_worker(device, shim=False)


@pytest.mark.parametrize("form", ["mem", "mem_v2", "addr", "addr_v2"])
@pytest.mark.parametrize("map_first", [False, True])
def test_stores_reach_every_gpu(start: Callable[[int], Worker], form: str, map_first: bool) -> None:
    bound_team(start, 3, form, map_first).check(100)


def test_one_process_with_several_gpus(start: Callable[[int], Worker]) -> None:
    worker = start(0)
    team = worker.multicast_create(SIZE, 2)
    blocks = [worker.block(SIZE, ordinal=device) for device in (0, 1)]
    for device, block in enumerate(blocks):
        worker.multicast_add(team, device)
        worker.mem_access(block["address"], SIZE, [["device", device, 3]])
    for half, offset in enumerate((0, 2 * MIB)):
        for device, block in enumerate(blocks):
            worker.multicast_bind_for(team, device, offset, block["handle"], (1 - half) * 2 * MIB, 2 * MIB)
    address = worker.map_block(team, SIZE)["address"]
    worker.memset_d32(address + 2 * MIB - 16, 9, 8)
    worker.ctx_sync()
    for block in blocks:
        assert worker.read(block["address"], 4) == [9] * 4, "the halves are bound the other way round"
        assert worker.read(block["address"] + SIZE - 16, 4) == [9] * 4


def test_bind_and_map_wait_for_all_gpus(start: Callable[[int], Worker]) -> None:
    first, second = start(0), start(1)
    team = first.multicast_create(SIZE, 2)
    there = second.mem_import(first.hand(first.mem_export(team), second))
    first.multicast_add(team, 0)
    block = first.block(SIZE)
    job = first.job("multicast_bind", team, 0, block["handle"], 0, SIZE)
    mapping = first.job("map_block", team, SIZE)
    assert first.job_answer(job, 0.3) is None and first.job_answer(mapping) is None
    second.multicast_add(there, 1)
    assert first.job_answer(job, 60) == [0, None]
    assert first.job_answer(mapping, 60)[0] == 0


def test_what_is_refused(start: Callable[[int], Worker]) -> None:
    one = start(0)
    assert one.code("multicast_create", SIZE + 1) == one.code("multicast_create", SIZE, 0) == INVALID_VALUE
    assert one.code("multicast_create", SIZE, 4) == INVALID_VALUE, "more than there are"
    team = one.multicast_create(SIZE, 1)
    block, unshared = one.block(SIZE), one.mem_create(SIZE, "device", 0, 0)
    other, host = one.mem_create(SIZE, "device", 1), one.mem_create(SIZE, "host_numa")
    assert one.code("multicast_add", team, 3) == INVALID_DEVICE
    assert one.code("multicast_add", block["handle"], 0) == INVALID_VALUE
    one.multicast_add(team, 0)
    assert one.code("multicast_add", team, 0) == one.code("multicast_add", team, 1) == INVALID_VALUE
    handle = block["handle"]
    for arguments in ((4096, handle, 0, 2 * MIB), (0, handle, 4096, 2 * MIB), (0, handle, 0, 2 * SIZE),
                      (2 * MIB, handle, 0, SIZE), (0, handle, 2 * MIB, SIZE), (0, handle, 0, 0)):
        assert one.code("multicast_bind", team, *arguments) == INVALID_VALUE
    assert one.code("multicast_bind", team, 0, unshared, 0, SIZE) == INVALID_VALUE
    assert one.code("multicast_bind", team, 0, other, 0, SIZE) == INVALID_DEVICE
    assert one.code("multicast_bind", team, 0, host, 0, SIZE) == INVALID_VALUE
    assert one.code("multicast_bind", handle, 0, handle, 0, SIZE) == INVALID_VALUE
    assert one.code("multicast_bind_for", team, 1, 0, handle, 0, SIZE) == INVALID_DEVICE
    assert one.code("multicast_bind_at", team, 0, one.alloc(SIZE), SIZE) == INVALID_VALUE
    one.multicast_bind(team, 0, handle, 0, SIZE)
    assert one.code("multicast_bind", team, 2 * MIB, handle, 0, 2 * MIB) == INVALID_VALUE, "bound already"
    assert one.code("multicast_unbind", team, 0, 0, 2 * MIB) == INVALID_VALUE
    assert one.code("mem_properties", team) == INVALID_VALUE
    one.multicast_unbind(team, 0, 0, SIZE)
    address = one.mem_reserve(SIZE)
    one.mem_map(address, SIZE, team)
    assert one.code("mem_access", address, SIZE, [["device", 1, 3]]) == INVALID_DEVICE
    one.mem_access(address, SIZE, [["device", 0, 3]])
    code = one.code("memset_d32", address, 1, 4) or one.code("ctx_sync")
    assert code in (INVALID_VALUE, ILLEGAL_ADDRESS), "nothing is bound"


def test_loads_are_refused(start: Callable[[int], Worker]) -> None:
    team = bound_team(start, 2)
    seat = team.seats[0]
    assert seat.worker.code("copy", seat.memory["address"], seat.address, 64) == INVALID_VALUE
    team.check(1)


def test_a_bind_keeps_the_memory_and_goes_with_its_process(start: Callable[[int], Worker]) -> None:
    team = bound_team(start, 2)
    first, second = team.seats
    before = second.worker.mem_info()[0]
    second.worker.drop_block(second.memory)
    assert second.worker.mem_info()[0] == before
    second.worker.multicast_unbind(second.team, 1, 0, SIZE)
    assert second.worker.mem_info()[0] == before + SIZE
    second.memory = second.worker.block(SIZE, ordinal=1)
    second.bind()
    second.worker.kill()
    watcher = start(1)
    assert watcher.mem_info()[0] >= before + SIZE, "what was bound has gone with its process"
    assert first.worker.code("memset_d32", first.address, 1, 4) in (0, ILLEGAL_ADDRESS)
    assert first.worker.code("ctx_sync") == ILLEGAL_ADDRESS


def test_late_importer(start: Callable[[int], Worker]) -> None:
    """While somebody holds the object an import sees it; one that only a descriptor keeps is empty."""
    first, second = start(0), start(1)
    team = first.multicast_create(SIZE, 1)
    first.multicast_add(team, 0)
    number = first.hand(first.mem_export(team), second)
    there = second.mem_import(number)
    assert second.code("multicast_add", there, 1) == INVALID_VALUE, "all are there"
    second.mem_release(there)
    first.mem_release(team)
    there = second.mem_import(number)
    second.multicast_add(there, 1)


@pytest.mark.parametrize("version", ["580.159.04", "610.5"])
def test_checkpoint_hangs_while_an_object_lives(machine: Setting, start_worker: Start, version: str) -> None:
    """Even an unbound one; below 610 a process that was restored cannot add a device."""
    one = start_worker(0, shim=False, env={"SIMCUDA_DRIVER_VERSION": version})
    other = start_worker(1, shim=False)
    team = one.multicast_create(SIZE, 1)
    other.cp_lock(one.pid)
    with pytest.raises(WorkerTimeout):
        other.do("cp_checkpoint", one.pid, deadline_s=1)
    other.kill()
    assert cycle(machine, one.pid, "unlock") == [0]
    one.mem_release(team)
    assert cycle(machine, one.pid, "lock", "checkpoint", "restore", "unlock") == [0] * 4
    team = one.multicast_create(SIZE, 1)
    assert one.code("multicast_add", team, 0) == (0 if version == "610.5" else NOT_SUPPORTED)


def test_memory_from_before_a_restore(machine: Setting, start_worker: Start) -> None:
    """Stores reach memory that went through a checkpoint once it is bound again; nothing else is left of the object."""
    worker = start_worker(0, shim=False, env={"SIMCUDA_DRIVER_VERSION": "610.5"})
    team = make_team([worker], [0])
    seat = team.seats[0]
    for _ in range(2):
        seat.bind()
        seat.map()
        team.check(7)
        worker.multicast_unbind(seat.team, 0, 0, SIZE)
        worker.drop_block({"handle": seat.team, "address": seat.address, "size": SIZE})
        assert cycle(machine, worker.pid, *FULL) == [0] * 4
        assert worker.read(seat.memory["address"]) == [7]
        seat.team = worker.multicast_create(SIZE, 1)
        worker.multicast_add(seat.team, 0)
