"""Where pids and start times were read.  In another pid or time namespace the same numbers mean other processes.

Owns the words that stand for a place in records of the state directory.  Must not know what a record says besides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

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


def same_pids(place: str) -> bool:
    """Tell whether pids noted at `place` are those of this process's namespace; false where none was noted."""
    return place.split()[:2] == here().split()[:2]


def living_there(place: str, kind: str, pids: Iterable[int]) -> Iterator[int]:
    """Yield those of these processes, pids of here, that live in the namespace of this kind in which `place` was noted.

    One whose namespaces this user may not see is left out.
    """
    noted = dict(zip(("pid", "time"), place.split()[1:], strict=True))[kind]
    for pid in pids:
        with contextlib.suppress(OSError):
            if _namespace(kind, pid) == noted:
                yield pid


def _namespace(kind: str, process: int | str = "self") -> str:
    with contextlib.suppress(FileNotFoundError):  # kernels before 5.6 have no time namespaces
        return os.readlink(f"{processes.PROC}/{process}/ns/{kind}")
    return f"{kind}:-"
