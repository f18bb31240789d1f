"""Memory of cuMemAlloc: sizes, alignment, what may be freed, what is answered about its addresses."""

from __future__ import annotations

import os

from tests.conformance.case import MIB, Seen, Start, case, here, mapped
from tests.programs import calls, content
from tests.programs.calls import need

SIZES = [1, 100, 256, 4864, 65536, MIB, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 4 * MIB]


@case()
def without_context(seen: Seen, start: Start) -> None:
    """Calls before cuInit and without a context."""
    seen("alloc before cuInit", calls.alloc(4096))
    seen("device count before cuInit", calls.device_count())
    need(calls.init(), "cuInit")
    seen("alloc without a context", calls.alloc(4096))
    seen("memory info without a context", calls.mem_info())
    handle = calls.mem_create(2 * MIB)
    seen("cuMemCreate without a context", handle)
    if handle.code == 0:
        seen("release without a context", calls.mem_release(handle.value))
    seen("reserve without a context", calls.mem_reserve(2 * MIB))


@case()
def sizes(seen: Seen, start: Start) -> None:
    """Alignment and range of every size."""
    here()
    seen("size 0", calls.alloc(0))
    seen("size larger than the device", calls.alloc(1 << 50))
    addresses = {}
    for size in SIZES:
        addresses[size] = need(calls.alloc(size), "alloc")
        base, length = need(calls.address_range(addresses[size]), "range")
        seen(f"range of {size}", [base - addresses[size], length])
    for alignment in (256, 512):
        seen(f"all aligned to {alignment}", all(a % alignment == 0 for a in addresses.values()))
    seen("2 MiB sizes aligned to 2 MiB", all(addresses[s] % (2 * MIB) == 0 for s in (2 * MIB, 4 * MIB)))
    for size in (4864, 3 * MIB):
        base, length = need(calls.address_range(addresses[size] + size - 1), "range")
        seen(f"range of the last byte of {size}", [base - addresses[size], length])
    for size, address in addresses.items():
        words = max(size // 4, 0)
        if words:
            content.write(address, content.pattern([size], words))
    for size, address in addresses.items():
        words = size // 4
        if words:
            same = bool((content.read(address, words) == content.pattern([size], words)).all())
            if not same:
                seen(f"content of {size}", same)
    seen("free all", [calls.free(address).code for address in addresses.values()])


@case()
def free_rules(seen: Seen, start: Start) -> None:
    """What cuMemFree refuses."""
    here()
    small, big = need(calls.alloc(4096), "alloc"), need(calls.alloc(4 * MIB), "alloc")
    seen("free 0", calls.free(0))
    seen("free inside small", calls.free(small + 256))
    seen("free inside big", calls.free(big + 2 * MIB))
    seen("free small", calls.free(small))
    seen("free small twice", calls.free(small))
    seen("free big", calls.free(big))
    seen("free big twice", calls.free(big))
    seen("free an address of nobody", calls.free(0x1000))
    host = need(calls.alloc_host(4096), "host")
    seen("free host memory as device memory", calls.free(host))
    seen("free host memory", calls.free_host(host))


@case()
def free_is_not_for_mappings(seen: Seen, start: Start) -> None:
    """cuMemFree on mapped cuMem memory."""
    here()
    _, address = mapped(2 * MIB)
    seen("free a mapping", calls.free(address))
    seen("mapping still there", calls.address_range(address))


@case()
def questions(seen: Seen, start: Start) -> None:
    """Address ranges and pointer attributes of allocations, sub-pointers, freed and foreign addresses."""
    context = here()
    for size in (4864, 4 * MIB):
        address = need(calls.alloc(size), "alloc")
        inside = address + 512
        answer = calls.pointer_attribute("CONTEXT", address)
        seen(f"{size} CONTEXT is current", answer.code == 0 and answer.value == context)
        for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED", "IS_LEGACY_CUDA_IPC_CAPABLE", "MAPPED",
                     "MEMPOOL_HANDLE", "ALLOWED_HANDLE_TYPES"):
            seen.value(f"{size} {name}", calls.pointer_attribute(name, address))
            seen.value(f"{size} inside {name}", calls.pointer_attribute(name, inside))
        seen("RANGE_START_ADDR inside", need(calls.pointer_attribute("RANGE_START_ADDR", inside), "start") == address)
        seen.value(f"{size} RANGE_SIZE inside", calls.pointer_attribute("RANGE_SIZE", inside))
        seen("DEVICE_POINTER inside", calls.pointer_attribute("DEVICE_POINTER", inside).value == inside)
        seen(f"{size} HOST_POINTER", calls.pointer_attribute("HOST_POINTER", address))
        both = calls.pointer_attributes(["MEMORY_TYPE", "RANGE_SIZE", "IS_LEGACY_CUDA_IPC_CAPABLE"], inside)
        seen.value(f"{size} several at once", both)
        need(calls.free(address), "free")
        seen(f"{size} range after free", calls.address_range(address))
        seen(f"{size} MEMORY_TYPE after free", calls.pointer_attribute("MEMORY_TYPE", address))
        seen.value(f"{size} several after free", calls.pointer_attributes(["MEMORY_TYPE", "RANGE_SIZE"], address))
    words = content.pattern([1], 1024)
    host = content.address_of(words)
    seen("range of host memory", calls.address_range(host))
    seen("MEMORY_TYPE of host memory", calls.pointer_attribute("MEMORY_TYPE", host))
    seen.value("several of host memory", calls.pointer_attributes(["MEMORY_TYPE", "RANGE_SIZE"], host))
    seen("range of 0", calls.address_range(0))


@case()
def buffer_ids(seen: Seen, start: Start) -> None:
    """Every allocation has an id of its own, also at an address used before."""
    here()
    ids, addresses = [], set()
    for size in (4096, 4096, 4 * MIB):
        for _ in range(3):
            address = need(calls.alloc(size), "alloc")
            addresses.add(address)
            ids.append(need(calls.pointer_attribute("BUFFER_ID", address), "id"))
            need(calls.free(address), "free")
    address = need(calls.alloc(4096), "alloc")
    seen("ids unique", len(set(ids)) == len(ids))
    same = [need(calls.pointer_attribute("BUFFER_ID", address + at), "id") for at in (0, 256, 4095)]
    seen("one id over the whole allocation", len(set(same)) == 1)


@case()
def pitch(seen: Seen, start: Start) -> None:
    """cuMemAllocPitch."""
    here()
    for width, height, element in ((100, 10, 4), (513, 3, 4), (4096, 1024, 8), (5000, 2000, 16)):
        answer = calls.alloc_pitch(width, height, element)
        seen(f"pitch {width}x{height}", answer.value[1] if answer.code == 0 else answer)
        if answer.code == 0:
            address = answer.value[0]
            base, size = need(calls.address_range(address), "range")
            seen(f"range {width}x{height}", [base - address, size])
            seen(f"last row is writable {width}x{height}",
                 calls.memset_d8(address + answer.value[1] * (height - 1), 7, width))
            seen(f"free {width}x{height}", calls.free(address))
    seen("element size 3", calls.alloc_pitch(100, 10, 3))
    seen("element size 0", calls.alloc_pitch(100, 10, 0))
    seen("width 0", calls.alloc_pitch(0, 10, 4))
    seen("height 0", calls.alloc_pitch(100, 0, 4))


@case()
def bounds(seen: Seen, start: Start) -> None:
    """Copies and memsets that leave the allocation, or meet freed memory."""
    here()
    address = need(calls.alloc(4 * MIB), "alloc")
    words = content.pattern([1], 1024)
    host = content.address_of(words)
    seen("memset beyond the end", calls.memset_d8(address + 4 * MIB - 16, 1, 64 * MIB))
    seen("copy out beyond the end", calls.copy_dtoh(host, address + 4 * MIB, 4096))
    seen("copy of nothing", calls.copy_dtoh(host, address, 0))
    seen("memset of nothing", calls.memset_d8(address, 0, 0))
    need(calls.free(address), "free")
    seen("copy out after free", calls.copy_dtoh(host, address, 4096))
    seen("memset after free", calls.memset_d8(address, 0, 4096))
    seen("copy to 0", calls.copy_htod(0, host, 4096))


@case(alone=True)
def memory_info(seen: Seen, start: Start) -> None:
    """What cuMemGetInfo counts, in MiB. Runs alone on the device."""
    here()
    # The first allocation of a context may take a block for small ones that stays.
    need(calls.free(need(calls.alloc(4096), "alloc")), "free")

    def free_mib() -> int:
        return int(need(calls.mem_info(), "info")[0]) // MIB

    before = free_mib()
    address = need(calls.alloc(64 * MIB), "alloc")
    seen("64 MiB by cuMemAlloc take", before - free_mib())
    need(calls.free(address), "free")
    seen("left after free", before - free_mib())
    handle = need(calls.mem_create(64 * MIB), "create")
    seen("64 MiB by cuMemCreate take", before - free_mib())
    va = need(calls.mem_reserve(64 * MIB), "reserve")
    need(calls.mem_map(va, 64 * MIB, handle), "map")
    need(calls.mem_release(handle), "release")
    seen("mapped and released take", before - free_mib())
    need(calls.mem_unmap(va, 64 * MIB), "unmap")
    seen("left after unmap", before - free_mib())
    need(calls.mem_address_free(va, 64 * MIB), "free")
    handle = need(calls.mem_create(64 * MIB), "create")
    fd = need(calls.mem_export(handle), "export")
    need(calls.mem_release(handle), "release")
    seen("kept by an exported fd", before - free_mib())
    os.close(fd)
    seen("left after closing the fd", before - free_mib())
