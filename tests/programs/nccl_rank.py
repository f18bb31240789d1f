"""One rank of an endless NCCL all-reduce: `python -m tests.programs.nccl_rank FOLDER`, RANK and WORLD_SIZE set.

Each step reduces random integers made from the step's seed, in place and on a second stream beside a copy, and compares
every element with the sum that each rank computes by itself on the CPU. The step goes to FOLDER/rank<N>; FOLDER/stop
ends the loop. NCCL_RANK_WORDS: how many words the memory beside has (default 2^26); NCCL_RANK_BURST: how many more
reductions a step has, one behind the other without a wait, whose result must be what it was (default 0).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.programs.stepping import note

WORDS = 1 << 20


def main(folder: Path) -> None:
    """Reduce until told to stop."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    weights = torch.arange(int(os.environ.get("NCCL_RANK_WORDS", 1 << 26)), device=device, dtype=torch.int64)
    weights_sum = int(weights.sum().item())
    side = torch.cuda.Stream()
    captured = torch.ones(WORDS, device=device, dtype=torch.int64)
    dist.all_reduce(captured)
    second = dist.new_group(backend="nccl")
    doubled = torch.ones(1, device=device, dtype=torch.int64)
    dist.all_reduce(doubled, group=second)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.fill_(rank + 1)
        dist.all_reduce(captured)
    burst = int(os.environ.get("NCCL_RANK_BURST", 0))
    kept = torch.arange(WORDS, device=device, dtype=torch.int64)
    turned = kept.clone()
    step = 0
    while not (folder / "stop").exists():
        step += 1
        parts = [torch.randint(-1000, 1000, (WORDS,), generator=torch.Generator().manual_seed(step * 1000 + r))
                 for r in range(world)]
        mine = parts[rank].to(device)
        with torch.cuda.stream(side):
            copied = weights.clone()
        dist.all_reduce(mine)
        graph.replay()
        doubled.fill_(step)
        dist.all_reduce(doubled, group=second)
        for _ in range(burst):
            dist.all_reduce(turned)
            turned //= world
        torch.cuda.synchronize()
        if not torch.equal(turned, kept):
            raise SystemExit(f"rank {rank}, step {step}: a sum of many in a row is wrong")
        if not torch.equal(mine.cpu(), sum(parts)):
            raise SystemExit(f"rank {rank}, step {step}: the sum is wrong")
        if not bool((captured == world * (world + 1) // 2).all()):
            raise SystemExit(f"rank {rank}, step {step}: the captured sum is wrong")
        if int(doubled.item()) != world * step:
            raise SystemExit(f"rank {rank}, step {step}: the sum of the second communicator is wrong")
        if int(copied.sum().item()) != weights_sum:
            raise SystemExit(f"rank {rank}, step {step}: the weights changed")
        note(folder, rank, step)
    (folder / f"done{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
