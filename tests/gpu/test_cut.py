"""The distributed cut again and again under load: ranks all-reduce all the time, and every suspend succeeds.

On GPUs NCCL's ranks go through 50 suspends; on the simulated driver, and through fewer on GPUs, workers whose kernels
wait for each other. `GPUSHARE_CUT_CYCLES` sets the number for the workers.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import need_package
from tests.gpu.conftest import Group
from tests.gpu.test_checkpoint_nccl import NO_MULTICAST, free_port
from tests.programs import setting as where
from tests.programs.client import Worker
from tests.programs.loops import BLOCK_WORDS
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping

NCCL_CYCLES = {"process": 50, "pages": 15}
WORKER_CYCLES = int(os.environ.get("GPUSHARE_CUT_CYCLES") or (10 if where.wanted_driver() == "real" else 4))
SEED = 20
WAIT_S = 60


@pytest.mark.machine(devices=2, driver="real")
@pytest.mark.timeout(290)
@pytest.mark.parametrize("depth", NCCL_CYCLES)
def test_nccl_under_load(machine: Setting, group: Group, tmp_path: Path, depth: str) -> None:
    """50 of 50: two ranks with many all-reduces a step, each suspend at a random moment; they check every sum."""
    need_package("torch", "PyTorch")
    env = NO_MULTICAST | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                          "NCCL_RANK_WORDS": str(1 << 20), "NCCL_RANK_BURST": "200"}
    ranks = Stepping(machine, "tests.programs.nccl_rank", 2, tmp_path, env)
    moment = random.Random(SEED)
    try:
        ranks.wait_for_more(3, 120)
        for number in range(NCCL_CYCLES[depth]):
            time.sleep(moment.uniform(0, 0.05))
            answers = [group.tool.suspend(*ranks.pids, options=("--depth", depth)), group.tool.resume(*ranks.pids)]
            for answer in answers:
                assert answer.exit_code == 0, f"cycle {number + 1} of {NCCL_CYCLES[depth]}, seed {SEED}: {answer}"
            ranks.wait_for_more(1, WAIT_S)
        ranks.finish()
    finally:
        ranks.kill()


@pytest.mark.machine(devices=2)
@pytest.mark.timeout(290)
@pytest.mark.parametrize("depth", ["process", "pages"])
def test_all_reduce_under_load(start_worker: Callable[..., Worker], group: Group, depth: str) -> None:
    """Kernels of both ranks wait for each other twice a round, others copy beside them; every sum is compared."""
    ranks = [start_worker(0), start_worker(1)]
    own = [rank.alloc(BLOCK_WORDS * 4) for rank in ranks]
    flags = [rank.alloc(4096) for rank in ranks]
    for rank, flag in zip(ranks, flags, strict=True):
        rank.write(flag, [0])
    loops = []
    for at, rank in enumerate(ranks):
        other = 1 - at
        theirs, their_flag = (rank.ipc_open(ranks[other].ipc_get(one[other])) for one in (own, flags))
        loops.append((rank, rank.loop_start("all_reduce", rank=at, own=own[at], theirs=theirs, mine_flag=flags[at],
                                            their_flag=their_flag)))
        loops.append((rank, rank.loop_start("copies", pause_s=0.002 if group.machine.simulated else 0)))
    moment = random.Random(SEED)
    for number in range(WORKER_CYCLES):
        time.sleep(moment.uniform(0, 0.1))
        answer = group.tool.suspend(*(rank.pid for rank in ranks), options=("--depth", depth))
        assert answer.exit_code == 0, f"cycle {number + 1} of {WORKER_CYCLES}, seed {SEED}: {answer}"
        group.resume(*ranks)
        seen = [rank.loop_state(loop)["count"] for rank, loop in loops]
        until = time.monotonic() + WAIT_S
        while any(rank.loop_state(loop)["count"] <= was for (rank, loop), was in zip(loops, seen, strict=True)):
            states = [rank.loop_state(loop) for rank, loop in loops]
            assert not any(state["errors"] for state in states), states
            assert time.monotonic() < until, f"cycle {number + 1}, seed {SEED}: a loop stands still: {states}"
            time.sleep(0.01)
    assert not any(rank.loop_state(loop)["errors"] for rank, loop in loops)
