"""The client of a worker process: starts it, asks it, and never waits for ever.

Every call has a deadline, because a process that the driver has lost answers nothing any more. A deadline makes the
worker print its stacks, and the exception carries the end of what it printed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.programs.calls import DriverError, Result, code_name
from tests.programs.setting import ROOT, Setting
from tests.programs.worker import nvidia_links

DEADLINE_S = 60.0
_numbers = itertools.count(1)


class WorkerTimeout(RuntimeError):
    """A worker did not answer in time."""


class WorkerDied(RuntimeError):
    """A worker ended."""


class WorkerError(RuntimeError):
    """A worker could not do what it was asked (not a refusal of the driver)."""


class Worker:
    """One worker process.

    `worker.try_("alloc", 4096)` returns the driver's `Result`; `worker.alloc(4096)` returns the value and raises
    `DriverError` when the driver refuses.
    """

    def __init__(self, setting: Setting, *, shim: bool = True, per_thread: bool = False, stderr: Path | None = None,
                 env: dict[str, str] | None = None) -> None:
        self.shim = shim
        self.stderr = stderr or Path(tempfile.gettempdir()) / f"gpushare-worker-{os.getpid()}-{next(_numbers)}.stderr"
        environ = setting.environ(with_shim=shim) | (env or {})
        if per_thread:
            environ["CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"] = "1"
        self._link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far, self.stderr.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.programs.worker", str(far.fileno())],
                pass_fds=[far.fileno()], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            )
        self.pid = self.process.pid

    # Asking

    def send(self, name: str, *args: Any, fd: int | None = None, **kwargs: Any) -> None:
        """Send a request without waiting for the answer."""
        text = json.dumps({"do": name, "args": args, "kwargs": kwargs}).encode()
        try:
            socket.send_fds(self._link, [text], [] if fd is None else [fd])
        except OSError as error:
            raise WorkerDied(self._story(f"is gone before {name}")) from error

    def receive(self, name: str = "", deadline_s: float = DEADLINE_S) -> tuple[Result, list[int]]:
        """Wait for the next answer; return it and the descriptors that came with it."""
        self._link.settimeout(deadline_s)
        try:
            text, fds, _, _ = socket.recv_fds(self._link, 1 << 20, 4)
        except TimeoutError:
            self._print_stacks()
            raise WorkerTimeout(self._story(f"did not answer {name} within {deadline_s:g} s")) from None
        except OSError:
            text, fds = b"", []
        if not text:
            raise WorkerDied(self._story(f"ended in {name}"))
        reply = json.loads(text)
        if "error" in reply:
            raise WorkerError(f"worker {self.pid}, {name}:\n{reply['error']}")
        return Result(reply["code"], reply["value"]), fds

    def try_(self, name: str, *args: Any, deadline_s: float = DEADLINE_S, **kwargs: Any) -> Result:
        """Run a command and return the driver's code and the value."""
        self.send(name, *args, **kwargs)
        return self.receive(name, deadline_s)[0]

    def do(self, name: str, *args: Any, deadline_s: float = DEADLINE_S, **kwargs: Any) -> Any:
        """Run a command that has to succeed and return its value."""
        answer = self.try_(name, *args, deadline_s=deadline_s, **kwargs)
        if answer.code != 0:
            detail = f" ({answer.value})" if answer.value else ""
            raise DriverError(f"worker {self.pid}, {name}{detail}", answer.code)
        return answer.value

    def code(self, name: str, *args: Any, **kwargs: Any) -> int:
        """Run a command and return the driver's code alone."""
        return self.try_(name, *args, **kwargs).code

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self.do, name)

    # Descriptors

    def give_fd(self, number: int) -> int:
        """Return a descriptor of this process that is a copy of the worker's."""
        self.send("give", number)
        answer, fds = self.receive("give")
        assert answer.code == 0 and len(fds) == 1
        return fds[0]

    def hand(self, number: int, other: Worker) -> int:
        """Hand a copy of this worker's descriptor to another worker; return its number there."""
        fd = self.give_fd(number)
        try:
            return other.take_fd(fd)
        finally:
            os.close(fd)

    def take_fd(self, fd: int) -> int:
        """Give the worker a copy of this process's descriptor; return its number there."""
        self.send("take", fd=fd)
        return int(self.receive("take")[0].value)

    def nvidia_fds(self) -> list[str]:
        """Return the worker's descriptors that belong to the driver, without asking the worker."""
        return nvidia_links(self.pid)

    def wait_until_unmapped(self, name: str, timeout_s: float = 60) -> None:
        """Wait until the worker maps no memory of that name any more."""
        until = time.monotonic() + timeout_s
        while name in Path(f"/proc/{self.pid}/maps").read_text():
            assert time.monotonic() < until, f"worker {self.pid} keeps {name}"
            time.sleep(0.02)

    def check(self) -> None:
        """Fail unless all memory of the worker holds what it must."""
        wrong = self.do("verify")
        assert not wrong, f"worker {self.pid}: memory differs from the reference: {wrong}"

    # Life

    def alive(self) -> bool:
        """Tell whether the process still exists."""
        return self.process.poll() is None

    def halt(self) -> None:
        """Stop the process by a signal, as a shell does; returns once no thread of it runs.

        A thread that is held by a tracer already stays so.
        """
        os.kill(self.pid, signal.SIGSTOP)
        until = time.monotonic() + DEADLINE_S
        while any(state not in "Tt" for state in self._thread_states()):
            assert time.monotonic() < until, f"worker {self.pid} does not stop"
            time.sleep(0.002)

    def go_on(self) -> None:
        """Let a halted process run again."""
        os.kill(self.pid, signal.SIGCONT)

    def _thread_states(self) -> list[str]:
        found = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end
                found.append(path.read_text().rpartition(")")[2].split()[0])
        return found

    def kill(self) -> None:
        """Kill the process, unless it has ended, and close the socket."""
        if self.alive():
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self._link.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.kill()

    def _print_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)

    def _story(self, what: str) -> str:
        ended = self.process.poll()
        tail = self.stderr.read_text(errors="replace")[-3000:] if self.stderr.exists() else ""
        status = "" if ended is None else f" (exit status {ended})"
        return f"worker {self.pid} {what}{status}; its output ends:\n{tail}"


def answer_of(code: int) -> str:
    """Return the driver's name of a code, for messages."""
    return code_name(code)


@contextlib.contextmanager
def workers(setting: Setting, count: int, *, shim: bool = True, start: bool = True) -> Iterator[list[Worker]]:
    """Start `count` workers, rank i on device i modulo the devices, and kill them at the end."""
    started: list[Worker] = []
    try:
        for _ in range(count):
            started.append(Worker(setting, shim=shim))
        if start:
            for rank, worker in enumerate(started):
                worker.start(rank % setting.devices)
        yield started
    finally:
        for worker in started:
            worker.kill()
