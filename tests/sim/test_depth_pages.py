"""`suspend --depth pages`: the memory leaves the GPUs, contexts stay, and threads run until they come to a gate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from gpususpend import arena, errors
from gpususpend.defaults import COMMAND
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim.conftest import Background, Pair, records, running, state, stopped_threads

MIB = 1 << 20
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
    loops = {kind: first.loop_start(kind) for kind in ("launches", "graphs", "copies")}
    pages(tool, *pair.pids)
    held = {kind: first.loop_state(number)["count"] for kind, number in loops.items()}
    time.sleep(0.3)
    assert held == {kind: first.loop_state(number)["count"] for kind, number in loops.items()}
    assert state(tool, machine, first.pid)["state"] == "suspended"
    tool.resume(*pair.pids).expect(0)
    until = time.monotonic() + 30
    while any(first.loop_state(number)["count"] <= held[kind] for kind, number in loops.items()):
        assert time.monotonic() < until, "a loop stands still after the resume"
        time.sleep(0.02)
    assert not any(first.loop_state(number)["errors"] for number in loops.values())
    pair.check()


def test_host_memory_stays_where_cpu_threads_use_it(start_worker: Start, tool: Tool) -> None:
    """HOST_NUMA memory is not the GPU's: a thread uses it all the time, the suspend included."""
    worker = start_worker(0)
    block = worker.block(2 * MIB, "host_numa")
    worker.alloc(MIB)
    loop = worker.loop_start("host_memory", address=block["address"], size=2 * MIB)
    pages(tool, worker.pid)
    before = worker.loop_state(loop)["count"]
    time.sleep(0.2)
    assert worker.loop_state(loop)["count"] > before
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


def test_a_process_without_the_shim_is_refused(start_worker: Start, tool: Tool) -> None:
    """Nobody could move its memory."""
    bare = start_worker(0, shim=False)
    bare.alloc(MIB)
    refusal = tool.run("suspend", "--driver", "sim", "--depth", "pages", "--allow-unshimmed", bare.pid).expect(3)
    assert refusal.json["error"]["code"] == "no-shim-for-pages" and refusal.json["error"]["pid"] == bare.pid


SLOW = {
    "prepare": "cuMemHostRegister_v2 1 delay 1500",
    "release": "cuMemcpyDtoHAsync_v2 1 delay 1500",
    "seal": "cuMemUnmap 1 delay 1500; cuMemRelease 1 delay 1500",
}


@pytest.mark.parametrize("step", [*SLOW, "suspended"])
def test_recover_brings_a_cut_off_suspend_to_a_whole_state(
    pair: Pair, tool: Tool, machine: Setting, background: Run, step: str
) -> None:
    """Killed at any step: the recorded state, or running, and every byte as it was."""
    pages(tool, *pair.pids)
    whole = records(tool)[0]
    tool.resume(*pair.pids).expect(0)
    if step == "suspended":
        pages(tool, *pair.pids)
    else:
        machine.inject(SLOW[step])
        command = background("suspend", "--depth", "pages", *pair.pids)
        command.wait_for_step(step)
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
        machine.inject(SLOW["prepare"])
        command = background("suspend", "--depth", "pages", *pids)
        command.wait_for_step("prepare")
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
    """Exit 8, and the resume can be repeated."""
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


def test_the_arena_has_huge_pages_on_any_machine(start_worker: Callable[..., Worker], tool: Tool) -> None:
    """No dump can be taken at this depth, so a private tmpfs may give them, whatever the machine's settings are."""
    try:
        os.close(arena.prepare(MIB, [arena.Kind.TMPFS]).fd)
    except errors.NotEnoughMemory:
        pytest.skip("this machine gives no huge pages (private tmpfs)")
    worker = start_worker(0)
    worker.fill(worker.alloc(4 * MIB), 4 * MIB, 1)
    answer = tool.run("suspend", "--driver", "sim", "--depth", "pages", worker.pid).expect(0)
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
