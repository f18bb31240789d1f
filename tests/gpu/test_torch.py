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
    need_package("torch", "PyTorch")
    env = NO_MULTICAST | KINDS[kind] | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                                        "TORCH_RANK_KIND": kind}
    ranks = Stepping(machine, "tests.programs.torch_rank", 2, tmp_path, env)
    try:
        ranks.wait_for_more(5, 100)
        group.cycle_at_work(ranks, 5)
        ranks.finish()
    finally:
        ranks.kill()
