"""Questions that come while the application works: they must neither disturb it nor be answered with half a truth."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.programs.client import Worker
from tests.sim import shim_control

SECONDS = 4


def test_imports_listed_while_memory_is_imported_and_released(start_worker: Callable[..., Worker]) -> None:
    """An object that its last user is giving back is seen by nobody; an import under way is no unresolved one."""
    worker = start_worker(0)
    loop = worker.loop_start("imports")
    until = time.monotonic() + SECONDS
    asked = 0
    while time.monotonic() < until:
        rows = shim_control.rows(worker.pid, "imports")
        assert all(row["state"] == "resolved" for row in rows), rows
        asked += 1
    state = worker.loop_stop(loop)
    assert asked > 10 and state["count"] > 0
    assert not state["errors"], state
