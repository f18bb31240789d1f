"""The cut: which launches are let through, and that it ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from gpususpend import errors, quiesce
from gpususpend.control import Reply
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.quiesce import Cut, Drain
from tests.unit import ranks_model


def test_launches_behind_which_nothing_is_left_help() -> None:
    """A launch that comes after a kernel which cannot end only adds to what has to."""
    threads: list[tuple[tuple[int, bool], ...]] = [((7, True),), ((8, False), (9, True)), ()]
    drains = [Drain(index != 1, len(waiting), 0, 0, 0, waiting) for index, waiting in enumerate(threads)]
    assert quiesce.helpers(drains) == {(0, 7), (1, 9)}
    assert quiesce.busy(drains) == {(1, 0), (1, 8)}
    assert quiesce.waiting(drains) == {(0, 7), (1, 8), (1, 9)}


@dataclass
class Model:
    """Ranks in a chain of collectives: the k-th of a rank ends when every rank has launched its k-th."""

    launched: list[int]
    waiting: list[int] = field(default_factory=list)
    admits: int = 0

    def ranks(self) -> list[ModelRank]:
        """Return the ranks."""
        return [ModelRank(self, index) for index in range(len(self.launched))]


@dataclass
class ModelRank:
    """One rank of the model, asked as a shim is."""

    model: Model
    index: int

    @property
    def pid(self) -> int:
        """Return a pid."""
        return 100 + self.index

    def ask(self, verb: str, deadline: Deadline, thread: int = 0) -> Reply:
        """Answer `drain` and `admit`."""
        launched = self.model.launched
        if verb == "admit":
            assert thread == 1
            self.model.admits += 1
            launched[self.index] += 1
            return Reply(True, {"admitted": "1"})
        drained = str(int(launched[self.index] <= min(launched)))
        head = {"drained": drained, "waiting": "1", "admitted": "0", "in_flight": "0"}
        return Reply(True, head, [{"thread": "1", "idle": drained}])


def test_ranks_that_are_behind_catch_up() -> None:
    """Rank 1 is three collectives behind: exactly three are let through, and no more."""
    model = Model([5, 2, 5, 5])
    admitted = quiesce.drain_all(model.ranks(), Deadline(10), lambda pids: None)  # type: ignore[arg-type]
    assert model.launched == [5, 5, 5, 5] and admitted == model.admits == 3


def test_many_launches_behind_cost_no_stall_each() -> None:
    """Two hundred kernels between two collectives are let through within the deadline."""
    model = Model([200, 0])
    quiesce.drain_all(model.ranks(), Deadline(5), lambda pids: None)  # type: ignore[arg-type]
    assert model.launched == [200, 200]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_cut_is_found_through_any_traffic(first: int) -> None:
    """Seeded ranks and programs; the deadline is the command's own, in the time of the model."""
    for seed in range(first, first + 10):
        ranks = ranks_model.world(seed)
        cut = Cut(ranks.ranks, ranks.deadline(LIMITS.timeout_s), lambda pids: None, random.Random(seed))  # type: ignore[arg-type]
        try:
            cut.find()
        except errors.DeadlinePassed as error:
            pytest.fail(f"seed {seed}: {error}")
        assert not any(thread.queue for rank in ranks.ranks for thread in rank.threads), f"seed {seed}"


def test_a_busy_rank_gets_its_own_next_launch_if_nobody_else_has_one() -> None:
    """Two streams of one rank may wait for each other."""
    flag = [ranks_model.Launch(0.001, awaits="flag"), ranks_model.Launch(0.001, sync=True)]
    world = ranks_model.World([[flag, [ranks_model.Launch(0.001, signals="flag", sync=True)]]], seed=1)
    rank = world.ranks[0]
    rank.closed = True
    rank._launch(rank.threads[0])
    assert Cut(world.ranks, world.deadline(10), lambda pids: None).find() >= 1  # type: ignore[arg-type]


def test_work_that_never_ends_meets_the_deadline() -> None:
    """The rank is named, with what it was doing."""

    class Stuck(ModelRank):
        def ask(self, verb: str, deadline: Deadline, thread: int = 0) -> Reply:
            return Reply(True, {"drained": "0", "waiting": "0", "admitted": "0", "in_flight": "2"})

    with pytest.raises(errors.DeadlinePassed) as caught:
        quiesce.drain_all([Stuck(Model([0]), 7)], Deadline(0.2), lambda pids: None)  # type: ignore[list-item]
    assert caught.value.facts["pid"] == 107 and "2 calls in flight" in str(caught.value)


def test_an_interruption_is_seen_between_two_looks() -> None:
    """`check` ends it."""

    def check(pids: list[int]) -> None:
        assert pids
        raise errors.Interrupt(step="quiesce", pid=0, signal="SIGINT")

    with pytest.raises(errors.Interrupt):
        quiesce.drain_all(Model([1, 0]).ranks(), Deadline(5), check)  # type: ignore[arg-type]
