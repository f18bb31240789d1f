"""The cut through processes whose streams wait for values that the other one's stream writes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.sim import schedules

pytestmark = pytest.mark.machine(driver="sim")

CUTS, TURNS = 40, 200


@pytest.mark.timeout(280)
def test_a_cut_is_found_between_write_and_wait(start_worker: Callable[..., Worker]) -> None:
    """A wait that has passed the gate may be for a write that has not: it is held like a launch, and let through."""
    pair = start_worker(0), start_worker(1)
    own = [worker.alloc(4096) for worker in pair]
    for worker, address in zip(pair, own, strict=True):
        worker.write(address, [0])
    theirs = [worker.ipc_open(pair[1 - at].ipc_get(own[1 - at])) for at, worker in enumerate(pair)]
    ranks = [schedules.rank_of(worker) for worker in pair]
    admitted = 0
    for number in range(CUTS):
        start = number * TURNS
        loops = [(worker, worker.loop_start("values", mine=own[at], theirs=theirs[at], turns=TURNS, start=start))
                 for at, worker in enumerate(pair)]
        time.sleep(0.002 * (number % 7))
        try:
            admitted += schedules.cut(ranks)
            schedules.finish(loops)
        except Exception as error:
            raise AssertionError(f"cut {number}") from error
    assert admitted > 0, "no cut was between a write and its wait"
