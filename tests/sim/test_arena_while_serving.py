"""A page-locked arena is given up only while the GPU is quiet: the driver waits for it with a lock in its hands.

Seen on an H200 (driver 580.159.04): `cuMemHostUnregister` beside a kernel that waits for another thread's copy never
returned, and neither did the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim import shim_control

SIZE = 8 << 20


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
        until = time.monotonic() + 60
        while "gpushare-arena" in Path(f"/proc/{worker.pid}/maps").read_text():
            assert time.monotonic() < until, "its pages are not free again"
            time.sleep(0.02)
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
