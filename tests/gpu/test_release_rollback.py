"""A suspend that fails leaves a workload that runs, and a resume that failed can be repeated (B14, B19-B23)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.conftest import Group, same_picture
from tests.programs.client import Worker
from tests.programs.setting import Setting

MIB = 1 << 20
ROLLED_BACK, LOST, STILL_SUSPENDED = 4, 5, 8
Share = Callable[..., tuple[dict[str, int], dict[str, int]]]
simulated = pytest.mark.machine(driver="sim")


class Ranks:
    """Two ranks with one object of every kind, and what they look like."""

    def __init__(self, first: Worker, second: Worker, share: Share) -> None:
        self.all = (first, second)
        self.pids = (first.pid, second.pid)
        for at, (owner, other) in enumerate(((first, second), (second, first))):
            for size in (4096, 4 * MIB):
                address = owner.alloc(size)
                owner.fill(address, size, at + size)
                other.expect(other.ipc_open(owner.ipc_get(address)), size, [at + size])
            share(owner, other, 4 * MIB, 7 + at, keep_fds=True)
            memory = owner.buffer(MIB)
            owner.host_fill(memory, MIB, 3)
            owner.host_register(memory, MIB, 3)
            block = owner.block(2 * MIB, "host_numa")
            owner.host_fill(block["address"], 2 * MIB, 5)
        self.before = [one.snapshot() for one in self.all]

    def verify(self) -> None:
        """Check that both run, with the same objects and the same content."""
        for one, picture in zip(self.all, self.before, strict=True):
            assert one.alive(), one._story("died")
            same_picture(picture, one.snapshot())
            one.check()


@pytest.fixture
def ranks(start_worker: Callable[..., Worker], share: Share) -> Ranks:
    """Two ranks on two devices."""
    return Ranks(start_worker(0), start_worker(1), share)


def rolled_back(group: Group, ranks: Ranks, answer: Any) -> None:
    """Check the answer of a suspend that rolled back, the ranks, and that a suspend works afterwards."""
    answer.expect(ROLLED_BACK)
    assert answer.json["next"] in ("retry", "operator", "cold-start")
    ranks.verify()
    group.cycle(*ranks.all)
    ranks.verify()


def test_b19_before_release(ranks: Ranks, group: Group) -> None:
    """A kernel that never ends: the ranks cannot be drained, nothing was released."""
    worker = ranks.all[1]
    flag = worker.alloc_host(4096, 2)
    worker.host_write(flag, 0)
    worker.kernel("gs_wait_flag", [flag, 1], worker.stream_create())
    answer = group.tool.suspend(*ranks.pids, options=("--timeout", "1")).expect(ROLLED_BACK)
    assert "deadline" in answer.stdout
    worker.host_write(flag, 1)
    ranks.verify()
    group.cycle(*ranks.all)


RELEASE_CALLS = ["cuMemcpyDtoHAsync_v2 2", "cuMemUnmap 2", "cuMemRelease 2"]


@simulated
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", RELEASE_CALLS)
def test_b19_midway_through_release(ranks: Ranks, group: Group, machine: Setting, call: str, rank: int) -> None:
    """One allocation cannot be saved or released, on one of the ranks."""
    machine.inject(f"{call} 999", ranks.pids[rank])
    answer = group.tool.suspend(*ranks.pids)
    machine.inject("", ranks.pids[rank])
    rolled_back(group, ranks, answer)


@simulated
@pytest.mark.parametrize("step", ["cuCheckpointProcessLock 1 600", "cuCheckpointProcessLock 2 801",
                                  "cuCheckpointProcessCheckpoint 1 304", "cuCheckpointProcessCheckpoint 2 2"])
def test_b13_b19_after_release(ranks: Ranks, group: Group, machine: Setting, step: str) -> None:
    """Everything is released and the driver refuses one process (B13: a lock that fails at once is a failure)."""
    machine.inject(step)
    answer = group.tool.suspend(*ranks.pids)
    machine.inject("")
    rolled_back(group, ranks, answer)


@simulated
def test_b22_import_without_its_exporter(start_worker: Callable[..., Worker], group: Group, share: Share) -> None:
    """The exporter freed what two others still map, and left: a normal cycle keeps the memory shared (B22)."""
    owner, first, second = start_worker(0), start_worker(0), start_worker(1)
    block = owner.block(4 * MIB)
    owner.fill(block["address"], 4 * MIB, 1)
    fd = owner.mem_export(block["handle"])
    sides = []
    for other in (first, second):
        there = owner.hand(fd, other)
        sides.append(other.import_block(there, 4 * MIB))
        other.expect(sides[-1]["address"], 4 * MIB, [1])
        other.close_fd(there)
    owner.close_fd(fd)
    owner.drop_block(block)
    group.cycle(owner, first, second)
    owner.kill()
    group.cycle(first, second)
    first.fill(sides[0]["address"], 4 * MIB, 2)
    second.expect(sides[1]["address"], 4 * MIB, [2])
    second.check()


@simulated
def test_b22_rollback_with_an_orphan(start_worker: Callable[..., Worker], group: Group, machine: Setting,
                                 share: Share) -> None:
    """The same, and the suspend fails after the release (B22)."""
    owner, other = start_worker(0), start_worker(1)
    block, _ = share(owner, other, 4 * MIB)
    owner.drop_block(block)
    machine.inject("cuCheckpointProcessLock 1 600")
    group.tool.suspend(owner.pid, other.pid).expect(ROLLED_BACK)
    machine.inject("")
    other.check()
    group.cycle(owner, other)


LOAD_CALLS = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync_v2", "cuMemImportFromShareableHandle",
              "cuMemExportToShareableHandle"]


@simulated
@pytest.mark.parametrize("call", LOAD_CALLS)
def test_b14_resume_is_repeated(ranks: Ranks, group: Group, machine: Setting, call: str) -> None:
    """The way back fails once on one rank; the second resume succeeds (B14).

    An address that cannot be had again (cuMemMap) is such a failure: nothing else is ever taken in its place, the gates
    stay closed (pitfall 22).
    """
    group.suspend(*ranks.all)
    machine.inject(f"{call} 1 2", ranks.pids[0])
    answer = group.tool.resume(*ranks.pids)
    machine.inject("", ranks.pids[0])
    answer.expect(STILL_SUSPENDED)
    group.resume(*ranks.all)
    ranks.verify()


def test_again_changes_nothing(ranks: Ranks, group: Group) -> None:
    """Suspend of a suspended group and resume of a running one say so and do nothing."""
    assert group.tool.resume(*ranks.pids).expect(0).json["already"] is True
    group.suspend(*ranks.all)
    assert group.tool.suspend(*ranks.pids).expect(0).json["already"] is True
    group.resume(*ranks.all)
    assert group.tool.resume(*ranks.pids).expect(0).json["already"] is True
    ranks.verify()


def test_lost_rank(start_worker: Callable[..., Worker], group: Group) -> None:
    """A rank that dies while suspended is named; the other one, which needs nothing of it, comes back (FR-2)."""
    first, second = start_worker(0), start_worker(1)
    first.fill(first.alloc(4 * MIB), 4 * MIB, 1)
    group.suspend(first, second)
    second.kill()
    answer = group.tool.resume(first.pid, second.pid).expect(LOST)
    assert str(second.pid) in answer.stdout
    first.check()


def test_lost_exporter(ranks: Ranks, group: Group) -> None:
    """A rank that dies suspended takes the memory with it that others map: that is lost, and no retry helps."""
    group.suspend(*ranks.all)
    ranks.all[1].kill()
    answer = group.tool.resume(*ranks.pids).expect(LOST)
    assert str(ranks.pids[1]) in answer.stdout
    assert answer.json["next"] == "cold-start"
