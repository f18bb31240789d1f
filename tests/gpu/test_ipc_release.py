"""The bare driver and legacy IPC: why memory of cuMemAlloc is carried on cuMem, and why opens are dropped first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.checkpoint import Checkpoint
from tests.gpu.conftest import LARGE, MIB
from tests.programs.client import Worker, WorkerTimeout

INVALID_VALUE, ILLEGAL_STATE, NOT_PERMITTED = 1, 401, 800


@pytest.mark.parametrize("size", [MIB, LARGE])
def test_open_memory_loses_the_process(start_worker: Callable[..., Worker], checkpoint: Checkpoint, size: int) -> None:
    owner, other = start_worker(0, shim=False), start_worker(0, shim=False)
    opened = other.ipc_open(owner.ipc_get(owner.alloc(size)))
    assert checkpoint.down(other.pid) == [0, 0]
    assert checkpoint.up(other.pid) == [INVALID_VALUE, ILLEGAL_STATE]
    with pytest.raises(WorkerTimeout):
        other.try_("read", opened, deadline_s=1)


@pytest.mark.parametrize("size", [MIB, LARGE])
def test_closed_memory_survives_but_cannot_be_opened_again(
    start_worker: Callable[..., Worker], checkpoint: Checkpoint, size: int
) -> None:
    owner, other = start_worker(0, shim=False), start_worker(0, shim=False)
    address = owner.alloc(size)
    owner.fill(address, size, 1)
    handle = owner.ipc_get(address)
    opened = other.ipc_open(handle)
    other.expect(opened, size, [1])
    other.check()
    other.forget(opened)
    other.ipc_close(opened)
    assert checkpoint.down(owner.pid, other.pid) == [0, 0, 0, 0]
    assert checkpoint.up(owner.pid, other.pid) == [0, 0, 0, 0]
    owner.check()
    assert other.code("ipc_open", owner.ipc_get(address)) == NOT_PERMITTED
