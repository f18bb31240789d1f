"""What the threads of a process are in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpususpend import stacks
from tests.sim import ordinary

PROGRAM = """
import ctypes, os, threading
libc = ctypes.CDLL(None)
for _ in range(3):
    threading.Thread(target=libc.pause, daemon=True).start()
names = os.listdir("/proc/self/task")
while sum(open(f"/proc/self/task/{one}/wchan").read() not in ("", "0") for one in names) < 3:
    pass
print(flush=True)
input()
"""


@pytest.fixture
def program() -> Iterator[int]:
    """A process with three threads that wait for a signal, and one that waits for a line."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process.pid
        process.kill()


def test_threads_in_the_same_call_are_counted_together(program: int) -> None:
    found = stacks.threads(program)
    first = next(iter(found))
    assert found[first] == 3 and sum(found.values()) == 4
    assert "(S)" in first and "pause" in first and "libc.so.6" in first, found
    assert any("python" in word for word in first.split(" from ")[1].split(" < ")), "who called it"


def test_a_thread_that_runs_and_processes_that_cannot_be_read() -> None:
    assert any(words.split(" from ")[0].endswith("(R)") for words in stacks.threads(os.getpid()))
    assert stacks.threads(1 << 30) == {}


def test_what_an_ordinary_user_may_not_read_is_left_out(program: int) -> None:
    """The state of another user's threads is everybody's to see, and nothing else."""
    code = f"from gpususpend import stacks; print(stacks.threads({program}))"
    command = ordinary.command_of(ordinary.python(), "-c", code)
    done = subprocess.run(command, env={"PYTHONPATH": ordinary.PACKAGES}, cwd="/", capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0 and "(S)" in done.stdout and " from " not in done.stdout, done
