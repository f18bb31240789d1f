"""Legacy IPC, with the answers to what is wrong: through the shim they are the driver's (FR-29)."""

from __future__ import annotations

from tests.conformance.case import MIB, Seen, Start, asked, case, here, mapped
from tests.programs import calls
from tests.programs.calls import need

SIZES = (4864, MIB, 4 * MIB)


@case()
def handles(seen: Seen, start: Start) -> None:
    """What has a handle, and how long it stays the same."""
    here()
    for size in SIZES:
        address = need(calls.alloc(size), "alloc")
        first, second = calls.ipc_get(address), calls.ipc_get(address)
        seen(f"get {size}", first)
        seen(f"same bytes twice {size}", first.value == second.value)
        inside = calls.ipc_get(address + 512)
        seen(f"get inside {size}", inside)
        seen(f"get inside gives the same bytes {size}", inside.value == first.value)
        need(calls.free(address), "free")
        seen(f"get after free {size}", calls.ipc_get(address))
        again = need(calls.alloc(size), "alloc")
        seen(f"new memory has new bytes {size}", calls.ipc_get(again).value != first.value)
    _, va = mapped(2 * MIB)
    seen("get of cuMem memory", calls.ipc_get(va))
    host = need(calls.alloc_host(4096), "host")
    seen("get of host memory", calls.ipc_get(host))
    seen("get of 0", calls.ipc_get(0))


@case()
def same_process(seen: Seen, start: Start) -> None:
    """A handle opened by the process that made it."""
    here()
    address = need(calls.alloc(4 * MIB), "alloc")
    handle = need(calls.ipc_get(address), "handle")
    seen("open", calls.ipc_open(handle))
    own = calls.ctx_create(0)
    seen("open in another context", calls.ipc_open(handle))
    need(calls.ctx_destroy(own.value), "destroy")


@case()
def opens(seen: Seen, start: Start) -> None:
    """Open, count, close."""
    owner, other = start(0), start(0)
    for size in SIZES:
        address = owner.alloc(size)
        owner.fill(address, size, size)
        handle = owner.ipc_get(address)
        first = other.try_("ipc_open", handle)
        seen(f"open {size}", first)
        second = other.try_("ipc_open", handle)
        seen(f"open twice {size}", second)
        seen(f"same address {size}", first.value == second.value)
        other.expect(first.value, size, [size])
        seen(f"content {size}", other.verify())
        base, length = other.address_range(first.value)
        seen(f"range {size}", [base - first.value, length])
        for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_LEGACY_CUDA_IPC_CAPABLE", "ALLOWED_HANDLE_TYPES", "MAPPED",
                     "RANGE_SIZE"):
            seen.value(f"{name} {size}", other.try_("pointer_attribute", name, first.value))
        other.fill(first.value, size // 2, 9)
        owner.expect(address, size // 2, [9])
        seen(f"the owner sees writes {size}", owner.verify())
        owner.forget(address)
        seen(f"free of opened memory {size}", other.code("free", first.value))
        seen(f"handle of opened memory {size}", other.code("ipc_get", first.value))
        seen(f"close inside {size}", other.code("ipc_close", first.value + 256))
        seen(f"close {size}", other.code("ipc_close", first.value))
        other.expect(first.value, size // 2, [9])
        seen(f"content after one close {size}", other.verify())
        other.forget(first.value)
        seen(f"close again {size}", other.code("ipc_close", first.value))
        seen(f"close once more {size}", other.code("ipc_close", first.value))
        seen(f"range after close {size}", other.code("address_range", first.value))
        again = other.try_("ipc_open", handle)
        seen(f"open again {size}", again)
        other.ipc_close(again.value)
        seen(f"free by the owner {size}", owner.code("free", address))
        seen(f"open after free {size}", other.code("ipc_open", handle))


@case()
def open_rules(seen: Seen, start: Start) -> None:
    """What cuIpcOpenMemHandle refuses."""
    owner, other = start(0), start(0)
    address = owner.alloc(4 * MIB)
    handle = owner.ipc_get(address)
    seen("flags 0", other.code("ipc_open", handle, 0))
    seen("flags 2", other.code("ipc_open", handle, 2))
    seen("zeros", other.code("ipc_open", "00" * 64))
    seen("close what was never opened", other.code("ipc_close", 0x7000000000))
    mine = other.alloc(4 * MIB)
    seen("close own memory", other.code("ipc_close", mine))
    seen("open inside", inside := other.try_("ipc_open", owner.try_("ipc_get", address + MIB).value or handle))
    if inside.code == 0:
        base, length = other.address_range(inside.value)
        seen("open inside gives", [base - inside.value, length])


@case()
def two_contexts(seen: Seen, start: Start) -> None:
    """One handle opened in two contexts of a process."""
    owner, other = start(0), start(0)
    address = owner.alloc(4 * MIB)
    owner.fill(address, 4 * MIB, 1)
    handle = owner.ipc_get(address)
    first = other.ipc_open(handle)
    second_context = other.ctx_create(0)
    second = other.try_("ipc_open", handle)
    seen("open in the second context", second)
    if second.code == 0:
        seen("same address", second.value == first)
        other.expect(second.value, 4 * MIB, [1])
        seen("content", other.verify())
        other.forget(second.value)
        seen("close in the second", other.code("ipc_close", second.value))
    seen("close the first's in the second", other.code("ipc_close", first))
    seen("destroy the second", other.code("ctx_destroy", second_context))
    seen("close in the first", other.code("ipc_close", first))


@case(bare=True)
def owner_goes(seen: Seen, start: Start) -> None:
    """The owner frees, or ends, while another process has the memory open: undefined, but this is what happens."""
    owner, other = start(0), start(0)
    address = owner.alloc(4 * MIB)
    owner.fill(address, 4 * MIB, 1)
    opened = other.ipc_open(owner.ipc_get(address))
    seen("free", asked(owner, "free", address))
    other.expect(opened, 4 * MIB, [1])
    seen("read after free", asked(other, "read", opened, 4))
    seen("content after free", asked(other, "verify") == 0 and not other.verify())
    owner.kill()
    seen("read after the owner's end", asked(other, "read", opened, 4))
    seen("close", asked(other, "ipc_close", opened))


@case(devices=2)
def between_devices(seen: Seen, start: Start) -> None:
    """Memory of device 0 opened on device 1: access comes with the open, by flag 1."""
    owner, other = start(0), start(1)
    address = owner.alloc(4 * MIB)
    owner.fill(address, 4 * MIB, 1)
    opened = other.try_("ipc_open", owner.ipc_get(address))
    seen("open", opened)
    other.expect(opened.value, 4 * MIB, [1])
    seen("content", other.verify())
    seen("kernel", other.code("kernel", "gs_fill", [opened.value, MIB, 5]))
    seen("sync", other.code("ctx_sync"))
    seen("the owner sees writes", set(owner.read(address, 1024)) == {5})
    seen.value("DEVICE_ORDINAL", other.try_("pointer_attribute", "DEVICE_ORDINAL", opened.value))
    seen("close", other.code("ipc_close", opened.value))


@case()
def content_of_slab_neighbours(seen: Seen, start: Start) -> None:
    """Small allocations opened one by one do not disturb their neighbours."""
    owner, other = start(0), start(0)
    blocks = [owner.alloc(4096) for _ in range(8)]
    for at, address in enumerate(blocks):
        owner.fill(address, 4096, at)
    opened = [other.ipc_open(owner.ipc_get(address)) for address in blocks]
    seen("addresses differ", len(set(opened)) == len(opened))
    for at, address in enumerate(opened):
        other.expect(address, 4096, [at])
    seen("content", other.verify())
    for address in opened:
        other.forget(address)
    seen("closes", [other.code("ipc_close", address) for address in opened])
    seen("the owner's content", owner.verify())
