"""Questions that come while the application works: they must neither disturb it nor be answered with half a truth."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gpususpend.deadline import Deadline
from tests.programs.client import Worker
from tests.sim import shim_control
from tests.sim.conftest import more
from tests.sim.schedules import rank_of
from tests.sim.shim_control import GRANULE, ask

SECONDS = 4


def test_imports_listed_while_memory_is_imported_and_released(start_worker: Callable[..., Worker]) -> None:
    """An object that its last user is giving back is seen by nobody; an import under way is no unresolved one."""
    worker = start_worker(0)
    loop = worker.loop_start("imports")
    until = time.monotonic() + SECONDS
    asked = 0
    while time.monotonic() < until or asked <= 10:
        rows = shim_control.rows(worker.pid, "imports")
        assert all(row["state"] == "resolved" for row in rows), rows
        asked += 1
    more(worker, loop, 1)
    state = worker.loop_stop(loop)
    assert not state["errors"], state


def test_commands_that_ask_at_once_wait_for_each_other(start_worker: Callable[..., Worker]) -> None:
    """Every suspend asks the shims of others what they import; none of them is told that a shim is busy."""
    owner, other = start_worker(), start_worker()
    block = owner.block(GRANULE)
    other.import_block(owner.hand(owner.mem_export(block["handle"]), other), GRANULE)

    def look(number: int) -> int:
        rank = rank_of(other)
        seen = [len(rank.listing("imports", Deadline(60))) for _ in range(100)]
        rank.client.close()
        assert seen == [1] * 100, f"command {number}"
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, range(4))) == [0, 1, 2, 3]


def test_an_answer_that_an_election_overtakes_counts_for_nothing(start_worker: Callable[..., Worker]) -> None:
    """An owner is asked, another one is named meanwhile, and then the first one says that it has the memory no more."""
    owner, first, second = start_worker(), start_worker(), start_worker()
    block = owner.block(GRANULE)
    exported = owner.mem_export(block["handle"])
    for worker in (first, second):
        worker.import_block(owner.hand(exported, worker), GRANULE)
    key = shim_control.rows(first.pid, "imports")[0]["key"]
    owner.drop_block(block)
    owner.halt()
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(shim_control.rows, second.pid, "imports")
        until = time.monotonic() + 60
        while ask(second.pid, "status")["busy"] != "imports":
            assert time.monotonic() < until
        time.sleep(0.2)
        ask(first.pid, "adopt", key=key)
        ask(second.pid, "redirect", key=key, pid=first.pid)
        owner.go_on()
        (row,) = rows.result()
    assert (row["state"], int(row["pid"])) == ("resolved", first.pid)
