"""Unlocking a page-locked arena: it waits for the work of a context, with a lock of the driver held.

Seen on an H200 (driver 580.159.04): `cuMemHostUnregister` beside a kernel that waits for another thread's copy never
returned, and neither did the copy.  Memory that was registered in another context than the kernel's was unregistered
at once, and the copies went on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim import shim_control

SIZE = 8 << 20
STEP = 1 << 30  # of page-locking


def test_refused_while_the_process_works(start_worker: Callable[..., Worker]) -> None:
    """Neither given up nor replaced before the gates are closed; both work afterwards."""
    worker = start_worker(0)
    worker.fill(worker.alloc(SIZE), SIZE, 1)
    with shim_control.Group([worker]) as group:
        group.arena(worker.pid, 2 * SIZE)
        for size in (0, 4 * SIZE):
            with pytest.raises(shim_control.Refused) as refused:
                group.arena(worker.pid, size)
            assert refused.value.code == "phase"
        assert shim_control.ask(worker.pid, "status")["arena_bytes"] == str(2 * SIZE)
        group.quiesce()
        group.arena(worker.pid, 4 * SIZE)
        group.arena(worker.pid, 0)
        group.all("open")
    worker.check()


def test_given_up_before_the_gates_open(start_worker: Callable[..., Worker], tool: Tool) -> None:
    """Kernels that need another thread's copies go on after a cycle, and no arena is left."""
    worker = start_worker(0)
    loop = worker.loop_start("fed_kernels")
    for _ in range(2):
        tool.suspend(worker.pid).expect(0)
        answer = tool.resume(worker.pid).expect(0)
        assert "keeps its arena" not in answer.stderr
        assert shim_control.ask(worker.pid, "status")["arena_bytes"] == "0"
        worker.wait_until_unmapped("gpushare-arena")
    state = worker.loop_stop(loop)
    assert not state["errors"], state


def test_memory_that_grows_until_the_gates_close(start_worker: Callable[..., Worker], tool: Tool) -> None:
    """The arena has room for it: a second one would be filled while everything stands still."""
    worker = start_worker(0)
    worker.fill(worker.alloc(SIZE), SIZE, 1)
    loop = worker.loop_start("allocations")
    for _ in range(4):
        phases = tool.suspend(worker.pid).expect(0).json["groups"][0]["phases"]
        assert [phase["name"] for phase in phases].count("prepare") == 1
        tool.resume(worker.pid).expect(0)
    state = worker.loop_stop(loop)
    assert not state["errors"], state


@pytest.mark.parametrize("calls", ["cuCtxCreate_v2 1 2", "cuMemGetInfo_v2 1 999"])
def test_where_no_context_can_be_made_it_is_locked_as_ever(
    start_worker: Callable[..., Worker], machine: Setting, calls: str
) -> None:
    worker = start_worker(0)
    worker.fill(worker.alloc(SIZE), SIZE, 1)
    machine.inject(calls, worker.pid)
    with shim_control.Group([worker]) as group:
        answer = group.arena(worker.pid, 2 * SIZE, apart=1)
        assert (answer["apart"], answer["locked_bytes"]) == ("0", str(2 * SIZE))
        with pytest.raises(shim_control.Refused):
            group.arena(worker.pid, 0)
        group.quiesce()
        group.release()
        group.seal()
        group.resume()
    worker.check()


def test_memory_of_the_gpu_that_the_application_may_want_is_not_taken(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(0)
    left = worker.mem_info()[0]
    worker.alloc(left - (1 << 30))
    with shim_control.Group([worker]) as group:
        assert group.arena(worker.pid, 2 * SIZE, apart=1)["apart"] == "0"


def test_unlocking_that_the_driver_refuses_is_told_and_tried_again_with_the_next_arena(
    start_worker: Callable[..., Worker], machine: Setting
) -> None:
    worker = start_worker(0)
    worker.fill(worker.alloc(SIZE), SIZE, 1)
    with shim_control.Group([worker]) as group:
        group.arena(worker.pid, 2 * SIZE, apart=1)
        machine.inject("cuMemHostUnregister 1 999", worker.pid)
        group.arena(worker.pid, 0)
        until = time.monotonic() + 60
        while (status := shim_control.ask(worker.pid, "status"))["leftover_bytes"] == "0":
            assert time.monotonic() < until, status
            time.sleep(0.01)
        assert (status["leftover_bytes"], status["arena_bytes"]) == (str(2 * SIZE), "0")
        group.arena(worker.pid, 4 * SIZE, apart=1)
        status = shim_control.ask(worker.pid, "status")
        assert (status["leftover_bytes"], status["arena_bytes"]) == ("0", str(4 * SIZE))
        group.quiesce()
        group.release()
        group.seal()
        group.resume()
        worker.wait_until_unmapped("test-arena")
    worker.check()


LOCK, UNLOCK = "cuMemHostRegister_v2", "cuMemHostUnregister"
OUT, BACK = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"


def calls_in(trace: Path) -> list[str]:
    """Return the calls of a worker that lock, unlock and copy, in order; equal ones in a row once."""
    words = [word for line in trace.read_text().splitlines() for word in line.split()]
    calls = [word for word in words if word in (LOCK, UNLOCK, OUT, BACK)]
    return [one for one, before in zip(calls, ["", *calls], strict=False) if one != before]


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_only_what_the_driver_would_carry_is_unlocked_while_suspended(
    start_worker: Callable[..., Worker], tool: Tool, tmp_path: Path, depth: str
) -> None:
    """Across a checkpoint page-locked memory takes the driver longer than it takes to lock it again, while copying."""
    trace = tmp_path / "trace"
    worker = start_worker(0, env={"SIMCUDA_TRACE": str(trace)})
    for _ in range(3):  # more than is locked in one step
        worker.alloc(STEP // 2)
    worker.fill(worker.alloc(SIZE), SIZE, 1)
    trace.write_text("")
    tool.suspend(worker.pid, "--depth", depth).expect(0)
    down = calls_in(trace)
    trace.write_text("")
    tool.resume(worker.pid).expect(0)
    up = calls_in(trace)
    worker.check()
    if depth == "pages":
        assert down == [LOCK, OUT] and up[0] == BACK and UNLOCK in up and LOCK not in up
    else:
        assert down == [LOCK, OUT, UNLOCK]
        assert up[:4] == [LOCK, BACK, LOCK, BACK], "the second step is locked while the first one is copied"


@pytest.mark.parametrize(
    ("suspend", "resume", "told"),
    [("cuMemHostUnregister 1 999", "", "stays page-locked"), ("", "cuMemHostRegister_v2 1 2", "")],
)
def test_what_the_driver_refuses_around_a_checkpoint_costs_time_only(
    start_worker: Callable[..., Worker], tool: Tool, machine: Setting, suspend: str, resume: str, told: str
) -> None:
    worker = start_worker(0)
    worker.fill(worker.alloc(SIZE), SIZE, 1)
    for _ in range(2):
        machine.inject(suspend, worker.pid)
        assert told in tool.suspend(worker.pid).expect(0).stderr
        machine.inject(resume, worker.pid)
        assert "keeps its arena" not in tool.resume(worker.pid).expect(0).stderr
        machine.inject("", worker.pid)
        worker.check()


def test_unlocking_alone_needs_closed_gates_too(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(0)
    worker.fill(worker.alloc(SIZE), SIZE, 1)
    with shim_control.Group([worker]) as group:
        group.arena(worker.pid, 2 * SIZE)
        with pytest.raises(shim_control.Refused) as refused:
            shim_control.ask(worker.pid, "arena", unlock=1)
        assert refused.value.code == "phase"
        group.quiesce()
        group.release()
        assert shim_control.ask(worker.pid, "arena", unlock=1)["locked_bytes"] == "0"
        group.seal()
        group.resume()
    worker.check()
