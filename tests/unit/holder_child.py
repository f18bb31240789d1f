"""What test_holder_refusals runs in a process of its own, as another user or behind a filter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpususpend import errors
from gpususpend.deadline import Deadline
from gpususpend.holder import Holder, HoldTarget


def attempt(state_dir: Path, pid: int) -> dict[str, Any]:
    """Check, then stop a process and let it go; return the facts of what was refused."""
    said: dict[str, Any] = {}
    targets = [HoldTarget(pid)]
    with Holder.start(state_dir) as held:
        steps: dict[str, Callable[[], object]] = {
            "check": lambda: held.check(targets, Deadline(60)),
            "stop": lambda: held.stop(targets, Deadline(60)),
        }
        for name, step in steps.items():
            try:
                step()
                said[name] = {}
            except errors.GpushareError as error:
                said[name] = {"code": error.code, **error.facts}
    return said
