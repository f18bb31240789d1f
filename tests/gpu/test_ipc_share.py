"""Memory of cuMemAlloc shared by CUDA IPC through whole cycles."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.conftest import LARGE, MIB, Group
from tests.programs.client import Worker

SIZES = (4864, MIB, LARGE)


def test_shared_both_ways_over_three_cycles(start_worker: Callable[..., Worker], group: Group) -> None:
    """Handles keep their bytes, openers their addresses, and writes reach the other side after every cycle."""
    first, second = start_worker(0), start_worker(1)
    sides = []
    for owner, other in ((first, second), (second, first)):
        for size in SIZES:
            address = owner.alloc(size)
            owner.fill(address, size, size)
            handle = owner.ipc_get(address)
            opened = other.ipc_open(handle)
            other.expect(opened, size, [size])
            sides.append((owner, other, address, opened, size, handle))
    first.check()
    second.check()
    for turn in range(3):
        group.cycle(first, second)
        for owner, other, address, opened, size, handle in sides:
            assert owner.ipc_get(address) == handle, "handle bytes changed"
            by_owner, by_other = (owner, address), (other, opened)
            (writer, there), (reader, here) = (by_owner, by_other) if turn % 2 else (by_other, by_owner)
            writer.fill(there, size, 100 + turn)
            reader.expect(here, size, [100 + turn])
        first.check()
        second.check()


def test_opened_count_survives(start_worker: Callable[..., Worker], group: Group) -> None:
    """Memory opened twice needs two closes after the cycle, and can be opened again."""
    owner, other = start_worker(0), start_worker(0)
    address = owner.alloc(4 * MIB)
    owner.fill(address, 4 * MIB, 1)
    handle = owner.ipc_get(address)
    opened = other.ipc_open(handle)
    assert other.ipc_open(handle) == opened
    group.cycle(owner, other)
    other.ipc_close(opened)
    other.expect(opened, 4 * MIB, [1])
    other.check()
    other.forget(opened)
    other.ipc_close(opened)
    assert other.code("ipc_close", opened) == 1
    again = other.ipc_open(owner.ipc_get(address))
    other.expect(again, 4 * MIB, [1])
    other.check()


def test_opened_after_the_cycle(start_worker: Callable[..., Worker], group: Group) -> None:
    """Memory of before and a handle of before are opened for the first time afterwards: natively NOT_PERMITTED."""
    owner, other = start_worker(0), start_worker(0)
    blocks = {size: owner.alloc(size) for size in SIZES}
    handles = {}
    for size, address in blocks.items():
        owner.fill(address, size, size)
        handles[size] = owner.ipc_get(address)
    group.cycle(owner, other)
    for size, handle in handles.items():
        other.expect(other.ipc_open(handle), size, [size])
    other.check()


@pytest.mark.parametrize("form", ["plain", "graph"])
def test_kernels_through_opened_memory(start_worker: Callable[..., Worker], group: Group, form: str) -> None:
    """An all-reduce step that reads the peer's memory, as launches and as a recorded graph."""
    ranks = [start_worker(0), start_worker(1)]
    size, words = 4 * MIB, MIB
    own = [rank.alloc(size) for rank in ranks]
    sums = [rank.alloc(size) for rank in ranks]
    for at, rank in enumerate(ranks):
        rank.fill(own[at], size, at + 1)
    opened = [rank.ipc_open(ranks[1 - at].ipc_get(own[1 - at])) for at, rank in enumerate(ranks)]
    streams = [rank.stream_create() for rank in ranks]
    step = [["gs_allreduce_step", [sums[at], own[at], opened[at], words]] for at in range(2)]
    for at, rank in enumerate(ranks):  # the module is loaded before anything is recorded
        rank.kernel("gs_fill", [sums[at], words, 0])
        rank.ctx_sync()
    graphs = [rank.record_graph(streams[at], [["kernel", *step[at]]]) for at, rank in enumerate(ranks)]
    for _ in range(3):
        for at, rank in enumerate(ranks):
            rank.memset_d8(sums[at], 0, size)
            rank.ctx_sync()  # a set of device memory is not waited for, and these streams do not wait for it either
            if form == "graph":
                rank.graph_launch(graphs[at], streams[at])
            else:
                rank.kernel(*step[at], streams[at])
            rank.stream_sync(streams[at])
            rank.expect(sums[at], size, [1, 2])
            rank.check()
        group.cycle(*ranks)
