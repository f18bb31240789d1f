"""The bare driver and imported cuMem memory: what has to be released before a checkpoint, and what comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.checkpoint import Checkpoint
from tests.gpu.conftest import LARGE, MIB
from tests.programs.client import Worker, WorkerTimeout

SIZE = LARGE
NOT_SUPPORTED, ILLEGAL_STATE, UNKNOWN = 801, 401, 999
Share = Callable[..., tuple[dict[str, int], dict[str, int]]]


def pair(start_worker: Callable[..., Worker], second: int = 0) -> tuple[Worker, Worker]:
    """Start two workers without the shim, the second on device `second`."""
    return start_worker(0, shim=False), start_worker(second, shim=False)


def test_kept_import_loses_the_process(
    start_worker: Callable[..., Worker], checkpoint: Checkpoint, share: Share
) -> None:
    owner, other = pair(start_worker)
    _, imported = share(owner, other, SIZE)
    assert checkpoint.down(other.pid) == [0, 0]
    assert not other.nvidia_fds(), "nothing tells that an import is kept: its own descriptor was closed"
    assert checkpoint.up(other.pid) == [NOT_SUPPORTED, ILLEGAL_STATE]
    with pytest.raises(WorkerTimeout):
        other.try_("read", imported["address"], deadline_s=1)
    assert checkpoint.down(owner.pid) + checkpoint.up(owner.pid) == [0, 0, 0, 0]
    owner.check()


@pytest.mark.parametrize("devices", [1, 2])
def test_released_import_comes_back_at_its_address(
    start_worker: Callable[..., Worker], checkpoint: Checkpoint, share: Share, machine: object, devices: int
) -> None:
    if devices > machine.devices:  # type: ignore[attr-defined]
        pytest.skip("needs 2 GPUs")
    owner, other = pair(start_worker, devices - 1)
    block, imported = share(owner, other, SIZE)
    address = imported["address"]
    other.mem_unmap(address, SIZE)
    other.mem_release(imported["handle"])
    other.forget(address)
    assert checkpoint.down(other.pid, owner.pid) == [0] * 4
    assert not other.nvidia_fds() and not owner.nvidia_fds()
    assert checkpoint.up(other.pid, owner.pid) == [0] * 4
    handle = other.mem_import(owner.hand(owner.mem_export(block["handle"]), other))
    other.mem_map(address, SIZE, handle)
    other.mem_access(address, SIZE, [["device", devices - 1, 3]])
    other.expect(address, SIZE, [1])
    other.check()
    owner.fill(block["address"], SIZE, 2)
    other.expect(address, SIZE, [2])
    other.check()


def test_host_numa_memory_loses_the_process(start_worker: Callable[..., Worker], checkpoint: Checkpoint) -> None:
    worker = start_worker(0, shim=False)
    worker.block(2 * MIB, "host_numa")
    assert checkpoint.down(worker.pid) == [0, 0]
    assert checkpoint.up(worker.pid)[0] == UNKNOWN
    with pytest.raises(WorkerTimeout):
        worker.try_("alloc", 4096, deadline_s=1)


def test_exported_descriptor_stays_visible(start_worker: Callable[..., Worker], checkpoint: Checkpoint) -> None:
    worker = start_worker(0, shim=False)
    block = worker.block(SIZE)
    worker.fill(block["address"], SIZE, 1)
    fd = worker.mem_export(block["handle"])
    assert checkpoint.down(worker.pid) == [0, 0]
    assert ["nvidiactl" in link for link in worker.nvidia_fds()] == [True]
    assert checkpoint.up(worker.pid) == [0, 0]
    worker.check()
    worker.close_fd(fd)
