"""Memory of cuMemAlloc, host memory, legacy IPC, and what can be asked about any address."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cu

from tests.programs.calls.base import Result, ask, ask_raw, command

IPC_BYTES = 64


def opaque(handle: Any) -> str:
    """Return an IPC handle's bytes; cuda-bindings shows them as a field in some versions only."""
    return ctypes.string_at(handle.getPtr(), IPC_BYTES).hex()


@command
def alloc(size: int) -> Result:
    """Allocate device memory."""
    return ask("cuMemAlloc", size)


@command
def free(address: int) -> Result:
    """Free device memory."""
    return ask("cuMemFree", address)


@command
def alloc_pitch(width: int, height: int, element_size: int) -> Result:
    """Allocate rows of `width` bytes; return [address, pitch]."""
    return ask("cuMemAllocPitch", width, height, element_size)


@command
def alloc_managed(size: int, flags: int = 1) -> Result:
    """Allocate managed memory."""
    return ask("cuMemAllocManaged", size, flags)


@command
def alloc_async(size: int, stream: int = 0) -> Result:
    """Allocate from the default pool, in stream order."""
    return ask("cuMemAllocAsync", size, stream)


@command
def free_async(address: int, stream: int = 0) -> Result:
    """Free memory of a pool, in stream order."""
    return ask("cuMemFreeAsync", address, stream)


@command
def mem_info() -> Result:
    """Return [free, total] bytes of the current context's device."""
    return ask("cuMemGetInfo")


@command
def address_range(address: int) -> Result:
    """Return [base, size] of the allocation that holds `address`."""
    return ask("cuMemGetAddressRange", address)


def _attribute(name: str) -> Any:
    return getattr(cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")


@command
def pointer_attribute(name: str, address: int) -> Result:
    """Return the attribute CU_POINTER_ATTRIBUTE_<name> of an address."""
    if name == "DEVICE_ORDINAL":  # cuda-bindings 13.3.1 shows 0, whatever the driver answers
        ordinal = ctypes.c_int(-1)
        code = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(ordinal), 9, ctypes.c_uint64(address))
        return Result(code, None if code else ordinal.value)
    return ask("cuPointerGetAttribute", _attribute(name), address)


@command
def pointer_attributes(names: list[str], address: int) -> Result:
    """Return several attributes of an address at once."""
    return ask("cuPointerGetAttributes", len(names), [_attribute(name) for name in names], address)


# Legacy IPC


@command
def ipc_get(address: int) -> Result:
    """Return the IPC handle of an allocation as hexadecimal digits."""
    answer = ask_raw("cuIpcGetMemHandle", address)
    return Result(answer.code, answer.value and opaque(answer.value))


@command
def ipc_open(handle: str, flags: int = 1) -> Result:
    """Open an IPC handle; return the address."""
    wanted = cu.CUipcMemHandle()
    ctypes.memmove(wanted.getPtr(), bytes.fromhex(handle), IPC_BYTES)
    return ask("cuIpcOpenMemHandle", wanted, flags)


@command
def ipc_close(address: int) -> Result:
    """Close memory that `ipc_open` opened."""
    return ask("cuIpcCloseMemHandle", address)


# Host memory


@command
def alloc_host(size: int, flags: int = 0) -> Result:
    """Allocate page-locked host memory of the driver's own."""
    return ask("cuMemHostAlloc", size, flags)


@command
def free_host(address: int) -> Result:
    """Free memory of `alloc_host`."""
    return ask("cuMemFreeHost", address)


@command
def host_register(address: int, size: int, flags: int = 0) -> Result:
    """Page-lock memory of the process."""
    return ask("cuMemHostRegister", address, size, flags)


@command
def host_unregister(address: int) -> Result:
    """Undo `host_register`."""
    return ask("cuMemHostUnregister", address)


@command
def host_device_pointer(address: int) -> Result:
    """Return the device address of page-locked memory."""
    return ask("cuMemHostGetDevicePointer", address, 0)


@command
def host_flags(address: int) -> Result:
    """Return the flags with which memory was page-locked."""
    return ask("cuMemHostGetFlags", address)
