"""Host memory: cuMem memory that CPU threads use without asking, and page-locked memory of the application."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.sim.shim_control import GRANULE, PLACEHOLDER, Group, Refused, ask, rows

Start = Callable[..., Worker]


def test_host_memory_of_two_processes(start_worker: Start) -> None:
    """FR-22: host-class memory keeps its bytes, is shared while it is away, and is the driver's again afterwards."""
    owner, other = start_worker(), start_worker(1)
    block = owner.block(GRANULE, kind="host_numa")
    owner.host_fill(block["address"], GRANULE, 1)
    seen = other.import_block(owner.hand(owner.mem_export(block["handle"]), other), GRANULE, kind="host_numa")
    before = owner.snapshot(), other.snapshot()
    with Group([owner, other]) as group:
        for round in range(3):
            group.suspend()
            assert owner.host_read(block["address"] + 64, 4) == other.host_read(seen["address"] + 64, 4)
            other.host_write(seen["address"], 100 + round)
            owner.host_write(block["address"] + 8, 200 + round)
            assert owner.host_read(block["address"], 1) == [100 + round]
            group.resume()
            assert owner.host_read(block["address"], 1) == other.read(seen["address"]) == [100 + round]
            assert other.host_read(seen["address"] + 8, 1) == owner.read(block["address"] + 8) == [200 + round]
            owner.write(block["address"], [5])
            assert other.host_read(seen["address"], 1) == [5]
            owner.host_fill(block["address"], GRANULE, 1)
            assert (owner.snapshot(), other.snapshot()) == before


def test_host_memory_whose_owner_dies_before_the_seal(start_worker: Start) -> None:
    """The seal says so at once, not at its deadline; nothing was dropped yet, so a rollback brings all of it back."""
    owner, other = start_worker(), start_worker(1)
    block = owner.block(GRANULE, kind="host_numa")
    owner.host_fill(block["address"], GRANULE, 1)
    seen = other.import_block(owner.hand(owner.mem_export(block["handle"]), other), GRANULE, kind="host_numa")
    content = other.host_read(seen["address"], 1000)
    with Group([owner, other]) as group:
        group.quiesce()
        group.release()
    owner.kill()
    with Group([other]) as rest:
        with pytest.raises(Refused) as refusal:
            rest.all("seal", timeout_ms=40_000)
        assert refusal.value.code == "gone" and refusal.value.fields["step"] == "share"
        rest.resume()
        assert other.host_read(seen["address"], 1000) == other.read(seen["address"], 1000) == content
        rest.quiesce()
        (row,) = rows(other.pid, "orphans")
        ask(other.pid, "adopt", key=row["key"])
        rest.arenas()
        rest.release()
        rest.seal()
        rest.resume()
    assert other.host_read(seen["address"], 1000) == other.read(seen["address"], 1000) == content


def test_pages_leaves_host_memory(start_worker: Start) -> None:
    """With host=0 the descriptors are replaced and host-class memory stays the driver's."""
    worker = start_worker()
    block = worker.block(GRANULE, kind="host_numa")
    exported = worker.mem_export(block["handle"])
    worker.host_fill(block["address"], GRANULE, 4)
    with Group([worker]) as group:
        group.suspend(host=0)
        assert PLACEHOLDER in worker.readlink(exported)
        worker.host_write(block["address"] + 4096, 1)
        group.resume()
    assert worker.read(block["address"] + 4096) == [1]


def test_registrations_stay(start_worker: Start) -> None:
    """Page-locked memory of the application stays registered at its address, with its flags (pitfall 15, FR-9)."""
    worker = start_worker()
    first, second = worker.buffer(1 << 20), worker.buffer(1 << 20, "shared")
    worker.host_register(first, 1 << 20, 3)
    worker.host_register(second, 1 << 20, 2)
    assert worker.code("host_register", first, 1 << 20, 3) == 712
    before = worker.snapshot()
    with Group([worker]) as group:
        group.suspend()
        group.resume()
    assert worker.snapshot() == before
    worker.host_unregister(first)
    worker.host_unregister(second)
    assert worker.code("host_unregister", first) == 713
    assert ask(worker.pid, "status")["host_registrations"] == "0"


def test_graph_that_copies_registered_memory(start_worker: Start) -> None:
    """A graph's copies hold the registration itself, which therefore lives through a suspend."""
    worker = start_worker()
    source, target = worker.buffer(4096), worker.buffer(4096, "shared")
    for memory in (source, target):
        worker.host_register(memory, 4096)
    block, stream = worker.alloc(4096), worker.stream_create()
    graph = worker.record_graph(stream, [["copy_htod", block, source, 4096], ["copy_dtoh", target, block, 4096]])
    with Group([worker]) as group:
        for turn in range(3):
            group.cycle()
            worker.host_write(source, turn)
            worker.graph_launch(graph, stream)
            worker.stream_sync(stream)
            assert worker.host_read(target, 1) == [turn]
