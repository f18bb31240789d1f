"""Questions before anything changes that concern processes outside the group."""

from __future__ import annotations

import math
import resource
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from gpususpend import control, errors, modes, openfiles, preflight, system
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS, limits_with
from gpususpend.driver import DriverResult
from gpususpend.group import Group, Rank, group_of
from gpususpend.journal import Kind, Member
from gpususpend.processes import Process

MEMBER = 2**22 + 1  # no process has it


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes that listen as shims do, as far as the table of sockets says."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
    pids = [one.pid for one in started]
    monkeypatch.setattr(control, "listeners", lambda: [*pids, MEMBER])
    yield pids
    for one in started:
        one.kill()
        one.wait()


def test_strangers_are_asked_all_at_once(strangers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By one deadline: while the gates are closed, those who do not answer must not cost it one after the other."""
    met = threading.Barrier(len(strangers))
    deadlines = set()

    def listing(rank: Rank, verb: str, deadline: Deadline) -> list[dict[str, str]]:
        deadlines.add(deadline.at)
        met.wait(60)
        if rank.pid == strangers[2]:
            raise errors.RankStopped(step=verb, pid=rank.pid, by="by a signal")
        if rank.pid == strangers[0]:
            raise ConnectionResetError
        return [{"state": "resolved", "pid": str(MEMBER if rank.pid == strangers[3] else 1)}]

    monkeypatch.setattr(Rank, "listing", listing)
    assert preflight.importers_from({MEMBER}, LIMITS) == [strangers[3]]
    assert len(deadlines) == 1


@pytest.mark.parametrize(("hard", "times"), [(math.inf, 1), (76, 1), (75, 2), (73, 4)])
def test_there_are_descriptors_for_all_strangers(
    strangers: list[int], monkeypatch: pytest.MonkeyPatch, hard: float, times: int
) -> None:
    """One that cannot be asked for want of a descriptor would pass for one that shares nothing."""
    asked: dict[float, int] = {}
    limit = resource.RLIM_INFINITY if hard == math.inf else int(hard)
    monkeypatch.setattr(openfiles, "DESCRIPTORS_A_RANK", 1)
    monkeypatch.setattr(openfiles, "DESCRIPTORS", 71)
    monkeypatch.setattr(system, "descriptor_limits", lambda: (72, limit))
    raised: list[int] = []
    monkeypatch.setattr(system, "limit_descriptors", lambda soft, hard: raised.append(soft))

    def listing(rank: Rank, verb: str, deadline: Deadline) -> list[dict[str, str]]:
        asked[deadline.at] = asked.get(deadline.at, 0) + 1
        return [{"state": "resolved", "pid": str(MEMBER)}]

    monkeypatch.setattr(Rank, "listing", listing)
    assert preflight.importers_from({MEMBER}, LIMITS) == strangers
    assert sum(asked.values()) == len(strangers) == 4 and len(asked) == times, asked
    assert raised == [min(hard, 76)]


@pytest.mark.parametrize(
    ("version", "compute", "warned"),
    [("595.71.05", [9, 10], True), ("595.71.05", [9], False), ("595.71.05", [], False), ("595.72", [12], False)],
)
def test_FR3_driver_under_which_a_kill_hangs(version: str, compute: list[int], warned: bool) -> None:
    """The way out is in the warning."""
    warnings: list[str] = []
    preflight.warn_of_driver(version, compute, warnings.append)
    assert [version in text and "suspend" in text for text in warnings] == [True] * warned


@pytest.mark.parametrize(("state", "told"), [(1, "LOCKED"), (3, "FAILED"), (4, "state 4"), (9, "state 9")])
def test_pitfall17_states_that_are_not_running(state: int, told: str) -> None:
    """Those of custom storage (4, 5) and of drivers to come are refused, and shown by their number."""
    group = group_of([Member(7, 1, 7, 0, "rank", Kind.SHIMMED)])
    answer = {7: DriverResult(0, "CUDA_SUCCESS", 0.0, True, state)}
    with pytest.raises(errors.DriverHasIt, match=f"the driver says {told};"):
        preflight.check_driver_states(group, answer)
    preflight.check_driver_states(group, {7: DriverResult(0, "CUDA_SUCCESS", 0.0, True, 0)})


def test_FR24_network_cards_that_use_memory_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning that names all of them, and the way out."""
    members = [Member(pid, 1, pid, 0, "rank", Kind.SHIMMED) for pid in (7, 8, 9)]
    monkeypatch.setattr(modes, "network_card", lambda pid: "/dev/infiniband/uverbs0" if pid < 9 else "")
    warnings: list[str] = []
    preflight.check_modes(group_of(members), {}, [], {}, warnings.append)
    (text,) = warnings
    assert text.startswith("pid 7, 8: /dev/infiniband/uverbs0") and "NCCL_IB_DISABLE=1" in text


def test_each_process_has_its_own_time_to_start_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still, or looks at many processes first, must not take a child's last chance away."""
    looks: Counter[int] = Counter()

    def look(process: Process, *_: object) -> None:
        looks[process.pid] += 1
        if process.pid == 7:
            time.sleep(0.2)  # longer than all the patience
        elif looks[process.pid] < 4:
            raise errors.KeptDescriptor(pid=process.pid, comm="child", fd=3, owner=MEMBER, way_out="")

    rank = Rank(Member(MEMBER, 1, MEMBER, 0, "python", Kind.SHIMMED))
    monkeypatch.setattr(preflight, "_shares", lambda *_: True)
    monkeypatch.setattr(preflight, "_has_orphans", lambda *_: False)
    monkeypatch.setattr(preflight, "_check_copies", look)
    everybody = [Process(pid, 1, pid, 0, 1, "") for pid in (7, 8)]
    monkeypatch.setattr(preflight.processes, "all_processes", lambda: everybody)
    preflight.check_descriptors(Group([rank], []), limits_with(exec_s=0.1))
    assert looks == {7: 1, 8: 4}
