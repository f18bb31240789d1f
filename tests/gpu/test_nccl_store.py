"""NCCL's ranks in place through a store: unchanged weights are written once, also for ranks started afresh."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from chunkstore import CHUNK_SIZE_BYTES
from tests.conftest import need_package
from tests.gpu.conftest import Group
from tests.gpu.test_checkpoint_nccl import NO_MULTICAST, free_port
from tests.gpu.vllm.chunks import weights_in, written_into_weights
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping
from tests.programs.usage import memory_by_pid

WEIGHTS = 5 * CHUNK_SIZE_BYTES  # of a rank; nothing else that it allocates is as large, but for copies of it
OF_A_RANK = {WEIGHTS: 1}


def started(machine: Setting, folder: Path) -> Stepping:
    """Two ranks at NCCL's default transport, at work."""
    folder.mkdir()
    env = NO_MULTICAST | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                          "NCCL_RANK_WORDS": str(WEIGHTS // 8)}
    ranks = Stepping(machine, "tests.programs.nccl_rank", 2, folder, env)
    ranks.wait_for_more(3, 120)
    return ranks


@pytest.mark.machine(devices=2, driver="real")
@pytest.mark.timeout(280)
def test_weights_are_written_once(machine: Setting, group: Group, tmp_path: Path) -> None:
    """Two saves of the same ranks, then one of others with the same weights."""
    need_package("torch", "PyTorch")
    checkpoints = []

    def save(ranks: Stepping) -> None:
        checkpoints.append(tmp_path / f"checkpoint-{len(checkpoints)}")
        words = ("--store", str(tmp_path / "store"), "--ckpt-dir", str(checkpoints[-1]),
                 "--cache", str(tmp_path / "cache"))
        moved = group.tool.suspend(*ranks.pids, options=words).expect(0).json["groups"][0]["stored"]["bytes"]
        print(checkpoints[-1].name, moved)
        assert not memory_by_pid(machine).keys() & set(ranks.pids)
        group.tool.resume(*ranks.pids).expect(0)
        ranks.wait_for_more(3, 60)

    ranks = started(machine, tmp_path / "first")
    try:
        save(ranks)
        assert len(weights_in(checkpoints[0], OF_A_RANK, set())) == 2, "the weights are not where they should be"
        save(ranks)
        ranks.finish()
    finally:
        ranks.kill()
    ranks = started(machine, tmp_path / "second")
    try:
        save(ranks)
        ranks.finish()
    finally:
        ranks.kill()
    for before, after in pairwise(checkpoints):
        assert written_into_weights(before, after, OF_A_RANK) == []
