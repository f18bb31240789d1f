"""Suspend and resume when something goes wrong, on real processes: told, rolled back, repeated."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpususpend import errors, processes
from gpususpend.deadline import Deadline
from tests.programs.client import Worker
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool
from tests.sim import ordinary
from tests.sim.conftest import MIB, Background, Pair, Start, endless_kernel, more, records, running, stopped_threads
from tests.sim.schedules import rank_of
from tests.sim.shim_control import ask

pytestmark = pytest.mark.usefixtures("own_network")

Run = Callable[..., Background]


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
    """A kernel that never ends: reason deadline, the rank is named, and what all ranks were in (FR-21)."""
    flag = endless_kernel(pair.second)
    answer = tool.suspend(*pair.pids, options=("--timeout", "4")).expect(4)
    assert answer.json["reason"] == "deadline" and answer.json["error"]["pid"] == pair.second.pid
    threads = answer.json["error"]["facts"]["threads"]
    assert set(threads) == {str(pid) for pid in pair.pids} and all(threads.values())
    assert any("libcuda.so.1" in words for words in threads[str(pair.second.pid)]), threads
    assert all(f"pid {pid}: " in answer.stderr for pid in pair.pids)
    pair.second.host_write(flag, 1)
    cycle(pair, tool)


def test_a_drain_that_goes_on_is_told(start_worker: Start) -> None:
    """The kernel that a suspend has waited for in vain holds up the next command's questions too, until it ends."""
    worker = start_worker(0)
    flag = endless_kernel(worker)
    ask(worker.pid, "close-launch")
    until = time.monotonic() + 60
    while ask(worker.pid, "status")["busy"] != "drain":
        assert time.monotonic() < until
        time.sleep(0.01)
    ask(worker.pid, "open")
    rank = rank_of(worker)
    with pytest.raises(errors.DeadlinePassed, match="work that runs on the GPU"):
        rank.listing("imports", Deadline(1))
    worker.host_write(flag, 1)
    assert rank.listing("imports", Deadline(60)) == []


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_a_poisoned_context_rolls_back(pair: Pair, tool: Tool, depth: str) -> None:
    """A kernel has faulted: process and error are named, the gates open, and the other rank has lost nothing."""
    pair.first.kernel("gs_fill", [0x1000, 1, 1])
    assert pair.first.code("ctx_sync") == 700
    error = tool.suspend(*pair.pids, options=("--depth", depth)).expect(4).json["error"]
    assert (error["step"], error["pid"], error["cuda"]) == ("drain", pair.first.pid, 700)
    assert "spoilt it for good" in error["message"] and error["facts"]["count_not_running"] == 0
    running(tool)
    pair.second.check()
    assert pair.first.code("ctx_sync") == 700
    pair.first.kill()
    tool.suspend(pair.second.pid, options=("--depth", depth)).expect(0)
    tool.resume(pair.second.pid).expect(0)
    pair.second.check()


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
    machine.inject("cuCheckpointProcessRestore 1 hold")
    command = background("resume", *pair.pids)
    command.wait_for_step("restore")
    machine.wait_until_held()
    command.process.send_signal(signal.SIGTERM)
    machine.inject("")
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
        worker.ctx_sync()
        flags.append(flag)
    theirs = [first.ipc_open(second.ipc_get(flags[1])), second.ipc_open(first.ipc_get(flags[0]))]
    loops = [
        worker.loop_start("lockstep", mine=flag, theirs=other)
        for worker, flag, other in zip((first, second), flags, theirs, strict=True)
    ]
    for _ in range(10):
        tool.suspend(first.pid, second.pid).expect(0)
        tool.resume(first.pid, second.pid).expect(0)
    for worker, loop in zip((first, second), loops, strict=True):
        more(worker, loop)


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_FR2_rank_killed_during_suspend(pair: Pair, tool: Tool, machine: Setting, background: Run, step: str) -> None:
    """Exit 5; the dead one is named, no rank stays locked."""
    machine.inject(f"cuCheckpointProcess{step.title()} 1 hold")
    command = background("suspend", *pair.pids)
    command.wait_for_step(step)
    machine.wait_until_held()
    pair.second.kill()
    machine.inject("")
    answer = command.end()
    assert answer.exit_code == 5, answer
    assert pair.second.pid in answer.json["error"]["facts"]["lost"]
    assert stopped_threads(pair.first.pid) == []


def test_FR2_survivor_runs_again(start_worker: Start, tool: Tool, machine: Setting, background: Run) -> None:
    """Two ranks that share nothing: the other one has all its content."""
    first, second = start_worker(0), start_worker(1)
    for worker in (first, second):
        block = worker.alloc(MIB)
        worker.fill(block, MIB, 9)
    machine.inject("cuCheckpointProcessCheckpoint 1 hold")
    command = background("suspend", first.pid, second.pid)
    command.wait_for_step("checkpoint")
    machine.wait_until_held()
    second.kill()
    machine.inject("")
    answer = command.end().expect(5)
    assert answer.json["error"]["facts"]["lost"] == [second.pid] and answer.json["next"] == "cold-start"
    first.check()
    running(tool)


@pytest.mark.parametrize("call", ["Lock", "Checkpoint"])
def test_driver_call_past_its_deadline(
    pair: Pair, tool: Tool, machine: Setting, background: Run, call: str
) -> None:
    """Exit 7 with pid and call, left there, journalled; recover waits for it and brings everything back."""
    machine.inject(f"cuCheckpointProcess{call} 1 hold")
    options = ("--timeout", "4", "--checkpoint-timeout", "2")
    answer = tool.suspend(*pair.pids, options=options).expect(7)
    error = answer.json["error"]
    assert error["facts"]["call"] == call.lower() and error["pid"] in pair.pids
    driver_pid = error["facts"]["driver_pid"]
    assert processes.read_process(driver_pid).comm == "gpushare-driver"
    assert records(tool)[0]["calls"][0]["pid"] == error["pid"]
    status = tool.run("status").expect(0).json["groups"][0]
    assert error["message"] in status["note"]
    assert tool.suspend(*pair.pids).expect(3).json["reason"] == "needs-recover"
    # Waited for as long as a call of its own, and not longer than the user likes.
    tool.run("recover", "--driver", "sim", *options).expect(7)
    command = background("recover")
    command.wait_for_line("driver call(s) that an earlier command left")
    command.process.send_signal(signal.SIGTERM)
    command.end().expect(130)
    command = background("recover")
    command.wait_for_line("driver call(s) that an earlier command left")
    machine.inject("")
    command.end().expect(0)
    running(tool)
    pair.check()


def test_FR18_cuda_started_during_the_suspend(
    pair: Pair, start_worker: Start, tool: Tool, machine: Setting, background: Run
) -> None:
    """A member without CUDA begins to use it: found by the second scan, everything rolls back, the next one works."""
    late = start_worker(None)
    machine.inject("cuCheckpointProcessCheckpoint 1 hold")
    command = background("suspend", *pair.pids, late.pid)
    command.wait_for_step("checkpoint")
    machine.wait_until_held()
    late.start(0)
    block = late.alloc(MIB)
    late.fill(block, MIB, 1)
    machine.inject("")
    answer = command.end().expect(4)
    assert answer.json["reason"] == "new-cuda-process" and answer.json["error"]["pid"] == late.pid
    tool.suspend(*pair.pids, late.pid).expect(0)
    tool.resume(*pair.pids).expect(0)
    late.check()
    pair.check()


@pytest.mark.parametrize("depth", ["process", "pages"])
@pytest.mark.usefixtures("own_network")
def test_FR18_cuda_started_while_all_are_suspended(
    pair: Pair, start_worker: Start, tool: Tool, machine: Setting, background: Run, depth: str
) -> None:
    """--all is not all if a stranger begins to use CUDA meanwhile; one that was suspended before is no newcomer."""
    down, late = start_worker(0), start_worker(None)
    tool.suspend(down.pid).expect(0)
    call = "cuCheckpointProcessCheckpoint" if depth == "process" else "cuMemcpyDtoHAsync_v2"
    where = None if depth == "process" else pair.first.pid
    machine.inject(f"{call} 1 hold", where)
    command = background("suspend", "--all", "--depth", depth)
    command.wait_for_step("checkpoint" if depth == "process" else "release")
    machine.wait_until_held()
    late.start(0)
    machine.inject("", where)
    answer = command.end().expect(4)
    assert answer.json["reason"] == "new-cuda-process" and answer.json["error"]["pid"] == late.pid
    pair.check()
    tool.run("suspend", "--driver", "sim", "--all", "--depth", depth).expect(0)
    tool.run("resume", "--driver", "sim", "--all").expect(0)
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


def test_a_restore_that_failed_is_never_gone_on_from(pair: Pair, tool: Tool) -> None:
    """The driver ends a process whose restore fails (here for want of addresses): each command says so at once."""
    tool.suspend(*pair.pids).expect(0)
    for pid in pair.pids:
        size = int(re.findall(r"^VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)[0]) << 10
        resource.prlimit(pid, resource.RLIMIT_AS, (size + MIB, resource.RLIM_INFINITY))
    first = tool.resume(*pair.pids).expect(5)
    assert first.json["error"]["message"].startswith("restore failed on pid"), first
    for pid in pair.pids:
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for verb in ("resume", "recover"):
        again = tool.run(verb, "--driver", "sim", *pair.pids, deadline_s=60).expect(5)
        assert again.json["error"]["facts"]["lost"] == list(pair.pids), again
        assert "the driver lost it" in again.json["error"]["message"], again


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_dead_ranks_need_no_room(start_worker: Start, tool: Tool, depth: str) -> None:
    """A GPU on which others have taken the dead one's place since has room for the one that lives."""
    large, small, greedy = (start_worker(0) for _ in range(3))
    for worker, size in ((large, 512 * MIB), (small, 4 * MIB)):
        worker.fill(worker.alloc(size), size, 1)
    tool.suspend(large.pid, small.pid, options=("--depth", depth)).expect(0)
    large.kill()
    free, _ = greedy.mem_info()
    block = greedy.alloc(free - 2 * MIB)
    answer = tool.resume(small.pid).expect(3)
    assert answer.json["reason"] == "no-gpu-room", "what the living one needs is asked for all the same"
    greedy.free(block)
    greedy.alloc(free - 64 * MIB)
    answer = tool.resume(small.pid).expect(5)
    assert answer.json["error"]["facts"]["lost"] == [large.pid]
    small.check()


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


def test_limit_that_was_too_short_does_not_bind_the_rollback(pair: Pair, tool: Tool, machine: Setting) -> None:
    """Copies take as long on the way back: what the memory needs to leave, it needs to return."""
    slow = "cuMemcpyDtoHAsync_v2 1 delay 3000\ncuMemcpyHtoDAsync_v2 1 delay 3000"
    for pid in pair.pids:
        machine.inject(slow, pid)
    answer = tool.suspend(*pair.pids, options=("--copy-timeout", "1")).expect(4)
    assert answer.json["reason"] == "deadline", answer
    running(tool)
    pair.check()
