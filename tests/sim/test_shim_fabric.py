"""Fabric handles that are kept: memory shared by 64 bytes goes through suspend and resume as by descriptors.

On the simulated driver only, with a channel (IMEX) and without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, running
from tests.sim.multicast import NEW, SIZE, Seat, Team
from tests.sim.shim_control import GRANULE, HARMLESS, Faults, Group, ask, rows

Start = Callable[..., Worker]
pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

FABRIC = 8
INVALID_VALUE, NOT_PERMITTED = 1, 800
WITH_CHANNEL = {"SIMCUDA_FABRIC": "1"}
KEPT = WITH_CHANNEL | {"GPUSHARE_FABRIC": "keep"}


@pytest.fixture
def start(start_worker: Start) -> Callable[[int], Worker]:
    """A function that starts a rank with a channel, to which fabric handles are shown."""
    return lambda device: start_worker(device, env=KEPT | NEW)


def cycle(tool: Tool, *workers: Worker) -> None:
    """Suspend and resume."""
    tool.suspend(*[worker.pid for worker in workers]).expect(0)
    tool.resume(*[worker.pid for worker in workers]).expect(0)
    running(tool)


def test_two_ranks_through_cycles(start: Callable[[int], Worker], tool: Tool) -> None:
    """Both see each other's writes, the bytes stay what they were, and good for a late importer."""
    owner, other = start(0), start(1)
    block = owner.block(SIZE, handle_type=FABRIC)
    owner.fill(block["address"], SIZE, 3)
    text = owner.fabric_export(block["handle"])
    seen = other.map_block(other.fabric_import(text), SIZE)
    other.expect(seen["address"], SIZE, [3])
    before = owner.snapshot(), other.snapshot()
    assert rows(other.pid, "imports")[0]["pid"] == str(owner.pid)
    for round in range(3):
        cycle(tool, owner, other)
        owner.check()
        other.check()
        assert (owner.snapshot(), other.snapshot()) == before
        assert owner.fabric_export(block["handle"]) == text
        other.write(seen["address"] + 64, [round])
        assert owner.read(block["address"] + 64) == [round]
        owner.fill(block["address"], SIZE, 3)
    late = start(0)
    again = late.map_block(late.fabric_import(text), SIZE)
    own = owner.map_block(owner.fabric_import(text), SIZE)
    cycle(tool, owner, other, late)
    owner.write(block["address"], [77])
    assert [late.read(again["address"]), owner.read(own["address"]), other.read(seen["address"])] == [[77]] * 3


def test_half_of_a_group_is_refused(start: Callable[[int], Worker], tool: Tool) -> None:
    owner, other = start(0), start(1)
    other.fabric_import(owner.fabric_export(owner.mem_create(SIZE, "device", 0, FABRIC)))
    for one, missing in ((owner, other), (other, owner)):
        assert tool.suspend(one.pid).expect(3).json["error"]["facts"]["missing"] == [missing.pid]


def test_the_owner_is_gone(start: Callable[[int], Worker], tool: Tool) -> None:
    """Who still maps the memory saves it, and the bytes lead there."""
    owner, first, second = start(0), start(0), start(1)
    block = owner.block(SIZE, handle_type=FABRIC)
    owner.fill(block["address"], SIZE, 5)
    text = owner.fabric_export(block["handle"])
    seen = [worker.map_block(worker.fabric_import(text), SIZE) for worker in (first, second)]
    for worker, one in zip((first, second), seen, strict=True):
        worker.expect(one["address"], SIZE, [5])
    owner.kill()
    for _ in range(2):
        cycle(tool, first, second)
        first.check()
        second.check()
    third = start(1)
    late = third.map_block(third.fabric_import(text), SIZE)
    first.write(seen[0]["address"], [9])
    assert third.read(late["address"]) == second.read(seen[1]["address"]) == [9]
    cycle(tool, first, second, third)
    assert third.read(late["address"]) == [9]


def test_memory_of_another_node_is_refused_by_name(start: Callable[[int], Worker], start_worker: Start,
                                                   tool: Tool) -> None:
    """What no shim of this machine knows, until it is given back."""
    elsewhere = start_worker(0, shim=False, env=WITH_CHANNEL)
    text = elsewhere.fabric_export(elsewhere.mem_create(SIZE, "device", 0, FABRIC))
    worker = start(0)
    imported = worker.fabric_import(text)
    error = tool.suspend(worker.pid).expect(3).json["error"]
    assert (error["code"], error["pid"], error["facts"]["kind"]) == ("uncarried", worker.pid, "fabric")
    assert error["facts"]["objects"]["fabric"][0] in error["message"] and "another node" in error["message"]
    worker.mem_release(imported)
    cycle(tool, worker)


def test_what_a_program_sees(start: Callable[[int], Worker], start_worker: Start) -> None:
    """That the memory can be exported as a descriptor, too, is not shown."""
    bare, worker = start_worker(0, shim=False, env=WITH_CHANNEL), start(0)
    answers = []
    for one in (bare, worker):
        block = one.block(GRANULE, handle_type=FABRIC)
        answers.append((
            one.mem_properties(block["handle"]), one.code("mem_export", block["handle"]),
            one.pointer_attribute("ALLOWED_HANDLE_TYPES", block["address"]),
            one.code("fabric_import", "00" * 64), one.code("fabric_export", one.mem_create(GRANULE)),
        ))  # fmt: skip
    assert answers[0] == answers[1]
    assert answers[0][1] == INVALID_VALUE


def test_without_a_channel(start: Callable[[int], Worker], start_worker: Start) -> None:
    worker = start_worker(0, env={"GPUSHARE_FABRIC": "keep"})
    assert worker.device_attribute("HANDLE_TYPE_FABRIC_SUPPORTED", 0) == 0
    assert worker.code("mem_create", GRANULE, "device", 0, FABRIC) == NOT_PERMITTED
    other = start(0)
    text = other.fabric_export(other.mem_create(GRANULE, "device", 0, FABRIC))
    assert worker.code("fabric_import", text) == NOT_PERMITTED


def test_bytes_do_not_keep_memory(start: Callable[[int], Worker]) -> None:
    owner, other = start(0), start(1)
    handle = owner.mem_create(SIZE, "device", 0, FABRIC)
    text = owner.fabric_export(handle)
    owner.mem_release(handle)
    assert other.code("fabric_import", text) == INVALID_VALUE


def test_multicast_by_bytes(start: Callable[[int], Worker], tool: Tool) -> None:
    """NCCL asks for this first where a fabric is there."""
    seats: list[Seat] = []
    text = ""
    for device in (0, 1):
        worker = start(device)
        made = worker.fabric_import(text) if text else worker.multicast_create(SIZE, 2, FABRIC)
        text = text or worker.fabric_export(made)
        seats.append(Seat(worker, device, made, worker.block(SIZE, ordinal=device, handle_type=FABRIC)))
        worker.multicast_add(made, device)
    for seat in seats:
        seat.bind()
        seat.map()
    team = Team(seats)
    for round in range(3):
        team.check(round)
        cycle(tool, *[seat.worker for seat in seats])
    team.check(7)


VERBS = ("release", "seal", "load", "remap", "unseal")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("number", [0, 1], ids=["owner", "importer"])
def test_b20_the_way_back_from_every_call(start_worker: Start, machine: Setting, tmp_path: Path, verb: str,
                                          number: int) -> None:
    """B20: a call that makes, exports, imports or drops memory fails, each in turn."""
    trace = tmp_path / "trace"
    owner, other = (start_worker(device, env=KEPT | {"SIMCUDA_TRACE": str(trace)}) for device in (0, 1))
    block = owner.block(2 * MIB, handle_type=FABRIC)
    seen = other.map_block(other.fabric_import(owner.fabric_export(block["handle"])), 2 * MIB)
    victim = (owner, other)[number]
    with Group([owner, other]) as group:
        faults = Faults(group, machine, trace, victim, VERBS[: VERBS.index(verb) + 1])
        faults.count()

        def before(number: int) -> None:
            owner.write(block["address"], [number])

        def after(number: int) -> None:
            assert other.read(seen["address"]) == [number]

        faults.fail_each(before, after, HARMLESS)
    assert ask(owner.pid, "status")["launch"] == "open"
