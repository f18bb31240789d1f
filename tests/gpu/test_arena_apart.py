"""An arena page-locked in a context of the shim's own is unlocked beside kernels that wait for other threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import LARGE, Group
from tests.programs.client import Worker
from tests.sim import shim_control

ARENA = "test-arena"


def contexts_made(trace: Path, pid: int) -> int:
    """Return how many contexts of its own the process has on a simulated driver, which writes the trace."""
    calls = [line.split() for line in trace.read_text().splitlines()]
    names = [name for name, result, whose in calls if result == "0" and whose == str(pid)]
    return names.count("cuCtxCreate_v2") - names.count("cuCtxDestroy_v2")


def test_unlocked_beside_kernels_that_never_end(start_worker: Callable[..., Worker], tmp_path: Path) -> None:
    """At any time, and after a cycle once the gates are open; nothing of it stays."""
    trace = tmp_path / "trace"
    worker = start_worker(0, env={"SIMCUDA_TRACE": str(trace)})
    worker.fill(worker.alloc(LARGE), LARGE, 1)
    with shim_control.Group([worker]) as one:
        loop = worker.loop_start("fed_kernels")
        for size in (2 * LARGE, 4 * LARGE):  # the second takes the place of the first
            answer = one.arena(worker.pid, size, apart=1)
            assert (answer["apart"], answer["locked_bytes"]) == ("1", str(size))
        assert not trace.exists() or contexts_made(trace, worker.pid) == 1
        one.arena(worker.pid, 0)
        worker.wait_until_unmapped(ARENA)
        for _ in range(2):
            one.arena(worker.pid, 4 * LARGE, apart=1)
            one.quiesce()
            one.release()
            one.seal()
            one.resume()
            worker.wait_until_unmapped(ARENA)
        assert not trace.exists() or contexts_made(trace, worker.pid) == 0
        state = worker.loop_stop(loop)
        assert not state["errors"], state
    worker.check()


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_cycles(start_worker: Callable[..., Worker], group: Group, depth: str) -> None:
    """Two ranks that share memory, under traffic; the first one's arena is locked apart, and its context checkpointed.

    Not again after a checkpoint: then a kernel keeps the GPU from other contexts.
    """
    ranks = [start_worker(0), start_worker(0)]
    for number, rank in enumerate(ranks):
        rank.fill(rank.alloc(LARGE), LARGE, number)
    own = ranks[0].alloc(LARGE)
    ranks[0].fill(own, LARGE, 7)
    ranks[1].expect(ranks[1].ipc_open(ranks[0].ipc_get(own)), LARGE, [7])
    # Two that copy all the time would leave nothing of a small machine to what is tested.
    loops = [rank.loop_start("copies", pause_s=0.002 if group.machine.simulated else 0) for rank in ranks]
    pids = [rank.pid for rank in ranks]
    with shim_control.Group(ranks) as shims:
        for cycle in range(3):
            # What is large enough stays: the command takes this one.
            apart = shims.arena(pids[0], 8 * LARGE, apart=1)["apart"]
            assert apart == ("1" if depth == "pages" or cycle == 0 else "0")
            group.tool.suspend(*pids, options=("--depth", depth, "--in-place")).expect(0)
            assert ARENA in Path(f"/proc/{pids[0]}/maps").read_text()
            answer = group.tool.resume(*pids).expect(0)
            assert "arena" not in answer.stderr, answer.stderr
            ranks[0].wait_until_unmapped(ARENA)
    for rank, loop in zip(ranks, loops, strict=True):
        assert rank.loop_stop(loop)["errors"] == []
        rank.check()
