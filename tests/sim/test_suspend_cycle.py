"""The thinnest path, whole: one command suspends two real processes that share memory, another resumes them."""

from __future__ import annotations

from collections.abc import Callable

from tests.programs.client import Worker
from tests.programs.tool import Tool

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
