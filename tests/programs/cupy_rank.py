"""One of two CuPy processes that share memory: `python -m tests.programs.cupy_rank FOLDER`, RANK 0 or 1.

Each rank owns an array, opens the other's by CUDA IPC, and every step multiplies a matrix, adds the peer's array and
compares with numpy. The step goes to FOLDER/rank<N>; FOLDER/stop ends the loop.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import cupy
import numpy

WORDS = 1 << 20


def put(folder: Path, name: str, content: bytes) -> None:
    """Write a file that appears whole."""
    (folder / f".{name}").write_bytes(content)
    (folder / f".{name}").rename(folder / name)


def main(folder: Path) -> None:
    """Compute until told to stop."""
    rank = int(os.environ["RANK"])
    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    # A block of its own: an array of CuPy's pool lies inside a bigger one.
    memory = cupy.cuda.memory.Memory(WORDS * 8)
    own = cupy.ndarray((WORDS,), cupy.int64, cupy.cuda.MemoryPointer(memory, 0))
    own[:] = cupy.arange(WORDS) * (rank + 1)
    cupy.cuda.runtime.deviceSynchronize()
    put(folder, f"handle{rank}", bytes(cupy.cuda.runtime.ipcGetMemHandle(own.data.ptr)))
    other_file = folder / f"handle{1 - rank}"
    while not other_file.exists():
        time.sleep(0.01)
    address = cupy.cuda.runtime.ipcOpenMemHandle(other_file.read_bytes())
    foreign = cupy.cuda.UnownedMemory(address, WORDS * 8, None)
    theirs = cupy.ndarray((WORDS,), cupy.int64, cupy.cuda.MemoryPointer(foreign, 0))
    wanted = numpy.arange(WORDS) * 3
    generator = numpy.random.default_rng(rank)
    matrix = generator.integers(-8, 8, (512, 512)).astype(numpy.float64)
    on_device = cupy.asarray(matrix)
    squared = matrix @ matrix
    step = 0
    while not (folder / "stop").exists():
        step += 1
        if not numpy.array_equal(cupy.asnumpy(own + theirs), wanted):
            raise SystemExit(f"rank {rank}, step {step}: the sum is wrong")
        if not numpy.array_equal(cupy.asnumpy(on_device @ on_device), squared):
            raise SystemExit(f"rank {rank}, step {step}: the product is wrong")
        put(folder, f"rank{rank}", str(step).encode())
    put(folder, f"done{rank}", b"")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
