"""Everything that an application can own comes back as it was, seen through the application's own calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.conftest import LARGE, MIB, Group
from tests.programs.client import Worker
from tests.programs.setting import Setting

Share = Callable[..., tuple[dict[str, int], dict[str, int]]]


def test_allocations_of_every_size(start_worker: Callable[..., Worker], group: Group) -> None:
    """Content, address, range and attributes; frees and new allocations go on afterwards."""
    worker = start_worker(0)
    sizes = [4, 256, 4864, 65536, MIB, 2 * MIB, 2 * MIB + 4, 5 * MIB, LARGE]
    blocks = {size: worker.alloc(size) for size in sizes}
    for size, address in blocks.items():
        worker.fill(address, size, size)
    pitched, _ = worker.alloc_pitch(1000, 20, 4)
    worker.fill(pitched, 4096, 77)
    group.cycle(worker, times=3)
    for size in (256, MIB, 5 * MIB):
        worker.forget(blocks[size])
        worker.free(blocks[size])
        assert worker.code("free", blocks[size]) == 1
    fresh = worker.alloc(8 * MIB)
    worker.fill(fresh, 8 * MIB, 5)
    worker.check()


def test_shared_blocks(start_worker: Callable[..., Worker], group: Group, share: Share) -> None:
    """cuMem memory shared by descriptor both ways; both see each other's writes afterwards (FR-5: two ranks)."""
    first, second = start_worker(0), start_worker(1)
    pairs = [(first, second, *share(first, second, 4 * MIB, 1)), (second, first, *share(second, first, 6 * MIB, 2))]
    for turn in range(3):
        group.cycle(first, second)
        for owner, other, block, imported in pairs:
            other.fill(imported["address"], block["size"], 10 + turn)
            owner.expect(block["address"], block["size"], [10 + turn])
            owner.check()
    for owner, other, block, imported in pairs:
        again = owner.hand(owner.mem_export(block["handle"]), other)
        fresh = other.import_block(again, block["size"])
        other.expect(fresh["address"], block["size"], [12])
        other.check()
        other.drop_block(imported)
        owner.drop_block(block)


def test_handles_keep_their_values(start_worker: Callable[..., Worker], group: Group) -> None:
    """Extra references, handles without a mapping, released handles that live by their mapping."""
    worker = start_worker(0)
    block = worker.block(4 * MIB)
    worker.fill(block["address"], 4 * MIB, 1)
    assert worker.mem_retain(block["address"]) == block["handle"]
    unmapped = worker.mem_create(2 * MIB)
    dropped = worker.block(2 * MIB)
    worker.fill(dropped["address"], 2 * MIB, 2)
    worker.mem_release(dropped["handle"])
    group.cycle(worker, times=2)
    assert worker.mem_retain(dropped["address"] + MIB) == dropped["handle"]
    worker.mem_release(dropped["handle"])
    assert [worker.code("mem_release", block["handle"]) for _ in range(2)] == [0, 0]
    worker.check()
    place = worker.mem_reserve(2 * MIB)
    worker.mem_map(place, 2 * MIB, unmapped)
    worker.mem_access(place, 2 * MIB, [["device", 0, 3]])
    worker.fill(place, 2 * MIB, 3)
    group.cycle(worker)


def test_b18_mappings_with_all_kinds_of_access(start_worker: Callable[..., Worker], group: Group) -> None:
    """One access call over two mappings, access taken away, one handle at two addresses (B18)."""
    worker = start_worker(0)
    size = 2 * MIB
    base = worker.mem_reserve(8 * size)
    handles = [worker.mem_create(size) for _ in range(3)]
    for at in range(2):
        worker.mem_map(base + at * size, size, handles[at])
    worker.mem_access(base, 2 * size, [["device", 0, 3]])
    worker.mem_map(base + 4 * size, size, handles[0])
    worker.mem_access(base + 4 * size, size, [["device", 0, 1]])
    worker.mem_map(base + 6 * size, size, handles[2])
    worker.mem_access(base + 6 * size, size, [["device", 0, 3]])
    worker.fill(base, 2 * size, 1)
    worker.fill(base + 6 * size, size, 3)
    worker.mem_access(base + 6 * size, size, [["device", 0, 0]])
    worker.forget(base + 6 * size)
    group.cycle(worker, times=2)
    assert worker.mem_get_access(base + 6 * size) == 0
    assert worker.mem_get_access(base + 4 * size) == 1
    worker.mem_access(base + 6 * size, size, [["device", 0, 3]])
    worker.expect(base + 6 * size, size, [3])
    worker.check()


def test_host_registrations(start_worker: Callable[..., Worker], group: Group) -> None:
    """Registered memory keeps flags and address, can be unregistered and registered again (B19, pitfall 15, FR-9)."""
    worker = start_worker(0)
    memories = [(worker.buffer(4 * MIB, where), flags) for where in ("anonymous", "shared") for flags in (0, 3)]
    for at, (memory, flags) in enumerate(memories):
        worker.host_fill(memory, 4 * MIB, at)
        worker.host_register(memory, 4 * MIB, flags)
    own = worker.alloc_host(MIB, 3)
    worker.host_fill(own, MIB, 9)
    group.cycle(worker, times=2)
    for memory, _ in memories:
        assert worker.code("host_register", memory, 4096) == 712
        worker.host_unregister(memory)
        assert worker.code("host_unregister", memory) == 713
        worker.host_register(memory, 4 * MIB, 2)
    group.cycle(worker)
    worker.free_host(own)


def test_streams_events_graphs_modules(start_worker: Callable[..., Worker], group: Group) -> None:
    """Pitfall 21: what the driver carries goes on with memory that the shim carries."""
    worker = start_worker(0)
    total, ones = worker.alloc(MIB), worker.alloc(MIB)
    worker.write(total, [0] * 1024)
    worker.write(ones, [1] * 1024)
    worker.kernel("gs_fill", [total, 1, 0])
    stream, event = worker.stream_create(), worker.event_create()
    worker.ctx_sync()
    shown = worker.buffer(4096)
    worker.host_register(shown, 4096)
    graph = worker.record_graph(stream, [["kernel", "gs_add", [total, ones, 1024]],
                                         ["copy_dtoh", shown, total, 4096]])
    for turn in range(1, 4):
        worker.graph_launch(graph, stream)
        worker.event_record(event, stream)
        worker.event_sync(event)
        assert set(worker.read(total, 1024)) == set(worker.host_read(shown, 1024)) == {turn}
        group.cycle(worker)
    assert worker.code("event_query", event) == 0


@pytest.mark.parametrize("child", [False, True], ids=["plain", "child"])
def test_fr45_graphs_find_their_addresses(start_worker: Callable[..., Worker], group: Group, child: bool) -> None:
    """FR-45: what a graph of sets, copies and kernels writes is the same before and after, bit by bit."""
    worker = start_worker(0)
    first, second, total = (worker.alloc(MIB) for _ in range(3))
    stream = worker.stream_create()
    graph = worker.record_graph(stream, [
        ["memset_d32", first, 0x1234567, 1024], ["copy_dtod", second, first, 4096],
        ["memset_d8", first, 7, 2048], ["kernel", "gs_allreduce_step", [total, first, second, 1024]],
        ["copy_dtod", first + 4096, total, 4096],
    ], child)  # fmt: skip
    seen = []
    for _ in range(3):
        for address in (first, second, total):
            worker.memset_d32(address, 0, MIB // 4)
        worker.ctx_sync()
        worker.graph_launch(graph, stream)
        worker.stream_sync(stream)
        seen.append([worker.read(address, 2048) for address in (first, second, total)])
        group.cycle(worker)
    assert seen[0] == seen[1] == seen[2] and seen[0][0][1024:] == seen[0][2][:1024] != [0] * 1024


def test_pool_memory_is_the_drivers(start_worker: Callable[..., Worker], group: Group) -> None:
    """FR-42: memory of the default pool comes back by the driver's own means."""
    worker = start_worker(0)
    block = worker.alloc_async(4 * MIB)
    worker.ctx_sync()
    worker.fill(block, 4 * MIB, 1)
    group.cycle(worker)


@pytest.mark.parametrize("kind", ["host_numa", "host"])
def test_host_memory_of_cumem(start_worker: Callable[..., Worker], group: Group, machine: Setting, kind: str) -> None:
    """FR-22: NCCL's shared-memory transport, host memory that both processes map."""
    owner, other = start_worker(0), start_worker(1)
    made = owner.try_("mem_create", 2 * MIB, kind, 0, 1)
    if made.code != 0:
        pytest.skip(f"this driver makes no exportable {kind} memory ({made.code})")
    owner.mem_release(made.value)
    block = owner.block(2 * MIB, kind)
    owner.host_fill(block["address"], 2 * MIB, 1)
    there = owner.hand(fd := owner.mem_export(block["handle"]), other)
    imported = other.import_block(there, 2 * MIB, kind)
    owner.close_fd(fd)
    other.close_fd(there)
    other.expect(imported["address"], 2 * MIB, [1])
    other.check()
    group.cycle(owner, other, times=2)
    other.host_fill(imported["address"], 2 * MIB, 2)
    owner.expect(block["address"], 2 * MIB, [2])
    owner.check()


def test_host_memory_in_use_all_the_time(start_worker: Callable[..., Worker], group: Group) -> None:
    """A thread that reads and writes HOST_NUMA memory without asking the driver never sees it gone or stale."""
    worker = start_worker(0)
    block = worker.block(2 * MIB, "host_numa")
    loop = worker.loop_start("host_memory", address=block["address"], size=2 * MIB)
    for _ in range(3):
        time.sleep(0.1)
        before = worker.loop_state(loop)["count"]
        group.suspend(worker)
        group.resume(worker)
        until = time.monotonic() + 60
        while (state := worker.loop_state(loop))["count"] <= before:
            assert state["errors"] == [] and time.monotonic() < until, state
            time.sleep(0.01)
    assert worker.loop_stop(loop)["errors"] == []


def test_b05_current_context_stays(start_worker: Callable[..., Worker], group: Group) -> None:
    """The calling threads keep their contexts, and a context of the application's own keeps its memory (B05)."""
    worker = start_worker(0)
    own = worker.ctx_create(0)
    block = worker.alloc(4 * MIB)
    worker.fill(block, 4 * MIB, 1)
    group.cycle(worker)
    assert worker.ctx_current() == own
    worker.forget(block)
    worker.free(block)
    worker.ctx_destroy(own)


LOOPS: dict[str, dict[str, Any]] = {
    "launches": {}, "graphs": {}, "copies": {}, "copies in a stream": {"stream": True}, "allocations": {},
    "fed_kernels": {}, "host_functions": {},
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("per_thread", [False, True], ids=["legacy", "per-thread"])
def test_b16_b17_goes_on_working(
    start_worker: Callable[..., Worker], group: Group, name: str, per_thread: bool
) -> None:
    """A thread that never stops asking is held at the gates and goes on where it was (B16, B17, FR-49)."""
    worker = start_worker(0, per_thread=per_thread)
    loop = worker.loop_start(name.split(" ")[0], **LOOPS[name])
    for _ in range(3):
        until = time.monotonic() + 60
        before = worker.loop_state(loop)["count"]
        while (state := worker.loop_state(loop))["count"] < before + 3 and time.monotonic() < until:
            assert not state["errors"]
            time.sleep(0.01)
        group.suspend(worker)
        group.resume(worker)
    state = worker.loop_stop(loop)
    assert state["errors"] == [] and not state["alive"]
    assert state["count"] > 3
