"""What every phase has in common: all ranks at once, one deadline, a barrier at the end.

Owns the threads of a phase, the watch for dead processes, the journal's `step` and the record of times for the report.
Must not know what the phases do.

Each thread writes one slot that nobody else writes; slots are read only after all threads were joined.  A failed rank
can therefore never pass for one that has not started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpususpend import errors, system
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
    begun: float = 0.0  # on the monotonic clock
    seconds: float = 0.0


def parallel(
    ranks: Sequence[Rank], work: Callable[[Rank], T], while_waiting: Callable[[list[int]], None] = lambda pids: None
) -> list[Slot[T]]:
    """Run `work` for every rank in a thread of its own, join all, and return one slot for each rank, in order.

    `work` has to end by its own deadline.  `while_waiting` is called now and then with the pids of those still at work.
    """
    slots: list[Slot[T]] = [Slot(rank) for rank in ranks]
    started: dict[int, threading.Thread] = {}
    try:
        for slot in slots:
            thread = threading.Thread(target=_fill, args=(slot, work), name=f"rank-{slot.rank.pid}", daemon=True)
            try:
                system.start(thread)
            except errors.SystemCall as error:
                slot.error = error
                break
            started[slot.rank.pid] = thread
    finally:
        for thread in started.values():
            while thread.is_alive():
                thread.join(JOIN_S)
                while_waiting([pid for pid, other in started.items() if other.is_alive()])
    return slots


def _fill(slot: Slot[T], work: Callable[[Rank], T]) -> None:
    slot.begun = time.monotonic()
    try:
        slot.values.append(work(slot.rank))
    except Exception as error:
        slot.error = error
    slot.seconds = time.monotonic() - slot.begun


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
    telling = (errors.RankDied, errors.RankStopped)

    def weight(error: errors.GpushareError) -> int:
        kinds = [number for number, kind in enumerate(telling) if isinstance(error, kind)]
        return kinds[0] if kinds else len(telling) + isinstance(error, errors.DeadlinePassed)

    ordered = sorted(failed, key=weight)
    ordered[0].facts["also"] = [str(error) for error in ordered[1:]]
    return ordered[0]


def timeout_ms(deadline: Deadline) -> int:
    """Return what is left of a deadline for a request's `timeout_ms`, so that the shim answers before it passes."""
    return max(1, int(deadline.left() * 1000) - 200)


@dataclass(frozen=True)
class Span:
    """Something that was done on one rank: when it began, on the monotonic clock, and the seconds that it took."""

    pid: int  # 0: on all of them together
    name: str
    begun: float
    seconds: float
    bytes: int = 0
    device: str = ""  # UUID of the GPU, where only one takes part


@dataclass
class PhaseTime:
    """One phase as it went, for the report and for a trace."""

    name: str
    begun: float = 0.0  # on the monotonic clock
    seconds: float = 0.0
    bytes: int = 0
    parts: list[Span] = field(default_factory=list)  # of one rank they follow each other
    copies: list[Span] = field(default_factory=list)  # of one rank and GPU they follow each other
    copy_seconds: dict[int, float] = field(default_factory=dict)  # by pid, while bytes crossed the bus
    lock_seconds: dict[int, float] = field(default_factory=dict)  # by pid, of these: while pages were locked

    def took(self, slots: Sequence[Slot[T]], name: str = "") -> None:
        """Keep how long each rank took for the phase, or for the part of it that is named."""
        self.parts += [Span(slot.rank.pid, name or self.name, slot.begun, slot.seconds) for slot in slots if slot.begun]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part that concerns all ranks together."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.parts.append(Span(0, name, begun, time.monotonic() - begun))

    @property
    def rank_seconds(self) -> dict[int, float]:
        """Return the seconds that each rank took, by pid."""
        seconds: dict[int, float] = {}
        for part in self.parts:
            if part.pid:
                seconds[part.pid] = seconds.get(part.pid, 0.0) + part.seconds
        return seconds
