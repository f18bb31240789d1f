"""What PyTorch does, measured on request: a program, `python -m tests.bench.gpu.torch_program launch|allreduce`.

For each line on stdin it prints a line of JSON: `launch`, small kernels a second; `allreduce`, the bus bandwidth of
NCCL in GB/s, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

KERNELS = 20_000
AT_ONCE = 500  # fewer than the GPU's queue holds
REDUCE_BYTES = 256 << 20
REDUCTIONS = 20


def launch() -> Callable[[], float]:
    """Return a function that measures kernels a second."""
    value = torch.zeros(1, device="cuda")

    def measure() -> float:
        begun = time.perf_counter()
        for _ in range(KERNELS // AT_ONCE):
            for _ in range(AT_ONCE):
                value.add_(1)
            torch.cuda.synchronize()
        return KERNELS / (time.perf_counter() - begun)

    return measure


def allreduce() -> Callable[[], float]:
    """Return a function that measures GB/s on the bus, as NCCL's own tests count them."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    data = torch.ones(REDUCE_BYTES // 4, device="cuda")

    def measure() -> float:
        dist.all_reduce(data)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(REDUCTIONS):
            dist.all_reduce(data)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / REDUCTIONS
        data.fill_(1)
        return REDUCE_BYTES * 2 * (world - 1) / world / seconds / 1e9

    return measure


def main() -> None:
    """Measure once for each line."""
    measure = {"launch": launch, "allreduce": allreduce}[sys.argv[1]]()
    measure()  # warms up
    for _ in sys.stdin:
        print(json.dumps({"value": measure()}), flush=True)


if __name__ == "__main__":
    main()
