"""A rank that somebody keeps stopped: noticed in seconds, named, and never the reason for a long wait (FR-21).

The deadlines of the commands in here are far below the time limits of the steps in which a rank is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpususpend import errors, processes
from gpususpend.control import Silence
from gpususpend.deadline import Deadline
from gpususpend.holder import Holder, HoldTarget
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import Background, Pair, drop_cgroup, endless_kernel, records, running
from tests.unit.fake_shim import sleeper

pytestmark = pytest.mark.usefixtures("own_network")

SOON_S = 50
Run = Callable[..., Background]


def named(answer: Answer, pid: int, by: str) -> Answer:
    """Check that an answer names the stopped process, what stops it and what to do."""
    error = answer.json["error"]
    assert answer.json["reason"] == "rank-stopped" and answer.json["next"] == "retry", answer
    assert f"pid {pid} does not answer, it is stopped {by}" in error["message"], answer
    assert f"kill -CONT {pid}" in error["message"]
    return answer


def cycle(pair: Pair, tool: Tool) -> None:
    """A whole cycle works."""
    running(tool)
    tool.suspend(*pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_FR21_stopped_by_a_signal_is_refused(pair: Pair, tool: Tool) -> None:
    """Before anything has changed."""
    pair.second.halt()
    named(tool.suspend(*pair.pids, deadline_s=SOON_S).expect(3), pair.second.pid, "by a signal")
    pair.second.go_on()
    cycle(pair, tool)


def test_FR21_stopped_by_a_tracer_is_refused(pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """A debugger that stops every thread, the shim's among them; it is named."""
    tmp_path.chmod(0o700)
    with Holder.start(tmp_path, keep_names=()) as debugger:
        debugger.stop([HoldTarget(pair.first.pid)], Deadline(60))
        by = f"by its tracer, pid {debugger.pid}"
        named(tool.suspend(*pair.pids, deadline_s=SOON_S).expect(3), pair.first.pid, by)
    cycle(pair, tool)


@contextlib.contextmanager
def frozen(pid: int, version: int) -> Iterator[str]:
    """Freeze a process by a cgroup of its own; yield the name."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    kind = {1: lambda words: words[2] == "cgroup" and "freezer" in words[3], 2: lambda words: words[2] == "cgroup2"}
    tops = [Path(words[1]) for words in mounts if kind[version](words)]
    folder = (tops or [Path("/none")])[0] / f"gpushare-test-{pid}"
    file, on, off = ("freezer.state", "FROZEN", "THAWED") if version == 1 else ("cgroup.freeze", "1", "0")
    try:
        folder.mkdir()
        before = folder.parent / "cgroup.procs"
        (folder / "cgroup.procs").write_text(str(pid))
        (folder / file).write_text(on)
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup of version {version} can be frozen here: {error.strerror}")
    try:
        shown, word = (folder / file, on) if version == 1 else (folder / "cgroup.events", "frozen 1")
        until = time.monotonic() + 60
        while word not in shown.read_text():  # its threads come to it one after the other
            assert time.monotonic() < until, "the cgroup does not freeze"
            time.sleep(0.005)
        yield folder.name
    finally:
        (folder / file).write_text(off)
        before.write_text(str(pid))
        drop_cgroup(folder)


@pytest.mark.parametrize("version", [1, 2])
def test_FR21_stopped_by_a_freezer_is_refused(pair: Pair, tool: Tool, version: int) -> None:
    """A paused container: the group is named, and a resume after it is thawed works."""
    with frozen(pair.second.pid, version) as name:
        answer = tool.suspend(*pair.pids, deadline_s=SOON_S).expect(3)
        named(answer, pair.second.pid, "by the freezer of cgroup /")
        assert name in answer.json["error"]["message"]
    tool.suspend(*pair.pids).expect(0)
    with frozen(pair.second.pid, version):
        named(tool.resume(*pair.pids, deadline_s=SOON_S).expect(8), pair.second.pid, "by the freezer of cgroup /")
    tool.resume(*pair.pids).expect(0)
    cycle(pair, tool)


# What holds a step up: the shim steps on the one rank that is stopped in it, driver calls on either.
STEPS = {
    "prepare": "cuMemHostRegister_v2 1 hold",
    "release": "cuMemcpyDtoHAsync_v2 1 hold",
    "lock": "cuCheckpointProcessLock 1 hold",
}


@pytest.mark.parametrize("step", STEPS)
def test_FR21_stopped_in_the_middle(pair: Pair, tool: Tool, machine: Setting, background: Run, step: str) -> None:
    """The step fails soon; the way back waits for the process no longer than --timeout, and can be repeated."""
    slow = None if "Process" in STEPS[step] else pair.second.pid
    machine.inject(STEPS[step], slow)
    command = background("suspend", *pair.pids, "--timeout", 5)
    command.wait_for_step(step)
    machine.wait_until_held()
    pair.second.halt()
    machine.inject("", slow)
    answer = command.end(SOON_S).expect(4 if step == "prepare" else 8)
    named(answer, pair.second.pid, "by a signal")
    pair.second.go_on()
    if step != "prepare":
        tool.resume(*pair.pids).expect(0)
    cycle(pair, tool)


def test_FR21_stopped_in_the_checkpoint(pair: Pair, tool: Tool, machine: Setting, background: Run) -> None:
    """The driver waits for it, the command no longer than --timeout: it says why, and recover goes on from there."""
    machine.inject("; ".join(f"cuCheckpointProcessCheckpoint {call} hold" for call in (1, 2)))
    command = background("suspend", *pair.pids, "--timeout", 5)
    command.wait_for_step("checkpoint")
    machine.wait_until_held()
    pair.second.halt()
    machine.inject("")
    answer = command.end(SOON_S).expect(7)
    stop = f"pid {pair.second.pid} does not answer, it is stopped by a signal"
    assert answer.json["reason"] == "call-pending" and stop in answer.json["error"]["message"], answer
    named(tool.run("recover", pair.first.pid, deadline_s=SOON_S).expect(8), pair.second.pid, "by a signal")
    pair.second.go_on()
    tool.run("recover", pair.first.pid).expect(0)
    cycle(pair, tool)


def test_FR21_stopped_while_work_runs(pair: Pair, tool: Tool, background: Run) -> None:
    """One rank computes and the other is stopped: that is what is named."""
    flag = endless_kernel(pair.first)
    command = background("suspend", *pair.pids, "--timeout", 6)
    command.wait_for_step("quiesce")
    pair.second.halt()
    named(command.end(SOON_S).expect(8), pair.second.pid, "by a signal")
    pair.second.go_on()
    pair.first.host_write(flag, 1)
    tool.resume(*pair.pids).expect(0)
    cycle(pair, tool)


def test_FR21_stopped_while_suspended(pair: Pair, tool: Tool) -> None:
    """A resume says so at once, and can be repeated."""
    tool.suspend(*pair.pids).expect(0)
    pair.first.halt()
    named(tool.resume(*pair.pids, deadline_s=SOON_S).expect(8), pair.first.pid, "by a signal")
    pair.first.go_on()
    tool.resume(*pair.pids).expect(0)
    cycle(pair, tool)


def test_FR21_stopped_after_a_dump_was_restored(pair: Pair, tool: Tool) -> None:
    """As criu restore --leave-stopped leaves it: a process that cannot say who it is has not been lost."""
    tool.suspend(*pair.pids).expect(0)
    tool.run("stop", "--driver", "sim", *pair.pids).expect(0)
    [path] = Path(tool.state_dir).glob("group-*.json")
    record = json.loads(path.read_text())
    for member in record["members"]:
        member["start_time"] -= 1  # what a restore makes of it
    path.write_text(json.dumps(record))
    pair.first.halt()
    answer = named(tool.resume(*pair.pids, deadline_s=SOON_S).expect(3), pair.first.pid, "by a signal")
    assert "nothing was changed" in answer.json["error"]["message"] and len(records(tool)) == 1
    rows = tool.run("status", *pair.pids).expect(0).json["groups"][0]["ranks"]
    assert {row["pid"]: row["state"] for row in rows}[pair.first.pid] == "no answer"
    pair.first.go_on()
    tool.resume(*pair.pids).expect(0)
    cycle(pair, tool)


def test_FR21_who_is_waited_for_is_shown(pair: Pair, tool: Tool, machine: Setting, background: Run) -> None:
    """And a process that is let run again in time comes back with the others."""
    machine.inject(STEPS["release"], pair.second.pid)
    command = background("suspend", *pair.pids, "--timeout", 60)
    command.wait_for_step("release")
    machine.wait_until_held()
    pair.second.halt()
    machine.inject("", pair.second.pid)
    command.wait_for_line(f"rollback: 1/2 ranks, waiting for pid {pair.second.pid} (stopped by a signal)")
    pair.second.go_on()
    named(command.end(SOON_S).expect(4), pair.second.pid, "by a signal")
    cycle(pair, tool)


def test_FR21_stopped_strangers_cost_a_suspend_nothing(
    pair: Pair, tool: Tool, start_worker: Callable[..., Worker]
) -> None:
    """They are passed over; one that shares is found beside them, whatever its place among them."""
    owner, sharer, *mute = (start_worker(0) for _ in range(4))
    handle = owner.ipc_get(owner.alloc(2 << 20))
    sharer.ipc_open(handle)
    for worker in mute:
        worker.halt()
    answer = tool.suspend(owner.pid, deadline_s=SOON_S).expect(3)
    assert answer.json["error"]["facts"]["missing"] == [sharer.pid]
    tool.suspend(*pair.pids, deadline_s=SOON_S).expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()
    for worker in mute:
        worker.go_on()


@pytest.mark.parametrize("words", [("resume",), ("stop",), ("recover", "--to", "running")])
def test_a_holder_that_is_stopped(pair: Pair, tool: Tool, words: tuple[str, ...]) -> None:
    """By a signal: it is let run to its end, in good order, and nobody waits."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    os.kill(holder, signal.SIGSTOP)
    answer = tool.run(*words, *(() if words == ("stop",) else ("--driver", "sim")), *pair.pids).expect(0)
    assert answer.json["warnings"] == [], answer
    tool.resume(*pair.pids).expect(0)
    cycle(pair, tool)


def test_a_holder_that_is_frozen(pair: Pair, tool: Tool, background: Run) -> None:
    """By its cgroup: it is waited for as long as --timeout allows, and named."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    with frozen(holder, 2):
        command = background("resume", *pair.pids, "--timeout", 4)
        command.wait_for_line(f"waiting for the holder, pid {holder} (stopped by the freezer of cgroup /")
        answer = command.end(SOON_S).expect(0)
        assert any(f"pid {holder}" in warning and "killed" in warning for warning in answer.json["warnings"]), answer
    cycle(pair, tool)


def test_a_holder_that_is_frozen_for_good(pair: Pair, tool: Tool) -> None:
    """Version 1 lets nobody be killed: told before anything changes, with the cgroup, until that is thawed."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    with frozen(holder, 1) as group:
        before = records(tool)
        for words in (("resume",), ("stop",), ("recover", "--to", "running")):
            driver = () if words == ("stop",) else ("--driver", "sim")
            answer = tool.run(*words, *driver, *pair.pids, deadline_s=SOON_S).expect(3)
            assert answer.json["reason"] == "holder-frozen" and group in answer.json["error"]["message"], answer
            assert records(tool) == before
    tool.resume(*pair.pids).expect(0)
    cycle(pair, tool)


def test_FR21_patience_is_had_once() -> None:
    """However many waits a command has for a process that is stopped; anew once it has answered."""
    with sleeper() as process:
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 60
        while not processes.stopped_by(process.pid):
            assert time.monotonic() < until
        first = Silence(process.pid, "first")
        with pytest.raises(errors.RankStopped):
            while first.look():
                time.sleep(0.05)
        for _ in range(2):
            with pytest.raises(errors.RankStopped, match="second"):
                Silence(process.pid, "second").look()
        first.over()
        assert Silence(process.pid, "third").look()
