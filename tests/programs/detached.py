"""A group that CRIU can dump: a plain parent and two ranks that share memory, tied to nobody by a pipe or a socket.

    python -m tests.programs.detached FOLDER

Rank 0 owns a buffer, rank 1 opens it by CUDA IPC; each has a descriptor of memory, too, which it imports at every step.
Both count steps: rank 0 adds one to every word of the buffer, rank 1
adds the buffer to its own and checks each word against the count. They take turns through files in FOLDER: `turn` holds
the number of the step; `step-1` what rank 1 has verified; `wrong` appears with a sentence when anything differs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

WORDS = 1 << 20
BYTES = 4 * WORDS
HANDLE_BYTES = 64
POSIX_FD = 1


def write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.rename(path)


def wait_for(path: Path, wanted: str | None = None) -> str:
    """Wait until a file exists, and holds `wanted` if that is given; return what it holds."""
    while True:
        try:
            text = path.read_text()
            if wanted is None or text == wanted:
                return text
        except FileNotFoundError:
            pass
        time.sleep(0.002)


def exported(cuda: ModuleType, call: Callable[[tuple], object], device: int) -> object:
    """Return a descriptor of new memory."""
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = cuda.CUmemAllocationHandleType(POSIX_FD)
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(device)
    handle = call(cuda.cuMemCreate(2 << 20, properties, 0))
    return call(cuda.cuMemExportToShareableHandle(handle, cuda.CUmemAllocationHandleType(POSIX_FD), 0))


def rank(number: int, folder: Path) -> None:
    """Take turns with the other rank until the process is killed."""
    import numpy
    from cuda.bindings import driver as cuda

    def call(answer: tuple) -> object:
        if int(answer[0]) != 0:
            write(folder / "wrong", f"rank {number}: the driver answered {answer[0]!r}")
            raise SystemExit(1)
        return answer[1] if len(answer) > 1 else None

    call(cuda.cuInit(0))
    device = call(cuda.cuDeviceGet(number % call(cuda.cuDeviceGetCount())))
    call(cuda.cuCtxSetCurrent(call(cuda.cuDevicePrimaryCtxRetain(device))))
    host = numpy.zeros(WORDS, dtype=numpy.uint32)
    own = call(cuda.cuMemAlloc(BYTES))
    call(cuda.cuMemcpyHtoD(own, host.ctypes.data, BYTES))
    if number == 0:
        write(folder / "handle", ctypes.string_at(call(cuda.cuIpcGetMemHandle(own)).getPtr(), HANDLE_BYTES).hex())
        shared = own
    else:
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), bytes.fromhex(wait_for(folder / "handle")), HANDLE_BYTES)
        shared = call(cuda.cuIpcOpenMemHandle(handle, cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value))
    kept, shareable = exported(cuda, call, device), cuda.CUmemAllocationHandleType(POSIX_FD)
    step = 0
    while True:
        step += 1
        call(cuda.cuMemRelease(call(cuda.cuMemImportFromShareableHandle(kept, shareable))))
        if number == 0:
            wait_for(folder / "turn", f"{step - 1}")
            host[:] = step
            call(cuda.cuMemcpyHtoD(shared, host.ctypes.data, BYTES))
            write(folder / "step-0", f"{step}")
        else:
            wait_for(folder / "step-0", f"{step}")
            call(cuda.cuMemcpyDtoD(own, shared, BYTES))
            call(cuda.cuMemcpyDtoH(host.ctypes.data, own, BYTES))
            if not (host == step).all():
                write(folder / "wrong", f"step {step}: the buffer holds {sorted(set(host.tolist()))[:4]}")
                raise SystemExit(1)
            write(folder / "step-1", f"{step}")
            write(folder / "turn", f"{step}")
        time.sleep(0.01)


def main() -> None:
    """Start the ranks and wait for them."""
    folder = Path(sys.argv[1])
    write(folder / "turn", "0")
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            rank(number, folder)
        children.append(child)
        write(folder / f"pid-{number}", f"{child}")
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
