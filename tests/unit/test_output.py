"""What becomes of a command whose output nobody takes: its exit status still says what it did."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpususpend.progress import Progress
from tests.programs.setting import ROOT


@pytest.mark.parametrize("where", [">/dev/full", "2>/dev/full", ">/dev/full 2>&1", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [["suspend", "{gone}"], ["suspend", "{gone}", "--json"], ["suspend", "x", "--json"]])
def test_exit_status_without_a_place_for_the_output(tmp_path: Path, where: str, words: list[str]) -> None:
    """A full disk, a closed stream."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    program = [sys.executable, "-m", "gpususpend", *(word.format(gone=gone.pid) for word in words)]
    environment = os.environ | {"NVSNAP_GPU_SUSPEND_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {where}', "sh", *program], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == (2 if "x" in words else 3), done
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_reader_that_has_gone(tmp_path: Path) -> None:
    """The end of a pipe."""
    environment = os.environ | {"NVSNAP_GPU_SUSPEND_STATE_DIR": str(tmp_path / "state")}
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "gpususpend", "suspend", str(os.getpid()), "--json"]
    done = subprocess.run(
        program, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert done.returncode == 3 and done.stderr.count("\n") == 1, done


class GoneTerminal(io.StringIO):
    """A terminal that takes a few writes, and then hangs up."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def isatty(self) -> bool:
        """Say that it is a terminal."""
        return True

    def write(self, text: str) -> int:
        """Take it, or fail as a terminal that has gone does."""
        self.room -= 1
        if self.room < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("room", range(6))
def test_terminal_that_hangs_up(room: int) -> None:
    """No step fails for it."""
    progress = Progress(GoneTerminal(room))
    for _ in range(2):
        progress.begin("release", 2, 100)
        progress.update(1, 50)
        progress.say("halfway")
        progress.update(2, 100)
        progress.end()
