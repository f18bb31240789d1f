"""Print what the driver says of devices, contexts, addresses and memory: `python -m tests.programs.attributes`.

One JSON object of question to answer. Addresses and handles are printed by what they are, since their numbers change
from run to run. Run with and without the shim, the difference is what a program can see of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

cuda = ctypes.CDLL("libcuda.so.1")  # the symbols, as a program that links against it finds them
Address = ctypes.c_uint64
KIB, MIB = 1 << 10, 1 << 20
UNTOUCHED = 0x5A
READ_WRITE = 3


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location), ("metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Memory of one kind, with the size that was asked for."""

    kind: str
    base: int
    size: int
    handle: int = 0


def need(rc: int, what: str) -> None:
    """Stop if the driver refuses what the questions need."""
    if rc != 0:
        raise RuntimeError(f"{what}: {rc}")


def names(enum: Any, prefix: str) -> dict[str, int]:
    """Return the members of an enumeration of cuda-bindings, short names to numbers."""
    members = {member.name.removeprefix(prefix): int(member) for member in enum}
    return {name: number for name, number in members.items() if number > 0 and not name.endswith("MAX")}


def read(call: Any, *arguments: Any) -> int | str:
    """Ask for a value of whatever width; return it, or the code of the refusal."""
    out = (ctypes.c_ubyte * 64)(*[UNTOUCHED] * 64)
    rc = call(out, *arguments)
    if rc != 0:
        return f"refused {rc}"
    width = next((w for w in (8, 4, 1) if bytes(out[w // 2 : w]) != bytes([UNTOUCHED]) * (w - w // 2)), 0)
    return int.from_bytes(bytes(out[:width]), "little") if width else "untouched"


def devices() -> Iterator[tuple[str, Any]]:
    """Ask about every device and every pair."""
    count = int(read(cuda.cuDeviceGetCount))
    yield "devices", count
    for device in range(count):
        for name, number in names(cu.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_").items():
            yield f"device {device}: {name}", read(cuda.cuDeviceGetAttribute, number, device)
        text = ctypes.create_string_buffer(64)
        need(cuda.cuDeviceGetName(text, 64, device), "cuDeviceGetName")
        yield f"device {device}: name", text.value.decode()
        yield f"device {device}: total memory", read(cuda.cuDeviceTotalMem_v2, device)
    for one, other in itertools.permutations(range(count), 2):
        yield f"device {one} to {other}: can access", read(cuda.cuDeviceCanAccessPeer, one, other)
        for name, number in names(cu.CUdevice_P2PAttribute, "CU_DEVICE_P2P_ATTRIBUTE_").items():
            yield f"device {one} to {other}: {name}", read(cuda.cuDeviceGetP2PAttribute, number, one, other)


def context() -> Iterator[tuple[str, Any]]:
    """Ask about the current context."""
    current = ctypes.c_void_p()
    need(cuda.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
    yield "context: device", read(cuda.cuCtxGetDevice)
    yield "context: flags", read(cuda.cuCtxGetFlags)
    yield "context: cache configuration", read(cuda.cuCtxGetCacheConfig)
    yield "context: API version", read(lambda out: cuda.cuCtxGetApiVersion(current, out))
    least, greatest = ctypes.c_int(), ctypes.c_int()
    need(cuda.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)), "cuCtxGetStreamPriorityRange")
    yield "context: stream priorities", [least.value, greatest.value]
    for limit in cu.CUlimit:
        if not limit.name.endswith("MAX"):
            yield f"context: {limit.name.removeprefix('CU_LIMIT_')}", read(cuda.cuCtxGetLimit, int(limit))
    active, flags = ctypes.c_int(), ctypes.c_uint()
    need(cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)), "cuDevicePrimaryCtxGetState")
    yield "primary context: flags, active", [flags.value, active.value]
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    need(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
    yield "memory: total", total.value
    yield "memory: free is less", free.value < total.value


def properties(handle_types: int, kind: int = 1, number: int = 0) -> Properties:
    """Return the properties of pinned memory."""
    return Properties(type=1, handle_types=handle_types, location=Location(kind, number))


def mapped(kind: str, size: int, wanted: Properties, access: list[Access]) -> Memory:
    """Create memory by cuMem and map it."""
    handle, base = ctypes.c_uint64(), Address()
    zero, length = ctypes.c_uint64(0), ctypes.c_size_t(size)
    need(cuda.cuMemCreate(ctypes.byref(handle), length, ctypes.byref(wanted), zero), "cuMemCreate")
    need(cuda.cuMemAddressReserve(ctypes.byref(base), length, zero, zero, zero), "cuMemAddressReserve")
    need(cuda.cuMemMap(base, length, zero, handle, zero), "cuMemMap")
    grants = (Access * len(access))(*access)
    need(cuda.cuMemSetAccess(base, length, grants, ctypes.c_size_t(len(access))), "cuMemSetAccess")
    return Memory(kind, base.value, size, handle.value)


def allocated(kind: str, size: int, function: str, *more: Any) -> Memory:
    """Allocate by a function that gives the address first and takes the size next."""
    base = Address()
    need(getattr(cuda, function)(ctypes.byref(base), ctypes.c_size_t(size), *more), function)
    return Memory(kind, base.value, size)


def registered(size: int) -> tuple[Memory, mmap.mmap]:
    """Register host memory; the mapping has to be kept."""
    pages = mmap.mmap(-1, size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    need(cuda.cuMemHostRegister_v2(ctypes.c_void_p(base), ctypes.c_size_t(size), 0), "cuMemHostRegister")
    return Memory("registered", base, size), pages


def opened(size: int, handle: str) -> Memory:
    """Open memory of another process."""
    base = Address()
    blob = (ctypes.c_ubyte * 64).from_buffer_copy(bytes.fromhex(handle))

    class Handle(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_ubyte * 64),)

    need(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(base), Handle(blob), 1), "cuIpcOpenMemHandle")
    return Memory("opened", base.value, size)


def from_peer() -> Memory | None:
    """Allocate on the second device and let the first one's context use it; None where there is but one."""
    if int(read(cuda.cuDeviceGetCount)) < 2:
        return None
    own, other = ctypes.c_void_p(), ctypes.c_void_p()
    need(cuda.cuCtxGetCurrent(ctypes.byref(own)), "cuCtxGetCurrent")
    need(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(other), 1), "cuDevicePrimaryCtxRetain")
    need(cuda.cuCtxSetCurrent(other), "cuCtxSetCurrent")
    memory = allocated("allocated on a peer", MIB, "cuMemAlloc_v2")
    need(cuda.cuCtxSetCurrent(own), "cuCtxSetCurrent")
    need(cuda.cuCtxEnablePeerAccess(other, 0), "cuCtxEnablePeerAccess")
    return memory


def named(value: int | str, memory: Memory) -> Any:
    """Return an address by what it is."""
    if isinstance(value, str) or value < 4096:
        return value
    if memory.base <= value <= memory.base + memory.size:
        return f"base + {value - memory.base}"
    return "another number" if value > 1 << 40 else value


IDENTITIES = ("BUFFER_ID", "MEMORY_BLOCK_ID")
HANDLES = ("CONTEXT", "MEMPOOL_HANDLE")


def handle(value: int | str, own_context: int) -> Any:
    """Return what a context or a pool is, not its number."""
    if isinstance(value, str) or value == 0:
        return value
    return "the current context" if value == own_context else "another"


def in_a_list(out: Any, number: int, address: Any) -> int:
    """Ask for one attribute by the call for several."""
    places = (ctypes.c_void_p * 1)(ctypes.addressof(out))
    return int(cuda.cuPointerGetAttributes(1, ctypes.byref(ctypes.c_int(number)), places, address))


def pointers(memory: Memory) -> Iterator[tuple[str, Any]]:
    """Ask about two addresses of a memory, one attribute at a time and all at once."""
    current = ctypes.c_void_p()
    need(cuda.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
    own = current.value or 0
    wanted = names(cu.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_")
    for offset in (0, memory.size - 1):
        where, address = f"{memory.kind} + {offset}", Address(memory.base + offset)
        for name, number in wanted.items():
            if name == "P2P_TOKENS":  # two numbers, for a kernel module
                continue
            value = read(cuda.cuPointerGetAttribute, number, address)
            if name in IDENTITIES:
                same = read(cuda.cuPointerGetAttribute, number, Address(memory.base)) == value
                yield f"{where}: {name}", "as at the base" if same else "another"
                continue
            listed = read(in_a_list, number, address)
            shown = [handle(one, own) if name in HANDLES else named(one, memory) for one in (value, listed)]
            yield f"{where}: {name}", shown[0]
            yield f"{where}: {name}, in a list", shown[1]


def memories(memory: Memory) -> Iterator[tuple[str, Any]]:
    """Ask what the driver knows of a memory beside its attributes."""
    base, size = Address(), ctypes.c_size_t()
    last = Address(memory.base + memory.size - 1)
    rc = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), last)
    yield f"{memory.kind}: address range", f"refused {rc}" if rc else [named(base.value, memory), size.value]
    location = Location(1, 0)
    yield f"{memory.kind}: access", read(lambda out: cuda.cuMemGetAccess(out, ctypes.byref(location), last))
    handle = ctypes.c_uint64()
    rc = cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(memory.base))
    yield f"{memory.kind}: handle", f"refused {rc}" if rc else handle.value == memory.handle
    if memory.handle:
        found = Properties()
        rc = cuda.cuMemGetAllocationPropertiesFromHandle(ctypes.byref(found), ctypes.c_uint64(memory.handle))
        shown = [found.type, found.handle_types, found.location.type, found.location.id, found.rdma, found.usage]
        yield f"{memory.kind}: properties", f"refused {rc}" if rc else shown
    yield f"{memory.kind}: host flags", read(lambda out: cuda.cuMemHostGetFlags(out, ctypes.c_void_p(memory.base)))
    device = read(lambda out: cuda.cuMemHostGetDevicePointer_v2(out, ctypes.c_void_p(memory.base), 0))
    yield f"{memory.kind}: device pointer", named(device, memory)


@contextlib.contextmanager
def exporter() -> Iterator[str]:
    """Another process that keeps memory and gives its IPC handle."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.programs.attributes", "export"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def use_first_device() -> None:
    """Make the primary context of the first device current."""
    current = ctypes.c_void_p()
    need(cuda.cuInit(0), "cuInit")
    need(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(current), 0), "cuDevicePrimaryCtxRetain")
    need(cuda.cuCtxSetCurrent(current), "cuCtxSetCurrent")


def export() -> None:
    """Allocate, print the handle, and live until the other closes our standard input."""
    use_first_device()
    memory = allocated("", 3 * MIB, "cuMemAlloc_v2")
    handle = (ctypes.c_ubyte * 64)()
    need(cuda.cuIpcGetMemHandle(handle, Address(memory.base)), "cuIpcGetMemHandle")
    print(bytes(handle).hex(), flush=True)
    sys.stdin.read()


def answers() -> dict[str, Any]:
    """Ask everything."""
    use_first_device()
    device, node = Access(Location(1, 0), READ_WRITE), Access(Location(3, 0), READ_WRITE)
    with exporter() as handle:
        host, pages = registered(64 * KIB)
        made = [
            allocated("allocated, small", 1000, "cuMemAlloc_v2"),
            allocated("allocated, large", 3 * MIB, "cuMemAlloc_v2"),
            mapped("mapped", 4 * MIB, properties(1), [device]),
            mapped("mapped, not exportable", 2 * MIB, properties(0), [device]),
            mapped("mapped, host", 2 * MIB, properties(1, 3), [device, node]),
            allocated("from a pool", MIB, "cuMemAllocAsync", None),
            allocated("managed", MIB, "cuMemAllocManaged", 1),
            allocated("page-locked", MIB, "cuMemHostAlloc", 0),
            host,
            opened(3 * MIB, handle),
        ]
        if (peer := from_peer()) is not None:
            made.append(peer)
        found = dict(itertools.chain(devices(), context(), *map(pointers, made), *map(memories, made)))
        del pages
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["export"]:
        export()
    else:
        json.dump(answers(), sys.stdout)
