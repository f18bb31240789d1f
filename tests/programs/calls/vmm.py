"""Virtual memory management: physical memory, reservations, mappings, access, sharing by descriptor."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

from tests.programs.calls.base import Result, ask, ask_raw, command

FABRIC = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
LOCATIONS = {"device": 1, "host": 2, "host_numa": 3}


def location(kind: str, ordinal: int) -> Any:
    place = cu.CUmemLocation()
    """Return a location as the driver takes it."""
    place.type = cu.CUmemLocationType(LOCATIONS[kind])
    place.id = ordinal
    return place


def _properties(kind: str, ordinal: int, handle_type: int, rdma: int) -> Any:
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = location(kind, ordinal)
    wanted.requestedHandleTypes = cu.CUmemAllocationHandleType(handle_type)
    wanted.allocFlags.gpuDirectRDMACapable = rdma
    return wanted


@command
def mem_granularity(kind: str = "device", ordinal: int = 0, recommended: bool = False) -> Result:
    """Return the granularity of physical memory in bytes."""
    which = cu.CUmemAllocationGranularity_flags(1 if recommended else 0)
    return ask("cuMemGetAllocationGranularity", _properties(kind, ordinal, 1, 0), which)


@command
def mem_create(size: int, kind: str = "device", ordinal: int = 0, handle_type: int = 1, rdma: int = 0) -> Result:
    """Create physical memory; `handle_type` 0 none, 1 POSIX fd, 8 fabric."""
    return ask("cuMemCreate", size, _properties(kind, ordinal, handle_type, rdma), 0)


@command
def mem_release(handle: int) -> Result:
    """Give up one reference to physical memory."""
    return ask("cuMemRelease", handle)


@command
def mem_reserve(size: int, alignment: int = 0, hint: int = 0) -> Result:
    """Reserve a range of addresses."""
    return ask("cuMemAddressReserve", size, alignment, hint, 0)


@command
def mem_address_free(address: int, size: int) -> Result:
    """Free a reservation."""
    return ask("cuMemAddressFree", address, size)


@command
def mem_map(address: int, size: int, handle: int, offset: int = 0) -> Result:
    """Map physical memory at a reserved address."""
    return ask("cuMemMap", address, size, offset, handle, 0)


@command
def mem_unmap(address: int, size: int) -> Result:
    """Unmap a range of whole mappings."""
    return ask("cuMemUnmap", address, size)


@command
def mem_access(address: int, size: int, entries: list[list[Any]]) -> Result:
    """Set access: each entry is [kind, ordinal, 0 none / 1 read / 3 read and write]."""
    descriptors = []
    for kind, ordinal, protection in entries:
        one = cu.CUmemAccessDesc()
        one.location = location(kind, ordinal)
        one.flags = cu.CUmemAccess_flags(protection)
        descriptors.append(one)
    return ask("cuMemSetAccess", address, size, descriptors, len(descriptors))


@command
def mem_get_access(address: int, kind: str = "device", ordinal: int = 0) -> Result:
    """Return the access that a location has to an address: 0, 1 or 3."""
    return ask("cuMemGetAccess", location(kind, ordinal), address)


@command
def mem_retain(address: int) -> Result:
    """Return the handle mapped at an address, with one more reference."""
    return ask("cuMemRetainAllocationHandle", address)


@command
def mem_properties(handle: int) -> Result:
    """Return the properties of physical memory."""
    answer = ask_raw("cuMemGetAllocationPropertiesFromHandle", handle)
    if answer.code != 0:
        return answer
    found = answer.value
    return Result(0, {
        "type": int(found.type), "handle_types": int(found.requestedHandleTypes),
        "location": int(found.location.type), "ordinal": int(found.location.id),
        "rdma": int(found.allocFlags.gpuDirectRDMACapable), "usage": int(found.allocFlags.usage),
    })


@command
def mem_export(handle: int, handle_type: int = 1) -> Result:
    """Export physical memory; return the number of the new fd."""
    return ask("cuMemExportToShareableHandle", handle, cu.CUmemAllocationHandleType(handle_type), 0)


@command
def fabric_export(handle: int) -> Result:
    """Export physical memory as a fabric handle; return its bytes as hexadecimal digits."""
    answer = ask_raw("cuMemExportToShareableHandle", handle, FABRIC, 0)
    return Result(answer.code, answer.value and bytes(answer.value.data).hex())


@command
def fabric_import(text: str) -> Result:
    """Import physical memory by the bytes of a fabric handle."""
    return ask("cuMemImportFromShareableHandle", bytearray.fromhex(text), FABRIC)


@command
def mem_import(fd: int, handle_type: int = 1) -> Result:
    """Import physical memory from an fd."""
    return ask("cuMemImportFromShareableHandle", fd, cu.CUmemAllocationHandleType(handle_type))
