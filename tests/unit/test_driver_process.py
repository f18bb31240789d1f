"""The driver process: answers, deadlines, and what becomes of calls that do not return."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpususpend import driver, errors, helpers, holder, processes
from gpususpend.deadline import Deadline
from gpususpend.defaults import limits_with
from gpususpend.driver import DriverProcess, DriverResult
from gpususpend.driver_process import NOT_CALLED
from gpususpend.helpers import HelperFailed
from tests.unit.threads_program import wait_for

SOURCE = Path(__file__).parent.parent / "programs" / "checkpoint_driver.c"
GOOD, REFUSED, UNKNOWN_RESULT, UNKNOWN_STATE, HANGS, KILLS = range(1, 7)
OLD, NEW = "GPU-00112233-4455-6677-8899-aabbccddeeff", "GPU-ffeeddcc-bbaa-9988-7766-554433221100"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"]
    subprocess.run([*os.environ.get("CC", "gcc").split(), *flags, "-o", folder / "libcuda.so.1", SOURCE], check=True)
    return folder


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def release(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file whose existence lets calls on the hanging pid return."""
    path = tmp_path / "release"
    monkeypatch.setattr(driver, "SIMULATED_LIBRARY", library)
    monkeypatch.setattr(driver, "LIMITS", limits_with(helper_grace_s=60.0))
    monkeypatch.setenv("FAKE_RELEASE", str(path))
    yield path
    path.touch()


def start(state_dir: Path) -> DriverProcess:
    return DriverProcess.start(state_dir, simulated=True, deadline=Deadline(60))


def test_answers(state_dir: Path, release: Path) -> None:
    with start(state_dir) as process:
        assert process.version() == driver.DriverVersion("580.159.04", 13000, True)
        states = process.states([GOOD, REFUSED, UNKNOWN_RESULT, UNKNOWN_STATE], Deadline(60))
        assert states[GOOD].value == driver.DriverState.CHECKPOINTED
        assert states[GOOD].ok
        assert (states[REFUSED].code, states[REFUSED].name) == (401, "CUDA_ERROR_ILLEGAL_STATE")
        assert (states[UNKNOWN_RESULT].code, states[UNKNOWN_RESULT].name) == (4242, "unknown result 4242")
        assert (states[UNKNOWN_STATE].code, states[UNKNOWN_STATE].value) == (0, 77)
        assert process.restore_threads([GOOD], Deadline(60))[GOOD].value == GOOD + 100
        assert process.lock([GOOD, REFUSED], 0.0)[GOOD].ok
        assert process.lock([UNKNOWN_RESULT], 5)[UNKNOWN_RESULT].code == 4242
        assert process.checkpoint([GOOD], Deadline(60))[GOOD].ok
        assert process.restore([GOOD], [], Deadline(60))[GOOD].ok
        assert process.unlock([GOOD], Deadline(60))[GOOD].ok
        assert process.unlock([], Deadline(60)) == {}
    assert os.listdir(state_dir) == []
    # Not even a zombie is left.
    assert not Path(f"/proc/{process.pid}").exists()


def test_gpu_pairs_reach_the_driver(
    state_dir: Path, release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "pairs"
    monkeypatch.setenv("FAKE_PAIRS", str(written))
    with start(state_dir) as process:
        assert process.restore([GOOD], [(OLD, NEW), (NEW, OLD)], Deadline(60))[GOOD].ok
    plain = [bytes.fromhex(text.removeprefix("GPU-").replace("-", "")) for text in (OLD, NEW, NEW, OLD)]
    assert written.read_bytes() == b"".join(plain)


def test_a_malformed_pair_is_an_answer(state_dir: Path, release: Path) -> None:
    with start(state_dir) as process:
        result = process.restore([GOOD], [("GPU-nonsense", NEW)], Deadline(60))[GOOD]
        assert (result.code, result.finished) == (NOT_CALLED, True)


def test_a_missing_function_is_an_answer(state_dir: Path, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_OLD", "1")
    with start(state_dir) as process:
        result = process.unlock([GOOD], Deadline(60))[GOOD]
        assert result.code == NOT_CALLED
        assert "cuCheckpointProcessUnlock" in result.name


def test_calls_run_at_once_and_one_that_hangs_is_named(state_dir: Path, release: Path) -> None:
    """Pitfall 1 and 8: the others' results do not wait for it, and it is not taken for a success."""
    with start(state_dir) as process:
        process.keep_waiting = lambda pids: pids != [HANGS]
        results = process.checkpoint([HANGS, GOOD, REFUSED], Deadline(60))
        assert results[GOOD].ok
        assert results[REFUSED].code == 401
        assert not results[HANGS].finished
        assert not results[HANGS].ok
        # The process still serves, and what comes late does not answer another request.
        release.touch()
        assert process.states([GOOD], Deadline(60))[GOOD].value == 2
        wait_for(lambda: driver.leftovers(state_dir)[0].results[("checkpoint", HANGS)].finished)
        assert process.unlock([GOOD], Deadline(60))[GOOD].ok


def test_the_process_outlives_a_call_and_writes_what_it_returned(state_dir: Path, release: Path) -> None:
    process = start(state_dir)
    assert not process.checkpoint([HANGS], Deadline(0.2))[HANGS].finished
    process.close()
    (left,) = driver.leftovers(state_dir)
    assert left.alive()
    assert (left.pid, left.start_time) == (process.pid, process.start_time)
    assert os.getsid(left.pid) == left.pid
    assert {os.readlink(f"/proc/{left.pid}/fd/{fd}") for fd in (0, 1, 2)} == {"/dev/null"}
    assert not left.results[("checkpoint", HANGS)].finished
    # A service manager that stops everything does not break the call off.
    os.kill(left.pid, signal.SIGTERM)
    release.touch()
    wait_for(lambda: not left.alive())
    (left,) = driver.leftovers(state_dir)
    assert left.results[("checkpoint", HANGS)].ok
    driver.forget(state_dir, left)
    assert os.listdir(state_dir) == []


def test_a_killed_command_leaves_its_calls_on_record(state_dir: Path, release: Path, library: Path) -> None:
    """The command is killed while it waits: the call goes on, and `recover` can read what it came to."""
    script = f"""
from pathlib import Path
from gpususpend import driver
driver.SIMULATED_LIBRARY = Path({str(library)!r})
process = driver.DriverProcess.start(Path({str(state_dir)!r}), simulated=True)
print("ready", flush=True)
process.lock([{HANGS}], 1000)
"""
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    assert command.stdout.readline() == "ready\n"
    wait_for(release.with_name("release.entered").exists)
    command.kill()
    command.wait()
    # Its pipe ends although the driver process lives on.
    command.stdout.read()
    wait_for(lambda: bool(driver.leftovers(state_dir)))
    release.touch()
    wait_for(lambda: driver.leftovers(state_dir)[0].results[("lock", HANGS)].ok)
    command.stdout.close()


def test_a_driver_process_that_dies_is_not_taken_for_success(state_dir: Path, release: Path) -> None:
    with start(state_dir) as process:
        results = process.checkpoint([KILLS], Deadline(60))
        assert results == {KILLS: DriverResult(0, "not returned", 0.0, finished=False)}
        with pytest.raises(HelperFailed):
            process.states([GOOD], Deadline(60))


@pytest.mark.parametrize(("code", "name"), [("100", "CUDA_ERROR_NO_DEVICE"), ("999", "CUDA_ERROR_UNKNOWN")])
def test_a_driver_that_does_not_start(
    state_dir: Path, release: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str
) -> None:
    monkeypatch.setenv("FAKE_INIT", code)
    with pytest.raises(errors.NoDriver, match=f"cuInit answers {code} {name}"):
        start(state_dir)


def test_no_driver_at_all(state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no library stands where the driver would be found first."""
    (tmp_path / "libcuda.so.1").write_text("")
    monkeypatch.setattr(driver, "SIMULATED_LIBRARY", tmp_path)
    with pytest.raises(errors.NoDriver, match="it cannot be loaded"):
        start(state_dir)


@pytest.mark.parametrize("version", ["565.57.01", "550.90", ""])
def test_an_old_driver_is_refused(
    state_dir: Path, release: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("FAKE_VERSION", version)
    with pytest.raises(errors.DriverTooOld, match="needs 570 or newer"):
        start(state_dir)


def test_a_gpu_map_needs_580(state_dir: Path, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERSION", "575.51.03")
    with start(state_dir) as process, pytest.raises(errors.DriverTooOld, match="--gpu-map: it needs 580"):
        process.require_map()
    monkeypatch.setenv("FAKE_VERSION", "580.65.06")
    with start(state_dir) as process:
        process.require_map()


def test_the_environment_of_the_process(state_dir: Path, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", f"/nowhere/{processes.SHIM_LIBRARY}")
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/nowhere/tool.so")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
    with start(state_dir) as process:
        names = {line.split(b"=")[0] for line in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")}
    unwanted = {"LD_PRELOAD", "CUDA_INJECTION64_PATH", "CUDA_VISIBLE_DEVICES"}
    assert not names & {name.encode() for name in (*unwanted, "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM")}


def test_other_preloads_stay() -> None:
    environment = {"LD_PRELOAD": f"/a/{processes.SHIM_LIBRARY}:/b/libasan.so", "HOME": "/root"}
    assert helpers.helper_environment(environment) == {"LD_PRELOAD": "/b/libasan.so", "HOME": "/root"}


def test_the_supervisor_loads_no_driver() -> None:
    code = "import sys, gpususpend.driver; sys.exit(any(name.startswith('cuda') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["driver_process", "holder_process"])
def test_a_helper_loads_nothing_slow(module: str) -> None:
    """It is started anew by every command; `secrets` alone loads all that hashes."""
    slow = {"secrets", "hashlib", "click", "numpy", "rich"}
    code = f"import sys, gpususpend.{module}; print({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "set()\n"


def test_b13_a_lock_that_fails_at_once_is_never_a_success(state_dir: Path, release: Path) -> None:
    with start(state_dir) as process:
        for _ in range(100):
            results = process.lock([GOOD, REFUSED], 5)
            assert (results[GOOD].ok, results[REFUSED].ok, results[REFUSED].code) == (True, False, 401)


def test_a_signal_to_the_terminal_does_not_reach_it(state_dir: Path, release: Path) -> None:
    with start(state_dir) as process:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)


REQUESTS: dict[str, dict[str, object]] = {
    driver.MODULE: {"do": "state", "pid": 1, "arguments": [1]}, holder.MODULE: {"do": "keep", "seconds": 60.0}
}  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
@pytest.mark.parametrize("when", ["at once", "once Python heeds it"])
@pytest.mark.parametrize("module", REQUESTS)
def test_a_signal_while_it_is_loaded(
    state_dir: Path, capfd: pytest.CaptureFixture[str], module: str, when: str, number: signal.Signals
) -> None:
    """It waits until the helper has said what becomes of it; none ends with a trace."""
    helper = helpers.Helper.start("x", module, state_dir, os.environ)

    def heeded() -> bool:
        text = Path(f"/proc/{helper.pid}/status").read_text()
        masks = re.findall(r"^Sig(?:Cgt|Ign):\s(\w+)", text, re.MULTILINE)
        return any(int(mask, 16) >> (signal.SIGINT - 1) & 1 for mask in masks)

    try:
        if when != "at once":
            wait_for(heeded)
        os.kill(helper.pid, number)
        if module == holder.MODULE and number == signal.SIGTERM:
            assert helper.ended(Deadline(60))  # as ever
        else:
            helper.send({"id": 1, **REQUESTS[module]})
            assert helper.receive(Deadline(60))["id"] == 1
        helper.hang_up()
        if module == holder.MODULE:  # which was kept, and ends since nothing that it holds lives
            assert helper.ended(Deadline(60))
    finally:
        helper.kill()
        helper.ended(Deadline(60))
        helper.close()
    assert capfd.readouterr() == ("", "")


def test_threads_of_the_caller_do_not_hinder_the_start(state_dir: Path, release: Path) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with start(state_dir) as process:
            assert process.states([GOOD], Deadline(60))[GOOD].ok
    finally:
        done.set()
        thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
