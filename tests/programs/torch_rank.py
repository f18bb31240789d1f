"""One of two PyTorch ranks that use memory in a way of its own: `python -m tests.programs.torch_rank FOLDER`.

RANK, WORLD_SIZE and TORCH_RANK_KIND are set, the last to a function below. Each step computes integers whose result is
known and compares every element. The step goes to FOLDER/rank<N>; FOLDER/stop ends the loop.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tests.programs.stepping import note

WORDS = 1 << 22


class Wrong(RuntimeError):
    """A result is not what it has to be."""


def same(found: torch.Tensor, wanted: torch.Tensor | int, what: str) -> None:
    """Raise Wrong unless all elements are as wanted."""
    if not bool((found == wanted).all()):
        raise Wrong(what)


class Block:
    """Memory of NCCL's own allocator, registered with a communicator, that PyTorch takes for an array of int64.

    Called directly: PyTorch's pool for it asks for multicast, which is off.
    """

    def __init__(self, words: int, communicator: int) -> None:
        nccl, address, handle = loaded("libnccl.so"), ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(words * 8)
        code = nccl.ncclMemAlloc(ctypes.byref(address), size)
        code = code or nccl.ncclCommRegister(ctypes.c_void_p(communicator), address, size, ctypes.byref(handle))
        if code:
            raise Wrong(f"NCCL gives no registered memory: {code}")
        self.__cuda_array_interface__ = {"shape": (words,), "typestr": "<i8", "data": (address.value, False),
                                         "version": 3}


def loaded(name: str) -> ctypes.CDLL:
    """Return a library that this process has mapped already."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"/{name}" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[5])
    raise Wrong(f"PyTorch has not loaded {name}")


def registered(rank: int, world: int, device: torch.device) -> Iterator[None]:
    """User buffers: memory of ncclMemAlloc, registered with the communicator by ncclCommRegister."""
    communicator = dist.group.WORLD._get_backend(device)._comm_ptr()
    mine, gathered = (torch.as_tensor(Block(words, communicator), device=device) for words in (WORDS, world * WORDS))
    step = 0
    while True:
        step += 1
        mine.fill_(step * (rank + 1))
        dist.all_gather_into_tensor(gathered, mine)
        for other, part in enumerate(gathered.chunk(world)):
            same(part, step * (other + 1), "gathered into registered memory")
        dist.all_reduce(mine)
        same(mine, step * world * (world + 1) // 2, "reduced in registered memory")
        yield


def symmetric(rank: int, world: int, device: torch.device) -> Iterator[None]:
    """Symmetric memory without multicast: kernels of each rank read the others' memory and signal through it."""
    import torch.distributed._symmetric_memory as symm_mem

    block = symm_mem.empty(WORDS, dtype=torch.float32, device=device)
    handle = symm_mem.rendezvous(block, dist.group.WORLD)
    name = dist.group.WORLD.group_name
    step = 0
    while True:
        step = step % 1000 + 1
        block.fill_(step * (rank + 1))
        handle.barrier()
        theirs = handle.get_buffer((rank + 1) % world, (WORDS,), torch.float32)
        same(theirs, step * ((rank + 1) % world + 1), "read from the other rank")
        handle.barrier()
        same(torch.ops.symm_mem.one_shot_all_reduce(block, "sum", name), step * world * (world + 1) // 2, "reduced")
        yield


def expandable(rank: int, world: int, device: torch.device) -> Iterator[None]:
    """Memory that grows and shrinks: with expandable segments the allocator maps and unmaps pieces of one range."""
    if "expandable_segments:True" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise Wrong("PYTORCH_CUDA_ALLOC_CONF does not ask for expandable segments")
    source = random.Random(rank)
    held: list[tuple[int, torch.Tensor]] = []
    step = 0
    while True:
        step += 1
        held.append((step, torch.full((source.randrange(1 << 10, 1 << 23),), step, dtype=torch.int64, device=device)))
        if len(held) > 8:
            del held[source.randrange(len(held))]
        if step % 7 == 0:
            torch.cuda.empty_cache()
        for number, one in held:
            same(one, number, "memory of before")
        total = torch.full((1 << 16,), step * (rank + 1), dtype=torch.int64, device=device)
        dist.all_reduce(total)
        same(total, step * world * (world + 1) // 2, "reduced")
        yield


KINDS: dict[str, Callable[[int, int, torch.device], Iterator[None]]] = {
    one.__name__: one for one in (registered, symmetric, expandable)
}


def main(folder: Path) -> None:
    """Compute until told to stop."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    steps = KINDS[os.environ["TORCH_RANK_KIND"]](rank, world, device)
    step = 0
    while not (folder / "stop").exists():
        step += 1
        next(steps)
        note(folder, rank, step)
    (folder / f"done{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
