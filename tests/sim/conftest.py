"""What the supervisor's tests on the simulated driver share."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.programs.client import Worker
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Answer, Tool

MIB = 1 << 20
Start = Callable[..., Worker]


_CLONE_NEWNET = 0x40000000


@pytest.fixture
def own_network() -> Iterator[None]:
    """A network namespace of the test's own, so that `--all` finds the shims of this test and of no other."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace to be had: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        libc.setns(before, _CLONE_NEWNET)
        os.close(before)


@dataclass
class Pair:
    """Two ranks on two devices that share memory both ways, with content that is known."""

    first: Worker
    second: Worker

    @property
    def pids(self) -> tuple[int, int]:
        """Return the pids."""
        return self.first.pid, self.second.pid

    @property
    def both(self) -> tuple[Worker, Worker]:
        """Return the workers."""
        return self.first, self.second

    def check(self) -> None:
        """Check that both run with all their content."""
        for worker in self.both:
            assert worker.alive(), worker._story("died")
            worker.check()


@pytest.fixture
def pair(start_worker: Start) -> Pair:
    """Two ranks that share memory."""
    one = Pair(start_worker(0), start_worker(1))
    for owner, other, seed in ((one.first, one.second, 3), (one.second, one.first, 7)):
        block = owner.alloc(3 * MIB)
        owner.fill(block, 3 * MIB, seed)
        other.expect(other.ipc_open(owner.ipc_get(block)), 3 * MIB, [seed])
    return one


class Background:
    """A command that runs while the test looks on."""

    def __init__(self, tool: Tool, *words: str | int) -> None:
        self.tool = tool
        self.command = [sys.executable, "-m", "gpususpend", *map(str, words), "--driver", "sim", "--json"]
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=tool.environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_for_step(self, step: str, timeout_s: float = 60) -> None:
        """Wait until the record says that a step has begun."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for record in records(self.tool):
                if record["step"] == step:
                    return
            assert self.process.poll() is None, self.end()
            time.sleep(0.01)
        raise AssertionError(f"no step {step} in {timeout_s} s: {records(self.tool)}")

    def end(self, timeout_s: float = 90) -> Answer:
        """Wait for the command's end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Answer(self.command, self.process.returncode, out, err)

    def kill(self) -> None:
        """Kill the command."""
        self.process.kill()
        self.process.communicate()


def records(tool: Tool) -> list[dict[str, Any]]:
    """Return the records in the tool's state directory."""
    found = []
    for path in Path(tool.state_dir).glob("group-*.json"):
        try:
            found.append(json.loads(path.read_text()))
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def background(tool: Tool) -> Iterator[Callable[..., Background]]:
    """A function that starts a command in the background."""
    started: list[Background] = []

    def start(*words: str | int) -> Background:
        started.append(Background(tool, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


def running(tool: Tool) -> None:
    """Check that no group is left in any state."""
    assert records(tool) == []
    for group in tool.run("status").expect(0).json["groups"]:
        assert group["state"] == "running", group


def stopped_threads(pid: int) -> list[str]:
    """Return the names of the threads of a process that are held by a tracer."""
    found = []
    for path in Path(f"/proc/{pid}/task").iterdir():
        try:
            if (path / "stat").read_text().rpartition(")")[2].split()[0] == "t":
                found.append((path / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def state(tool: Tool, machine: Setting, pid: int) -> dict[str, Any]:
    """Return what status says of one process."""
    for group in tool.run("status").expect(0).json["groups"]:
        for rank in group["ranks"]:
            if rank["pid"] == pid:
                return dict(rank)
    raise AssertionError(f"status does not know pid {pid}")
