"""Virtual memory management in one process."""

from __future__ import annotations

from tests.conformance.case import MIB, Seen, Start, case, here, mapped
from tests.programs import calls, content
from tests.programs.calls import need

G = 2 * MIB
RW, READ, NONE = 3, 1, 0
DEVICE_ATTRIBUTES = [
    "UNIFIED_ADDRESSING", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "HANDLE_TYPE_FABRIC_SUPPORTED", "HOST_REGISTER_SUPPORTED",
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", "IPC_EVENT_SUPPORTED",
    "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "MEMORY_POOLS_SUPPORTED",
]


@case()
def attributes(seen: Seen, start: Start) -> None:
    """What the device says that it can do."""
    need(calls.init(), "cuInit")
    for name in DEVICE_ATTRIBUTES:
        seen.value(name, calls.device_attribute(name, 0))


@case()
def create_rules(seen: Seen, start: Start) -> None:
    """Granularity, sizes, properties."""
    here()
    seen.value("granularity device", calls.mem_granularity("device"))
    seen.value("granularity device recommended", calls.mem_granularity("device", recommended=True))
    seen.value("granularity host numa", calls.mem_granularity("host_numa"))
    seen.value("granularity host", calls.mem_granularity("host"))
    seen("size 0", calls.mem_create(0))
    seen("size not a multiple", calls.mem_create(G + 4096))
    seen("device 99", calls.mem_create(G, "device", 99))
    seen("device -1", calls.mem_create(G, "device", -1))
    seen("more than the device has", calls.mem_create(1 << 46))
    seen("fabric handle type", calls.mem_create(G, handle_type=8))
    for label, options in (("plain", {"handle_type": 0}), ("exportable", {}), ("rdma", {"rdma": 1}),
                           ("host numa", {"kind": "host_numa"}), ("host", {"kind": "host", "handle_type": 0})):
        made = calls.mem_create(G, **options)
        seen(f"create {label}", made)
        if made.code == 0:
            seen.value(f"properties {label}", calls.mem_properties(made.value))
            seen(f"release {label}", calls.mem_release(made.value))


@case()
def reserve_rules(seen: Seen, start: Start) -> None:
    """Reservations."""
    here()
    seen("size 0", calls.mem_reserve(0))
    seen("size 4096", calls.mem_reserve(4096))
    seen("size not a multiple", calls.mem_reserve(G + 4096))
    seen("alignment 3", calls.mem_reserve(G, 3))
    one = need(calls.mem_reserve(4 * G), "reserve")
    seen("aligned to the granule", one % G == 0)
    big = calls.mem_reserve(G, 64 * MIB)
    seen("aligned as asked", big.code == 0 and big.value % (64 * MIB) == 0)
    seen("reserved range is no allocation", calls.address_range(one))
    seen("MEMORY_TYPE of a reservation", calls.pointer_attribute("MEMORY_TYPE", one))
    seen("free with another size", calls.mem_address_free(one, G))
    seen("free inside", calls.mem_address_free(one + G, 3 * G))
    taken = calls.mem_reserve(G, 0, one)
    seen("hint at a taken address", taken)
    seen("it is elsewhere", taken.value != one)
    seen("free", calls.mem_address_free(one, 4 * G))
    seen("free twice", calls.mem_address_free(one, 4 * G))
    hinted = calls.mem_reserve(4 * G, 0, one)
    seen("hint at a free address is taken", hinted.value == one)


@case()
def map_rules(seen: Seen, start: Start) -> None:
    """What cuMemMap refuses, and one handle at two addresses."""
    here()
    handle = need(calls.mem_create(2 * G), "create")
    va = need(calls.mem_reserve(8 * G), "reserve")
    seen("map at an address of nobody", calls.mem_map(0x7000000000, 2 * G, handle))
    seen("map beyond the reservation", calls.mem_map(va + 7 * G, 2 * G, handle))
    seen("map with an offset", calls.mem_map(va, G, handle, G))
    seen("map more than the handle has", calls.mem_map(va, 4 * G, handle))
    seen("map at an odd address", calls.mem_map(va + 4096, 2 * G, handle))
    part = calls.mem_map(va, G, handle)
    seen("map a part of the handle", part)
    if part.code == 0:
        seen("unmap the part", calls.mem_unmap(va, G))
    seen("map a handle that is none", calls.mem_map(va, 2 * G, 0))
    seen("map", calls.mem_map(va, 2 * G, handle))
    seen("map again at the same place", calls.mem_map(va, 2 * G, handle))
    seen("map overlapping", calls.mem_map(va + G, 2 * G, handle))
    seen("map the same handle elsewhere", calls.mem_map(va + 4 * G, 2 * G, handle))
    seen("access both", [calls.mem_access(a, 2 * G, [["device", 0, RW]]).code for a in (va, va + 4 * G)])
    content.write(va, content.pattern([1], 64))
    seen("both show the same memory", bool((content.read(va + 4 * G, 64) == content.pattern([1], 64)).all()))
    seen("free the range while mapped", calls.mem_address_free(va, 8 * G))
    seen("unmap one", calls.mem_unmap(va, 2 * G))
    seen("the other stays", bool((content.read(va + 4 * G, 64) == content.pattern([1], 64)).all()))
    seen("unmap the other", calls.mem_unmap(va + 4 * G, 2 * G))
    seen("free the range", calls.mem_address_free(va, 8 * G))


@case()
def unmap_rules(seen: Seen, start: Start) -> None:
    """Whole mappings only, several at once."""
    here()
    va = need(calls.mem_reserve(8 * G), "reserve")
    handles = [need(calls.mem_create(2 * G), "create") for _ in range(3)]
    for at, handle in enumerate(handles):
        need(calls.mem_map(va + at * 2 * G, 2 * G, handle), "map")
    need(calls.mem_access(va, 6 * G, [["device", 0, RW]]), "access")
    seen("unmap a part", calls.mem_unmap(va, G))
    seen("unmap from the middle", calls.mem_unmap(va + G, G))
    seen("unmap one and a half", calls.mem_unmap(va, 3 * G))
    seen("unmap beyond the mapped", calls.mem_unmap(va, 8 * G))
    seen("nothing was unmapped", [calls.address_range(va + at * 2 * G).code for at in range(3)])
    seen("unmap two at once", calls.mem_unmap(va, 4 * G))
    seen("unmap twice", calls.mem_unmap(va, 2 * G))
    seen("range after unmap", calls.address_range(va))
    seen("unmap the last", calls.mem_unmap(va + 4 * G, 2 * G))
    seen("unmap what is no reservation", calls.mem_unmap(0x7000000000, G))
    for handle in handles:
        need(calls.mem_release(handle), "release")
    seen("free the range", calls.mem_address_free(va, 8 * G))


@case()
def access_rules(seen: Seen, start: Start) -> None:
    """Ranges of cuMemSetAccess, what entries add up to, access taken away."""
    here()
    va = need(calls.mem_reserve(8 * G), "reserve")
    first, second = (need(calls.mem_create(2 * G), "create") for _ in range(2))
    need(calls.mem_map(va, 2 * G, first), "map")
    words = content.pattern([5], 1024)
    host = content.address_of(words)
    seen.value("access of a fresh mapping", calls.mem_get_access(va))
    seen("set on a partly mapped range", calls.mem_access(va, 4 * G, [["device", 0, RW]]))
    seen("set on an unmapped range", calls.mem_access(va + 4 * G, 2 * G, [["device", 0, RW]]))
    need(calls.mem_map(va + 2 * G, 2 * G, second), "map")
    seen("set over two mappings", calls.mem_access(va, 4 * G, [["device", 0, RW]]))
    seen.value("access of the second", calls.mem_get_access(va + 3 * G))
    seen("set none over one", calls.mem_access(va, 2 * G, [["device", 0, NONE]]))
    seen.value("access after none", calls.mem_get_access(va))
    seen.value("access of the other after none", calls.mem_get_access(va + 2 * G))
    seen("set again", calls.mem_access(va, 2 * G, [["device", 0, RW]]))
    seen("copy", calls.copy_htod(va, host, 4096))
    seen("set half a mapping", calls.mem_access(va, G, [["device", 0, READ]]))
    seen.value("access of the first half", calls.mem_get_access(va))
    seen.value("access of the second half", calls.mem_get_access(va + G))
    seen("set read only over all", calls.mem_access(va, 2 * G, [["device", 0, READ]]))
    seen("copy out of read only", calls.copy_dtoh(host, va, 4096))
    seen("set an odd size", calls.mem_access(va, 4096, [["device", 0, RW]]))
    seen("no entries", calls.mem_access(va, 2 * G, []))
    seen("host numa access to device memory", calls.mem_access(va, 2 * G, [["host_numa", 0, RW]]))
    seen("host access to device memory", calls.mem_access(va, 2 * G, [["host", 0, RW]]))
    seen("device 99", calls.mem_access(va, 2 * G, [["device", 99, RW]]))
    seen("access of an unmapped address", calls.mem_get_access(va + 5 * G))
    seen("content stayed", bool((content.read(va, 1024) == words).all()))


@case()
def copy_without_access(seen: Seen, start: Start) -> None:
    """Copies to mapped memory without access may end the context, so each is asked in a process of its own."""
    for label, name in (("copy in", "copy_htod"), ("memset", "memset_d8")):
        worker = start(0)
        block = worker.block(G, access=[["device", 0, NONE]])
        source = worker.buffer(4096) if name == "copy_htod" else 1
        seen(label, worker.code(name, block["address"], source, 4096))
        seen(f"sync after {label}", worker.code("ctx_sync"))
        seen(f"alloc after {label}", worker.code("alloc", 4096))


@case()
def copy_into_read_only(seen: Seen, start: Start) -> None:
    """A copy into memory that may only be read."""
    here()
    _, va = mapped(G)
    words = content.pattern([5], 1024)
    need(calls.mem_access(va, G, [["device", 0, READ]]), "access")
    seen("copy out", calls.copy_dtoh(content.address_of(words), va, 4096))
    seen("copy in", calls.copy_htod(va, content.address_of(words), 4096))
    seen("sync", calls.ctx_sync())
    seen("alloc", calls.alloc(4096))


@case(devices=2)
def access_adds_up(seen: Seen, start: Start) -> None:
    """Two locations, set one after the other."""
    here()
    _, va = mapped(G)
    seen("set the second device", calls.mem_access(va, G, [["device", 1, READ]]))
    seen.value("first device keeps", calls.mem_get_access(va, "device", 0))
    seen.value("second device has", calls.mem_get_access(va, "device", 1))
    seen("take the first away", calls.mem_access(va, G, [["device", 0, NONE]]))
    seen.value("first device has now", calls.mem_get_access(va, "device", 0))
    seen.value("second device keeps", calls.mem_get_access(va, "device", 1))
    seen("two entries at once", calls.mem_access(va, G, [["device", 0, RW], ["device", 1, RW]]))
    seen.value("the second device has now", calls.mem_get_access(va, "device", 1))


@case()
def host_numa_access(seen: Seen, start: Start) -> None:
    """Host memory that the device and the CPU use."""
    here()
    handle, va = mapped(G, "host_numa")
    seen("host numa access", calls.mem_access(va, G, [["host_numa", 0, RW]]))
    seen.value("device has", calls.mem_get_access(va, "device", 0))
    seen.value("host numa has", calls.mem_get_access(va, "host_numa", 0))
    content.write(va, content.pattern([2], 512))
    seen("the CPU reads what the device wrote", bool((content.host_view(va, 512) == content.pattern([2], 512)).all()))
    content.host_view(va, 512)[:] = content.pattern([3], 512)
    seen("the device reads what the CPU wrote", bool((content.read(va, 512) == content.pattern([3], 512)).all()))
    seen.value("MEMORY_TYPE", calls.pointer_attribute("MEMORY_TYPE", va))
    base, size = need(calls.address_range(va), "range")
    seen("range starts at the address", base == va)
    seen("range is as long", size == G)
    seen("retain gives the handle", calls.mem_retain(va).value == handle)


@case()
def references(seen: Seen, start: Start) -> None:
    """Counts of create, retain and map, and what a handle is worth after release."""
    here()
    handle, va = mapped(2 * G)
    content.write(va, content.pattern([1], 64))
    held = calls.mem_retain(va)
    seen("retain", held)
    seen("retain gives the value mapped", held.value == handle)
    seen("retain inside gives it too", calls.mem_retain(va + G + 5).value == handle)
    seen("three releases", [calls.mem_release(handle).code for _ in range(3)])
    seen("mapping works without a reference", bool((content.read(va, 64) == content.pattern([1], 64)).all()))
    again = calls.mem_retain(va)
    seen("retain after the last release", again)
    seen("it is the same value", again.value == handle)
    seen("properties", calls.mem_properties(handle))
    seen("export", calls.mem_export(handle))
    seen("release", calls.mem_release(handle))
    seen("unmap", calls.mem_unmap(va, 2 * G))
    seen("retain an unmapped address", calls.mem_retain(va))
    seen("retain an address of nobody", calls.mem_retain(0x1000))
    address = need(calls.alloc(4 * MIB), "alloc")
    seen("retain memory of cuMemAlloc", calls.mem_retain(address))


@case()
def released_twice(seen: Seen, start: Start) -> None:
    """One release too many."""
    here()
    handle = need(calls.mem_create(G), "create")
    need(calls.mem_release(handle), "release")
    seen("release again", calls.mem_release(handle))


@case(crashes=True)
def dead_handles(seen: Seen, start: Start) -> None:
    """Calls with a handle that was released for good. Driver 580.159.04 follows it: SIGSEGV inside cuMemMap."""
    here()
    handle = need(calls.mem_create(G), "create")
    va = need(calls.mem_reserve(G), "reserve")
    need(calls.mem_release(handle), "release")
    seen("map", calls.mem_map(va, G, handle))
    seen("export", calls.mem_export(handle))
    seen("properties", calls.mem_properties(handle))
    seen("release 0", calls.mem_release(0))


@case()
def across_mappings(seen: Seen, start: Start) -> None:
    """Copies, memsets and kernels that run over the border of two mappings; what is answered about each."""
    here()
    va = need(calls.mem_reserve(4 * G), "reserve")
    for at in range(2):
        need(calls.mem_map(va + at * 2 * G, 2 * G, need(calls.mem_create(2 * G), "create")), "map")
    need(calls.mem_access(va, 4 * G, [["device", 0, RW]]), "access")
    border = va + 2 * G - 4096
    seen("memset", calls.memset_d32(border, 7, 2048))
    seen("memset is whole", set(content.read(border, 2048).tolist()) == {7})
    words = content.pattern([9], 2048)
    seen("copy in", calls.copy_htod(border, content.address_of(words), 8192))
    seen("copy out is whole", bool((content.read(border, 2048) == words).all()))
    seen("copy across to itself", calls.copy_dtod(va, border, 8192))
    seen("copy in a stream", calls.copy_htod(border, content.address_of(words), 8192, 0))
    module = need(calls.module_load(), "module")
    kernel = need(calls.function(module, "gs_fill"), "kernel")
    seen("kernel", calls.launch(kernel, "gs_fill", [border, 2048, 3]))
    seen("sync", calls.ctx_sync())
    seen("kernel is whole", set(content.read(border, 2048).tolist()) == {3})
    for label, address in (("first", va + G), ("second", va + 3 * G)):
        base, size = need(calls.address_range(address), "range")
        seen(f"range of the {label}", [base - va, size])
        start_at = need(calls.pointer_attribute("RANGE_START_ADDR", address), "start")
        seen(f"RANGE_START_ADDR of the {label}", start_at - va)
        seen.value(f"RANGE_SIZE of the {label}", calls.pointer_attribute("RANGE_SIZE", address))
    seen("one retain over both", calls.mem_retain(va).value == calls.mem_retain(va + 2 * G).value)


@case()
def questions(seen: Seen, start: Start) -> None:
    """Pointer attributes of mapped memory."""
    context = here()
    for label, handle_type in (("exportable", 1), ("plain", 0)):
        _, va = mapped(2 * G, handle_type=handle_type)
        for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED", "IS_LEGACY_CUDA_IPC_CAPABLE", "MAPPED",
                     "ALLOWED_HANDLE_TYPES", "MEMPOOL_HANDLE", "RANGE_SIZE"):
            seen.value(f"{label} {name}", calls.pointer_attribute(name, va + G))
        answer = calls.pointer_attribute("CONTEXT", va)
        seen(f"{label} CONTEXT", "current" if answer.value == context else answer.code or bool(answer.value))
        seen(f"{label} IPC handle", calls.ipc_get(va))
    _, va = mapped(G, access=False)
    seen.value("without access MEMORY_TYPE", calls.pointer_attribute("MEMORY_TYPE", va))
    seen("without access range", calls.address_range(va))


@case()
def kernel_without_access(seen: Seen, start: Start) -> None:
    """A kernel that writes where it has no access poisons its context."""
    here()
    _, va = mapped(G, access=False)
    module = need(calls.module_load(), "module")
    kernel = need(calls.function(module, "gs_fill"), "kernel")
    seen("launch", calls.launch(kernel, "gs_fill", [va, 16, 1]))
    seen("sync", calls.ctx_sync())
    seen("sync again", calls.ctx_sync())
    seen("alloc afterwards", calls.alloc(4096))


@case()
def remap_keeps_graph(seen: Seen, start: Start) -> None:
    """A graph goes on after its memory was made anew at the same addresses."""
    here()
    handle, va = mapped(2 * G)
    stream = need(calls.stream_create(), "stream")
    need(calls.capture_begin(stream, 1), "capture")
    need(calls.memset_d32(va, 7, 1024, stream), "memset")
    need(calls.copy_dtod(va + G, va, 4096, stream), "copy")
    executable = need(calls.graph_instantiate(need(calls.capture_end(stream), "capture")), "instantiate")
    seen("replay", [calls.graph_launch(executable, stream).code, calls.stream_sync(stream).code])
    seen("result", set(content.read(va + G, 1024).tolist()) == {7})
    seen("unmap", calls.mem_unmap(va, 2 * G))
    seen("release", calls.mem_release(handle))
    handle = need(calls.mem_create(2 * G), "create")
    seen("map again", calls.mem_map(va, 2 * G, handle))
    seen("access again", calls.mem_access(va, 2 * G, [["device", 0, RW]]))
    need(calls.memset_d8(va, 0, 2 * G), "memset")
    need(calls.ctx_sync(), "sync")  # the graph's stream does not wait for the default one
    seen("replay again", [calls.graph_launch(executable, stream).code, calls.stream_sync(stream).code])
    seen("result again", set(content.read(va + G, 1024).tolist()) == {7})
