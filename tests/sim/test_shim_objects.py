"""Handles, mappings and access as the application sees them, and what happens where a table cannot grow."""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.programs.client import Worker
from tests.sim.shim_control import GRANULE, Group, ask

Start = Callable[..., Worker]
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


@contextlib.contextmanager
def no_room(worker: Worker) -> Iterator[None]:
    """Let the worker's address space grow by a little only: no new table fits."""
    size = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.prlimit(worker.pid, resource.RLIMIT_AS, (size + (1 << 20) // 2, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(worker.pid, resource.RLIMIT_AS, before)


def test_retain_returns_what_was_mapped(start_worker: Start) -> None:
    """A handle's value never changes; each retain takes a release of its own."""
    worker = start_worker()
    handle = worker.mem_create(2 * GRANULE)
    address = worker.mem_reserve(2 * GRANULE)
    worker.mem_map(address, 2 * GRANULE, handle)
    worker.mem_access(address, 2 * GRANULE, [["device", 0, 3]])
    worker.mem_release(handle)
    assert worker.code("mem_release", handle) == INVALID_VALUE
    assert worker.mem_retain(address + GRANULE + 5) == handle
    assert worker.mem_retain(address) == handle
    with Group([worker]) as group:
        group.cycle()
    assert worker.mem_retain(address) == handle
    for _ in range(3):
        worker.mem_release(handle)
    assert worker.code("mem_release", handle) == INVALID_VALUE
    worker.mem_unmap(address, 2 * GRANULE)
    assert ask(worker.pid, "status")["objects"] == "0"
    assert worker.code("mem_map", address, 2 * GRANULE, handle) == INVALID_VALUE


def test_native_memory_shows_no_handle(start_worker: Start) -> None:
    """Memory of cuMemAlloc cannot be retained, unmapped or given access as if it were mapped."""
    worker = start_worker()
    for memory in (worker.alloc(3 << 20), worker.alloc(100)):
        assert worker.code("mem_retain", memory) == INVALID_VALUE
        assert worker.code("mem_unmap", memory, GRANULE) == INVALID_VALUE
        assert worker.code("mem_access", memory, GRANULE, [["device", 0, 3]]) == INVALID_VALUE
        worker.free(memory)


def test_b18_access_is_merged_by_location(start_worker: Start) -> None:
    """B18: grants accumulate, span mappings, hold for parts, are taken by PROT_NONE, and come back exactly."""
    worker = start_worker()
    worker.primary_retain(1)
    address = worker.mem_reserve(4 * GRANULE)
    for part in range(2):
        worker.mem_map(address + part * 2 * GRANULE, 2 * GRANULE, worker.mem_create(2 * GRANULE))
    worker.mem_access(address, 4 * GRANULE, [["device", 0, 3]])
    worker.mem_access(address, 4 * GRANULE, [["device", 1, 3]])
    worker.mem_access(address, 2 * GRANULE, [["device", 1, 1]])
    places = [address + part * GRANULE for part in range(4)]

    def seen() -> list[tuple[int, int]]:
        return [(worker.mem_get_access(place, "device", 0), worker.mem_get_access(place, "device", 1))
                for place in places]

    assert seen() == [(3, 1), (3, 1), (3, 3), (3, 3)]
    with Group([worker]) as group:
        group.cycle()
        assert seen() == [(3, 1), (3, 1), (3, 3), (3, 3)]
        worker.mem_access(address + 2 * GRANULE, 2 * GRANULE, [["device", 1, 0]])
        before = seen()
        group.cycle()
        assert seen() == before == [(3, 1), (3, 1), (3, 0), (3, 0)]
    worker.mem_unmap(address, 4 * GRANULE)
    assert ask(worker.pid, "status")["mappings"] == "0"


def test_several_mappings_of_one_object(start_worker: Start) -> None:
    """Two mappings of one object see one memory after a cycle."""
    worker = start_worker()
    block = worker.block(GRANULE)
    second = worker.mem_reserve(GRANULE)
    worker.mem_map(second, GRANULE, block["handle"])
    worker.mem_access(second, GRANULE, [["device", 0, 3]])
    worker.fill(block["address"], GRANULE, 1)
    worker.expect(second, GRANULE, [1])
    with Group([worker]) as group:
        group.cycle()
    worker.check()
    worker.write(second, [8])
    assert worker.read(block["address"]) == [8]


def test_memory_without_access_is_carried(start_worker: Start) -> None:
    """Memory that is mapped nowhere, or where nobody may read it, keeps its content."""
    worker = start_worker()
    block = worker.block(GRANULE)
    worker.fill(block["address"], GRANULE, 1)
    hidden = worker.block(GRANULE)
    worker.fill(hidden["address"], GRANULE, 2)
    worker.forget(block["address"])
    worker.mem_unmap(block["address"], GRANULE)
    worker.forget(hidden["address"])
    worker.mem_access(hidden["address"], GRANULE, [["device", 0, 0]])
    with Group([worker]) as group:
        group.cycle()
    worker.mem_map(block["address"], GRANULE, block["handle"])
    for one, seed in ((block, 1), (hidden, 2)):
        worker.mem_access(one["address"], GRANULE, [["device", 0, 3]])
        worker.expect(one["address"], GRANULE, [seed])
    worker.check()


def test_slabs_hold_many_small_allocations(start_worker: Start) -> None:
    """Small memory is aligned, apart, reused, and gone when freed."""
    worker = start_worker()
    sizes = [1, 255, 256, 257, 4096, 100000, (2 << 20) - 1, 700000, 700000, 700000]
    held = {worker.alloc(size): size for size in sizes}
    assert all(address % 512 == 0 for address in held)
    spans = sorted((address, address + size) for address, size in held.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for address, size in held.items():
        assert worker.address_range(address + size - 1) == [address, size]
    for address in held:
        worker.free(address)
    assert ask(worker.pid, "status")["objects"] == "0"


def test_b28_tables_that_cannot_grow(start_worker: Start) -> None:
    """B28: OUT_OF_MEMORY, and neither the driver nor the tables have changed."""
    worker = start_worker()
    address = worker.mem_reserve(GRANULE)
    with no_room(worker):
        assert worker.code("mem_create", GRANULE) == OUT_OF_MEMORY
        assert worker.code("alloc", 100) == OUT_OF_MEMORY
    handle = worker.mem_create(GRANULE)
    with no_room(worker):
        assert worker.code("mem_map", address, GRANULE, handle) == OUT_OF_MEMORY
    worker.mem_map(address, GRANULE, handle)
    with no_room(worker):
        assert worker.code("mem_access", address, GRANULE, [["device", 0, 3]]) == OUT_OF_MEMORY
        assert worker.mem_get_access(address, "device", 0) == 0
        assert worker.code("mem_export", handle) == OUT_OF_MEMORY
    worker.mem_access(address, GRANULE, [["device", 0, 3]])
    buffer = worker.buffer(4096)
    with no_room(worker):
        assert worker.code("host_register", buffer, 4096, 0) == OUT_OF_MEMORY
    worker.host_register(buffer, 4096, 0)
    worker.fill(address, GRANULE, 1)
    with Group([worker]) as group:
        group.cycle()
    worker.check()
    assert ask(worker.pid, "status")["objects"] == "1"
