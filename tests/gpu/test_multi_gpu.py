"""One process, two devices: peer access is followed for memory made before and after, and after a cycle (B04)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.conftest import Group
from tests.programs.client import Worker

MIB = 1 << 20
pytestmark = pytest.mark.machine(devices=2)


class TwoDevices:
    """A worker with both devices and a buffer on the second that kernels on the first write to."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.first = worker.start(0)["context"]
        self.second = worker.primary_retain(1)

    def remote(self, size: int, seed: int) -> int:
        """Allocate on the second device and fill."""
        self.worker.use(self.second)
        address = int(self.worker.alloc(size))
        self.worker.fill(address, size, seed)
        self.worker.use(self.first)
        return address

    def write_from_first(self, address: int, word: int) -> None:
        """Write through the peer by a kernel and read back on the owner."""
        self.worker.use(self.first)
        self.worker.kernel("gs_fill", [address, 16, word])
        self.worker.ctx_sync()
        self.worker.use(self.second)
        assert self.worker.read(address, 16) == [word] * 16
        self.worker.use(self.first)


@pytest.fixture
def two(start_worker: Callable[..., Worker]) -> TwoDevices:
    """One process with both devices."""
    return TwoDevices(start_worker(None))


def test_b04_peer_access_through_cycles(two: TwoDevices, group: Group) -> None:
    worker = two.worker
    early = [two.remote(4096, 1), two.remote(4 * MIB, 2)]
    worker.peer_enable(two.second)
    late = [two.remote(4096, 3), two.remote(4 * MIB, 4)]
    for turn in range(2):
        group.cycle(worker)
        fresh = [two.remote(4096, 5), two.remote(4 * MIB, 6)]
        for address in early + late + fresh:
            worker.forget(address)
            two.write_from_first(address, 100 + turn)
        assert worker.code("peer_enable", two.second) == 704


def test_disable_and_enable_around_a_cycle(two: TwoDevices, group: Group) -> None:
    worker = two.worker
    worker.peer_enable(two.second)
    block = two.remote(4 * MIB, 1)
    worker.peer_disable(two.second)
    group.cycle(worker)
    assert worker.code("peer_disable", two.second) == 705
    worker.peer_enable(two.second)
    worker.forget(block)
    two.write_from_first(block, 7)
    group.cycle(worker)
    two.write_from_first(block, 8)


def test_access_entries_of_both_devices(two: TwoDevices, group: Group) -> None:
    worker = two.worker
    block = worker.block(2 * MIB, "device", 1, [["device", 1, 3], ["device", 0, 3]])
    group.cycle(worker, times=2)
    two.write_from_first(block["address"], 9)


def test_b05_every_allocation_returns_to_its_own_device(two: TwoDevices, group: Group) -> None:
    """B05: saved and loaded in the context of the device it belongs to, whatever is current."""
    worker = two.worker
    worker.fill(worker.alloc(8 * MIB), 8 * MIB, 1)
    remote = two.remote(16 * MIB, 2)
    worker.use(two.first)
    group.cycle(worker, times=2)
    assert worker.pointer_attribute("DEVICE_ORDINAL", remote) == 1
    assert worker.ctx_current() == two.first
