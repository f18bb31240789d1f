"""`suspend --depth pages`: the memory leaves the GPUs, contexts stay, and threads run until they come to a gate."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpususpend import processes
from gpususpend.defaults import COMMAND
from tests.programs.client import Worker
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool
from tests.sim.conftest import Background, Pair, more, records, running, standing, state, stopped_threads
from tests.sim.test_suspend_states import killed

MIB, GIB = 1 << 20, 1 << 30
pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]
Start = Callable[..., Worker]
Run = Callable[..., Background]


def pages(tool: Tool, *pids: int) -> dict[str, object]:
    """Suspend at this depth; return the group of the report."""
    return dict(tool.run("suspend", "--driver", "sim", "--depth", "pages", *pids).expect(0).json["groups"][0])


def test_memory_leaves_and_comes_back(pair: Pair, tool: Tool) -> None:
    """The GPUs keep the contexts and nothing else; no driver checkpoint, no stopped thread; three times."""
    for _ in range(3):
        group = pages(tool, *pair.pids)
        assert group["state"] == "suspended" and group["depth"] == "pages" and group["holder"] is None
        names = [phase["name"] for phase in group["phases"]]  # type: ignore[attr-defined]
        assert "release" in names and not {"lock", "checkpoint", "freeze"} & set(names)
        for gpu in group["gpus"]:  # type: ignore[attr-defined]
            assert gpu["used_before"] - gpu["used_after"] >= 3 * MIB, gpu
        for worker in pair.both:
            assert worker.nvidia_fds() and not stopped_threads(worker.pid)
        back = tool.run("resume", "--driver", "sim", *pair.pids).expect(0).json["groups"][0]
        asked = {phase["name"]: phase["ranks"] for phase in back["phases"]}
        assert len(asked["load"]) == 2 and not asked["restore"] and not asked["unlock"], "the driver has nothing to do"
        pair.check()
    running(tool)


def test_threads_run_until_they_come_to_a_gate(pair: Pair, tool: Tool, machine: Setting) -> None:
    """Launches wait, whatever the thread; what uses no CUDA goes on."""
    first = pair.first
    loops = [first.loop_start(kind) for kind in ("launches", "graphs", "copies")]
    pages(tool, *pair.pids)
    standing(first, loops)
    assert state(tool, machine, first.pid)["state"] == "suspended"
    tool.resume(*pair.pids).expect(0)
    for loop in loops:
        more(first, loop)
    pair.check()


def test_host_memory_stays_where_cpu_threads_use_it(start_worker: Start, tool: Tool) -> None:
    """HOST_NUMA memory is not the GPU's: a thread uses it all the time, the suspend included."""
    worker = start_worker(0)
    block = worker.block(2 * MIB, "host_numa")
    worker.alloc(MIB)
    loop = worker.loop_start("host_memory", address=block["address"], size=2 * MIB)
    pages(tool, worker.pid)
    more(worker, loop)
    tool.resume(worker.pid).expect(0)
    assert worker.loop_stop(loop)["errors"] == []


def test_what_needs_the_other_depth_is_refused(pair: Pair, tool: Tool) -> None:
    """A second suspend at another depth, and `stop`, which is for a dump; the same depth again is done already."""
    pages(tool, *pair.pids)
    again = tool.run("suspend", "--driver", "sim", "--depth", "pages", *pair.pids).expect(0)
    assert again.json["already"] is True
    for words in (["suspend", "--driver", "sim", *pair.pids], ["stop", "--driver", "sim", *pair.pids]):
        refusal = tool.run(*words).expect(3)
        assert refusal.json["error"]["code"] == "other-depth" and "pages" in refusal.json["error"]["message"]
    tool.resume(*pair.pids).expect(0)
    pair.check()


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_fr42_memory_that_is_left_to_the_driver_is_told(start_worker: Start, tool: Tool, depth: str) -> None:
    """FR-42: what a stream-ordered pool holds is not the shim's, and does not go at depth pages."""
    worker = start_worker(0)
    options = ("--depth", depth)
    pool = worker.alloc_async(2 * GIB) if depth == "pages" else 0  # the driver would copy it at the other depth
    worker.stream_sync(0)
    warnings = tool.suspend(worker.pid, options=options).expect(0).json["warnings"]
    told = [text for text in warnings if "not carried by its shim" in text]
    assert bool(told) == bool(pool) and all(f"pid {worker.pid}: 2.0" in text for text in told), warnings
    assert all("stays on the GPUs" in text for text in told)
    tool.resume(worker.pid).expect(0)


def test_a_process_without_the_shim_is_refused(start_worker: Start, tool: Tool) -> None:
    """Nobody could move its memory."""
    bare = start_worker(0, shim=False)
    bare.alloc(MIB)
    refusal = tool.run("suspend", "--driver", "sim", "--depth", "pages", "--allow-unshimmed", bare.pid).expect(3)
    assert refusal.json["error"]["code"] == "no-shim-for-pages" and refusal.json["error"]["pid"] == bare.pid


HELD = {
    "prepare": "cuMemHostRegister_v2 1 hold",
    "release": "cuMemcpyDtoHAsync_v2 1 hold",
}


@pytest.mark.parametrize("step", [*HELD, "seal", "suspended"])
def test_recover_brings_a_cut_off_suspend_to_a_whole_state(
    pair: Pair, tool: Tool, machine: Setting, background: Run, step: str
) -> None:
    """Killed at any step: the recorded state, or running, and every byte as it was."""
    pages(tool, *pair.pids)
    whole = records(tool)[0]
    tool.resume(*pair.pids).expect(0)
    if step == "suspended":
        pages(tool, *pair.pids)
    elif step == "seal":
        killed(tool, step, "suspend", "--depth", "pages", *pair.pids)
    else:
        machine.inject(HELD[step])
        command = background("suspend", "--depth", "pages", *pair.pids)
        command.wait_for_step(step)
        machine.wait_until_held()
        command.kill()
        machine.inject("")
    assert records(tool)[0]["depth"] == "pages"
    tool.run("recover", "--driver", "sim", "--to", "suspended", *pair.pids).expect(0)
    assert state(tool, machine, pair.first.pid)["state"] == "suspended"
    told = {name: (whole[name], records(tool)[0][name]) for name in set(whole) - {"id", "created"}}
    assert all(before == now for before, now in told.values()), told
    tool.run("recover", "--driver", "sim", *pair.pids).expect(0)
    assert state(tool, machine, pair.first.pid)["state"] == "suspended"
    tool.run("recover", "--driver", "sim", "--to", "running", *pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.machine(driver="sim", devices=1, memory_bytes=1024 * MIB)
@pytest.mark.parametrize("cut_off", ["prepare", "load"])
def test_a_full_gpu_is_no_hindrance_to_what_is_there(
    start_worker: Start, tool: Tool, machine: Setting, background: Run, cut_off: str
) -> None:
    """Room is asked for where all memory is away: not where it never left, or came back in part."""
    ranks = [start_worker(0), start_worker(0)]
    free, _ = ranks[0].mem_info()
    size = 3 * free // 8 // MIB * MIB
    for worker in ranks:
        worker.fill(worker.alloc(size), size, 1)
    pids = [worker.pid for worker in ranks]
    if cut_off == "prepare":
        machine.inject(HELD["prepare"])
        command = background("suspend", "--depth", "pages", *pids)
        command.wait_for_step("prepare")
        machine.wait_until_held()
        command.kill()
    else:
        pages(tool, *pids)
        machine.inject("cuMemCreate 1 2", pids[1])
        tool.resume(*pids).expect(8)
    machine.inject("")
    tool.resume(*pids).expect(0)
    running(tool)
    for worker in ranks:
        worker.check()


def test_a_rank_that_cannot_get_its_memory_back_stays_suspended(pair: Pair, tool: Tool, machine: Setting) -> None:
    """FR-51: exit 8, and the resume can be repeated, with all content."""
    pages(tool, *pair.pids)
    machine.inject("cuMemCreate 1 2")
    tool.run("resume", "--driver", "sim", *pair.pids).expect(8)
    machine.inject("")
    tool.resume(*pair.pids).expect(0)
    pair.check()


def test_help_names_the_depths(tool: Tool) -> None:
    """With the command's own name in the example."""
    text = tool.run("suspend", "--help", json_out=False).expect(0).stdout
    assert "pages|process" in text.replace("process|pages", "pages|process") and COMMAND in text


@pytest.mark.usefixtures("private_huge_pages")
@pytest.mark.parametrize("option", ["--depth=pages", "--in-place"])
def test_the_arena_has_huge_pages_on_any_machine(start_worker: Start, tool: Tool, option: str) -> None:
    """Where no dump is taken, a private tmpfs may give them, whatever the machine's settings are."""
    worker = start_worker(0)
    worker.fill(worker.alloc(4 * MIB), 4 * MIB, 1)
    answer = tool.run("suspend", "--driver", "sim", option, worker.pid).expect(0)
    assert "plain pages" not in answer.stderr
    tool.resume(worker.pid).expect(0)
    worker.check()


def test_import_of_an_own_export_that_goes_first(pair: Pair, tool: Tool) -> None:
    """The owner's descriptor stays known when the import is gone, which has a place in the table before the owner's."""
    worker, other = pair.both
    first = worker.mem_create(2 * MIB)
    block = worker.block(4 * MIB)
    worker.fill(block["address"], 4 * MIB, 1)
    kept = worker.mem_export(block["handle"])
    worker.mem_release(first)
    own = worker.mem_import(kept)
    pages(tool, *pair.pids)
    tool.resume(*pair.pids).expect(0)
    worker.mem_release(own)
    for _ in range(2):
        pages(tool, *pair.pids)
        tool.resume(*pair.pids).expect(0)
        worker.check()
    there = worker.hand(kept, other)
    seen = other.import_block(there, 4 * MIB)
    worker.write(block["address"], [7])
    assert other.read(seen["address"]) == [7]


def test_export_without_a_descriptor_for_the_shim(pair: Pair, tool: Tool) -> None:
    """An export that the shim could not know again is refused, as one is for which there is no descriptor at all."""
    worker, other = pair.both
    block = worker.block(4 * MIB)
    worker.fill(block["address"], 4 * MIB, 1)
    opened = worker.use_up_fds()
    worker.close_fd(opened.pop())
    assert worker.code("mem_export", block["handle"]) != 0
    for fd in opened:
        worker.close_fd(fd)
    kept = worker.mem_export(block["handle"])
    pages(tool, *pair.pids)
    tool.resume(*pair.pids).expect(0)
    seen = other.import_block(worker.hand(kept, other), 4 * MIB)
    worker.write(block["address"], [7])
    assert other.read(seen["address"]) == [7]


IDLE = "import time; time.sleep(600)"
COMPUTES = """
import sys, time
sys.path.insert(0, {root!r})
from cuda.bindings import driver
for call in (driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(0)):
    assert call[0] == 0, call
driver.cuCtxSetCurrent(call[1])
assert driver.cuMemAlloc(1 << 20)[0] == 0
time.sleep(600)
"""


def wait_for_program(worker: Worker, code: str) -> None:
    """Wait until a process has become another program, and has its memory if it computes."""
    until = time.monotonic() + 60
    while b"time.sleep" not in Path(f"/proc/{worker.pid}/cmdline").read_bytes() or (
        code is COMPUTES and not processes.threads_named(worker.pid, [processes.CONTROL_THREAD])
    ):
        assert time.monotonic() < until and worker.alive()
        time.sleep(0.05)


@pytest.mark.parametrize("code", [IDLE, COMPUTES], ids=["idle", "computes"])
@pytest.mark.parametrize("command", ["resume", "recover"])
def test_a_rank_that_becomes_another_program(start_worker: Start, tool: Tool, code: str, command: str) -> None:
    """exec while suspended: what it had is lost, and it is named; the other one runs again, and nothing waits."""
    stays, turns = start_worker(0), start_worker(1)
    block = stays.alloc(3 * MIB)
    stays.fill(block, 3 * MIB, 3)
    turns.expect(turns.ipc_open(stays.ipc_get(block)), 3 * MIB, [3])
    turns.alloc(MIB)
    pages(tool, stays.pid, turns.pid)
    turns.send("exec_program", code.format(root=str(ROOT)))
    wait_for_program(turns, code)
    words = ["--to", "running"] if command == "recover" else []
    answer = tool.run(command, "--driver", "sim", *words, stays.pid).expect(5)
    error = answer.json["error"]
    assert error["facts"]["lost"] == [turns.pid] and "another program" in error["message"], error
    assert answer.json["next"] == "cold-start" and turns.alive()
    running(tool)
    stays.check()


def test_the_only_rank_becomes_another_program(start_worker: Start, tool: Tool) -> None:
    """Nothing is left of its group."""
    worker = start_worker(0)
    worker.alloc(MIB)
    pages(tool, worker.pid)
    worker.send("exec_program", IDLE)
    wait_for_program(worker, IDLE)
    answer = tool.run("resume", "--driver", "sim", worker.pid).expect(5)
    assert answer.json["reason"] == "group-gone" and records(tool) == []


def test_a_rank_that_becomes_another_program_in_a_suspend(
    start_worker: Start, tool: Tool, machine: Setting, background: Run
) -> None:
    """exec in the middle: the suspend turns back, and the other one runs again."""
    stays, turns = start_worker(0), start_worker(1)
    block = stays.alloc(3 * MIB)
    stays.fill(block, 3 * MIB, 3)
    turns.alloc(MIB)
    machine.inject("cuMemcpyDtoHAsync_v2 1 hold", stays.pid)
    command = background("suspend", "--depth", "pages", stays.pid, turns.pid)
    command.wait_for_step("release")
    machine.wait_until_held()
    turns.send("exec_program", IDLE)
    wait_for_program(turns, IDLE)
    machine.inject("", stays.pid)
    answer = command.end(60).expect(5)
    assert answer.json["error"]["facts"]["lost"] == [turns.pid] and answer.json["reason"] == "rank-replaced", answer
    running(tool)
    stays.check()
