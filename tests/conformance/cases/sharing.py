"""Memory shared by descriptors: exports, imports, and what keeps memory alive."""

from __future__ import annotations

import fcntl
import os

from tests.conformance.case import MIB, Seen, Start, case, here, mapped
from tests.programs import calls, content
from tests.programs.calls import need
from tests.programs.client import Worker

G = 2 * MIB
F_DUPFD_QUERY = 1027


def shared(owner: Worker, other: Worker, size: int = 2 * G, **where: object) -> tuple[dict[str, int], dict[str, int]]:
    """Make a block in one worker and map it in the other; no descriptor stays open."""
    block = owner.block(size, **where)
    fd = owner.mem_export(block["handle"])
    there = owner.hand(fd, other)
    seen_there = other.import_block(there, size)
    owner.close_fd(fd)
    other.close_fd(there)
    return block, seen_there


@case()
def export_rules(seen: Seen, start: Start) -> None:
    """Exports in one process."""
    here()
    handle = need(calls.mem_create(G), "create")
    fd = calls.mem_export(handle)
    seen("export before map", fd)
    seen("descriptor is the driver's", "nvidia" in os.readlink(f"/proc/self/fd/{fd.value}"))
    seen("close-on-exec", bool(fcntl.fcntl(fd.value, fcntl.F_GETFD) & fcntl.FD_CLOEXEC))
    second = need(calls.mem_export(handle), "export")
    try:
        seen("a copy is the same open file", fcntl.fcntl(fd.value, F_DUPFD_QUERY, os.dup(fd.value)))
        seen("a second export is another", fcntl.fcntl(fd.value, F_DUPFD_QUERY, second))
    except OSError:
        seen("a copy is the same open file", 1)  # a kernel before 6.10 cannot be asked
        seen("a second export is another", 0)
    fcntl.fcntl(fd.value, fcntl.F_SETOWN, os.getpid())
    seen("tag is read back", fcntl.fcntl(os.dup(fd.value), fcntl.F_GETOWN) == os.getpid())
    seen("a second export has no tag", fcntl.fcntl(second, fcntl.F_GETOWN) == 0)
    seen("export as fabric", calls.mem_export(handle, 8))
    plain = need(calls.mem_create(G, handle_type=0), "create")
    seen("export what is not exportable", calls.mem_export(plain))


@case()
def own_import(seen: Seen, start: Start) -> None:
    """A process imports what it exported."""
    here()
    handle, va = mapped(G)
    content.write(va, content.pattern([1], 64))
    fd = need(calls.mem_export(handle), "export")
    mine = calls.mem_import(fd)
    seen("import", mine)
    seen("value differs from the created one", mine.value != handle)
    again = calls.mem_import(fd)
    seen("import again", again)
    seen("second value differs from the first", again.value != mine.value)
    seen("properties are equal", calls.mem_properties(mine.value).value == calls.mem_properties(handle).value)
    os.close(fd)
    there = need(calls.mem_reserve(G), "reserve")
    seen("map", calls.mem_map(there, G, mine.value))
    seen("access", calls.mem_access(there, G, [["device", 0, 3]]))
    seen("same memory", bool((content.read(there, 64) == content.pattern([1], 64)).all()))
    seen("retain gives the imported value", calls.mem_retain(there).value == mine.value)
    seen("releases", [calls.mem_release(h).code for h in (mine.value, mine.value, again.value, handle)])
    seen("unmap the created", calls.mem_unmap(va, G))
    seen("content lives in the import", bool((content.read(there, 64) == content.pattern([1], 64)).all()))


@case()
def import_rules(seen: Seen, start: Start) -> None:
    """Imports of what is no export."""
    here()
    null = os.open("/dev/null", os.O_RDWR)
    seen("import /dev/null", calls.mem_import(null))
    seen("import a number that is not open", calls.mem_import(1000))


@case()
def between_processes(seen: Seen, start: Start) -> None:
    """Export, import, writes seen by both, life of the memory."""
    owner, other = start(0), start(0)
    block = owner.block(2 * G)
    owner.fill(block["address"], 2 * G, 1)
    fd = owner.mem_export(block["handle"])
    there = owner.hand(fd, other)
    imported = other.try_("mem_import", there)
    seen("import", imported)
    seen.value("properties of the import", other.try_("mem_properties", imported.value))
    address = other.mem_reserve(2 * G)
    seen("map a part", part := other.try_("mem_map", address, G, imported.value))
    if part.code == 0:
        other.mem_unmap(address, G)
    seen("map more than there is", other.code("mem_map", address, 4 * G, imported.value))
    seen("map", other.code("mem_map", address, 2 * G, imported.value))
    seen("access", other.code("mem_access", address, 2 * G, [["device", 0, 3]]))
    other.expect(address, 2 * G, [1])
    seen("content", other.verify())
    other.fill(address, 2 * G, 2)
    owner.expect(block["address"], 2 * G, [2])
    seen("the exporter sees writes", owner.verify())
    for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_LEGACY_CUDA_IPC_CAPABLE", "ALLOWED_HANDLE_TYPES", "MAPPED"):
        seen.value(name, other.try_("pointer_attribute", name, address))
    again = other.try_("mem_export", imported.value)
    seen("export an import", again)
    if again.code == 0:
        other.close_fd(again.value)
    seen("import the same descriptor again", other.try_("mem_import", there))
    owner.close_fd(fd)
    other.close_fd(there)
    owner.drop_block(block)
    seen("content after the exporter dropped it", other.verify())
    owner.kill()
    seen("content after the exporter's end", other.verify())
    seen("release and unmap", [other.code("mem_release", imported.value), other.code("mem_unmap", address, 2 * G)])


@case(devices=2)
def between_devices(seen: Seen, start: Start) -> None:
    """Memory of device 0 mapped by a process on device 1."""
    owner, other = start(0), start(1)
    block, imported = shared(owner, other)
    owner.fill(block["address"], 2 * G, 1)
    other.expect(imported["address"], 2 * G, [1])
    seen("content", other.verify())
    seen.value("properties", other.try_("mem_properties", imported["handle"]))
    seen.value("DEVICE_ORDINAL", other.try_("pointer_attribute", "DEVICE_ORDINAL", imported["address"]))
    seen("kernel", other.code("kernel", "gs_fill", [imported["address"], 2 * G // 4, 5]))
    seen("sync", other.code("ctx_sync"))
    seen("the exporter sees writes", set(owner.read(block["address"], 1024)) == {5})


@case()
def host_numa(seen: Seen, start: Start) -> None:
    """HOST_NUMA memory between two processes, as NCCL shares it."""
    owner, other = start(0), start(0)
    block = owner.block(G, "host_numa")
    owner.host_fill(block["address"], G, 1)
    fd = owner.mem_export(block["handle"])
    there = owner.hand(fd, other)
    imported = other.import_block(there, G, "host_numa")
    other.expect(imported["address"], G, [1])
    seen("content by the device", other.verify())
    seen("content by the CPU", other.host_read(imported["address"], 4) == owner.host_read(block["address"], 4))
    seen.value("properties", other.try_("mem_properties", imported["handle"]))


@case()
def descriptor_keeps_memory(seen: Seen, start: Start) -> None:
    """An exported descriptor alone keeps the memory."""
    owner, other = start(0), start(0)
    block = owner.block(G)
    owner.fill(block["address"], G, 1)
    there = owner.hand(owner.mem_export(block["handle"]), other)
    owner.kill()
    imported = other.import_block(there, G)
    other.expect(imported["address"], G, [1])
    seen("content", other.verify())
