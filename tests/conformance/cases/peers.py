"""Peer access between two devices of one process."""

from __future__ import annotations

from collections.abc import Callable

from tests.conformance.case import MIB, Seen, Start, case
from tests.programs.client import Worker


def both(worker: Worker) -> tuple[int, int]:
    """Start a worker on both devices; return the contexts, the first current."""
    first = worker.start(0)["context"]
    second = worker.primary_retain(1)
    worker.use(first)
    return first, second


def reaches(worker: Worker, context: int, address: int) -> list[int]:
    """Let a kernel in `context` write to `address`; return the codes of launch and sync."""
    worker.use(context)
    return [worker.code("kernel", "gs_fill", [address, 64, 1]), worker.code("ctx_sync")]


@case(devices=2)
def rules(seen: Seen, start: Start) -> None:
    """Enable and disable."""
    worker = start(None)
    first, second = both(worker)
    seen.value("can access", worker.try_("can_access_peer", 0, 1))
    seen.value("can access itself", worker.try_("can_access_peer", 0, 0))
    seen("disable when off", worker.code("peer_disable", second))
    seen("enable", worker.code("peer_enable", second))
    seen("enable twice", worker.code("peer_enable", second))
    seen("enable with flags", worker.code("peer_enable", second, 1))
    seen("enable oneself", worker.code("peer_enable", first))
    seen("disable", worker.code("peer_disable", second))
    seen("disable twice", worker.code("peer_disable", second))
    worker.use(second)
    seen("other direction is its own", worker.code("peer_disable", first))


@case(devices=2)
def before_and_after(seen: Seen, start: Start) -> None:
    """Kernels reach memory made before and after peer access was enabled, small and big, in one direction."""
    worker = start(None)
    first, second = both(worker)
    worker.use(second)
    early = [worker.alloc(size) for size in (4096, 4 * MIB)]
    worker.use(first)
    worker.peer_enable(second)
    worker.use(second)
    late = [worker.alloc(size) for size in (4096, 4 * MIB)]
    for label, address in zip(("early small", "early big", "late small", "late big"), early + late, strict=True):
        seen(label, reaches(worker, first, address))
    seen.value("DEVICE_ORDINAL from the peer", worker.try_("pointer_attribute", "DEVICE_ORDINAL", early[1]))
    worker.use(first)
    seen("free from the other context", worker.code("free", early[1]))


@case(devices=2)
def without(seen: Seen, start: Start) -> None:
    """A kernel that reaches for a peer's memory without access."""
    worker = start(None)
    first, second = both(worker)
    worker.use(second)
    address = worker.alloc(4 * MIB)
    seen("without", reaches(worker, first, address))


@case(devices=2)
def after_disable(seen: Seen, start: Start) -> None:
    """A kernel that reaches for a peer's memory after access was taken away."""
    worker = start(None)
    first, second = both(worker)
    worker.use(second)
    address = worker.alloc(4 * MIB)
    worker.use(first)
    worker.peer_enable(second)
    seen("with", reaches(worker, first, address))
    worker.peer_disable(second)
    seen("after disable", reaches(worker, first, address))


def copied(seen: Seen, worker: Worker, label: str, make: Callable[[int], int]) -> None:
    """Copy between two devices without peer access by one form, `label`; `make` returns memory on a device."""
    first, second = both(worker)
    worker.use(second)
    theirs = make(1)
    worker.use(first)
    mine = make(0)
    worker.fill(mine, 2 * MIB, 1)
    if label == "peer copy":
        seen(label, worker.code("copy_peer", theirs, second, mine, first, 2 * MIB))
    else:
        seen(label, worker.code(label.replace(" ", "_"), theirs, mine, 2 * MIB))
    seen(f"sync after {label}", worker.code("ctx_sync"))
    wanted = worker.try_("read", mine, 64).value
    worker.use(second)
    seen(f"content after {label}", worker.code("ctx_sync") or worker.read(theirs, 64) == wanted)


FORMS = ("copy dtod", "copy", "peer copy")


@case(devices=2)
def copies(seen: Seen, start: Start) -> None:
    """Copies of memory of cuMemAlloc between devices need no peer access."""
    for label in FORMS:
        worker = start(None)
        copied(seen, worker, label, lambda device, worker=worker: int(worker.alloc(2 * MIB)))


@case(devices=2)
def copies_of_mappings(seen: Seen, start: Start) -> None:
    """Copies of mapped cuMem memory without access for the other device: only the peer copy is told where each lies."""
    for label in FORMS:
        worker = start(None)
        copied(seen, worker, label,
               lambda device, worker=worker: int(worker.block(2 * MIB, "device", device)["address"]))


@case(devices=2)
def from_the_other_context(seen: Seen, start: Start) -> None:
    """Copies to and from the host, and memsets, of another device's memory, without peer access."""
    for label in ("copy_dtoh", "copy_htod", "copy", "memset_d8"):
        worker = start(None)
        first, second = both(worker)
        worker.use(second)
        theirs = worker.alloc(2 * MIB)
        worker.use(first)
        host = worker.buffer(4096)
        arguments = {"copy_dtoh": (host, theirs, 4096), "memset_d8": (theirs, 7, 4096)}.get(label, (theirs, host, 4096))
        seen(label, worker.code(label, *arguments))
        seen(f"sync after {label}", worker.code("ctx_sync"))


@case(devices=2)
def mappings_ignore_it(seen: Seen, start: Start) -> None:
    """cuMem mappings follow their access entries, not peer access."""
    worker = start(None)
    first, second = both(worker)
    block = worker.block(2 * MIB, "device", 1, [["device", 0, 3]])
    seen("with an entry", reaches(worker, first, block["address"]))
    worker.use(first)
    worker.peer_enable(second)
    worker.mem_access(block["address"], 2 * MIB, [["device", 0, 0]])
    seen.value("access after none", worker.try_("mem_get_access", block["address"], "device", 0))
