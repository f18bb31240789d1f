"""Quiesce: one cut through the work of all ranks, after which no rank waits for another.

Owns the drain over all ranks between the launch gate and the memory gate, and the decision which launches are let
through meanwhile.  Must not know what happens to memory.

A rank may spin in a collective that another rank has not launched yet when the gates close.  It can never drain by
itself; the others, drained and with launches waiting, are let through one launch at a time until everybody has drained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpususpend import errors
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.group import Rank


@dataclass(frozen=True)
class Drain:
    """The state of one rank's drain."""

    drained: bool
    waiting: int  # launches that wait at the gate
    admitted: int  # launches let through since the gate closed
    in_flight: int  # threads inside a gated call
    captures: int = 0  # graphs that are being recorded: waiting for the device would break them

    def __str__(self) -> str:
        """Return it as one phrase for a message."""
        busy = f"graphs being recorded: {self.captures}" if self.captures else "work still running"
        state = "drained" if self.drained else busy
        return f"{state}, {self.waiting} launches waiting, {self.in_flight} calls in flight"


def look(rank: Rank, deadline: Deadline) -> Drain:
    """Ask a rank how far its drain is."""
    reply = rank.ask("drain", deadline.within(LIMITS.request_s))
    return Drain(
        reply.number("drained") == 1, reply.number("waiting"), reply.number("admitted"), reply.number("in_flight"),
        reply.number("captures"),
    )


def choose(drains: Sequence[Drain]) -> list[int]:
    """Return the indexes of the ranks that one launch shall be let through on; none while all are drained.

    Drained ranks come first: their next launch is what somebody else may wait for.  If none of these has a launch
    waiting, a rank that is itself still busy may need its own next launch (two streams that wait for each other).
    """
    if all(drain.drained for drain in drains):
        return []
    drained = [index for index, drain in enumerate(drains) if drain.drained and drain.waiting]
    return drained or [index for index, drain in enumerate(drains) if not drain.drained and drain.waiting]


def lags(drains: Sequence[Drain]) -> bool:
    """Tell whether somebody has drained with a launch waiting while somebody else has not drained.

    Once the first stall is over, this is reason enough: ranks may be many launches apart, and each would cost a stall.
    """
    return any(drain.drained and drain.waiting for drain in drains) and not all(drain.drained for drain in drains)


def drain_all(ranks: Sequence[Rank], deadline: Deadline, check: Callable[[], None]) -> int:
    """Wait until every rank has drained; return the number of launches that were let through.

    The launch gates are closed.  `check` is called between two looks and may raise.  Raises DeadlinePassed, which
    names the first rank that is not drained.
    """
    admitted = 0
    before: list[Drain] = []
    patience = quiet = deadline.within(LIMITS.stall_s)
    while True:
        check()
        drains = [look(rank, deadline) for rank in ranks]
        if all(drain.drained for drain in drains):
            return admitted
        if deadline.passed():
            raise _late(ranks, drains, deadline)
        if drains != before:
            before, quiet = drains, deadline.within(LIMITS.stall_s)
        if quiet.passed() or (patience.passed() and lags(drains)):
            for index in choose(drains):
                ranks[index].ask("admit", deadline.within(LIMITS.request_s), n=1)
                admitted += 1
            before = []
        deadline.sleep(LIMITS.poll_s)


def _late(ranks: Sequence[Rank], drains: Sequence[Drain], deadline: Deadline) -> errors.DeadlinePassed:
    index = next(index for index, drain in enumerate(drains) if not drain.drained)
    detail = "; ".join(f"pid {rank.pid}: {drain}" for rank, drain in zip(ranks, drains, strict=True))
    return errors.DeadlinePassed(step="quiesce", pid=ranks[index].pid, seconds=deadline.seconds, detail=detail)
