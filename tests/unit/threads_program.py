"""Starts tests/programs/threads.c and watches its counters."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "programs" / "threads.c"
SIGNALS, CONTROL, GPU, SPAWNED, READY, RELEASED, PLAIN = range(7)


def build(folder: Path) -> Path:
    """Compile the program."""
    program = folder / "threads"
    compiler = os.environ.get("CC", "gcc").split()
    subprocess.run([*compiler, "-O2", "-pthread", "-o", program, SOURCE], check=True)
    return program


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition holds; fail after that many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


class Counting:
    """A running program; `counters` reads its slots."""

    def __init__(self, program: Path, folder: Path, threads: int, *modes: str) -> None:
        self.threads = threads
        path = folder / f"slots-{time.monotonic_ns()}"
        path.write_bytes(bytes(65536))
        path.chmod(0o666)
        with path.open("r+b") as file:
            self._slots = mmap.mmap(file.fileno(), 65536)
        self.process = subprocess.Popen([program, path, str(threads), *modes])
        self.pid = self.process.pid
        wait_for(lambda: self.counters()[READY] == 1)

    def counters(self) -> tuple[int, ...]:
        """Return all slots."""
        return struct.unpack(f"{PLAIN + 1 + self.threads}Q", self._slots[: 8 * (PLAIN + 1 + self.threads)])

    def plain(self) -> tuple[int, ...]:
        """Return the slots of the plain threads and of the spawned ones: all that a stop must halt."""
        counters = self.counters()
        return (counters[SPAWNED], *counters[PLAIN:])

    def assert_stopped(self) -> None:
        """Fail if anything but the two threads to keep moves; these must move."""
        before, at = self.plain(), self.counters()
        wait_for(lambda: self.counters()[CONTROL] > at[CONTROL] + 20)
        assert self.plain() == before

    def assert_running(self) -> None:
        """Fail if any plain thread stands still."""
        before = self.plain()
        wait_for(lambda: all(now > then for now, then in zip(self.plain()[2:], before[2:], strict=True)))

    def states(self) -> set[str]:
        """Return the states of all threads."""
        stats = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return {text.rpartition(")")[2].split()[0] for text in stats}

    def release(self) -> None:
        """Let the child of the mode `vfork` end."""
        self._slots[8 * RELEASED : 8 * RELEASED + 8] = struct.pack("Q", 1)

    def send_signals(self, count: int) -> None:
        """Queue that many signals; each must arrive once."""
        for _ in range(count):
            os.kill(self.pid, signal.SIGRTMIN)

    def end(self) -> None:
        """Kill and collect it."""
        self.process.kill()
        self.process.wait(60)
