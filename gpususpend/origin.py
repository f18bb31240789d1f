"""Where pids and start times were read.  In another pid or time namespace the same numbers mean other processes.

Owns the words that stand for a place in records of the state directory.  Must not know what a record says besides.
"""

from __future__ import annotations

import contextlib
import os

from gpususpend import processes
from gpususpend.helpers import boot_id


def here() -> str:
    """Return this process's place: boot, pid namespace and time namespace, as one word each."""
    return " ".join([boot_id(), *(_namespace(kind) for kind in ("pid", "time"))])


def other(place: str) -> str:
    """Return which namespace, `pid` or `time`, keeps this process from judging what was noted at `place`; else "".

    Nothing keeps it where no place was noted, or one of another boot: of that nothing lives here but what was restored.
    """
    noted, own = place.split(), here().split()
    if len(noted) != len(own) or noted[0] != own[0]:
        return ""
    return next((kind for kind, a, b in zip(("pid", "time"), noted[1:], own[1:], strict=True) if a != b), "")


def _namespace(kind: str) -> str:
    with contextlib.suppress(FileNotFoundError):  # kernels before 5.6 have no time namespaces
        return os.readlink(f"{processes.PROC}/self/ns/{kind}")
    return f"{kind}:-"
