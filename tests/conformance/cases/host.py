"""Host memory: registrations and the driver's own."""

from __future__ import annotations

import ctypes
import mmap

from tests.conformance.case import MIB, Seen, Start, case, here
from tests.programs import calls, content
from tests.programs.calls import need
from tests.programs.client import WorkerDied

_kept: list[mmap.mmap] = []


def anonymous(size: int) -> int:
    """Map memory of this process; return the address."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _kept.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@case()
def register_rules(seen: Seen, start: Start) -> None:
    """What is refused."""
    here()
    memory = anonymous(4 * MIB)
    seen("register", calls.host_register(memory, 2 * MIB))
    seen("register twice", calls.host_register(memory, 2 * MIB))
    seen("register overlapping", calls.host_register(memory + MIB, 2 * MIB))
    seen("register inside", calls.host_register(memory + 4096, 4096))
    seen("register the neighbour", calls.host_register(memory + 2 * MIB, MIB))
    seen("unregister inside", calls.host_unregister(memory + 4096))
    seen("unregister", calls.host_unregister(memory))
    seen("unregister twice", calls.host_unregister(memory))
    seen("unregister the neighbour", calls.host_unregister(memory + 2 * MIB))
    seen("unregister what never was", calls.host_unregister(memory + 3 * MIB))
    seen("register again", calls.host_register(memory, 2 * MIB))
    seen("unregister again", calls.host_unregister(memory))
    seen("size 0", calls.host_register(memory, 0))
    seen("odd address and size", calls.host_register(memory + 100, 5000))
    seen("unregister odd", calls.host_unregister(memory + 100))
    seen("unknown flags", calls.host_register(memory, 4096, 1 << 20))
    seen("unmapped memory", calls.host_register(0x10000, 4096))
    device = need(calls.alloc(4096), "alloc")
    seen("device memory", calls.host_register(device, 4096))


@case()
def register_answers(seen: Seen, start: Start) -> None:
    """What is answered about registered memory."""
    context = here()
    for flags in (0, 1, 3):
        memory = anonymous(MIB)
        need(calls.host_register(memory, MIB, flags), "register")
        seen.value(f"flags of {flags}", calls.host_flags(memory))
        seen(f"device pointer is the address {flags}", calls.host_device_pointer(memory).value == memory)
        seen.value(f"MEMORY_TYPE {flags}", calls.pointer_attribute("MEMORY_TYPE", memory + 4096))
        inside = calls.pointer_attribute("HOST_POINTER", memory + 4096)
        seen(f"HOST_POINTER {flags}", inside.value == memory + 4096)
        start_at = calls.pointer_attribute("RANGE_START_ADDR", memory + 4096)
        seen(f"RANGE_START_ADDR {flags}", start_at.code or start_at.value == memory)
        seen.value(f"RANGE_SIZE {flags}", calls.pointer_attribute("RANGE_SIZE", memory + 4096))
        seen(f"address range {flags}", calls.address_range(memory))
        seen(f"CONTEXT {flags}", calls.pointer_attribute("CONTEXT", memory).value == context)
        content.host_view(memory, 64)[:] = content.pattern([1], 64)
        seen(f"the device reads it {flags}", bool((content.read(memory, 64) == content.pattern([1], 64)).all()))
        need(calls.host_unregister(memory), "unregister")
        seen(f"MEMORY_TYPE afterwards {flags}", calls.pointer_attribute("MEMORY_TYPE", memory))
        seen(f"flags afterwards {flags}", calls.host_flags(memory))
        seen(f"device pointer afterwards {flags}", calls.host_device_pointer(memory))


@case(bare=True)
def graph_keeps_registration(seen: Seen, start: Start) -> None:
    """A graph's copy does not go on once its host memory was unregistered, though it is registered again."""
    worker = start(0)
    block, memory, stream = worker.alloc(4096), worker.buffer(4096), worker.stream_create()
    worker.host_register(memory, 4096)
    executable = worker.record_graph(stream, [["memset_d32", block, 7, 1024], ["copy_dtoh", memory, block, 4096]])
    seen("replay", [worker.code("graph_launch", executable, stream), worker.code("stream_sync", stream)])
    seen("result", set(worker.host_read(memory, 1024)) == {7})
    worker.host_unregister(memory)
    worker.host_register(memory, 4096)
    try:
        goes_on = [worker.code("graph_launch", executable, stream), worker.code("stream_sync", stream)] == [0, 0]
    except WorkerDied:  # the driver's library ran into a registration that is gone
        goes_on = False
    seen("goes on", goes_on)


@case()
def own_memory(seen: Seen, start: Start) -> None:
    """cuMemHostAlloc."""
    here()
    memory = need(calls.alloc_host(MIB, 3), "alloc")
    seen.value("flags", calls.host_flags(memory))
    seen("device pointer is the address", calls.host_device_pointer(memory).value == memory)
    seen.value("MEMORY_TYPE", calls.pointer_attribute("MEMORY_TYPE", memory))
    seen("unregister", calls.host_unregister(memory))
    seen("register", calls.host_register(memory, MIB))
    seen("free inside", calls.free_host(memory + 4096))
    seen("free", calls.free_host(memory))
    seen("size 0", calls.alloc_host(0))


@case()
def kernels_use_it(seen: Seen, start: Start) -> None:
    """A kernel that writes to registered memory."""
    worker = start(0)
    memory = worker.buffer(MIB, "shared")
    worker.host_register(memory, MIB, 3)
    worker.kernel("gs_iota", [worker.host_device_pointer(memory), 16, 5])
    worker.ctx_sync()
    seen("written", worker.host_read(memory, 4))
