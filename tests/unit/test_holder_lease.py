"""The lease that a kept holder has with each shim, against a stand-in for a shim."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpususpend import errors, holder
from gpususpend.deadline import Deadline
from gpususpend.holder import Holder, HoldTarget
from tests.unit.threads_program import wait_for

# Listens as a shim does, on a thread of its own, and writes down what happens to the lease. It is ready once the first
# thread sleeps: one that was stopped on its way there would keep the interpreter's lock, or be waited for to take it.
SHIM = """
import os, socket, sys, threading, time
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(b"\\0nvsnap-gpushare.%d" % (os.getpid() if sys.argv[2] == "own" else int(sys.argv[2])))
listener.listen()
log = open(sys.argv[1], "a", buffering=1)
SLEEPS = {"x86_64": ("230", "270", "23"), "aarch64": ("115", "72")}[os.uname().machine]  # clock_nanosleep, select
def sleeping():
    return open(f"/proc/self/task/{os.getpid()}/syscall").read().split()[0]
def serve():
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("nvsnap-gpushare")
    until = time.monotonic() + 60
    while sleeping() not in SLEEPS and time.monotonic() < until:
        time.sleep(0.01)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        state = ""
        while data := connection.recv(32768).decode():
            state = data
            log.write(data + "\\n")
            connection.send(b"ok 1" if sys.argv[3] == "ok" else b"err 1 code=busy msg=not now")
        if state == "1 lease":
            log.write("lost\\n")
threading.Thread(target=serve, daemon=True).start()
while True:
    time.sleep(60)
"""


class Shim:
    """A running stand-in."""

    def __init__(self, folder: Path, pid: str = "own", answer: str = "ok") -> None:
        self.log = folder / f"log-{pid}-{answer}"
        self.log.touch()
        command = [sys.executable, "-c", SHIM, str(self.log), pid, answer]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.pid = self.process.pid

    def said(self) -> list[str]:
        """Return what happened so far."""
        return self.log.read_text().splitlines()

    def end(self) -> None:
        """Kill and collect it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def plain() -> Iterator[int]:
    """A process without a shim."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_kept_holder_has_a_lease_and_gives_it_back(state_dir: Path, tmp_path: Path, plain: int) -> None:
    shim = Shim(tmp_path)
    try:
        held = Holder.start(state_dir)
        held.stop([HoldTarget(shim.pid), HoldTarget(plain)], Deadline(60))
        assert shim.said() == []
        record = held.keep()
        assert record.leases == (shim.pid,)
        assert shim.said() == ["1 lease"]
        assert set(holder.end(record, Deadline(60)).continued) == {shim.pid, plain}
        wait_for(lambda: shim.said() == ["1 lease", "1 unlease"])
    finally:
        shim.end()


def test_a_killed_holder_breaks_its_lease(state_dir: Path, tmp_path: Path) -> None:
    shim = Shim(tmp_path)
    try:
        held = Holder.start(state_dir)
        held.stop([HoldTarget(shim.pid)], Deadline(60))
        record = held.keep()
        os.kill(record.pid, signal.SIGKILL)
        wait_for(lambda: shim.said() == ["1 lease", "lost"])
        holder.end(record, Deadline(60))
    finally:
        shim.end()


def test_a_refused_lease_leaves_the_holder_to_the_command(state_dir: Path, tmp_path: Path) -> None:
    good, bad = Shim(tmp_path), Shim(tmp_path, answer="busy")
    try:
        with Holder.start(state_dir) as held:
            held.stop([HoldTarget(good.pid), HoldTarget(bad.pid)], Deadline(60))
            with pytest.raises(errors.HolderFailed, match="not now"):
                held.keep()
            assert os.listdir(state_dir) == []
            assert held.go(Deadline(60)).gone == ()
        wait_for(lambda: good.said() == ["1 lease", "1 unlease"])
    finally:
        good.end()
        bad.end()


def test_b02_a_squatter_gets_no_lease(state_dir: Path, tmp_path: Path, plain: int) -> None:
    squatter = Shim(tmp_path, pid=str(plain))
    try:
        with Holder.start(state_dir) as held:
            held.stop([HoldTarget(plain)], Deadline(60))
            with pytest.raises(errors.HolderFailed, match=f"is held by pid {squatter.pid}"):
                held.keep()
        assert squatter.said() == []
    finally:
        squatter.end()


def test_a_shim_that_died_does_not_hold_up_the_end(state_dir: Path, tmp_path: Path, plain: int) -> None:
    shim = Shim(tmp_path)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(shim.pid), HoldTarget(plain)], Deadline(60))
    record = held.keep()
    shim.end()
    assert holder.end(record, Deadline(60)) == holder.HolderResult(True, False, (plain,), (shim.pid,))
