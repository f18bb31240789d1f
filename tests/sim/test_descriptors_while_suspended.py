"""Exported descriptors that are used while the group is suspended at depth pages: threads run, and do with them what
they like.  Calls wait at the gates and give the right memory afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, Start, running

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]
SIZE = 2 * MIB


@pytest.fixture
def shared(start_worker: Start) -> tuple[Worker, Worker, int, int]:
    """An owner and another process; the descriptor of the owner's memory in both, unused in the other."""
    owner, other = start_worker(0), start_worker(1)
    block = owner.block(SIZE)
    owner.fill(block["address"], SIZE, 1)
    number = owner.mem_export(block["handle"])
    return owner, other, number, owner.hand(number, other)


def suspended(tool: Tool, *workers: Worker) -> None:
    """Suspend at depth pages."""
    tool.run("suspend", "--driver", "sim", "--depth", "pages", *(worker.pid for worker in workers)).expect(0)


def holds_the_memory(worker: Worker, block: dict[str, int]) -> None:
    """Check the content, and forget the block."""
    worker.expect(block["address"], SIZE, [1])
    worker.check()
    worker.drop_block(block)


# What is done with the descriptor while all is suspended: the process that has the new number, and the number.
USES: dict[str, Callable[[Worker, Worker, int, int], tuple[Worker, int]]] = {
    "the exporter's own": lambda owner, other, number, received: (owner, number),
    "received before": lambda owner, other, number, received: (other, received),
    "duplicated": lambda owner, other, number, received: (owner, owner.dup_fd(number)),
    "received before, duplicated": lambda owner, other, number, received: (other, other.dup_fd(received)),
    "sent": lambda owner, other, number, received: (other, owner.hand(number, other)),
    "received before, sent back": lambda owner, other, number, received: (owner, other.hand(received, owner)),
    "sent to itself": lambda owner, other, number, received: (owner, owner.hand(number, owner)),
}


@pytest.mark.parametrize("use", USES)
def test_an_import_waits_and_gets_the_memory(
    shared: tuple[Worker, Worker, int, int], tool: Tool, use: str
) -> None:
    """Whichever descriptor it is made of; the next suspend knows it too."""
    owner, other = shared[:2]
    suspended(tool, owner, other)
    user, number = USES[use](*shared)
    job = user.job("import_block", number, SIZE)
    assert user.job_answer(job, 0.3) is None, "it did not wait"
    tool.resume(owner.pid).expect(0)
    answer = user.job_answer(job, 60)
    assert answer is not None and answer[0] == 0, answer
    holds_the_memory(user, answer[1])
    for _ in range(2):
        suspended(tool, owner, other)
        tool.resume(owner.pid).expect(0)
        holds_the_memory(user, user.import_block(number, SIZE))
    owner.check()
    running(tool)


@pytest.mark.parametrize("close", [False, True])
def test_one_on_its_way_while_all_comes_back(
    shared: tuple[Worker, Worker, int, int], tool: Tool, close: bool
) -> None:
    """Sent while suspended and received afterwards, the sender's own closed or not."""
    owner, other, number, _ = shared
    suspended(tool, owner, other)
    under_way = owner.give_fd(number)
    if close:
        owner.close_fd(number)
    tool.resume(owner.pid).expect(0)
    other.send("take", fd=under_way)
    os.close(under_way)
    late = int(other.receive("take")[0].value)
    holds_the_memory(other, other.import_block(late, SIZE))
    suspended(tool, owner, other)
    tool.resume(owner.pid).expect(0)
    holds_the_memory(other, other.import_block(late, SIZE))
    owner.check()


def test_an_export_waits(shared: tuple[Worker, Worker, int, int], tool: Tool) -> None:
    """And is of the memory as it is afterwards."""
    owner, other = shared[:2]
    block = owner.block(SIZE)
    owner.fill(block["address"], SIZE, 1)
    suspended(tool, owner, other)
    job = owner.job("mem_export", block["handle"])
    assert owner.job_answer(job, 0.3) is None
    tool.resume(owner.pid).expect(0)
    answer = owner.job_answer(job, 60)
    assert answer is not None and answer[0] == 0
    holds_the_memory(other, other.import_block(owner.hand(answer[1], other), SIZE))


def test_numbers_that_are_closed_or_used_otherwise(shared: tuple[Worker, Worker, int, int], tool: Tool) -> None:
    """They stay as they are."""
    owner, other, number, received = shared
    pipe = os.pipe()
    suspended(tool, owner, other)
    owner.close_fd(number)
    owner.send("take", fd=pipe[0])
    reused = int(owner.receive("take")[0].value)
    other.close_fd(received)
    link = owner.readlink(reused)
    tool.resume(owner.pid).expect(0)
    assert link.startswith("pipe:") and owner.readlink(reused) == link
    for end in pipe:
        os.close(end)
    owner.check()
    running(tool)
