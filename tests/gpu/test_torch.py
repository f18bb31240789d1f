"""PyTorch ranks with memory of their own kind: user buffers of NCCL, symmetric memory, expandable segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import need_package
from tests.gpu.conftest import Group
from tests.gpu.test_checkpoint_nccl import NO_MULTICAST, free_port
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping

KINDS = {"registered": {}, "symmetric": {}, "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


@pytest.mark.machine(devices=2, driver="real")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks(machine: Setting, group: Group, tmp_path: Path, kind: str) -> None:
    """Three cycles in place at work; the ranks compare every element of every step."""
    through_cycles(machine, group, tmp_path, kind, 2)


@pytest.mark.machine(devices=1, driver="real")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["registered", "expandable"])
def test_one_rank(machine: Setting, group: Group, tmp_path: Path, kind: str) -> None:
    """The same of a rank by itself: what the memory is made of, without what ranks share."""
    through_cycles(machine, group, tmp_path, kind, 1)


def through_cycles(machine: Setting, group: Group, tmp_path: Path, kind: str, count: int) -> None:
    """Start ranks of a kind and take them through three cycles."""
    need_package("torch", "PyTorch")
    env = NO_MULTICAST | KINDS[kind] | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                                        "MASTER_PORT": free_port(), "TORCH_RANK_KIND": kind}
    ranks = Stepping(machine, "tests.programs.torch_rank", count, tmp_path, env)
    try:
        ranks.wait_for_more(5, 100)
        group.cycle_at_work(ranks, 5)
        ranks.finish()
    finally:
        ranks.kill()
