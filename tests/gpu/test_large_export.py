"""B31: memory of 512 MiB and more, whose export drivers may refuse once it has gone through a restore."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.checkpoint import Checkpoint
from tests.gpu.conftest import Group
from tests.programs.client import Worker
from tests.programs.setting import wanted_driver

MIB = 1 << 20
INVALID_VALUE = 1
LARGE = (512, 1024) if wanted_driver() == "real" else (512,)  # simulated GPUs are memory of a small machine


@pytest.mark.parametrize("size", [510 * MIB, *(mib * MIB for mib in LARGE)])
def test_export_of_the_bare_driver(
    start_worker: Callable[..., Worker], checkpoint: Checkpoint, size: int
) -> None:
    """Memory of before a checkpoint is exported whole after it; from 512 MiB on that, or a clean refusal."""
    owner, other = start_worker(0, shim=False), start_worker(0, shim=False)
    block = owner.block(size)
    owner.fill(block["address"], MIB, 1)
    assert checkpoint.down(owner.pid) + checkpoint.up(owner.pid) == [0, 0, 0, 0]
    owner.check()
    exported = owner.try_("mem_export", block["handle"])
    if size >= 512 * MIB and exported.code == INVALID_VALUE:
        return
    assert exported.code == 0
    imported = other.import_block(owner.hand(exported.value, other), size)
    other.expect(imported["address"], MIB, [1])
    other.check()


@pytest.mark.parametrize("mib", LARGE)
def test_b31_export_after_each_cycle(start_worker: Callable[..., Worker], group: Group, mib: int) -> None:
    """Pitfall 12: large memory is exported anew after every cycle, and an import of before sees what is written."""
    owner, other = start_worker(0), start_worker(0)
    size = mib * MIB
    block = owner.block(size)
    last = block["address"] + size - MIB
    for address, seed in ((block["address"], 1), (last, 2)):
        owner.fill(address, MIB, seed)
    fd = owner.mem_export(block["handle"])
    kept = other.import_block(there := owner.hand(fd, other), size)
    owner.close_fd(fd)
    other.close_fd(there)
    other.expect(kept["address"], MIB, [1])
    for turn in range(3):
        group.cycle(owner, other)
        fd = owner.mem_export(block["handle"])
        fresh = other.import_block(there := owner.hand(fd, other), size)
        owner.close_fd(fd)
        other.close_fd(there)
        other.fill(fresh["address"] + size - MIB, MIB, 10 + turn)
        owner.expect(last, MIB, [10 + turn])
        other.expect(kept["address"] + size - MIB, MIB, [10 + turn])
        owner.check()
        other.check()
        other.forget(fresh["address"] + size - MIB)
        other.drop_block(fresh)
