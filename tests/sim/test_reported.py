"""What users of such systems have reported (FR-…), and lessons of others (pitfalls), each as a case of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpususpend import errors, resume
from gpususpend.defaults import limits_with
from gpususpend.group import HINTS
from gpususpend.session import Context
from tests.programs.client import Worker
from tests.programs.setting import SIMCUDA, Setting
from tests.programs.tool import Tool
from tests.programs.usage import memory_by_pid
from tests.sim.conftest import MIB, Background, Pair, Start, running
from tests.sim.multicast import NEW, SIZE, make_team
from tests.sim.shim_control import Group

pytestmark = pytest.mark.usefixtures("own_network")


def share(owner: Worker, other: Worker, seed: int) -> None:
    """Let one process use memory of another, by descriptor, with content that both check."""
    block = owner.block(2 * MIB)
    owner.fill(block["address"], 2 * MIB, seed)
    fd = owner.mem_export(block["handle"])
    there = owner.hand(fd, other)
    imported = other.import_block(there, 2 * MIB)
    owner.close_fd(fd)
    other.close_fd(there)
    other.expect(imported["address"], 2 * MIB, [seed])


def caught_signals(pid: int) -> dict[str, str]:
    """Return which signals a process catches and ignores."""
    return dict(re.findall(r"^(SigCgt|SigIgn):\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M))


def test_pitfall6_no_signals(start_worker: Start, tool: Tool) -> None:
    """PyTorch replaces handlers of others: the shim has none, before a cycle and after it."""
    bare, worker = start_worker(0, shim=False), start_worker(0)
    assert caught_signals(worker.pid) == caught_signals(bare.pid)
    tool.suspend(worker.pid).expect(0)
    tool.resume(worker.pid).expect(0)
    assert caught_signals(worker.pid) == caught_signals(bare.pid)


def test_fr27_nobody_takes_descriptors_of_others(start_worker: Start, tool: Tool) -> None:
    """FR-27: descriptors go between ranks by SCM_RIGHTS; pidfd_getfd and ptrace may be denied, as in containers."""
    ranks = [start_worker(None), start_worker(None)]
    for device, rank in enumerate(ranks):
        for call in ("pidfd_getfd", "ptrace"):
            rank.deny(call)
        rank.start(device)
    share(ranks[0], ranks[1], 3)
    share(ranks[1], ranks[0], 4)
    for _ in range(2):
        tool.suspend(*(rank.pid for rank in ranks)).expect(0)
        tool.resume(*(rank.pid for rank in ranks)).expect(0)
        for rank in ranks:
            rank.check()


def test_fr31_no_python_of_the_program_runs(start_worker: Start, tool: Tool) -> None:
    """FR-31: memory goes and comes beneath the framework, while its interpreter cannot run a single line."""
    worker = start_worker(0)
    worker.fill(worker.alloc(MIB), MIB, 1)
    ours, theirs = os.pipe()
    try:
        ready, told = os.pipe()
        worker.send("hold_gil", worker.take_fd(told), worker.take_fd(ours))
        with open(told, "wb"), open(ready, "rb") as line:
            line.read(1)
        worker.send("verify")
        tool.suspend(worker.pid).expect(0)
        tool.resume(worker.pid).expect(0)
        worker._link.settimeout(0.2)
        with pytest.raises(TimeoutError):
            worker._link.recv(1)
        os.write(theirs, b"x")
        worker.receive("hold_gil")
        assert worker.receive("verify")[0].value == []
    finally:
        os.close(ours)
        os.close(theirs)


def footprint(pid: int) -> tuple[int, int, int]:
    """Return how many descriptors and mappings a process has, and its bytes of anonymous memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(Pss\w*): +(\d+) kB", text, re.M)}
    maps = len(Path(f"/proc/{pid}/maps").read_text().splitlines())
    return len(os.listdir(f"/proc/{pid}/fd")), maps, sizes["Pss_Anon"]


def test_fr47_nothing_grows_with_the_cycles(start_worker: Start) -> None:
    """FR-47: 100 cycles; descriptors, mappings and memory of the ranks stay what they were after the first few."""
    ranks = [start_worker(0), start_worker(1)]
    share(ranks[0], ranks[1], 3)
    ranks[1].fill(ranks[1].alloc(MIB), MIB, 5)
    with Group(ranks) as group:
        for _ in range(10):
            group.cycle()
        before = [footprint(rank.pid) for rank in ranks]
        for _ in range(90):
            group.cycle()
        after = [footprint(rank.pid) for rank in ranks]
    for rank, was, now in zip(ranks, before, after, strict=True):
        rank.check()
        # Far less than one in each cycle: a shim closes its connections a moment after its caller, and malloc makes a
        # few more of its arenas when threads meet in it.
        assert now[0] <= was[0] + 4 and now[1] <= was[1] + 20 and now[2] <= was[2] + MIB, (was, now)


def test_fr6_nothing_large_is_left_to_the_driver(
    start_worker: Start, tool: Tool, machine: Setting, background: Callable[..., Background]
) -> None:
    """FR-6: its checkpoint is slow, so by the time of the lock everything that was allocated is in the arenas."""
    worker = start_worker(0)
    context = memory_by_pid(machine)[worker.pid]
    for _ in range(4):
        worker.alloc(16 * MIB)
    assert memory_by_pid(machine)[worker.pid] >= context + 64 * MIB
    machine.inject("cuCheckpointProcessLock 1 hold")
    command = background("suspend", worker.pid)
    command.wait_for_step("lock")
    machine.wait_until_held()
    assert memory_by_pid(machine)[worker.pid] <= context + MIB
    machine.inject("")
    command.end().expect(0)
    tool.resume(worker.pid).expect(0)


def test_fr26_bind_that_the_fabric_manager_refuses(start_worker: Start, tool: Tool, machine: Setting) -> None:
    """FR-26: 802, which passes: all bind again together, and are told of it; no other failure is tried again."""
    team = make_team([start_worker(device, env=NEW) for device in (0, 1)], [0, 1])
    for seat in team.seats:
        seat.bind()
        seat.map()
    tool.suspend(*team.pids).expect(0)
    machine.inject("cuMulticastBindMem 1 802; cuMulticastBindMem 2 401", team.pids[1])
    answer = tool.resume(*team.pids).expect(8).json
    error, [warning] = answer["error"], answer["warnings"]
    assert (error["step"], error["pid"], error["cuda"]) == ("bind", team.pids[1], 401)
    assert f"bind failed on pid {team.pids[1]}" in warning and "CUDA_ERROR_SYSTEM_NOT_READY" in warning
    machine.inject("cuMulticastBindMem 1 802", team.pids[1])
    tool.resume(*team.pids).expect(0)
    team.check(7)


def test_fr26_fabric_that_does_not_become_ready() -> None:
    """FR-26: it is asked for a while only, and then named with who may be the cause."""
    failure = errors.ShimError(step="bind", pid=7, cuda=802, cuda_name="", detail="802")
    asked: list[str] = []
    warnings: list[str] = []

    def verb(name: str, seconds: float) -> None:
        asked.append(name)
        raise failure

    context = SimpleNamespace(warnings=warnings, warn=lambda text: Context.warn(context, text))  # type: ignore[arg-type]
    session = SimpleNamespace(limits=limits_with(fabric_s=0.6), verb=verb, context=context)
    with pytest.raises(errors.ShimError):
        resume.rebuild(session, "bind")  # type: ignore[arg-type]
    assert len(asked) > 1 and len(warnings) == 1
    assert "nvidia-fabricmanager" in HINTS[802]


def test_pitfall11_object_that_nothing_is_bound_to(start_worker: Start, tool: Tool, machine: Setting) -> None:
    """Even such a one makes a checkpoint hang: it is taken apart, and can be used after the resume."""
    team = make_team([start_worker(device, env=NEW) for device in (0, 1)], [0, 1])
    tool.suspend(*team.pids).expect(0)
    tool.resume(*team.pids).expect(0)
    for seat in team.seats:
        seat.bind()
    for seat in team.seats:
        seat.map()
    team.check(3)
    assert all(seat.memory["size"] == SIZE for seat in team.seats if "size" in seat.memory)


PLUGIN = """
extern int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(unsigned long long *, unsigned long);
int use_cuda(void) {
    int device; void *context; unsigned long long memory;
    return cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device)
        || cuCtxSetCurrent(context) || cuMemAlloc_v2(&memory, 4096);
}
"""

DEEP = """
import ctypes, os, sys, time
assert ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_DEEPBIND).use_cuda() == 0
print("ready", flush=True)
time.sleep(600)
"""


def test_fr38_library_that_passes_the_shim_by(
    machine: Setting, tool: Tool, tmp_path: Path, start_worker: Start
) -> None:
    """FR-38: RTLD_DEEPBIND binds a library to the driver itself: refused alone and beside a rank, not half carried."""
    worker = start_worker(0)
    (tmp_path / "plugin.c").write_text(PLUGIN)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "plugin.so", tmp_path / "plugin.c",
                    f"-L{SIMCUDA.parent}", "-l:libcuda.so.1"], check=True, timeout=60)
    process = subprocess.Popen([sys.executable, "-c", DEEP, tmp_path / "plugin.so"], stdout=subprocess.PIPE, text=True,
                               env=machine.environ(with_shim=True))
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        answer = tool.suspend(process.pid).expect(3)
        assert answer.json["reason"] == "nothing-found", answer
        for depth in ("process", "pages"):
            error = tool.suspend(worker.pid, process.pid, options=("--depth", depth)).expect(3).json["error"]
            assert (error["code"], error["pid"]) == ("past-the-shim", process.pid)
        running(tool)
    finally:
        process.kill()
        process.communicate()


def test_fr46_page_locking_that_ends_half_way(pair: Pair, tool: Tool, machine: Setting) -> None:
    """FR-46: the driver takes no more: what is locked is given back at the resume, and nothing of it is in the way."""
    for _ in range(2):
        machine.inject("cuMemHostRegister_v2 1 712", pair.first.pid)
        answer = tool.suspend(*pair.pids).expect(0)
        assert f"pid {pair.first.pid}" in answer.stderr and "copied more slowly" in answer.stderr
        machine.inject("", pair.first.pid)
        tool.resume(*pair.pids).expect(0)
        pair.check()
    tool.suspend(*pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()
