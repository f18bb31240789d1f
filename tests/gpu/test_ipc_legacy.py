"""B32: CUDA IPC handles of memory below 2 MiB, which drivers from 610 on are reported not to checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpususpend.driver_process import kernel_driver_version
from tests.gpu.checkpoint import Checkpoint
from tests.gpu.conftest import Group
from tests.programs.client import Worker
from tests.programs.setting import Setting

SIZES = (4864, 65536, 1 << 20)


@pytest.mark.parametrize("size", SIZES)
def test_handle_of_the_bare_driver(start_worker: Callable[..., Worker], checkpoint: Checkpoint, size: int) -> None:
    """A handle that nobody opened: the checkpoint succeeds, or a driver that is known for it takes the process."""
    owner = start_worker(0, shim=False)
    address = owner.alloc(size)
    owner.fill(address, size, 1)
    owner.ipc_get(address)
    down = checkpoint.down(owner.pid)
    if not owner.alive():
        version = kernel_driver_version()
        assert int(version.partition(".")[0]) >= 610, f"driver {version} ended the process: {down}"
        return
    assert down + checkpoint.up(owner.pid) == [0, 0, 0, 0]
    owner.check()


def test_b32_small_handles(
    start_worker: Callable[..., Worker], group: Group, machine: Setting, tmp_path: Path
) -> None:
    """Pitfall 13: handles taken and not opened go through three cycles as they are; no native handle is ever made."""
    trace = tmp_path / "trace"
    owner, other = start_worker(0, env={"SIMCUDA_TRACE": str(trace)}), start_worker(0)
    blocks = {size: owner.alloc(size) for size in SIZES}
    for size, address in blocks.items():
        owner.fill(address, size, size)
    handles = {size: owner.ipc_get(address) for size, address in blocks.items()}
    group.cycle(owner, other, times=3)
    assert handles == {size: owner.ipc_get(address) for size, address in blocks.items()}
    for size, handle in handles.items():
        other.expect(other.ipc_open(handle), size, [size])
    other.check()
    group.cycle(owner, other)
    if machine.simulated:
        asked = {line.split()[0] for line in trace.read_text().splitlines()}
        assert "cuMemCreate" in asked and "cuIpcGetMemHandle" not in asked
