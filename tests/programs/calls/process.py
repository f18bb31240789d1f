"""Checkpoint calls on another process, and kinds of object that the shim does not carry yet."""

from __future__ import annotations

import ctypes
import os

from cuda.bindings import driver as cu

from tests.programs.calls.base import MISSING, Result, ask, ask_raw, command, is_simulated, need
from tests.programs.calls.memory import opaque
from tests.programs.calls.vmm import location


@command
def cp_state(pid: int) -> Result:
    """Return the checkpoint state: 0 running, 1 locked, 2 checkpointed, 3 failed."""
    return ask("cuCheckpointProcessGetState", pid)


@command
def cp_thread(pid: int) -> Result:
    """Return the restore thread's id."""
    return ask("cuCheckpointProcessGetRestoreThreadId", pid)


@command
def cp_lock(pid: int, timeout_ms: int = 10_000) -> Result:
    """Lock a process."""
    wanted = cu.CUcheckpointLockArgs()
    wanted.timeoutMs = timeout_ms
    return ask("cuCheckpointProcessLock", pid, wanted)


@command
def cp_checkpoint(pid: int) -> Result:
    """Checkpoint a locked process."""
    return ask("cuCheckpointProcessCheckpoint", pid, None)


@command
def cp_restore(pid: int, pairs: list[list[int]] | None = None) -> Result:
    """Restore a process; `pairs` lists [old ordinal, new ordinal]."""
    if pairs is None:
        return ask("cuCheckpointProcessRestore", pid, None)
    listed = []
    for old, new in pairs:
        pair = cu.CUcheckpointGpuPair()
        pair.oldUuid = need(ask_raw("cuDeviceGetUuid", old), "uuid")
        pair.newUuid = need(ask_raw("cuDeviceGetUuid", new), "uuid")
        listed.append(pair)
    wanted = cu.CUcheckpointRestoreArgs()
    wanted.gpuPairs = listed
    wanted.gpuPairsCount = len(listed)
    return ask("cuCheckpointProcessRestore", pid, wanted)


@command
def cp_unlock(pid: int) -> Result:
    """Unlock a process."""
    return ask("cuCheckpointProcessUnlock", pid, None)


# Kinds of object that the shim does not carry yet


@command
def pool_create(ordinal: int = 0) -> Result:
    """Create an exportable pool."""
    wanted = cu.CUmemPoolProps()
    wanted.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.handleTypes = cu.CUmemAllocationHandleType(1)
    wanted.location = location("device", ordinal)
    return ask("cuMemPoolCreate", wanted)


@command
def pool_export(pool: int) -> Result:
    """Export a pool; return the number of the new fd."""
    return ask("cuMemPoolExportToShareableHandle", pool, cu.CUmemAllocationHandleType(1), 0)


@command
def pool_destroy(pool: int) -> Result:
    """Destroy a pool."""
    return ask("cuMemPoolDestroy", pool)


@command
def event_ipc_get(event: int) -> Result:
    """Return the IPC handle of an event as hexadecimal digits."""
    answer = ask_raw("cuIpcGetEventHandle", event)
    return Result(answer.code, answer.value and opaque(answer.value))


@command
def event_ipc_open(handle: str) -> Result:
    """Open an event by its IPC handle; return the event."""
    wanted = cu.CUipcEventHandle()
    ctypes.memmove(wanted.getPtr(), bytes.fromhex(handle), len(handle) // 2)
    return ask("cuIpcOpenEventHandle", wanted)


def _descriptor() -> int:
    """Return a new descriptor, for a driver that takes it over."""
    return os.open("/dev/zero", os.O_RDONLY)


@command
def dma_buf(address: int, size: int) -> Result:
    """Get a range as a descriptor for other devices, and close it: whoever mapped the memory may still have it."""
    kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    answer = ask("cuMemGetHandleForAddressRange", address, size, kind, 0)
    if answer.code == 0:
        os.close(answer.value)
    return answer


@command
def green_create(ordinal: int) -> Result:
    """Create a green context, simulated driver only: a real one wants a description of multiprocessors."""
    if not is_simulated():
        return Result(MISSING)
    return ask("cuGreenCtxCreate", cu.CUdevResourceDesc(1), ordinal, 1)


@command
def green_destroy(context: int) -> Result:
    """Destroy a green context."""
    return ask("cuGreenCtxDestroy", context)


@command
def array_create() -> Result:
    """Create a sparse array, of which nothing is mapped."""
    wanted = cu.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width = wanted.Height = 1024
    wanted.Format, wanted.NumChannels, wanted.Flags = cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32, 1, 0x40
    return ask("cuArray3DCreate", wanted)


@command
def array_map(array: int, handle: int) -> Result:
    """Map memory into the first tile of a sparse array."""
    wanted = cu.CUarrayMapInfo()
    wanted.resourceType = cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
    wanted.resource.array = cu.CUarray(array)
    wanted.memOperationType = cu.CUmemOperationType.CU_MEM_OPERATION_TYPE_MAP
    wanted.memHandle.memHandle = handle
    wanted.deviceBitMask = 1
    return ask("cuMemMapArrayAsync", [wanted], 1, 0)


@command
def array_destroy(array: int) -> Result:
    """Destroy an array."""
    return ask("cuArrayDestroy", array)


@command
def external_memory_import(size: int) -> Result:
    """Import memory of another API, simulated driver only: a real one wants what a graphics API exported."""
    if not is_simulated():
        return Result(MISSING)
    wanted = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    wanted.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
    wanted.handle.fd, wanted.size = _descriptor(), size
    return ask("cuImportExternalMemory", wanted)


@command
def external_memory_destroy(memory: int) -> Result:
    """Let memory of another API go."""
    return ask("cuDestroyExternalMemory", memory)


@command
def external_semaphore_import() -> Result:
    """Import a semaphore of another API, simulated driver only."""
    if not is_simulated():
        return Result(MISSING)
    wanted = cu.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
    wanted.type = cu.CUexternalSemaphoreHandleType.CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD
    wanted.handle.fd = _descriptor()
    return ask("cuImportExternalSemaphore", wanted)


@command
def external_semaphore_destroy(semaphore: int) -> Result:
    """Let a semaphore of another API go."""
    return ask("cuDestroyExternalSemaphore", semaphore)


@command
def graphics_register() -> Result:
    """Register a buffer of OpenGL, simulated driver only: a real one wants a context of OpenGL."""
    return ask("cuGraphicsGLRegisterBuffer", 1, 0) if is_simulated() else Result(MISSING)


@command
def graphics_unregister(resource: int) -> Result:
    """Let a buffer of OpenGL go."""
    return ask("cuGraphicsUnregisterResource", resource)


@command
def proc_address(name: str, version: int) -> Result:
    """Look a driver function up as of a CUDA version, by cuGetProcAddress of CUDA 12; return its address."""
    found = ctypes.c_void_p()
    look_up = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    code = look_up(name.encode(), ctypes.byref(found), version, ctypes.c_uint64(0), None)
    return Result(code, found.value)
