"""The cut on real processes: 300 of the schedules of tests.sim.schedules, and what a shim says of waiting launches."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gpususpend.control import parse_reply
from tests.programs.client import Worker
from tests.sim import schedules
from tests.sim.shim_control import ask, talk

pytestmark = pytest.mark.machine(driver="sim")


@pytest.mark.parametrize("first", range(0, 300, 100))
@pytest.mark.timeout(280)
def test_a_cut_is_found_through_every_schedule(start_worker: Callable[..., Worker], first: int) -> None:
    """Ranks that have launched their part of a collective, and others that have not."""
    crew = schedules.Crew([start_worker(at) for at in range(schedules.RANKS)])
    for seed in range(first, first + 100):
        try:
            crew.run(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error


def test_a_waiting_launch_says_whether_its_stream_is_idle(start_worker: Callable[..., Worker]) -> None:
    """One comes after a kernel that cannot end; another's stream has nothing left to do. Each can be let through."""
    worker = start_worker()
    flag, done = worker.alloc(4096), worker.alloc(4096)
    for address in (flag, done):
        worker.memset_d32(address, 0, 1024)
        worker.ctx_sync()
    stuck, idle = worker.stream_create(), worker.stream_create()
    worker.kernel("gs_wait_flag", [flag, 1], stuck)
    ask(worker.pid, "close-launch")
    after_stuck = worker.job("kernel", "gs_fill", [done, 1, 1], stuck)
    after_nothing = worker.job("kernel", "gs_fill", [done + 4, 1, 1], idle)
    threads = waiting(worker, 2)
    assert sorted(threads.values()) == [0, 1]
    ask(worker.pid, "admit", thread=next(thread for thread, value in threads.items() if value == 1))
    until = time.monotonic() + 60
    while worker.job_answer(after_nothing) is None:
        assert time.monotonic() < until, "the launch that was let through does not return"
    assert worker.job_answer(after_stuck) is None and list(waiting(worker, 1).values()) == [0]
    ask(worker.pid, "open")
    worker.memset_d32(flag, 1, 1)
    worker.ctx_sync()
    assert worker.job_answer(after_stuck, 60) == [0, None]


def waiting(worker: Worker, count: int) -> dict[int, int]:
    """Wait until that many launches wait; return what the shim says of each thread: 1 for an idle stream."""
    until = time.monotonic() + 60
    while True:
        reply = parse_reply(talk(worker.pid, "1 drain")[0])
        found = {int(group["thread"]): int(group["idle"]) for group in reply.groups}
        if len(found) == count:
            return found
        assert time.monotonic() < until, f"{reply}"
        time.sleep(0.01)
