"""The thinnest path, whole: one command suspends two real processes that share memory, another resumes them."""

from __future__ import annotations

from collections.abc import Callable

from tests.programs.client import Worker
from tests.programs.tool import Answer, Tool

MIB = 1 << 20


def test_two_processes_that_share_memory(start_worker: Callable[..., Worker], tool: Tool) -> None:
    """By IPC, across devices, with content that is checked before and after (FR-5: two ranks as a case of its own)."""
    owner, other = start_worker(0), start_worker(1)
    block = owner.alloc(4 * MIB)
    owner.fill(block, 4 * MIB, 5)
    other.expect(other.ipc_open(owner.ipc_get(block)), 4 * MIB, [5])
    for worker in (owner, other):
        worker.check()
    down = tool.suspend(owner.pid, other.pid).expect(0).json
    assert down["simulated"] is True and down["groups"][0]["state"] == "suspended"
    assert owner.nvidia_fds() == other.nvidia_fds() == []
    up = tool.resume(owner.pid, other.pid).expect(0).json
    assert up["groups"][0]["state"] == "running" and up["groups"][0]["not_running"] == 0
    for worker in (owner, other):
        worker.check()


def test_a_shared_gpu_is_told(start_worker: Callable[..., Worker], tool: Tool) -> None:
    """Whoever else uses a rank's GPU is named: at the suspend, and again where somebody came meanwhile."""
    def told(answer: Answer) -> list[list[int]]:
        return [[int(word.rstrip(",")) for word in text.partition("pids ")[2].partition(":")[0].split()]
                for text in answer.expect(0).json["warnings"] if "is shared by pids" in text]

    first, apart = start_worker(0), start_worker(1)
    for worker in (first, apart):
        worker.alloc(2 * MIB)
    assert told(tool.suspend(first.pid)) == []
    second = start_worker(0)
    second.alloc(2 * MIB)
    both = [sorted((first.pid, second.pid))]
    assert told(tool.resume(first.pid)) == both
    assert told(tool.suspend(first.pid)) == both
    assert told(tool.resume(first.pid)) == both
    assert told(tool.suspend(first.pid, second.pid)) == both
    assert told(tool.resume(first.pid, second.pid)) == []
    assert told(tool.suspend(first.pid, options=("--depth", "pages"))) == []
    assert told(tool.resume(first.pid)) == []
