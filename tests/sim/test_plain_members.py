"""Processes of a group that use no CUDA come and go while the command works: that is no failure in either direction."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpususpend import processes
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim import ordinary
from tests.sim.conftest import (
    DOWN,
    DOWN_PAGES,
    MIB,
    UP,
    Pair,
    Start,
    end_process,
    paused,
    records,
    running,
    state,
    stopped_threads,
)  # fmt: skip
from tests.unit.fake_shim import sleeper

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

SHORT_S, LONG_S = 0.01, 0.2


@pytest.fixture
def worker(start_worker: Start) -> Worker:
    """A rank with memory whose content is known."""
    one = start_worker(0)
    one.fill(one.alloc(MIB), MIB, 1)
    return one


@contextlib.contextmanager
def busy_shell(*command: str, seconds: float = SHORT_S) -> Iterator[subprocess.Popen[bytes]]:
    """Run a shell that starts one child after the other, each of which lives for so long."""
    loop = ["sh", "-c", f"while :; do sleep {seconds}; done"]
    with subprocess.Popen([*command, *loop], start_new_session=True) as shell:
        try:
            yield shell
        finally:
            os.killpg(shell.pid, 9)


def ended(answer: Answer) -> list[int]:
    """Return the members that a command says have ended."""
    return [one["pid"] for group in answer.json["groups"] for one in group["ended"]]


def known(tool: Tool) -> list[int]:
    """Return the members in the only record."""
    (record,) = records(tool)
    return [member["pid"] for member in record["members"]]


def test_children_that_come_and_go(worker: Worker, tool: Tool) -> None:
    """A shell beside the rank starts programs all the time: twenty cycles, and everything of it stands still."""
    with busy_shell() as shell:
        for _ in range(20):
            tool.run("suspend", "--driver", "sim", "--tree", shell.pid, worker.pid).expect(0)
            members = known(tool)
            assert worker.pid in members and "sh" in stopped_threads(shell.pid)
            below = processes.descendants([shell.pid], processes.all_processes())
            assert all(one.pid in members and stopped_threads(one.pid) for one in below), (members, below)
            tool.resume(worker.pid).expect(0)
        running(tool)
        worker.check()


def test_children_that_come_and_go_at_pages(worker: Worker, tool: Tool) -> None:
    """Nothing is stopped, so the members are others at every look: a second suspend still finds nothing to do."""
    words = ("suspend", "--driver", "sim", "--depth", "pages", "--tree")
    with busy_shell(seconds=LONG_S) as shell:
        for _ in range(5):
            tool.run(*words, shell.pid, worker.pid).expect(0)
            assert tool.run(*words, shell.pid, worker.pid).expect(0).json["already"] is True
            tool.run("recover", "--driver", "sim").expect(0)
            tool.run("resume", "--driver", "sim", "--tree", shell.pid).expect(0)
        running(tool)
        worker.check()


def test_children_of_an_ordinary_user(tool: Tool, machine: Setting) -> None:
    """To whom the kernel shows nothing of a process that is about to end."""
    python = ordinary.python()
    assert machine.state is not None
    os.chown(machine.state, ordinary.UID, ordinary.UID)
    program = "from tests.sim.test_other_user import PROGRAM\nexec(PROGRAM)"
    user = ["setpriv", f"--reuid={ordinary.UID}", f"--regid={ordinary.UID}", "--clear-groups"]
    environment = machine.environ(with_shim=True) | {"PYTHONPATH": ordinary.PACKAGES}
    with busy_shell(*user) as shell, subprocess.Popen(
        [*user, python, "-c", program], env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(10):
                words = ("--driver", "sim", "--tree", shell.pid, process.pid)
                ordinary.run(tool, "suspend", *words, env={"NVSNAP_GPU_SUSPEND_STATE_DIR": ""}).expect(0)
                ordinary.run(tool, "resume", *words, env={"NVSNAP_GPU_SUSPEND_STATE_DIR": ""}).expect(0)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "True\n"
        finally:
            process.kill()


@pytest.mark.parametrize("step", DOWN)
def test_one_ends_on_the_way_down(pair: Pair, tool: Tool, tmp_path: Path, step: str) -> None:
    """It is no member any more, and the others are suspended."""
    with sleeper() as plain, paused(tool, tmp_path / "p", step, "suspend", plain.pid, *pair.pids) as go_on:
        plain.kill()
        plain.wait()
        answer = go_on().expect(0)
        assert ended(answer) == [plain.pid] and known(tool) == sorted(pair.pids)
        assert answer.json["groups"][0]["state"] == "suspended"
    assert ended(tool.resume(*pair.pids).expect(0)) == []
    running(tool)
    pair.check()


@pytest.mark.parametrize("step", DOWN_PAGES)
def test_one_ends_on_the_way_down_to_pages(pair: Pair, tool: Tool, tmp_path: Path, step: str) -> None:
    """The same where nothing is stopped."""
    words = ("suspend", "--depth", "pages", *pair.pids)
    with sleeper() as plain, paused(tool, tmp_path / "p", step, *words, plain.pid) as go_on:
        plain.kill()
        plain.wait()
        assert ended(go_on().expect(0)) == [plain.pid] and known(tool) == sorted(pair.pids)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("step", UP)
def test_one_ends_on_the_way_up(pair: Pair, tool: Tool, tmp_path: Path, step: str) -> None:
    """It is told, and all others run."""
    with sleeper() as plain:
        tool.suspend(*pair.pids, plain.pid).expect(0)
        with paused(tool, tmp_path / "p", step, "resume", *pair.pids) as go_on:
            plain.kill()
            plain.wait()
            assert ended(go_on().expect(0)) == [plain.pid]
    running(tool)
    pair.check()


@pytest.mark.parametrize("command", ["resume", "recover"])
def test_one_ends_while_suspended(pair: Pair, tool: Tool, machine: Setting, command: str) -> None:
    """It is told and no failure; a recover that keeps the group suspended lets it go."""
    with sleeper() as plain:
        holder = tool.suspend(*pair.pids, plain.pid).expect(0).json["groups"][0]["holder"]
        plain.kill()
        plain.wait()
        assert state(tool, machine, plain.pid)["state"] == "ended"
        if command == "recover":
            end_process(holder)
            answer = tool.run("recover", "--driver", "sim").expect(0)
            assert answer.json["groups"][0]["state"] == "suspended" and known(tool) == sorted(pair.pids)
        else:
            answer = tool.resume(plain.pid).expect(0)
        assert ended(answer) == [plain.pid]
        tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_one_ends_in_a_suspend_that_is_rolled_back(
    pair: Pair, tool: Tool, machine: Setting, tmp_path: Path
) -> None:
    """What failed is another thing: everything runs again, 4 and not 5."""
    machine.inject("cuCheckpointProcessCheckpoint 1 304")
    with sleeper() as plain, paused(tool, tmp_path / "p", "lock", "suspend", plain.pid, *pair.pids) as go_on:
        plain.kill()
        plain.wait()
        answer = go_on().expect(4)
        assert ended(answer) == [plain.pid] and "all 2 processes run again" in answer.json["error"]["message"]
    machine.inject("")
    running(tool)
    pair.check()


@pytest.mark.parametrize("step", ["quiesce", "checkpoint"])
def test_one_has_ended_when_a_killed_suspend_is_recovered(
    pair: Pair, tool: Tool, tmp_path: Path, step: str
) -> None:
    """`recover --to suspended` brings the others back first and suspends them anew."""
    with sleeper() as plain:
        with paused(tool, tmp_path / "p", step, "suspend", plain.pid, *pair.pids):
            pass
        plain.kill()
        plain.wait()
        answer = tool.run("recover", "--driver", "sim", "--to", "suspended").expect(0)
        assert answer.json["groups"][-1]["state"] == "suspended" and known(tool) == sorted(pair.pids)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_one_appears_after_the_look(worker: Worker, tool: Tool, tmp_path: Path) -> None:
    """A child of a process of a tree is stopped with the others, its own child too; one of a named process is not."""
    script = "read line; sh -c 'sleep 600 & wait' & wait"
    with sleeper() as named, subprocess.Popen(
        ["sh", "-c", script], start_new_session=True, stdin=subprocess.PIPE
    ) as shell:
        try:
            words = ("suspend", "--tree", shell.pid, worker.pid, named.pid)
            with paused(tool, tmp_path / "p", "checkpoint", *words) as go_on:
                assert shell.stdin is not None
                shell.stdin.write(b"\n")
                shell.stdin.flush()
                fresh: set[int] = set()
                until = time.monotonic() + 60
                while len(fresh) < 2 and time.monotonic() < until:
                    below = processes.descendants([shell.pid], processes.all_processes())
                    fresh = {one.pid for one in below} - set(known(tool))
                child = worker.fork_idle()
                go_on().expect(0)
            assert len(fresh) == 2 and fresh < set(known(tool)) and child not in known(tool)
            assert all(stopped_threads(pid) for pid in (*fresh, shell.pid)) and not stopped_threads(child)
            tool.resume(worker.pid).expect(0)
            assert not any(stopped_threads(pid) for pid in (*fresh, shell.pid))
        finally:
            os.killpg(shell.pid, 9)
    worker.check()


def test_one_that_another_group_keeps_stopped(start_worker: Start, tool: Tool) -> None:
    """A child of a tree that belongs to a suspended group whose record is lost: nothing is changed, nobody let go."""
    first, second = start_worker(0), start_worker(1)
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) as shell:
        try:
            until = time.monotonic() + 60
            while not (below := processes.descendants([shell.pid], processes.all_processes())):
                assert time.monotonic() < until
            (child,) = below
            tool.suspend(first.pid, child.pid).expect(0)
            (record,) = Path(tool.state_dir).glob("group-*.json")
            record.unlink()
            answer = tool.run("suspend", "--driver", "sim", "--tree", shell.pid, second.pid).expect(3)
            assert answer.json["reason"] == "cannot-trace", answer
            assert stopped_threads(first.pid) and stopped_threads(child.pid)
            tool.run("recover", "--driver", "sim", "--to", "running").expect(0)
        finally:
            os.killpg(shell.pid, 9)
    running(tool)


def test_FR2_a_rank_that_ends_is_still_a_loss(pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """Beside a plain one that ends too: the rank is named, and nothing else."""
    with sleeper() as plain, paused(tool, tmp_path / "p", "release", "suspend", plain.pid, *pair.pids) as go_on:
        plain.kill()
        plain.wait()
        pair.second.kill()
        answer = go_on().expect(5)
        assert pair.second.pid in answer.json["error"]["facts"]["lost"] and ended(answer) == [plain.pid]
        assert plain.pid not in answer.json["error"]["facts"]["lost"]
