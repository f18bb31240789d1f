"""Quiesce: one cut through the work of all ranks, after which no rank waits for another.

Owns the drain over all ranks between the launch gate and the memory gate, and the decision which launches are let
through meanwhile.  Must not know what happens to memory.

A rank may spin in a collective that another rank has not launched yet when the gates close.  It can never drain by
itself; of the launches that wait elsewhere, on streams that have nothing left to do, one at a time is let through until
everybody has drained (docs/decisions/cut.md).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpususpend import errors
from gpususpend.control import number
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.group import Rank

GROWTH = 1.1


Check = Callable[[list[int]], None]
Lane = tuple[int, int]
"""A rank's index, and the id of a thread of it whose launch waits; 0 stands for all work of that rank."""


@dataclass(frozen=True)
class Drain:
    """The state of one rank's drain."""

    drained: bool
    waiting: int  # launches that wait at the gate
    admitted: int  # launches let through since the gate closed
    in_flight: int  # threads inside a gated call
    captures: int = 0  # graphs that are being recorded: waiting for the device would break them
    threads: tuple[tuple[int, bool], ...] = ()  # whose launches wait, and whether their streams have nothing left to do

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
        tuple((number(group, "thread"), number(group, "idle") == 1) for group in reply.groups),
    )


class Cut:
    """The search for a moment at which every rank has drained.

    A launch too many makes its lane the next one that waits for somebody: so launches are let through one at a time,
    on the lane that has got the stuck ones going before, and none before everything stands still.  Ranks that are many
    launches behind cost no stall each, since the one that is let through has drained again at once.
    """

    def __init__(
        self, ranks: Sequence[Rank], deadline: Deadline, check: Check, dice: random.Random | None = None
    ) -> None:
        self._ranks = ranks
        self._deadline = deadline
        self._check = check
        self._dice = dice or random.Random()
        self._helped: Counter[tuple[Lane, Lane]] = Counter()  # (stuck, helper): how often that ended a stall
        self._used: Counter[Lane] = Counter()  # launches let through in the present stall
        self._stall_s = LIMITS.stall_s
        self.admitted = 0

    def find(self) -> int:
        """Wait until every rank has drained; return the number of launches that were let through."""
        while busy(drains := self._settle()):
            self._end_stall(drains)
            # Kernels that take longer than this are taken for stuck ones: wait longer each time.
            self._stall_s = min(GROWTH * self._stall_s, LIMITS.longest_stall_s)
        return self.admitted

    def _look(self) -> list[Drain]:
        drains = [look(rank, self._deadline) for rank in self._ranks]
        self._check([rank.pid for rank, drain in zip(self._ranks, drains, strict=True) if not drain.drained])
        if busy(drains) and self._deadline.passed():
            raise _late(self._ranks, drains, self._deadline)
        return drains

    def _settle(self) -> list[Drain]:
        """Look until all have drained or nothing changes any more."""
        before = self._look()
        quiet = self._deadline.within(self._stall_s)
        while busy(before) and not quiet.passed():
            self._deadline.sleep(LIMITS.poll_s)
            drains = self._look()
            if drains != before:
                before, quiet = drains, self._deadline.within(self._stall_s)
        return before

    def _end_stall(self, drains: Sequence[Drain]) -> None:
        """Let launches through until one of those that do not drain by themselves has drained.

        Not for longer than twice the time after which all are let through: a rank that gets launches all the time
        never drains, although what it was stuck in may be over.
        """
        stuck = busy(drains)
        wide = self._deadline.within(LIMITS.one_by_one_s)
        enough = self._deadline.within(2 * LIMITS.one_by_one_s)
        self._used.clear()
        while stuck and stuck <= busy(drains) and not enough.passed():
            ready = helpers(drains)
            if not ready:  # they run, or are stuck as well: only now may a busy lane need its own next launch
                drains = self._settle()
                if helpers(drains) or not stuck <= busy(drains):
                    continue
                ready = waiting(drains)
            chosen = ready if wide.passed() or not ready else {self._best(ready, stuck)}
            self._admit(chosen)
            drains = self._watch(chosen, stuck)
            self._helped.update((other, lane) for other in stuck - busy(drains) for lane in chosen)

    def _admit(self, chosen: set[Lane]) -> None:
        for index, thread in chosen:
            self._ranks[index].ask("admit", self._deadline.within(LIMITS.request_s), thread=thread)
        self.admitted += len(chosen)
        self._used.update(chosen)

    def _best(self, ready: set[Lane], stuck: set[Lane]) -> Lane:
        """Return the lane to let through: who helped these before, and not one lane all the time."""

        def promise(lane: Lane) -> float:
            return sum(self._helped[other, lane] for other in stuck) - self._used[lane] / 4 + self._dice.random() / 8

        return max(sorted(ready), key=promise)

    def _watch(self, chosen: set[Lane], stuck: set[Lane]) -> list[Drain]:
        """Look until somebody stuck has drained, all of the chosen have, or the chosen are stuck as well."""
        patience = self._deadline.within(self._stall_s)
        while True:
            self._deadline.sleep(LIMITS.poll_s)
            drains = self._look()
            over = chosen and all(drains[lane[0]].drained or lane in helpers(drains) for lane in chosen)
            if patience.passed() or over or not stuck <= busy(drains):
                return drains


def busy(drains: Sequence[Drain]) -> set[Lane]:
    """Return the lanes that have work left: what a waiting launch comes after, and the rank as a whole (lane 0)."""
    found = {(index, 0) for index, drain in enumerate(drains) if not drain.drained}
    return found | {(index, thread) for index, drain in enumerate(drains) for thread, idle in drain.threads if not idle}


def helpers(drains: Sequence[Drain]) -> set[Lane]:
    """Return the lanes that have nothing left to do and a launch waiting: somebody may wait for just that."""
    return {(index, thread) for index, drain in enumerate(drains) for thread, idle in drain.threads if idle}


def waiting(drains: Sequence[Drain]) -> set[Lane]:
    """Return all lanes with a launch waiting."""
    return {(index, thread) for index, drain in enumerate(drains) for thread, _ in drain.threads}


def drain_all(ranks: Sequence[Rank], deadline: Deadline, check: Check) -> int:
    """Wait until every rank has drained; return the number of launches that were let through.

    The launch gates are closed.  `check` is called after each look with the pids that are not drained, and may raise.
    Raises DeadlinePassed, which names the first rank that is not drained.
    """
    return Cut(ranks, deadline, check).find()


def _late(ranks: Sequence[Rank], drains: Sequence[Drain], deadline: Deadline) -> errors.DeadlinePassed:
    index = next(index for index, drain in enumerate(drains) if not drain.drained)
    detail = "; ".join(f"pid {rank.pid}: {drain}" for rank, drain in zip(ranks, drains, strict=True))
    return errors.DeadlinePassed(step="quiesce", pid=ranks[index].pid, seconds=deadline.seconds, detail=detail)
