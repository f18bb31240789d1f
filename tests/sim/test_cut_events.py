"""The cut through processes that hand work to each other by interprocess events, behind each other's kernels too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.relay import Relay
from tests.sim import schedules

pytestmark = pytest.mark.machine(driver="sim")

SCHEDULES = 50


@pytest.mark.timeout(280)
def test_a_cut_is_found_wherever_events_are_recorded(start_worker: Callable[..., Worker]) -> None:
    """Streams that wait for a record whose stream is stuck in a kernel, which a launch at the gate would end."""
    relay = Relay(start_worker(0), start_worker(1))
    ranks = [schedules.rank_of(worker) for worker in relay.workers]
    admitted = 0
    for seed in range(SCHEDULES):
        pick = random.Random(seed)
        try:
            relay.start(seed, pick.randint(8, 24))
            for _ in range(pick.randint(1, 3)):
                time.sleep(pick.uniform(0, 0.02))
                admitted += schedules.cut(ranks)
            relay.finish()
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error
    assert admitted > 0, "no schedule was cut where one waits for the other"
