"""The tool's own processes beside the GPUs, and where a workload goes that is moved to another one."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.programs.usage import memory_by_pid
from tests.sim.conftest import MIB, Pair, Start
from tests.sim.shim_control import ask

pytestmark = pytest.mark.usefixtures("own_network")


def test_pitfall19_no_context_in_our_processes(pair: Pair, tool: Tool, machine: Setting, tmp_path: Path) -> None:
    """Pitfall 19: what we start calls cuInit and asks; a context would hold GPU memory and stand in device maps."""
    trace = tmp_path / "trace"
    env = {"SIMCUDA_TRACE": str(trace)}
    tool.suspend(*pair.pids, env=env).expect(0)
    assert memory_by_pid(machine) == {}
    tool.resume(*pair.pids, env=env).expect(0)
    calls = collections.defaultdict(set)
    for line in trace.read_text().splitlines():
        name, _, pid = line.split()
        calls[int(pid)].add(name)
    assert calls and not calls.keys() & set(pair.pids)
    for names in calls.values():
        assert "cuInit" in names
        assert not [name for name in names if name.startswith(("cuCtxCreate", "cuDevicePrimaryCtx", "cuMem"))], names
    pair.check()


def test_pitfall23_gpus_are_paired_by_uuid(start_worker: Start, tool: Tool, tmp_path: Path) -> None:
    """Pitfall 23: a map names both GPUs by UUID in any order of lines; the content is where the map says."""
    worker = start_worker(0)
    block = worker.alloc(3 * MIB)
    worker.fill(block, 3 * MIB, 5)
    uuids = [gpu["uuid"] for gpu in tool.run("gpus", "--driver", "sim").expect(0).json["gpus"]]
    bad, good = tmp_path / "bad.map", tmp_path / "good.map"
    bad.write_text("0 1\n1 0\n")
    good.write_text(f"{uuids[1]} {uuids[0]}\n{uuids[0]} {uuids[1]}\n")
    tool.suspend(worker.pid).expect(0)
    answer = tool.resume(worker.pid, options=("--gpu-map", str(bad))).expect(3)
    assert answer.json["reason"] == "gpu-map"
    tool.resume(worker.pid, options=("--gpu-map", str(good))).expect(0)
    worker.check()
    assert worker.device_uuid(0) in uuids[1].replace("-", "")


def test_pitfall30_no_pid_is_kept(start_worker: Callable[..., Worker]) -> None:
    """Pitfalls 10 and 30: parent and child are served under their own pids, though the driver was found before."""
    parent = start_worker(None)
    parent.driver_version()
    child = parent.fork_with_cuda()
    until = time.monotonic() + 60
    while f"nvsnap-gpushare.{child}" not in Path("/proc/net/unix").read_text() or (
        ask(child, "status")["objects"] != "1"
    ):
        assert time.monotonic() < until, "the child owns nothing"
        time.sleep(0.01)
    theirs = ask(child, "hello")
    parent.start(0)
    assert parent.alloc(3 * MIB) and parent.alloc(3 * MIB)
    ours = ask(parent.pid, "hello")
    assert (int(ours["pid"]), int(theirs["pid"])) == (parent.pid, child) and ours["nonce"] != theirs["nonce"]
    assert ask(child, "status")["objects"] == "1" and ask(parent.pid, "status")["objects"] == "2"
