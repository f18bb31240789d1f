"""Graphs that are recorded while a suspend comes: waiting for the device would break them, so it waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import more
from tests.sim.shim_control import ask

MIB = 1 << 20
WORDS = 1024
MODES = {"global": 0, "thread local": 1, "relaxed": 2}
pytestmark = pytest.mark.machine(driver="sim")


class Recording:
    """A graph that sets `source` to 3 and adds it to `target`, recorded step by step."""

    def __init__(self, worker: Worker, mode: int) -> None:
        self.worker = worker
        self.source, self.target = worker.alloc(4 * MIB), worker.alloc(4 * MIB)
        worker.kernel("gs_fill", [self.target, WORDS, 1])  # loads the module, which a recording forbids
        worker.ctx_sync()
        self.stream = worker.stream_create()
        worker.capture_begin(self.stream, mode)

    def step(self) -> None:
        """Record the first half."""
        self.worker.memset_d32(self.source, 3, WORDS, self.stream)

    def end(self) -> None:
        """Record the rest; the graph must be what was recorded, no more and no less."""
        self.worker.kernel("gs_add", [self.target, self.source, WORDS], self.stream)
        executable = self.worker.graph_instantiate(self.worker.capture_end(self.stream))
        assert set(self.worker.read(self.target, WORDS)) == {1}
        self.worker.graph_launch(executable, self.stream)
        self.worker.stream_sync(self.stream)
        assert set(self.worker.read(self.target, WORDS)) == {4}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_suspend_waits_for_the_end(start_worker: Callable[..., Worker], tool: Tool, mode: int) -> None:
    worker = start_worker(0)
    recording = Recording(worker, mode)
    answers: list[Answer] = []
    suspend = threading.Thread(target=lambda: answers.append(tool.suspend(worker.pid)))
    suspend.start()
    until = time.monotonic() + 60
    while ask(worker.pid, "status")["launch"] == "open":
        assert time.monotonic() < until, "the gate stays open"
        time.sleep(0.01)
    time.sleep(0.3)
    recording.step()
    assert suspend.is_alive()
    worker.kernel("gs_add", [recording.target, recording.source, WORDS], recording.stream)
    graph = worker.capture_end(recording.stream)
    suspend.join()
    answers[0].expect(0)
    tool.resume(worker.pid).expect(0)
    worker.graph_launch(worker.graph_instantiate(graph), recording.stream)
    worker.stream_sync(recording.stream)
    assert set(worker.read(recording.target, WORDS)) == {4}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_endless_recording_rolls_back(start_worker: Callable[..., Worker], tool: Tool, mode: int) -> None:
    """Exit 4 that names the reason, and the recording is as good as before."""
    worker = start_worker(0)
    recording = Recording(worker, mode)
    recording.step()
    answer = tool.suspend(worker.pid, options=("--timeout", "2")).expect(4)
    assert answer.json["reason"] == "deadline" and answer.json["error"]["pid"] == worker.pid
    assert "graphs being recorded: 1" in answer.stdout
    recording.end()
    tool.suspend(worker.pid).expect(0)
    tool.resume(worker.pid).expect(0)


def captures(worker: Worker) -> int:
    """Return how many recordings the shim knows of."""
    return int(ask(worker.pid, "drain")["captures"])


def test_every_end_is_noticed(start_worker: Callable[..., Worker]) -> None:
    """A recording ends well, broken, with its stream, with its context; a beginning that is refused is none."""
    worker = start_worker(0)
    stream = worker.stream_create()
    assert worker.code("capture_begin", 0) == 900 and captures(worker) == 0
    worker.capture_begin(stream)
    assert worker.code("capture_begin", stream) == 401 and captures(worker) == 1
    worker.capture_end(stream)
    assert captures(worker) == 0
    worker.capture_begin(stream)
    assert worker.code("ctx_sync") == 900 and captures(worker) == 1
    assert worker.code("capture_end", stream) == 901 and captures(worker) == 0
    worker.capture_begin(stream)
    worker.stream_destroy(stream)
    assert captures(worker) == 0
    context = worker.ctx_create(0)
    worker.capture_begin(worker.stream_create())
    assert captures(worker) == 1
    worker.ctx_destroy(context)
    assert captures(worker) == 0


def test_threads_record_on_their_own_default_streams(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(0, per_thread=True)
    worker.capture_begin(0, 1)
    waits, ends = os.pipe()
    job = worker.job("record_until", 0, 1, worker.take_fd(waits))
    until = time.monotonic() + 60
    while captures(worker) != 2:
        assert time.monotonic() < until
    os.write(ends, b".")
    assert worker.job_answer(job, 60) == [0, None] and captures(worker) == 1
    os.close(waits)
    os.close(ends)
    worker.capture_end(0)
    assert captures(worker) == 0


def test_contexts_have_a_default_stream_of_the_thread_each(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(0, per_thread=True)
    home, other = worker.ctx_current(), worker.ctx_create(0)
    for context in (home, other):
        worker.use(context)
        worker.capture_begin(0, 1)
    assert captures(worker) == 2
    worker.capture_end(0)
    assert captures(worker) == 1
    worker.use(home)
    worker.capture_end(0)
    assert captures(worker) == 0


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_recording_of_a_thread_that_has_ended(start_worker: Callable[..., Worker], tool: Tool, mode: int) -> None:
    """Nobody can end it any more, so nobody waits for it; what waits for the whole context still works."""
    worker = start_worker(0, per_thread=True)
    block = worker.alloc(4 * MIB)
    worker.fill(block, 4 * MIB, 3)
    assert worker.job_answer(worker.job("capture_begin", 0, mode), 60) == [0, None]
    assert worker.code("ctx_sync") == 900, "the driver does not know that the thread has ended"
    assert captures(worker) == 0
    for _ in range(2):
        tool.suspend(worker.pid).expect(0)
        tool.resume(worker.pid).expect(0)
    if mode != MODES["global"]:  # which forbids the copies of other threads
        worker.check()
        worker.free(block)


def test_a_stream_that_stays_is_still_recorded(start_worker: Callable[..., Worker], machine: Setting) -> None:
    worker = start_worker(0)
    stream = worker.stream_create()
    worker.capture_begin(stream)
    machine.inject("cuStreamDestroy_v2 1 999", worker.pid)
    assert worker.code("stream_destroy", stream) == 999
    machine.inject("", worker.pid)
    assert captures(worker) == 1
    worker.capture_end(stream)
    assert captures(worker) == 0


def test_free_beside_a_relaxed_recording_waits_and_breaks_nothing(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(0)
    flag = worker.alloc_host(4096, 2)
    worker.host_write(flag, 0)
    block = worker.alloc(4 * MIB)
    recording = Recording(worker, MODES["relaxed"])
    recording.step()
    worker.kernel("gs_wait_flag", [flag, 1], worker.stream_create())
    job = worker.job("free", block)
    assert worker.job_answer(job, 0.4) is None
    worker.host_write(flag, 1)
    assert worker.job_answer(job, 60) == [0, None]
    recording.end()


def test_a_free_breaks_no_capture_that_begins_meanwhile(start_worker: Callable[..., Worker]) -> None:
    """As without the shim: a free waits for the GPU, and another thread records graphs all the time."""
    worker = start_worker()
    loops = [worker.loop_start("captures")] + [worker.loop_start("allocations", sizes=[512, MIB]) for _ in range(6)]
    for number in loops:
        more(worker, number, 10)
    time.sleep(2)
    for number in loops:
        assert worker.loop_stop(number)["errors"] == []
