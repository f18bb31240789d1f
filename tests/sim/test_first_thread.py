"""A process whose first thread ends while others go on: /proc shows it as a zombie, and it is none."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool

pytestmark = pytest.mark.machine(driver="sim")

SIZE = 3 << 20
PROGRAM = f"""
import ctypes, sys, threading, time
from tests.programs import calls, content
need = calls.need
need(calls.init(), "init")
context = need(calls.primary_retain(0), "context")
need(calls.ctx_set(context), "context")
address = need(calls.alloc({SIZE}), "memory")
print(need(calls.ipc_get(address), "handle"), flush=True)

def count():
    need(calls.ctx_set(context), "context")
    turn = 0
    while True:
        turn += 1
        need(calls.memset_d32(address, turn, 16), "set")
        assert content.read(address, 1)[0] == turn
        print(turn, flush=True)
        time.sleep(0.05)

threading.Thread(target=count).start()
sys.stdin.readline()
ctypes.CDLL(None).pthread_exit(None)
"""


class Program:
    """A program whose first thread ends when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid
        self.handle = self.read()

    def read(self) -> str:
        """Return its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def lose_first_thread(self) -> None:
        """Let the first thread end, and see that it has."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        stat = Path(f"/proc/{self.pid}/stat")
        while ") Z " not in stat.read_text():
            time.sleep(0.01)

    def goes_on(self) -> None:
        """See that the other thread still counts."""
        for _ in range(3):
            assert self.read().isdigit()


@contextmanager
def program(machine: Setting) -> Iterator[Program]:
    """Start one."""
    process = subprocess.Popen([sys.executable, "-u", "-c", PROGRAM], cwd=ROOT, env=machine.environ(with_shim=True),
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Program(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_it_ends_while_suspended(
    machine: Setting, start_worker: Callable[..., Worker], tool: Tool, depth: str
) -> None:
    """Everybody comes back, and what is shared is shared still."""
    other = start_worker(1)
    with program(machine) as one:
        opened = other.ipc_open(one.handle)
        tool.suspend(one.pid, other.pid, options=("--depth", depth)).expect(0)
        if depth == "process":
            tool.run("stop", one.pid, other.pid).expect(0)
        one.lose_first_thread()
        answer = tool.resume(one.pid, other.pid).expect(0)
        assert {rank["pid"] for rank in answer.json["groups"][0]["ranks"]} == {one.pid, other.pid}
        one.goes_on()
        before, until = other.read(opened)[0], time.monotonic() + 60
        while other.read(opened)[0] <= before:
            assert time.monotonic() < until, "the other side does not see what it counts"
            time.sleep(0.05)


def test_it_has_ended_before(machine: Setting, start_worker: Callable[..., Worker], tool: Tool) -> None:
    """Then it is refused by name: nobody could look what it keeps open."""
    other = start_worker(1)
    with program(machine) as one:
        opened = other.ipc_open(one.handle)
        one.lose_first_thread()
        for pids in ((one.pid, other.pid), (one.pid,)):
            error = tool.suspend(*pids).expect(3).json["error"]
            assert error["code"] == "headless" and error["pid"] == one.pid, error
        one.goes_on()
        assert other.read(opened)[0]
