"""Suspend and resume when something goes wrong, on real processes: told, rolled back, repeated."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpususpend import processes
from tests.programs.client import Worker
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool
from tests.sim import ordinary
from tests.sim.conftest import MIB, Background, Pair, Start, records, running, stopped_threads

pytestmark = pytest.mark.usefixtures("own_network")

Run = Callable[..., Background]


def endless_kernel(worker: Worker) -> int:
    """Start a kernel that ends when the word at the returned address becomes 1."""
    flag = int(worker.alloc_host(4096, 2))
    worker.host_write(flag, 0)
    worker.kernel("gs_wait_flag", [flag, 1], worker.stream_create())
    return flag


def cycle(pair: Pair, tool: Tool) -> None:
    """A whole cycle works."""
    tool.suspend(*pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_B23_rollback_is_told(pair: Pair, tool: Tool, machine: Setting) -> None:
    """The message says what failed, where, the driver's name for it, and that all run again (pitfall 51, FR-30)."""
    machine.inject("cuCheckpointProcessCheckpoint 2 304")
    answer = tool.suspend(*pair.pids).expect(4)
    error = answer.json["error"]
    assert (error["code"], error["cause"]) == ("rolled-back", "driver-error") and error["step"] == "checkpoint"
    assert error["pid"] in pair.pids and error["cuda"] == 304
    assert error["cuda_name"] == "CUDA_ERROR_OPERATING_SYSTEM"
    assert "all 2 processes run again" in error["message"] and error["facts"]["count_not_running"] == 0
    assert answer.json["groups"][0]["not_running"] == 0
    machine.inject("")
    running(tool)
    cycle(pair, tool)


def test_B23_rollback_that_fails_is_told(pair: Pair, tool: Tool, machine: Setting) -> None:
    """Both reasons, and how many do not run; the next resume brings all back (pitfall 51, FR-30)."""
    machine.inject("cuCheckpointProcessCheckpoint 2 304\ncuCheckpointProcessUnlock 1 999")
    answer = tool.suspend(*pair.pids).expect(8)
    data = answer.json
    assert data["next"] == "retry" and data["groups"][0]["not_running"] == 2
    assert "checkpoint" in data["error"]["facts"]["first"] or "checkpoint" in " ".join(data["warnings"])
    machine.inject("")
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("number", [1, 2])
def test_B13_lock_that_fails_at_once(pair: Pair, tool: Tool, machine: Setting, number: int) -> None:
    """Never reported as success."""
    machine.inject(f"cuCheckpointProcessLock {number} 600")
    answer = tool.suspend(*pair.pids).expect(4)
    assert answer.json["error"]["step"] == "lock" and answer.json["error"]["cuda"] == 600
    machine.inject("")
    running(tool)
    pair.check()


def test_quiesce_deadline_rolls_back(pair: Pair, tool: Tool) -> None:
    """A kernel that never ends: reason deadline, the rank is named."""
    flag = endless_kernel(pair.second)
    answer = tool.suspend(*pair.pids, options=("--timeout", "2")).expect(4)
    assert answer.json["reason"] == "deadline" and answer.json["error"]["pid"] == pair.second.pid
    pair.second.host_write(flag, 1)
    cycle(pair, tool)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_rolls_back(pair: Pair, tool: Tool, background: Run, number: signal.Signals) -> None:
    """Exit 130, and everything runs."""
    flag = endless_kernel(pair.first)
    command = background("suspend", *pair.pids)
    command.wait_for_step("quiesce")
    command.process.send_signal(number)
    answer = command.end().expect(130)
    assert answer.json["error"]["code"] == "interrupted" and number.name in answer.json["error"]["message"]
    pair.first.host_write(flag, 1)
    running(tool)
    pair.check()


def test_signal_does_not_interrupt_a_resume(pair: Pair, tool: Tool, machine: Setting, background: Run) -> None:
    """It is finished, since half-way is nowhere to be left."""
    tool.suspend(*pair.pids).expect(0)
    machine.inject("cuCheckpointProcessRestore 1 delay 1500")
    command = background("resume", *pair.pids)
    command.wait_for_step("restore")
    command.process.send_signal(signal.SIGTERM)
    command.end().expect(0)
    running(tool)
    pair.check()


def test_FR4_ranks_that_wait_for_each_other(start_worker: Start, tool: Tool) -> None:
    """Pitfalls 1 and 3: in lockstep, one always has a kernel that waits for the other; suspended ten times."""
    first, second = start_worker(0), start_worker(1)
    flags = []
    for worker in (first, second):
        flag = worker.alloc(MIB)
        worker.memset_d32(flag, 0, MIB // 4)
        flags.append(flag)
    theirs = [first.ipc_open(second.ipc_get(flags[1])), second.ipc_open(first.ipc_get(flags[0]))]
    loops = [
        worker.loop_start("lockstep", mine=flag, theirs=other)
        for worker, flag, other in zip((first, second), flags, theirs, strict=True)
    ]
    for _ in range(10):
        tool.suspend(first.pid, second.pid).expect(0)
        tool.resume(first.pid, second.pid).expect(0)
    time.sleep(0.2)
    for worker, loop in zip((first, second), loops, strict=True):
        state = worker.loop_state(loop)
        assert state["errors"] == [] and state["alive"] and state["count"] > 10, state


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_FR2_rank_killed_during_suspend(pair: Pair, tool: Tool, machine: Setting, background: Run, step: str) -> None:
    """Exit 5; the dead one is named, no rank stays locked."""
    machine.inject(f"cuCheckpointProcess{step.title()} 1 delay 2000")
    command = background("suspend", *pair.pids)
    command.wait_for_step(step)
    pair.second.kill()
    answer = command.end()
    assert answer.exit_code == 5, answer
    assert pair.second.pid in answer.json["error"]["facts"]["lost"]
    machine.inject("")
    assert stopped_threads(pair.first.pid) == []


def test_FR2_survivor_runs_again(start_worker: Start, tool: Tool, machine: Setting, background: Run) -> None:
    """Two ranks that share nothing: the other one has all its content."""
    first, second = start_worker(0), start_worker(1)
    for worker in (first, second):
        block = worker.alloc(MIB)
        worker.fill(block, MIB, 9)
    machine.inject("cuCheckpointProcessCheckpoint 1 delay 1500")
    command = background("suspend", first.pid, second.pid)
    command.wait_for_step("checkpoint")
    second.kill()
    answer = command.end().expect(5)
    assert answer.json["error"]["facts"]["lost"] == [second.pid] and answer.json["next"] == "cold-start"
    first.check()
    running(tool)


@pytest.mark.parametrize("call", ["Lock", "Checkpoint"])
def test_driver_call_past_its_deadline(pair: Pair, tool: Tool, machine: Setting, call: str) -> None:
    """Exit 7 with pid and call, left there, journalled; recover waits for it and brings everything back."""
    machine.inject(f"cuCheckpointProcess{call} 1 delay 16000")
    options = ("--timeout", "3", "--checkpoint-timeout", "2")
    answer = tool.suspend(*pair.pids, options=options).expect(7)
    error = answer.json["error"]
    assert error["facts"]["call"] == call.lower() and error["pid"] in pair.pids
    driver_pid = error["facts"]["driver_pid"]
    assert processes.read_process(driver_pid).comm == "gpushare-driver"
    assert records(tool)[0]["calls"][0]["pid"] == error["pid"]
    status = tool.run("status").expect(0).json["groups"][0]
    assert "have not returned" in status["note"]
    assert tool.suspend(*pair.pids).expect(3).json["reason"] == "needs-recover"
    machine.inject("")
    tool.run("recover", "--driver", "sim").expect(0)
    running(tool)
    pair.check()


def test_FR18_cuda_started_during_the_suspend(
    pair: Pair, start_worker: Start, tool: Tool, machine: Setting, background: Run
) -> None:
    """A member without CUDA begins to use it: found by the second scan, everything rolls back, the next one works."""
    late = start_worker(None)
    machine.inject("cuCheckpointProcessCheckpoint 1 delay 6000")
    command = background("suspend", *pair.pids, late.pid)
    command.wait_for_step("checkpoint")
    late.start(0)
    block = late.alloc(MIB)
    late.fill(block, MIB, 1)
    answer = command.end().expect(4)
    assert answer.json["reason"] == "new-cuda-process" and answer.json["error"]["pid"] == late.pid
    machine.inject("")
    tool.suspend(*pair.pids, late.pid).expect(0)
    tool.resume(*pair.pids).expect(0)
    late.check()
    pair.check()


def test_pitfall53_descriptor_that_is_left(pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """FR-8: a node of the driver that nobody neutralises: pid and path are named, everything rolls back."""
    node = tmp_path / "nvidia7"
    node.touch()
    fd = os.open(node, os.O_RDWR)
    pair.second.send("take", fd=fd)
    number = pair.second.receive("take")[0].value
    os.close(fd)
    answer = tool.suspend(*pair.pids).expect(4)
    message = answer.json["error"]["message"]
    assert answer.json["reason"] == "not-quiet" and str(node) in message and str(pair.second.pid) in message
    pair.check()
    pair.second.close_fd(number)
    cycle(pair, tool)


def test_pitfall16_no_room_on_the_gpu(pair: Pair, start_worker: Start, tool: Tool, machine: Setting) -> None:
    """Refused before the driver is asked; nothing changed, and it works once there is room (FR-1)."""
    tool.suspend(*pair.pids).expect(0)
    greedy = start_worker(0)
    free, _ = greedy.mem_info()
    block = greedy.alloc(free - 4 * MIB)
    before = records(tool)
    answer = tool.resume(*pair.pids).expect(3)
    assert answer.json["reason"] == "no-gpu-room" and answer.json["next"] == "retry"
    assert str(greedy.pid) in answer.json["error"]["message"]
    assert records(tool) == before and "python" in stopped_threads(pair.first.pid)
    greedy.free(block)
    tool.resume(*pair.pids).expect(0)
    pair.check()


def test_B12_no_process_can_be_started(machine: Setting, tool: Tool, tmp_path: Path) -> None:
    """As an ordinary user at the limit of processes: refused, nothing is signalled, nothing changes."""
    python = ordinary.python()
    code = "import sys; from gpususpend.cli import main; main(sys.argv[1:])"
    with_limit = ["setpriv", f"--reuid={ordinary.UID}", f"--regid={ordinary.UID}", "--clear-groups"]
    victim = subprocess.Popen([*with_limit, python, "-c", "import time; time.sleep(600)"])
    node = tmp_path / "x"
    node.touch()
    environment = machine.environ() | {"PYTHONPATH": ordinary.PACKAGES, "NVSNAP_GPU_SUSPEND_STATE_DIR": ""}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))

    try:
        done = subprocess.run(
            [*with_limit, python, "-c", code, "gpus", "--driver", "sim", "--json"], cwd="/", env=environment,
            capture_output=True, text=True, preexec_fn=limit, timeout=60,
        )
        assert done.returncode == 1 and "helper-failed" in done.stdout, done
        assert victim.poll() is None and processes.read_process(victim.pid)
    finally:
        victim.kill()
        victim.wait()


def test_allow_unshimmed(pair: Pair, start_worker: Start, tool: Tool) -> None:
    """Alone, it is carried by the driver; beside shimmed ones that have exported memory it is refused."""
    for worker in pair.both:
        worker.kill()
    bare = start_worker(0, shim=False)
    block = bare.alloc(MIB)
    bare.fill(block, MIB, 4)
    answer = tool.suspend(bare.pid, options=("--allow-unshimmed",)).expect(0)
    assert answer.json["groups"][0]["ranks"][0]["kind"] == "unshimmed"
    assert bare.nvidia_fds() == [] and "python" in stopped_threads(bare.pid)
    tool.resume(bare.pid).expect(0)
    bare.check()


def test_allow_unshimmed_beside_exports(pair: Pair, start_worker: Start, tool: Tool) -> None:
    """Whoever has handed memory out may have handed it to this one."""
    fd = pair.first.mem_export(pair.first.block(2 * MIB)["handle"])
    bare = start_worker(0, shim=False)
    answer = tool.suspend(*pair.pids, bare.pid, options=("--allow-unshimmed",)).expect(3)
    assert answer.json["reason"] == "may-share" and answer.json["error"]["pid"] == bare.pid
    pair.first.close_fd(fd)
    pair.check()


def test_progress_goes_to_stderr_and_can_be_silenced(pair: Pair, tool: Tool, machine: Setting) -> None:
    """Stdout holds the result alone."""
    machine.inject("cuCheckpointProcessCheckpoint 1 304")
    loud = tool.suspend(*pair.pids, json_out=False).expect(4)
    assert loud.stdout.startswith("simulated driver") and "rolling back" in loud.stderr
    machine.inject("")
    quiet = tool.suspend(*pair.pids, options=("--quiet",), json_out=False).expect(0)
    assert "rolling back" not in quiet.stderr and "suspended" in quiet.stdout
    tool.resume(*pair.pids).expect(0)


def test_killed_in_the_middle_of_a_write(tool: Tool, tmp_path: Path) -> None:
    """What a killed writer leaves beside the records harms nobody."""
    (Path(tool.state_dir) / "group-x.json.0123456789abcdef.tmp").write_text("{")
    (Path(tool.state_dir) / "group-bad.json").write_text("{")
    tool.run("status").expect(0)
    assert sys.executable and ROOT


def test_rank_without_descriptors(start_worker: Callable[..., Worker], tool: Tool) -> None:
    """A rank that has used up its descriptors, its exports among them, is suspended or runs on, and loses nothing."""
    worker = start_worker(0)
    block = worker.block(2 * MIB)
    worker.fill(block["address"], 2 * MIB, 1)
    kept = [worker.mem_export(block["handle"]) for _ in range(3)]
    opened = worker.use_up_fds()
    answer = tool.suspend(worker.pid).expect(0, 4)
    if answer.exit_code == 0:
        tool.resume(worker.pid).expect(0)
    for fd in opened:
        worker.close_fd(fd)
    worker.check()
    for fd in kept:
        worker.mem_release(worker.mem_import(fd))
    tool.suspend(worker.pid).expect(0)
    tool.resume(worker.pid).expect(0)
    worker.check()
