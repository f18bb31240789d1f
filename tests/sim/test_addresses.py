"""Addresses that the application holds are never to be had by anybody else, whatever is suspended (FR-44)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim.shim_control import GRANULE, Group

Start = Callable[..., Worker]


def held_ranges(owner: Worker, other: Worker) -> tuple[list[list[int]], list[list[int]]]:
    """Own and share one range of every kind; return [address, size] of each, of both sides."""
    block, host = owner.block(GRANULE), owner.block(GRANULE, kind="host_numa")
    owner.fill(block["address"], GRANULE, 1)
    large, small = owner.alloc(3 << 20), owner.alloc(1000)
    owner.fill(large, 3 << 20, 2)
    seen = other.import_block(owner.hand(owner.mem_export(block["handle"]), other), GRANULE)
    opened = [other.ipc_open(owner.ipc_get(address)) for address in (large, small)]
    other.expect(seen["address"], GRANULE, [1])
    other.expect(opened[0], 3 << 20, [2])
    small_at = small - small % GRANULE
    opened_at = opened[1] - opened[1] % GRANULE
    mine = [[block["address"], GRANULE], [host["address"], GRANULE], [large, 4 << 20], [small_at, GRANULE]]
    return mine, [[seen["address"], GRANULE], [opened[0], 4 << 20], [opened_at, GRANULE]]


def test_fr44_a_thread_that_reserves_all_the_time(start_worker: Start) -> None:
    """FR-44: threads that want those very addresses, of the kernel and of the driver, get none during three cycles."""
    owner, other = start_worker(), start_worker(1)
    loops = []
    for worker, ranges in zip((owner, other), held_ranges(owner, other), strict=True):
        loops += [(worker, worker.loop_start(kind, ranges=ranges)) for kind in ("mapper", "reserver")]
    with Group([owner, other]) as group:
        for _ in range(3):
            before = [worker.loop_state(number)["count"] for worker, number in loops]
            group.suspend()
            time.sleep(0.1)
            group.resume()
            for (worker, number), count in zip(loops, before, strict=True):
                until = time.monotonic() + 60
                while (state := worker.loop_state(number))["count"] < count + 3 and time.monotonic() < until:
                    time.sleep(0.01)
                assert state["errors"] == [] and state["count"] >= count + 3, state
    for worker in (owner, other):
        worker.check()


def test_fr44_no_reservation_is_freed(machine: Setting, start_worker: Start, tool: Tool, tmp_path: Path) -> None:
    """FR-44: in a whole cycle of the tool every address range that is given back was taken in that cycle."""
    trace = tmp_path / "trace"
    env = {"SIMCUDA_TRACE": str(trace)}
    owner, other = start_worker(env=env), start_worker(1, env=env)
    held_ranges(owner, other)
    for _ in range(2):
        begin = trace.stat().st_size
        tool.suspend(owner.pid, other.pid).expect(0)
        tool.resume(owner.pid, other.pid).expect(0)
        with trace.open() as lines:
            lines.seek(begin)
            names = [line.split()[0] for line in lines]
        assert names.count("cuMemAddressFree") == names.count("cuMemAddressReserve")
        assert "cuMemUnmap" in names and "cuMemMap" in names
    owner.check()
    other.check()
