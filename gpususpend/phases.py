"""What every phase has in common: all ranks at once, one deadline, a barrier at the end.

Owns the threads of a phase, the watch for dead processes, the journal's `step` and the record of times for the report.
Must not know what the phases do.

Each thread writes one slot that nobody else writes; slots are read only after all threads were joined.  A failed rank
can therefore never pass for one that has not started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpususpend import errors
from gpususpend.deadline import Deadline
from gpususpend.group import Rank

T = TypeVar("T")
JOIN_S = 0.1


@dataclass
class Slot(Generic[T]):
    """What one rank's thread left: a value, or the error that it met.  Neither: the thread was never started."""

    rank: Rank
    values: list[T] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0


def parallel(
    ranks: Sequence[Rank], work: Callable[[Rank], T], while_waiting: Callable[[int], None] = lambda done: None
) -> list[Slot[T]]:
    """Run `work` for every rank in a thread of its own, join all, and return one slot for each rank, in order.

    `work` has to end by its own deadline.  `while_waiting` is called with the number of finished ranks now and then.
    """
    slots: list[Slot[T]] = [Slot(rank) for rank in ranks]
    started: list[threading.Thread] = []
    try:
        for slot in slots:
            thread = threading.Thread(target=_fill, args=(slot, work), name=f"rank-{slot.rank.pid}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system lets this user have no more threads
                slot.error = error
                break
            started.append(thread)
    finally:
        for thread in started:
            while thread.is_alive():
                thread.join(JOIN_S)
                while_waiting(sum(not other.is_alive() for other in started))
    return slots


def _fill(slot: Slot[T], work: Callable[[Rank], T]) -> None:
    begun = time.monotonic()
    try:
        slot.values.append(work(slot.rank))
    except Exception as error:
        slot.error = error
    slot.seconds = time.monotonic() - begun


def results(step: str, slots: Sequence[Slot[T]]) -> dict[int, T]:
    """Return the values by pid; raises the error that says most if any rank failed or was not started."""
    failed = [as_error(step, slot) for slot in slots if slot.error is not None or not slot.values]
    if failed:
        raise worst(failed)
    return {slot.rank.pid: slot.values[0] for slot in slots}


def as_error(step: str, slot: Slot[T]) -> errors.GpushareError:
    """Return a failed rank's error as one that names step and pid."""
    if isinstance(slot.error, errors.GpushareError):
        return slot.error
    detail = str(slot.error) if slot.error is not None else "it was not started"
    return errors.StepFailed(step=step, pid=slot.rank.pid, detail=detail)


def worst(failed: Sequence[errors.GpushareError]) -> errors.GpushareError:
    """Return the error to report first: a death explains the failures of others; a deadline explains nothing."""

    def weight(error: errors.GpushareError) -> int:
        return 0 if isinstance(error, errors.RankDied) else 2 if isinstance(error, errors.DeadlinePassed) else 1

    ordered = sorted(failed, key=weight)
    ordered[0].facts["also"] = [str(error) for error in ordered[1:]]
    return ordered[0]


def timeout_ms(deadline: Deadline) -> int:
    """Return what is left of a deadline for a request's `timeout_ms`, so that the shim answers before it passes."""
    return max(1, int(deadline.left() * 1000) - 200)


@dataclass
class PhaseTime:
    """One phase as it went, for the report."""

    name: str
    seconds: float = 0.0
    bytes: int = 0
    rank_seconds: dict[int, float] = field(default_factory=dict)
    copy_seconds: dict[int, float] = field(default_factory=dict)  # of these, while bytes crossed the bus
