"""The few driver calls that a rank makes, through cuda-bindings, with errors as exceptions.

Owns no policy: what is allocated and shared is decided in rank.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

KERNELS = Path(__file__).with_name("kernels.ptx")
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
IPC_BYTES = 64  # of an IPC handle, whose content cuda-bindings does not show
BLOCK = 256
MAX_GRID = 2048


class CudaError(Exception):
    """A driver call failed; the message names the call and the driver's error."""


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` and return its results without the status: nothing, one value, or a tuple.

    Raises CudaError when the driver answers anything but success.
    """
    try:
        status, *results = function(*arguments)
    except (RuntimeError, ValueError) as error:  # what cuda-bindings raises for a missing function, an unknown code
        raise CudaError(f"{function.__name__}: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{function.__name__}: {status.name} ({int(status)})")
    return results[0] if len(results) == 1 else tuple(results) or None


@dataclass(frozen=True)
class Shared:
    """Memory from cuMemCreate, mapped for one device: created here, or imported from another process."""

    handle: Any
    address: int
    size_bytes: int

    def free(self) -> None:
        """Unmap, give the address back and drop the reference."""
        call(driver.cuMemUnmap, self.address, self.size_bytes)
        call(driver.cuMemAddressFree, self.address, self.size_bytes)
        call(driver.cuMemRelease, self.handle)


class Device:
    """One device with its primary context current in this thread, the demo's kernels and a stream."""

    def __init__(self, ordinal: int) -> None:
        call(driver.cuInit, 0)
        self.ordinal = ordinal
        self.device = call(driver.cuDeviceGet, ordinal)
        call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, self.device))
        self._module = call(driver.cuModuleLoadData, KERNELS.read_bytes() + b"\0")
        self._functions: dict[str, Any] = {}
        self.stream = call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def launch(self, kernel: str, nwords: int, *parameters: int) -> None:
        """Launch `kernel` on the stream over `nwords` words; every parameter is passed 8 bytes wide."""
        if kernel not in self._functions:
            self._functions[kernel] = call(driver.cuModuleGetFunction, self._module, kernel.encode())
        grid = max(1, min(MAX_GRID, (nwords + BLOCK - 1) // BLOCK))
        packed = (parameters, (ctypes.c_uint64,) * len(parameters))
        function = self._functions[kernel]
        call(driver.cuLaunchKernel, function, grid, 1, 1, BLOCK, 1, 1, 0, self.stream, packed, 0)

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        call(driver.cuStreamSynchronize, self.stream)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new device memory from cuMemAlloc."""
        return int(call(driver.cuMemAlloc, size_bytes))

    def create_shared(self, size_bytes: int) -> Shared:
        """Create memory that can be exported as a POSIX fd, and map it."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        properties.requestedHandleTypes = POSIX_FD
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = int(call(driver.cuMemGetAllocationGranularity, properties, minimum))
        size = (size_bytes + granule - 1) // granule * granule
        return self._map(call(driver.cuMemCreate, size, properties, 0), size)

    def import_shared(self, fd: int, size_bytes: int) -> Shared:
        """Import what another process exported as `fd`, and map it; the caller closes `fd`."""
        return self._map(call(driver.cuMemImportFromShareableHandle, fd, POSIX_FD), size_bytes)

    def _map(self, handle: Any, size_bytes: int) -> Shared:
        address = int(call(driver.cuMemAddressReserve, size_bytes, 0, 0, 0))
        call(driver.cuMemMap, address, size_bytes, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call(driver.cuMemSetAccess, address, size_bytes, [access], 1)
        return Shared(handle, address, size_bytes)

    def capture(self, work: Callable[[], None]) -> Any:
        """Return an executable graph of what `work` puts on the stream."""
        call(driver.cuStreamBeginCapture, self.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        work()
        graph = call(driver.cuStreamEndCapture, self.stream)
        executable = call(driver.cuGraphInstantiate, graph, 0)
        call(driver.cuGraphDestroy, graph)
        return executable

    def read(self, address: int, nwords: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return a copy of `nwords` words of device memory."""
        host = np.empty(nwords, np.uint32)
        call(driver.cuMemcpyDtoH, host.ctypes.data, address, host.nbytes)
        return host


def export_fd(shared: Shared) -> int:
    """Export `shared` as a POSIX fd that the caller owns."""
    return int(call(driver.cuMemExportToShareableHandle, shared.handle, POSIX_FD, 0))


def ipc_handle(address: int) -> bytes:
    """Return the 64 bytes that let another process open the allocation at `address`."""
    handle = call(driver.cuIpcGetMemHandle, address)  # its memory goes with it
    return ctypes.string_at(handle.getPtr(), IPC_BYTES)


def ipc_open(handle: bytes) -> int:
    """Map another process's allocation; raises CudaError."""
    opaque = driver.CUipcMemHandle()
    ctypes.memmove(opaque.getPtr(), handle, IPC_BYTES)
    flag = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return int(call(driver.cuIpcOpenMemHandle, opaque, flag))


def all_reach_each_other(ordinals: Sequence[int]) -> bool:
    """Tell whether each of the devices can use the memory of each other one."""
    devices = [call(driver.cuDeviceGet, ordinal) for ordinal in sorted(set(ordinals))]
    return all(call(driver.cuDeviceCanAccessPeer, a, b) for a in devices for b in devices if a is not b)
