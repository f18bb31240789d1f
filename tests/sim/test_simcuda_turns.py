"""Two processes on one simulated GPU after a restore: who keeps whom away, as measured on a GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.programs.client import Worker

pytestmark = pytest.mark.machine(driver="sim", extra={"SIMCUDA_SWITCH_TIMEOUT_MS": "700"})


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, for 60 s."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def restored(start_worker: Callable[..., Worker]) -> tuple[Worker, Worker]:
    """Return a process that went through a checkpoint, and one that did not, on the same GPU."""
    first, second = start_worker(0, shim=False), start_worker(0, shim=False)
    for step in ("lock", "checkpoint", "restore", "unlock"):
        second.do(f"cp_{step}", first.pid)
    return first, second


def waiting_kernel(worker: Worker) -> tuple[int, int]:
    """Launch a kernel that waits for a word of host memory; return that and the stream."""
    flag, stream = worker.alloc_host(4096, 2), worker.stream_create()
    worker.host_write(flag, 0)
    worker.kernel("gs_wait_flag", [flag, 1], stream)
    return flag, stream


def test_thrown_out_when_others_want_the_gpu(start_worker: Callable[..., Worker]) -> None:
    """And not before: the kernel may wait as long as nobody else has work."""
    first, second = restored(start_worker)
    _, stream = waiting_kernel(first)
    time.sleep(1.5)
    assert first.code("stream_query", stream) == 600
    block = second.alloc(4096)
    second.memset_d8(block, 1, 4096)
    second.ctx_sync()
    assert first.code("stream_sync", stream) == 719
    second.memset_d8(block, 1, 4096)
    second.ctx_sync()


def test_own_copies_wait_while_others_want_the_gpu(start_worker: Callable[..., Worker]) -> None:
    """So a kernel that waits for a copy of its own process is lost, too; beside nobody it is not."""
    first, second = restored(start_worker)
    first_loop = first.loop_start("fed_kernels")
    until(lambda: first.loop_state(first_loop)["count"] > 20, "kernels are fed")
    second_loop = second.loop_start("copies")
    until(lambda: first.loop_state(first_loop)["errors"], "the fed kernel is lost")
    assert "719" in first.loop_state(first_loop)["errors"][0]
    before = second.loop_state(second_loop)["count"]
    until(lambda: second.loop_state(second_loop)["count"] > before + 5, "the other one goes on")


def test_a_killed_process_keeps_nobody_away(start_worker: Callable[..., Worker]) -> None:
    first, second = restored(start_worker)
    waiting_kernel(first)
    os.kill(first.pid, signal.SIGKILL)
    block = second.alloc(4096)
    second.memset_d8(block, 1, 4096)
    second.ctx_sync()


def test_new_context_shares(start_worker: Callable[..., Worker]) -> None:
    first, second = restored(start_worker)
    first.ctx_create(0)
    flag, stream = waiting_kernel(first)
    block = second.alloc(4096)
    second.memset_d8(block, 1, 4096)
    second.ctx_sync()
    assert first.code("stream_query", stream) == 600
    first.host_write(flag, 1)
    first.stream_sync(stream)
