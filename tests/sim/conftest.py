"""What the supervisor's tests on the simulated driver share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chunkstore import Store
from gpususpend import arena, errors, processes
from tests.programs.client import Worker
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Answer, Tool
from tests.sim.places import CHUNK, Places

MIB = 1 << 20
# The steps of a suspend and of a resume, as the journal has them.
DOWN = ["preflight", "prepare", "quiesce", "release", "unlock-pages", "seal", "lock", "checkpoint", "freeze"]
DOWN_PAGES = ["preflight", "prepare", "quiesce", "release", "seal"]
UP = ["restore", "unlock", "load", "remap", "unseal", "bind", "check", "unlock-pages", "open"]
UP_PAGES = UP[2:]
Start = Callable[..., Worker]


@pytest.fixture
def private_huge_pages() -> None:
    """A machine on which a private tmpfs gives huge pages."""
    try:
        os.close(arena.prepare(MIB, [arena.Kind.TMPFS]).fd)
    except errors.NotEnoughMemory:
        pytest.skip("this machine gives no huge pages (private tmpfs)")


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


def endless_kernel(worker: Worker) -> int:
    """Start a kernel that ends when the word at the returned address becomes 1."""
    flag = int(worker.alloc_host(4096, 2))
    worker.host_write(flag, 0)
    worker.kernel("gs_wait_flag", [flag, 1], worker.stream_create())
    return flag


@pytest.fixture
def places(tool: Tool) -> Iterator[Places]:
    """A store of small chunks, so that an allocation has several; in memory, since it syncs a lot."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="gpushare-test-store-", dir=parent))
    Store.create(root / "store", chunk_size_bytes=CHUNK)
    yield Places(tool, root)
    shutil.rmtree(root, ignore_errors=True)


class Background:
    """A command that runs while the test looks on."""

    def __init__(self, tool: Tool, *words: str | int, env: dict[str, str] | None = None) -> None:
        self.tool = tool
        self.command = [sys.executable, "-m", "gpususpend", *map(str, words), "--driver", "sim", "--json"]
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=tool.environ() | (env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
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

    def wait_for_line(self, word: str) -> None:
        """Wait until the command has told something on stderr; what came until then is not in the answer."""
        assert self.process.stderr is not None
        while word not in (line := self.process.stderr.readline()):
            assert line, "the command has ended"

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


Run = Callable[..., Background]


@pytest.fixture
def background(tool: Tool) -> Iterator[Run]:
    """A function that starts a command in the background."""
    started: list[Background] = []

    def start(*words: str | int) -> Background:
        started.append(Background(tool, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


@contextlib.contextmanager
def paused(tool: Tool, scratch: Path, step: str, *words: str | int) -> Iterator[Callable[[], Answer]]:
    """Run a command as far as `step`; yield what lets it go on and returns how it ends."""
    scratch.touch()
    command = [sys.executable, "-m", "tests.programs.paused", step, str(scratch), *map(str, words), "--driver", "sim"]
    process = subprocess.Popen(
        [*command, "--json"], cwd=ROOT, env=tool.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while not any(record["step"] == step for record in records(tool)):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.01)

        def go_on() -> Answer:
            scratch.unlink()
            out, err = process.communicate(timeout=90)
            return Answer(command, process.returncode, out, err)

        yield go_on
    finally:
        scratch.unlink(missing_ok=True)
        process.kill()
        process.communicate()


def end_process(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal that ends a process, and wait until it has ended; whoever started it need not have collected it."""
    os.kill(pid, number)
    until = time.monotonic() + 60
    with contextlib.suppress(errors.NoSuchProcess):
        while processes.read_process(pid):
            assert time.monotonic() < until, f"pid {pid} does not end"
            time.sleep(0.005)


def drop_cgroup(folder: Path) -> None:
    """Remove a cgroup; one that has just been left, or whose last process has just ended, may count as in use."""
    until = time.monotonic() + 60
    while folder.exists():
        with contextlib.suppress(OSError):
            folder.rmdir()
        assert time.monotonic() < until, f"{folder} stays in use"
        time.sleep(0.01)


def more(worker: Worker, loop: int, rounds: int = 3) -> None:
    """Wait until a loop has done some rounds more."""
    goal, until = worker.loop_state(loop)["count"] + rounds, time.monotonic() + 60
    while (state := worker.loop_state(loop))["count"] < goal:
        assert time.monotonic() < until and state["alive"] and not state["errors"], state
        time.sleep(0.02)


def standing(worker: Worker, loops: Sequence[int]) -> list[int]:
    """Check that loops stand still at a gate, each once it has ended the round that it is in; return their rounds."""
    before = [worker.loop_state(loop)["count"] for loop in loops]
    time.sleep(0.3)
    now = [worker.loop_state(loop)["count"] for loop in loops]
    assert all(count <= was + 1 for count, was in zip(now, before, strict=True)), (before, now)
    return now


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
