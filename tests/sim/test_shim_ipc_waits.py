"""Memory of another process is opened whatever that process does at the moment, as the driver opens it."""

from __future__ import annotations

from collections.abc import Callable

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.sim.shim_control import Group, ask

MIB = 1 << 20
PATIENCE_S = 60.0
INVALID_VALUE, MAP_FAILED = 1, 205


def test_open_of_an_exporter_that_does_not_answer(start_worker: Callable[..., Worker], machine: Setting) -> None:
    """A stopped one and a suspended one are waited for, one that dies is gone, one that hangs is given up."""
    stopped, suspended, dies, hangs = exporters = [start_worker() for _ in range(4)]
    handles = []
    for seed, worker in enumerate(exporters):
        block = worker.alloc(3 * MIB)
        worker.fill(block, 3 * MIB, seed)
        handles.append(worker.ipc_get(block))
    other = start_worker(1)
    for worker in (stopped, dies):
        worker.halt()
    machine.inject("cuMemExportToShareableHandle 1 hang", hangs.pid)
    with Group([suspended]) as group:
        group.suspend()
        jobs = [other.job("ipc_open", handle) for handle in handles]
        answer = other.job_answer(jobs[3], PATIENCE_S)
        assert answer is not None and answer[0] == MAP_FAILED
        assert other.job_answer(jobs[0], 0.3) is None
        assert other.job_answer(jobs[1]) is None and other.job_answer(jobs[2]) is None
        assert ask(other.pid, "status")["in_flight"] == "3"
        dies.kill()
        answer = other.job_answer(jobs[2], PATIENCE_S)
        assert answer is not None and answer[0] == INVALID_VALUE
        stopped.go_on()
        group.back()
        assert other.job_answer(jobs[1], 0.3) is None, "not before it runs: its memory is being made again"
        group.resume()
    for seed in (0, 1):
        answer = other.job_answer(jobs[seed], PATIENCE_S)
        assert answer is not None and answer[0] == 0
        other.expect(answer[1], 3 * MIB, [seed])
    other.check()
