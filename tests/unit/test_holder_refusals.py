"""The holder where the system does not let it trace, or does not let it start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpususpend import errors, holder, tracing
from gpususpend.deadline import Deadline
from gpususpend.defaults import limits_with
from gpususpend.holder import Holder, HoldTarget
from tests.unit.threads_program import Counting, build, wait_for

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("program"))


@pytest.fixture
def process(program: Path, tmp_path: Path) -> Iterator[Counting]:
    counting = Counting(program, tmp_path, 3)
    yield counting
    counting.end()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


def stop_in_child(state_dir: Path, pid: int, prepare: str, interpreter: str = sys.executable) -> dict[str, Any]:
    """Run `prepare`, then check and stop `pid`, in a process of its own; return what the two said."""
    script = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
sys.dont_write_bytecode = True
from pathlib import Path
from tests.unit import holder_child
{prepare}
print(json.dumps(holder_child.attempt(Path({str(state_dir)!r}), {pid})))
"""
    done = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, timeout=100, cwd="/")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_ptrace_denied_by_seccomp(state_dir: Path, process: Counting) -> None:
    said = stop_in_child(state_dir, process.pid, "from tests.programs.denied import deny; deny('ptrace')")
    for verb in ("check", "stop"):
        assert said[verb]["code"] == "cannot-trace"
        assert said[verb]["setting"] == "seccomp filter"
    process.assert_running()


def test_already_traced_by_another(state_dir: Path, process: Counting) -> None:
    other = Holder.start(state_dir)
    with other, Holder.start(state_dir) as held:
        other.stop([HoldTarget(process.pid)], Deadline(60))
        for verb in (held.check, held.stop):
            with pytest.raises(errors.CannotTrace, match=rf"pid {other.pid} \(gpushare-holder\)"):
                verb([HoldTarget(process.pid)], Deadline(60))
        process.assert_stopped()
    process.assert_running()


def test_traced_by_a_holder_that_is_to_end(state_dir: Path, process: Counting) -> None:
    """Its threads can be stopped anew then."""
    with Holder.start(state_dir) as kept, Holder.start(state_dir) as held:
        kept.stop([HoldTarget(process.pid)], Deadline(20))
        held.check([HoldTarget(process.pid)], Deadline(20), holders=[kept.pid])
        with pytest.raises(errors.CannotTrace):
            held.check([HoldTarget(process.pid)], Deadline(20), holders=[held.pid])


def test_a_refusal_lets_go_of_everything(state_dir: Path, process: Counting, program: Path, tmp_path: Path) -> None:
    """What was stopped before the refused one runs again."""
    traced = Counting(program, tmp_path, 1)
    try:
        with Holder.start(state_dir) as other, Holder.start(state_dir) as held:
            other.stop([HoldTarget(traced.pid)], Deadline(60))
            with pytest.raises(errors.CannotTrace):
                held.stop([HoldTarget(process.pid), HoldTarget(traced.pid)], Deadline(60))
            process.assert_running()
            assert held.go(Deadline(60)).threads == {}
    finally:
        traced.end()


def ordinary_interpreter() -> str:
    """Return an interpreter that an ordinary user may execute."""
    for candidate in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        if candidate and can_run(candidate):
            return candidate
    pytest.skip("no Python 3.10 or newer that an ordinary user may execute")


def can_run(interpreter: str) -> bool:
    """Tell whether nobody can run it on the tree."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import gpususpend.holder; sys.exit(sys.version_info < (3, 10))"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", code], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", timeout=100
        )
    except OSError:
        return False
    return done.returncode == 0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
AS_NOBODY = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"


@pytest.fixture
def open_state_dir(program: Path) -> Iterator[Path]:
    """A state directory that nobody owns, at a place that nobody reaches."""
    path = Path(tempfile.mkdtemp(prefix="gpushare-test-", dir="/tmp"))
    os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


@needs_root
def test_an_ordinary_user_on_an_own_process(open_state_dir: Path) -> None:
    interpreter = ordinary_interpreter()
    sleeper = subprocess.Popen(["sleep", "600"], user=NOBODY, group=NOBODY, extra_groups=[])
    try:
        # Before its program has begun it is not dumpable, so nobody may trace it.
        wait_for(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n")
        said = stop_in_child(open_state_dir, sleeper.pid, AS_NOBODY, interpreter)
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if scope.exists() and scope.read_text().strip() != "0":
            assert said["stop"]["setting"] == f"kernel.yama.ptrace_scope={scope.read_text().strip()}"
        else:
            assert said == {"check": {}, "stop": {}}
    finally:
        sleeper.kill()
        sleeper.wait()


@needs_root
def test_an_ordinary_user_on_a_process_of_root(open_state_dir: Path, process: Counting) -> None:
    said = stop_in_child(open_state_dir, process.pid, AS_NOBODY, ordinary_interpreter())
    for verb in ("check", "stop"):
        assert said[verb]["code"] == "cannot-trace"
        assert said[verb]["setting"] == "CAP_SYS_PTRACE"
    process.assert_running()


@pytest.mark.parametrize(
    ("scope", "detail"),
    [
        ("1", "only a process's ancestors may trace it"),
        ("2", "only a process with CAP_SYS_PTRACE may trace"),
        ("3", "nobody may trace"),
    ],
)
def test_yama_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, detail: str) -> None:
    """The reason is read from /proc, here a made-up one: Yama is not in every kernel."""
    own = tmp_path / "self"
    target = tmp_path / "4711" / "task" / "4711"
    for folder in (own, target):
        folder.mkdir(parents=True)
    (own / "status").write_text("CapEff:\t0000000000000000\n")
    (tmp_path / "4711" / "status").write_text(f"Uid:\t{os.geteuid()}\t{os.geteuid()}\t{os.geteuid()}\t0\n")
    (target / "status").write_text("TracerPid:\t0\n")
    yama = tmp_path / "sys" / "kernel" / "yama"
    yama.mkdir(parents=True)
    (yama / "ptrace_scope").write_text(f"{scope}\n")
    monkeypatch.setattr(tracing, "PROC", str(tmp_path))
    error = PermissionError(1, "Operation not permitted")
    denied = tracing.refusal(4711, 4711, error)
    assert (denied.detail, denied.setting) == (detail, f"kernel.yama.ptrace_scope={scope}")
    (target / "status").write_text("TracerPid:\t99\n")
    assert tracing.refusal(4711, 4711, error).setting == "TracerPid"
    assert tracing.refusal(4711, 4711, error, holders=[99]).setting == f"kernel.yama.ptrace_scope={scope}"


@needs_root
def test_B12_no_process_can_be_made(open_state_dir: Path) -> None:
    """Starting fails, and no signal is sent to anybody: a cleanup with pid -1 would reach the whole session."""
    interpreter = ordinary_interpreter()
    bystander = subprocess.Popen(["sleep", "600"], user=NOBODY, group=NOBODY, extra_groups=[])
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True
import os, resource, signal
from pathlib import Path
from gpususpend.helpers import HelperFailed
from gpususpend.holder import Holder
{AS_NOBODY}
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
sent = []
os.kill = os.killpg = signal.pidfd_send_signal = lambda *a: sent.append(a)
try:
    Holder.start(Path({str(open_state_dir)!r}))
except HelperFailed as error:
    print(error, sent)
"""
    try:
        done = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, timeout=100, cwd="/")
        cause = "it cannot be started: clone3 or execve is answered with Resource temporarily unavailable"
        assert done.stdout == f"the holder process failed: {cause} []\n", done
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_holder_that_breaks_is_reported(state_dir: Path, process: Counting) -> None:
    with Holder.start(state_dir) as held:
        held.stop([HoldTarget(process.pid)], Deadline(60))
        os.kill(held.pid, signal.SIGKILL)
        with pytest.raises(errors.HolderFailed, match="ended"):
            held.go(Deadline(60))
    process.assert_running()


def test_a_late_answer_is_not_taken_for_the_next_one(
    state_dir: Path, process: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Holder.start(state_dir) as held:
        os.kill(held.pid, signal.SIGSTOP)
        monkeypatch.setattr(holder, "LIMITS", limits_with(helper_grace_s=0.1))
        with pytest.raises(errors.HolderFailed, match="does not answer"):
            held.stop([HoldTarget(process.pid)], Deadline(0.1))
        os.kill(held.pid, signal.SIGCONT)
        monkeypatch.undo()
        assert held.go(Deadline(60)).threads == {}
        process.assert_running()
