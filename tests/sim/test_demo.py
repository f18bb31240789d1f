"""The demo, as `make demo` runs it: what it shows, and that it notices when something is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from gpususpend.demo import rank as demo_rank
from gpususpend.demo import wire
from tests.programs.setting import ROOT, SCRUBBED, Setting

pytestmark = pytest.mark.timeout(270)


def demo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the demo on the simulated driver to its end, and see that it leaves no process."""
    environment = {name: value for name, value in os.environ.items() if name not in SCRUBBED} | variables
    command = [sys.executable, "-m", "gpususpend.demo", "--driver", "sim", "--mib", "8", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=240)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def result(*arguments: str) -> dict[str, Any]:
    """Run the demo and return its JSON."""
    done = demo("--json", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_step_and_check_without_a_suspend(ranks: int) -> None:
    found = result("--cycles", "0", "--ranks", str(ranks))
    assert len(found["ranks"]) == ranks
    assert found["simulated"] is True
    assert found["schema"] == "gpushare-demo/1"


def test_cycles_leave_no_pid_and_no_memory_on_the_gpu() -> None:
    found = result("--cycles", "2")
    assert [cycle["cycle"] for cycle in found["cycles"]] == [1, 2]
    for cycle in found["cycles"]:
        assert cycle["suspended"]["pids_listed_before"] is True
        assert cycle["suspended"]["pids_listed"] == []
        assert cycle["suspended"]["unreturned_bytes"] <= 50 << 20
        assert cycle["checked_bytes"] > 2 * 8 << 20
        assert cycle["steps"] >= 4
        (group,) = cycle["suspend"]["report"]["groups"]
        names = [phase["name"] for phase in group["phases"]]
        assert {"quiesce", "release", "checkpoint"} <= set(names)


def test_table_says_simulated_on_every_line_of_progress() -> None:
    done = demo("--cycles", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr and all(line.startswith("simulated: ") for line in done.stderr.splitlines())
    assert "simulated" in done.stdout and "release" in done.stdout and "GB/s" in done.stdout


def test_failing_driver_call_ends_the_demo_with_its_name() -> None:
    done = demo("--cycles", "0", SIMCUDA_INJECT="cuModuleLoadData 1 2")
    assert done.returncode == 1
    assert "cuModuleLoadData" in done.stderr and "CUDA_ERROR_OUT_OF_MEMORY" in done.stderr
    assert "rank " in done.stderr and "Traceback" not in done.stderr


def test_rank_whose_demo_has_gone_says_nothing(machine: Setting) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with ours:
            wire.send(ours, {"do": "look"})
        command = [sys.executable, "-m", "gpususpend.demo.rank", str(theirs.fileno()), "0", "2"]
        done = subprocess.run(command, cwd=ROOT, env=machine.environ(with_shim=True), pass_fds=[theirs.fileno()],
                              capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_failing_resume_ends_the_demo_with_what_the_command_said() -> None:
    done = demo("--cycles", "1", SIMCUDA_INJECT="cuCheckpointProcessRestore 1 2")
    assert done.returncode == 1
    assert "simulated: error: resume exited with 8: " in done.stderr, done.stderr
    assert "restore failed on pid" in done.stderr and "Left in phase resuming" in done.stderr, done.stderr


def test_one_wrong_byte_is_named() -> None:
    wanted = demo_rank.iota(1000, 5)
    found = wanted.copy()
    found[700] += np.uint32(1)
    with pytest.raises(demo_rank.Mismatch, match="inbox: 1 of 1000 differ, first at 700: 706 instead of 705"):
        demo_rank.compare("inbox", found, wanted)
    assert demo_rank.compare("inbox", wanted, wanted) == 4000
