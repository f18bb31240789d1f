"""What becomes of a command whose output nobody takes: its exit status still says what it did."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpususpend import system
from gpususpend.cli import output
from gpususpend.progress import Progress
from gpususpend.report import GroupReport
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
        timeout=100,
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
        program, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=100
    )
    os.close(write)
    assert done.returncode == 3 and done.stderr.count("\n") == 2, done
    assert "the result could not be written: Broken pipe" in done.stderr


@pytest.mark.parametrize("words", [["status"], ["status", "--json"]])
def test_result_that_is_lost(tmp_path: Path, words: list[str]) -> None:
    """A command that succeeds says on stderr that its result is lost; nothing to say is nothing lost."""
    environment = os.environ | {"NVSNAP_GPU_SUSPEND_STATE_DIR": str(tmp_path / "state")}
    command = ["sh", "-c", 'exec "$@" >/dev/full', "sh", sys.executable, "-m", "gpususpend", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done
    told = "the result could not be written: No space left on device; the exit status stands"
    assert done.stderr == f"nvsnap-gpu-suspend: {told}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["suspend", "--store", "x", "--ckpt-dir", "y", "1"], ["suspend", "--trace", "x", "1"], ["store", "ls", "x"],
        ["store", "show", "x"], ["resume", "--cache", "x", "1"], ["cache-gc", "x", "1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_current_directory_that_was_removed(tmp_path: Path, words: list[str]) -> None:
    """A relative path is refused in one line."""
    (tmp_path / "gone").mkdir()
    program = "import sys; from gpususpend.cli import main; main(sys.argv[1:])"
    command = ["sh", "-c", 'rmdir ../gone; exec "$@"', "sh", sys.executable, "-c", program, *words, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path / "gone", env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3 and done.stderr.count("\n") == 1, done
    assert json.loads(done.stdout)["reason"] == "no-current-directory" and "absolute path" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["frob"], "frob"), (["suspend", "--dept", "pages"], "--dept"), (["suspend", "--depth", "x", "1"], "--depth"),
        (["suspend", "--timeout", "nan", "1"], "--timeout"), (["store", "ls"], "STORE"), (["store", "frob"], "frob"),
        (["cache-gc", "x", "much"], "much"), (["suspend"], "--tree"), (["suspend", "x"], "x"),
        (["gpus", "a", "b"], "b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_malformed_arguments_are_one_line(words: list[str], told: str) -> None:
    """On stderr, with what is wrong and exit status 2."""
    done = subprocess.run(
        [sys.executable, "-m", "gpususpend", *words], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("nvsnap-gpu-suspend: ") and told in done.stderr, done


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


@pytest.mark.parametrize("changed", [False, True])
def test_an_error_of_the_system_that_nobody_foresaw(capsys: pytest.CaptureFixture[str], changed: bool) -> None:
    """One line: the call or the place, what things are in now, what to do; 3 only where nothing has changed."""
    with pytest.raises(SystemExit) as leaving, output.reporting("resume", as_json=True) as report:
        report.groups.append(GroupReport("suspended", [], id="4711"))
        report.changed = changed
        Path("/proc/1/nothing-of-this-name").read_text()
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (leaving.value.code, answer["reason"]) == (1 if changed else 3, "system-call")
    state = ". Group 4711: suspended. " if changed else "; nothing was changed. "
    told = f"/proc/1/nothing-of-this-name: No such file or directory{state}See to the cause, then try again"
    assert err == f"nvsnap-gpu-suspend: {told}\n"


def test_a_denied_call_is_named_or_its_place() -> None:
    """The kernel's word alone leaves nobody any wiser."""
    with pytest.raises(PermissionError) as named, system.named("flock"):
        raise PermissionError(1, "Operation not permitted")
    assert str(system.refusal(named.value)).startswith("flock is answered with Operation not permitted. A seccomp")
    with pytest.raises(PermissionError) as unnamed:
        raise PermissionError(1, "Operation not permitted")
    assert "in test_output.test_a_denied_call" in str(system.refusal(unnamed.value))
    assert str(system.refusal(OSError(1, "Operation not permitted", 3))).startswith("Operation not permitted. ")
    assert "(ulimit -v, ulimit -d, its cgroup)" in str(system.refusal(MemoryError()))
