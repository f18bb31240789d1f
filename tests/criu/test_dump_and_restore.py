"""A suspended group whose holder is ended can be dumped by CRIU, killed, restored and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool

FETCH = Path(__file__).with_name("fetch.sh")
CRIU_FOLDER = ROOT / "build" / "criu"
STEP_DEADLINE_S = 60


@pytest.fixture(scope="session")
def criu(outside: list[str]) -> str:
    """Return a CRIU of 4.1 or newer: the system's, else one unpacked beside the tree."""
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    unpacked = CRIU_FOLDER / "criu-run"
    for program in filter(None, [shutil.which("criu"), shutil.which(unpacked)]):
        if subprocess.run([program, "check"], capture_output=True, timeout=60).returncode == 0:
            return program
    if shutil.which("dpkg") is None:
        pytest.skip("no CRIU 4.1, and no dpkg to unpack one")
    subprocess.run([*outside, "bash", str(FETCH), str(CRIU_FOLDER)], check=True, timeout=300)
    return str(unpacked)


def step_of(folder: Path) -> int:
    """Return the last step that rank 1 has verified; fail when it found anything wrong."""
    wrong = folder / "wrong"
    assert not wrong.exists(), wrong.read_text()
    try:
        return int((folder / "step-1").read_text())
    except FileNotFoundError:
        return 0


def advance(folder: Path, steps: int = 3) -> int:
    """Wait until the group has made so many further steps."""
    target = step_of(folder) + steps
    deadline = time.monotonic() + STEP_DEADLINE_S
    while step_of(folder) < target:
        assert time.monotonic() < deadline, f"the group stands at step {step_of(folder)}, waited for {target}"
        time.sleep(0.02)
    return step_of(folder)


def wait_until_gone(root: int, folder: Path) -> None:
    """Wait until nobody has the pids any more: CRIU has killed the group, but its parents collect it in their time."""
    pids = [root, *(int((folder / name).read_text()) for name in ("pid-0", "pid-1"))]
    deadline = time.monotonic() + STEP_DEADLINE_S
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, f"pids {pids} are still taken"
        time.sleep(0.02)


def run_criu(criu: str, verb: str, images: Path, *options: str) -> None:
    """Run CRIU and show the end of its log when it fails."""
    log = images / f"{verb}.log"
    done = subprocess.run([criu, verb, "-D", str(images), "-o", log.name, "-v4", *options],
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    tail = log.read_text(errors="replace")[-4000:] if log.exists() else done.stderr.decode()
    assert done.returncode == 0, f"criu {verb} ended with {done.returncode}:\n{tail}"


@pytest.fixture
def group(machine: Setting, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """A function that starts the group in a session of its own; whatever runs of it at the end is killed."""
    folder = tmp_path / "group"
    folder.mkdir()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "tests.programs.detached", str(folder)], cwd=ROOT,
                                env=machine.environ(with_shim=True), stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    yield start
    for name in ("pid-0", "pid-1"):
        if (folder / name).exists():
            try:
                os.kill(int((folder / name).read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.machine(driver="sim")
@pytest.mark.parametrize("stored", [False, True])
def test_stop_then_criu_dump_kill_restore_resume(group: Callable[[], subprocess.Popen[bytes]], tool: Tool, criu: str,
                                                 tmp_path: Path, stored: bool) -> None:
    """The whole way round, and once more from the restored group, whose shims answer under their names (pitfall 30).

    With the memory in the image, or in a store.
    """
    folder = tmp_path / "group"
    root = group()
    advance(folder)
    for round_number in range(2):
        places = ("--store", tmp_path / "store", "--ckpt-dir", tmp_path / f"ckpt-{round_number}") if stored else ()
        tool.run("suspend", "--driver", "sim", *map(str, places), "--tree", root.pid).expect(0)
        tool.run("stop", "--driver", "sim", "--tree", root.pid).expect(0)
        before = step_of(folder)
        images = tmp_path / f"images-{round_number}"
        images.mkdir()
        run_criu(criu, "dump", images, "-t", str(root.pid))
        if round_number == 0:
            root.wait(60)
        wait_until_gone(root.pid, folder)
        assert step_of(folder) == before
        run_criu(criu, "restore", images, "-d")
        tool.run("resume", "--driver", "sim", "--tree", root.pid).expect(0)
        assert advance(folder) > before
    os.kill(root.pid, signal.SIGKILL)
