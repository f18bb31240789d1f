"""`suspend --depth pages`: the memory leaves the GPUs and comes back, contexts stay; with sharing, under traffic."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.gpu.conftest import LARGE, MIB, Group, same_picture
from tests.programs.client import Worker
from tests.programs.usage import memory_by_pid

SIZE = 4 * LARGE
DRIVERS_OWN = 4 * MIB  # what the driver keeps for small allocations of its own, of which a wait makes one
PAGES = ("--depth", "pages")


def test_memory_leaves_and_comes_back(start_worker: Callable[..., Worker], group: Group) -> None:
    """Shared by IPC between two processes; each GPU gets back what the owners hold, three times."""
    ranks = [start_worker(0), start_worker(1)]
    for at, rank in enumerate(ranks):
        own = rank.alloc(SIZE)
        rank.fill(own, SIZE, at + 1)
        other = ranks[1 - at]
        other.expect(other.ipc_open(rank.ipc_get(own)), SIZE, [at + 1])
    for _ in range(3):
        pictures, before = [rank.snapshot() for rank in ranks], memory_by_pid(group.machine)
        answer = group.tool.suspend(*(rank.pid for rank in ranks), options=PAGES).expect(0)
        assert answer.json["groups"][0]["depth"] == "pages"
        after = memory_by_pid(group.machine)
        for rank in ranks:
            assert rank.nvidia_fds(), "its context is to stay"
            assert before[rank.pid] - after.get(rank.pid, 0) >= SIZE - DRIVERS_OWN, f"{before} became {after}"
        group.resume(*ranks)
        for rank, picture in zip(ranks, pictures, strict=True):
            same_picture(picture, rank.snapshot())
            rank.check()


def test_work_goes_on_where_it_was(start_worker: Callable[..., Worker], group: Group) -> None:
    """Launches, graphs, copies and fed kernels all the time; held in between, right before and after."""
    worker = start_worker(0)
    loops = {kind: worker.loop_start(kind) for kind in ("launches", "graphs", "copies", "fed_kernels")}
    for _ in range(5):
        time.sleep(0.2)
        group.tool.suspend(worker.pid, options=PAGES).expect(0)
        held = {kind: worker.loop_state(number)["count"] for kind, number in loops.items()}
        group.resume(worker)
        until = time.monotonic() + 60
        while any(worker.loop_state(number)["count"] <= held[kind] for kind, number in loops.items()):
            assert time.monotonic() < until, "a loop stands still after the resume"
            time.sleep(0.01)
    for number in loops.values():
        assert worker.loop_stop(number)["errors"] == []
