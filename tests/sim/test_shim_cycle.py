"""Release, load, remap: everything that processes share comes back as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.sim.shim_control import GRANULE, PLACEHOLDER, Group, ask, rows

Start = Callable[..., Worker]


def test_hello_says_who_answers(start_worker: Start) -> None:
    """The first words of the protocol."""
    worker = start_worker()
    hello = ask(worker.pid, "hello")
    assert (hello["pid"], hello["phase"], hello["simulated"]) == (str(worker.pid), "running", "1")


def test_one_process_keeps_its_memory(start_worker: Start) -> None:
    """Large, small and mapped memory of one process."""
    worker = start_worker()
    large = worker.alloc(5 << 20)
    small = [worker.alloc(size) for size in (4, 256, 1000, 65536)]
    block = worker.block(2 * GRANULE)
    worker.fill(large, 5 << 20, 1)
    for seed, address in enumerate(small):
        worker.fill(address, (4, 256, 1000, 65536)[seed], seed + 2)
    worker.fill(block["address"], 2 * GRANULE, 9)
    before = worker.snapshot()
    with Group([worker]) as group:
        for _ in range(3):
            group.suspend()
            status = ask(worker.pid, "status")
            assert status["phase"] == "sealed"
            group.resume()
            assert worker.snapshot() == before
    assert ask(worker.pid, "status")["launch"] == "open"


def test_two_processes_share_by_descriptor(start_worker: Start) -> None:
    """Exporter and importer see each other's writes after each of three cycles."""
    owner, other = start_worker(), start_worker(1)
    block = owner.block(2 * GRANULE)
    owner.fill(block["address"], 2 * GRANULE, 1)
    number = owner.hand(owner.mem_export(block["handle"]), other)
    seen = other.import_block(number, 2 * GRANULE)
    other.expect(seen["address"], 2 * GRANULE, [1])
    assert rows(other.pid, "imports")[0]["state"] == "resolved"
    snapshots = owner.snapshot(), other.snapshot()
    with Group([owner, other]) as group:
        for round in range(3):
            group.suspend()
            assert not rows(owner.pid, "fds") and not rows(other.pid, "fds")
            group.resume()
            assert (owner.snapshot(), other.snapshot()) == snapshots
            owner.write(block["address"], [round])
            assert other.read(seen["address"]) == [round]
            other.write(seen["address"] + 4, [round + 7])
            assert owner.read(block["address"] + 4) == [round + 7]
            owner.fill(block["address"], 2 * GRANULE, 1)


def test_b25_descriptors_stay_what_they_were(start_worker: Start) -> None:
    """B25: exported descriptors, copies and kept imports are replaced and come back on their numbers."""
    owner, other = start_worker(), start_worker()
    block = owner.block(GRANULE)
    exported = owner.mem_export(block["handle"])
    copy = owner.dup_fd(exported)
    kept = owner.hand(exported, other)
    seen = other.import_block(kept, GRANULE)
    closed = owner.dup_fd(exported)
    with Group([owner, other]) as group:
        group.suspend()
        assert PLACEHOLDER in owner.readlink(exported) and PLACEHOLDER in owner.readlink(copy)
        assert PLACEHOLDER in other.readlink(kept)
        owner.close_fd(closed)
        group.resume()
    assert "nvidia" in owner.readlink(exported) and "nvidia" in owner.readlink(copy)
    third = start_worker()
    again = third.import_block(other.hand(kept, third), GRANULE)
    late = third.import_block(owner.hand(copy, third), GRANULE)
    owner.write(block["address"], [77])
    assert third.read(again["address"]) == third.read(late["address"]) == other.read(seen["address"]) == [77]
    states = {row["state"] for row in rows(third.pid, "imports")}
    assert states == {"resolved"}


@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_ipc_comes_back(start_worker: Start, size: int) -> None:
    """Memory opened by a CUDA IPC handle, from a slab and from an allocation of its own."""
    owner, other = start_worker(), start_worker(1)
    owner.alloc(512)
    memory = owner.alloc(size)
    owner.fill(memory, size, 3)
    handle = owner.ipc_get(memory)
    seen = other.ipc_open(handle)
    assert other.ipc_open(handle) == seen
    other.expect(seen, size, [3])
    snapshots = owner.snapshot(), other.snapshot()
    with Group([owner, other]) as group:
        for _ in range(2):
            group.cycle()
            assert (owner.snapshot(), other.snapshot()) == snapshots
            assert owner.ipc_get(memory) == handle
    other.write(seen, [5])
    assert owner.read(memory) == [5]
    other.ipc_close(seen)
    other.ipc_close(seen)
    assert other.code("ipc_close", seen) != 0
