"""What every phase relies on: all ranks at once, one writer for each result, read after the join."""

from __future__ import annotations

import os
import threading
import time

import pytest

from gpususpend import errors, phases
from gpususpend.group import Rank
from gpususpend.journal import Kind, Member


def ranks(count: int) -> list[Rank]:
    """Return ranks that nobody talks to."""
    return [Rank(Member(pid, 1, pid, 0, "x", Kind.SHIMMED)) for pid in range(1000, 1000 + count)]


def test_all_ranks_run_at_once() -> None:
    """Each waits for all others: one after the other would never end (pitfall 1)."""
    barrier = threading.Barrier(8)
    slots = phases.parallel(ranks(8), lambda rank: barrier.wait(60))
    assert sorted(slot.values[0] for slot in slots) == list(range(8))


def test_B13_instant_failure_is_a_failure_every_time() -> None:
    """One rank fails at once while the others still start, a hundred times (pitfall 8)."""
    for turn in range(100):

        def work(rank: Rank, turn: int = turn) -> int:
            if rank.pid == 1000 + turn % 8:
                raise errors.DriverError(step="lock", pid=rank.pid, cuda=600, cuda_name="CUDA_ERROR_NOT_READY")
            return rank.pid

        slots = phases.parallel(ranks(8), work)
        with pytest.raises(errors.DriverError) as caught:
            phases.results("lock", slots)
        assert caught.value.facts["pid"] == 1000 + turn % 8
        assert sum(bool(slot.values) for slot in slots) == 7


def test_B13_a_value_that_is_false_is_a_result() -> None:
    """None and 0 are no sign of a thread that was not started."""
    slots = phases.parallel(ranks(2), lambda rank: None)
    assert phases.results("x", slots) == {1000: None, 1001: None}


def test_B12_a_thread_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The started ones are joined first; what hinders the others is told."""
    real, begun, ended = threading.Thread.start, [], []

    def start(self: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)

    def work(rank: Rank) -> int:
        time.sleep(0.05)
        ended.append(rank.pid)
        return rank.pid

    slots = phases.parallel(ranks(4), work)
    assert sorted(ended) == [1000, 1001]
    with pytest.raises(errors.SystemCall, match="no thread can be started"):
        phases.results("load", slots)
    assert "not started" in str(phases.as_error("load", slots[3]))


def test_death_is_reported_before_what_it_causes() -> None:
    """And a deadline last; the others stand beside it."""
    late = errors.DeadlinePassed(step="x", pid=1, seconds=1, detail="late")
    failed = errors.StepFailed(step="x", pid=2, detail="broken")
    died = errors.RankDied(step="x", pid=3, comm="python")
    first = phases.worst([late, failed, died])
    assert first is died and len(died.facts["also"]) == 2  # type: ignore[arg-type]
    assert phases.worst([late, failed]) is failed


def test_progress_knows_who_is_waited_for() -> None:
    """The slow one, while it still works (FR-21)."""
    seen: list[list[int]] = []
    alone = threading.Event()

    def look(pids: list[int]) -> None:
        seen.append(pids)
        if pids == [1002]:
            alone.set()

    slots = phases.parallel(ranks(3), lambda rank: alone.wait(60) if rank.pid == 1002 else True, look)
    assert phases.results("load", slots) == {1000: True, 1001: True, 1002: True} and seen[-1] == []


def test_threads_are_gone_afterwards() -> None:
    """Joined, each of them."""
    before = set(threading.enumerate())
    phases.parallel(ranks(16), lambda rank: os.getpid())
    assert set(threading.enumerate()) <= before
