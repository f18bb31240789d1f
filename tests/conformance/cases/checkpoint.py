"""The driver's checkpoint calls, from another process. Most results of section 0 of the fact sheet are asked here."""

from __future__ import annotations

import os
import time

from tests.conformance.case import HANG_S, HANGS, LOST_S, MIB, Seen, Start, asked, case, here
from tests.conformance.cases.sharing import shared
from tests.conformance.cases.work import BEGINS_S, Running
from tests.programs import calls
from tests.programs.calls import need
from tests.programs.client import Worker
from tests.programs.crossing import INTERPROCESS, crossing


def drive(worker: Worker, *steps: str) -> list[int]:
    """Apply steps to a worker and return the codes."""
    calls.init()
    return [getattr(calls, f"cp_{step}")(worker.pid).code for step in steps]


def cycle(seen: Seen, label: str, *workers: Worker) -> None:
    """Lock and checkpoint every worker in turn, then restore and unlock in turn; note codes and descriptors."""
    calls.init()
    for step in ("lock", "checkpoint"):
        seen(f"{label}: {step}", [getattr(calls, f"cp_{step}")(one.pid).code for one in workers])
    seen(f"{label}: states", [calls.cp_state(one.pid).value for one in workers])
    seen(f"{label}: descriptors left", [len(one.nvidia_fds()) for one in workers])
    for step in ("restore", "unlock"):
        seen(f"{label}: {step}", [getattr(calls, f"cp_{step}")(one.pid).code for one in workers])


@case()
def states(seen: Seen, start: Start) -> None:
    """States, codes and order of the calls."""
    worker = start(0)
    block = worker.alloc(4 * MIB)
    worker.fill(block, 4 * MIB, 1)
    seen("state before the caller's cuInit", calls.cp_state(worker.pid))
    need(calls.init(), "cuInit")
    pid = worker.pid
    seen.value("running", calls.cp_state(pid))
    thread = calls.cp_thread(pid)
    seen("restore thread belongs to the process", str(thread.value) in os.listdir(f"/proc/{pid}/task"))
    seen("running: checkpoint, restore, unlock", drive(worker, "checkpoint", "restore", "unlock"))
    seen("lock", calls.cp_lock(pid))
    seen.value("locked", calls.cp_state(pid))
    seen("locked: lock, restore", drive(worker, "lock", "restore"))
    seen("unlock", calls.cp_unlock(pid))
    seen.value("running again", calls.cp_state(pid))
    seen("lock again", calls.cp_lock(pid))
    seen("checkpoint", calls.cp_checkpoint(pid))
    seen.value("checkpointed", calls.cp_state(pid))
    seen("restore thread is the same", calls.cp_thread(pid).value == thread.value)
    seen("checkpointed: lock, checkpoint, unlock", drive(worker, "lock", "checkpoint", "unlock"))
    seen("descriptors left", len(worker.nvidia_fds()))
    seen("restore", calls.cp_restore(pid))
    seen.value("restored", calls.cp_state(pid))
    seen("restored: restore", drive(worker, "restore"))
    seen("unlock at the end", calls.cp_unlock(pid))
    seen("content", worker.verify())
    seen("goes on", [worker.code("alloc", 4 * MIB), worker.code("free", block)])


@case()
def targets(seen: Seen, start: Start) -> None:
    """Processes that cannot be a target."""
    need(calls.init(), "cuInit")
    plain = start(None)
    for label, pid in (("without CUDA", plain.pid), ("of nobody", 4_000_000), ("-1", -1), ("0", 0)):
        seen(f"state {label}", calls.cp_state(pid))
        seen(f"thread {label}", calls.cp_thread(pid))
        seen(f"lock {label}", calls.cp_lock(pid, 1000))
    plain.init()
    seen.value("state after cuInit alone", calls.cp_state(plain.pid))
    cycle(seen, "cuInit alone", plain)
    seen("goes on", plain.code("start", 0))


NEVER_HELD = ("attribute", "context", "version")
"""Calls that every driver answers for a locked process: once they are answered, the others have begun too."""


@case()
def calls_wait_while_locked(seen: Seen, start: Start) -> None:
    """What a locked process's own calls do."""
    worker = start(0)
    block = worker.alloc(4 * MIB)
    need(calls.init(), "cuInit")
    need(calls.cp_lock(worker.pid), "lock")
    jobs = {
        "copy": worker.job("read", block, 4), "alloc": worker.job("alloc", 4096),
        "create": worker.job("mem_create", 2 * MIB), "attribute": worker.job("pointer_attribute", "MEMORY_TYPE", block),
        "context": worker.job("ctx_current"), "version": worker.job("driver_version"),
        "host register": worker.job("host_register", worker.buffer(4096), 4096),
        "sync": worker.job("ctx_sync"), "range": worker.job("address_range", block), "info": worker.job("mem_info"),
    }
    until = time.monotonic() + HANG_S
    while time.monotonic() < until and any(worker.job_answer(jobs[name]) is None for name in NEVER_HELD):
        time.sleep(0.01)
    time.sleep(0.5)
    for name, job in jobs.items():
        seen(f"{name} waits", worker.job_answer(job) is None)
    seen("unlock", calls.cp_unlock(worker.pid))
    for name, job in jobs.items():
        answer = worker.job_answer(job, HANG_S)
        seen(f"{name} ends", HANGS if answer is None else answer[0])


@case()
def lock_waits(seen: Seen, start: Start) -> None:
    """A lock waits for running work, and gives up at its timeout."""
    worker = start(0)
    running = Running(worker)
    need(calls.init(), "cuInit")
    began = time.monotonic()
    seen("lock", calls.cp_lock(worker.pid, 1000))
    seen("it waited", time.monotonic() - began > 0.9)
    seen.value("state", calls.cp_state(worker.pid))
    seen("calls go on", asked(worker, "alloc", 4096))
    running.end()
    seen("lock again", calls.cp_lock(worker.pid, 30_000))
    seen("unlock", calls.cp_unlock(worker.pid))


@case(bare=True)
def import_kept(seen: Seen, start: Start) -> None:
    """An importer that released nothing: checkpoints, and is lost at the restore."""
    owner, other = start(0), start(0)
    block, imported = shared(owner, other)
    owner.fill(block["address"], 1 * MIB, 1)
    cycle(seen, "importer", other)
    seen("importer's next call", asked(other, "read", imported["address"], 4, deadline_s=LOST_S))
    cycle(seen, "exporter", owner)
    seen("exporter's content", owner.verify())


@case(bare=True)
def import_released(seen: Seen, start: Start) -> None:
    """An importer that unmapped and released first gets the memory again at the same address."""
    owner, other = start(0), start(0)
    block, imported = shared(owner, other)
    owner.fill(block["address"], 4 * MIB, 1)
    other.mem_unmap(imported["address"], 4 * MIB)
    other.mem_release(imported["handle"])
    cycle(seen, "released", other, owner)
    fd = owner.mem_export(block["handle"])
    there = owner.hand(fd, other)
    handle = other.try_("mem_import", there)
    seen("import", handle)
    seen("map at the same address", other.code("mem_map", imported["address"], 4 * MIB, handle.value))
    seen("access", other.code("mem_access", imported["address"], 4 * MIB, [["device", 0, 3]]))
    other.expect(imported["address"], 4 * MIB, [1])
    seen("content", other.verify())
    owner.fill(block["address"], 4 * MIB, 2)
    other.expect(imported["address"], 4 * MIB, [2])
    seen("writes are shared", other.verify())


@case(bare=True, devices=2)
def import_released_between_devices(seen: Seen, start: Start) -> None:
    """The same over two devices."""
    owner, other = start(0), start(1)
    block, imported = shared(owner, other)
    owner.fill(block["address"], 4 * MIB, 1)
    other.mem_unmap(imported["address"], 4 * MIB)
    other.mem_release(imported["handle"])
    cycle(seen, "released", other, owner)
    there = owner.hand(owner.mem_export(block["handle"]), other)
    handle = other.mem_import(there)
    seen("map at the same address", other.code("mem_map", imported["address"], 4 * MIB, handle))
    seen("access", other.code("mem_access", imported["address"], 4 * MIB, [["device", 1, 3]]))
    other.expect(imported["address"], 4 * MIB, [1])
    seen("content", other.verify())


@case(bare=True)
def exported_descriptor(seen: Seen, start: Start) -> None:
    """An exported descriptor stays open over the checkpoint and remains visible."""
    owner = start(0)
    block = owner.block(4 * MIB)
    owner.fill(block["address"], 4 * MIB, 1)
    fd = owner.mem_export(block["handle"])
    cycle(seen, "descriptor open", owner)
    seen("content", owner.verify())
    seen("export again", owner.code("mem_export", block["handle"]))
    owner.close_fd(fd)


@case(bare=True)
def ipc_open(seen: Seen, start: Start) -> None:
    """A process with memory of another open by legacy IPC is lost at the restore."""
    owner, other = start(0), start(0)
    opened = other.ipc_open(owner.ipc_get(owner.alloc(64 * MIB)))
    cycle(seen, "opener", other)
    seen("opener's next call", asked(other, "read", opened, 4, deadline_s=LOST_S))


@case(bare=True)
def ipc_closed(seen: Seen, start: Start) -> None:
    """Closed first, both survive, but legacy IPC is refused afterwards."""
    for size in (64 * MIB, MIB):
        owner, other = start(0), start(0)
        address = owner.alloc(size)
        opened = other.ipc_open(owner.ipc_get(address))
        seen(f"close {size}", other.code("ipc_close", opened))
        cycle(seen, f"closed {size}", owner, other)
        again = owner.try_("ipc_get", address)
        seen(f"get afterwards {size}", again)
        seen(f"open afterwards {size}", other.code("ipc_open", again.value) if again.code == 0 else "not asked")


@case(bare=True)
def large_exports(seen: Seen, start: Start) -> None:
    """Exportable memory made before the checkpoint is exported and imported after it."""
    for size, written in ((64, 1), (64, 64), (510, 1), (512, 1), (512, 512), (1024, 1), (1024, 1024)):
        label = f"{size} MiB" if written == 1 else f"{size} MiB written"
        owner, other = start(0), start(0)
        block = owner.block(size * MIB)
        owner.memset_d8(block["address"], 0, written * MIB)
        owner.fill(block["address"], MIB, 1)
        cycle(seen, label, owner)
        fd = owner.try_("mem_export", block["handle"])
        if size < 512:
            seen(f"{label}: export", fd)
        if fd.code == 0:
            imported = other.import_block(owner.hand(fd.value, other), size * MIB)
            other.expect(imported["address"], MIB, [1])
        # From 512 MiB on the same driver refuses on one machine and not on another; what it gives has to be right.
        question, fine = ("content", (0,)) if size < 512 else ("content, unless refused", (0, 1))
        seen(f"{label}: {question}", other.verify() if fd.code in fine else fd)
        owner.kill()
        other.kill()


@case(bare=True)
def host_numa(seen: Seen, start: Start) -> None:
    """Exportable HOST_NUMA memory loses its process at the restore."""
    owner = start(0)
    block = owner.block(2 * MIB, "host_numa")
    owner.host_fill(block["address"], 2 * MIB, 1)
    cycle(seen, "host numa", owner)
    seen("next call", asked(owner, "ctx_sync", deadline_s=LOST_S))


@case()
def host_registrations(seen: Seen, start: Start) -> None:
    """Registrations and the driver's host memory come back."""
    for where in ("anonymous", "shared"):
        worker = start(0)
        memory = worker.buffer(4 * MIB, where)
        worker.host_register(memory, 4 * MIB, 2)
        own = worker.alloc_host(4 * MIB, 3)
        worker.host_fill(own, 4 * MIB, 2)
        cycle(seen, where, worker)
        seen(f"{where}: content", worker.verify())
        seen(f"{where}: registered still", worker.code("host_register", memory, 4096))
        seen(f"{where}: unregister", worker.code("host_unregister", memory))
        seen(f"{where}: free", worker.code("free_host", own))


@case(bare=True)
def managed(seen: Seen, start: Start) -> None:
    """Managed memory: a clean refusal."""
    worker = start(0)
    block = worker.alloc_managed(64 * MIB)
    worker.host_fill(block, 64 * MIB, 1)
    need(calls.init(), "cuInit")
    seen("lock", calls.cp_lock(worker.pid))
    seen("checkpoint", calls.cp_checkpoint(worker.pid))
    seen.value("state", calls.cp_state(worker.pid))
    seen("unlock", calls.cp_unlock(worker.pid))
    seen("content", worker.verify())


@case()
def pool_memory(seen: Seen, start: Start) -> None:
    """Memory of the default pool is the driver's to carry."""
    worker = start(0)
    block = worker.alloc_async(4 * MIB)
    worker.ctx_sync()
    worker.fill(block, 4 * MIB, 1)
    cycle(seen, "pool", worker)
    seen("content", worker.verify())


@case()
def graphs(seen: Seen, start: Start) -> None:
    """Graphs, streams, events and modules survive."""
    worker = start(0)
    block, other = worker.alloc(4096), worker.alloc(4096)
    worker.kernel("gs_fill", [block, 16, 0])
    stream, event = worker.stream_create(), worker.event_create()
    worker.event_record(event, stream)
    worker.ctx_sync()
    steps = [["memset_d32", block, 3, 1024], ["copy_dtod", other, block, 4096],
             ["kernel", "gs_add", [other, block, 1024]]]
    memory = worker.buffer(4096)
    worker.host_register(memory, 4096)
    executable = worker.record_graph(stream, [*steps, ["copy_dtoh", memory, other, 4096]])
    cycle(seen, "graph", worker)
    worker.memset_d8(other, 0, 4096)
    worker.ctx_sync()
    seen("replay", [worker.code("graph_launch", executable, stream), worker.code("stream_sync", stream)])
    seen("result", set(worker.read(other, 1024)) == {6})
    seen("result in registered memory", set(worker.host_read(memory, 1024)) == {6})
    seen("event", worker.code("event_query", event))


@case(bare=True)
def graph_over_remap(seen: Seen, start: Start) -> None:
    """A graph goes on when its memory was dropped before the checkpoint and made again after it."""
    worker = start(0)
    block = worker.block(4 * MIB)
    stream = worker.stream_create()
    middle = block["address"] + 2 * MIB
    executable = worker.record_graph(stream, [["memset_d32", block["address"], 7, 1024],
                                              ["copy_dtod", middle, block["address"], 4096]])
    worker.mem_unmap(block["address"], 4 * MIB)
    worker.mem_release(block["handle"])
    cycle(seen, "dropped", worker)
    handle = worker.mem_create(4 * MIB)
    seen("map", worker.code("mem_map", block["address"], 4 * MIB, handle))
    seen("access", worker.code("mem_access", block["address"], 4 * MIB, [["device", 0, 3]]))
    worker.memset_d8(block["address"], 0, 4 * MIB)
    worker.ctx_sync()
    seen("replay", [worker.code("graph_launch", executable, stream), worker.code("stream_sync", stream)])
    seen("result", set(worker.read(middle, 1024)) == {7})


@case(devices=2)
def other_device(seen: Seen, start: Start) -> None:
    """A map of devices: all must be listed; the memory moves."""
    worker = start(0)
    block = worker.alloc(64 * MIB)
    worker.fill(block, 64 * MIB, 1)
    need(calls.init(), "cuInit")
    need(calls.cp_lock(worker.pid), "lock")
    need(calls.cp_checkpoint(worker.pid), "checkpoint")
    count = need(calls.device_count(), "count")
    swapped = [[0, 1], [1, 0]] + [[d, d] for d in range(2, count)]
    seen("restore with all devices", calls.cp_restore(worker.pid, swapped))
    seen("unlock", calls.cp_unlock(worker.pid))
    seen("content", worker.verify())


@case(devices=2)
def part_of_a_map(seen: Seen, start: Start) -> None:
    """A map that leaves a device out."""
    worker = start(0)
    need(calls.init(), "cuInit")
    need(calls.cp_lock(worker.pid), "lock")
    need(calls.cp_checkpoint(worker.pid), "checkpoint")
    seen("restore with one of the devices", calls.cp_restore(worker.pid, [[0, 0]]))
    seen.value("state", calls.cp_state(worker.pid))


@case(alone=True)
def memory_back(seen: Seen, start: Start) -> None:
    """The device is empty of a checkpointed process, and of one that dies checkpointed."""
    worker = start(0)
    here()
    before = need(calls.mem_info(), "info")[0]
    worker.fill(worker.alloc(256 * MIB), MIB, 1)
    seen("256 MiB are gone", before - need(calls.mem_info(), "info")[0] >= 256 * MIB)
    need(calls.cp_lock(worker.pid), "lock")
    need(calls.cp_checkpoint(worker.pid), "checkpoint")
    seen("they are back", need(calls.mem_info(), "info")[0] >= before)
    need(calls.cp_restore(worker.pid), "restore")
    need(calls.cp_unlock(worker.pid), "unlock")
    seen("content", worker.verify())


@case(bare=True)
def events_between_processes(seen: Seen, start: Start) -> None:
    """Interprocess events survive in their owner and in a process that opened one: records still cross."""
    owner, opener = start(0), start(0)
    event = owner.event_create(INTERPROCESS)
    handle = owner.event_ipc_get(event)
    opened = opener.event_ipc_open(handle)
    for turn in range(3):
        if turn:
            cycle(seen, f"cycle {turn}", owner, opener)
        seen(f"the owner records {turn}", crossing(owner, event, opener, opened))
        seen(f"the opener records {turn}", crossing(opener, opened, owner, event))
    seen("handle afterwards is the same", owner.event_ipc_get(event) == handle)
    again = opener.try_("event_ipc_open", handle)
    seen("opened afterwards", again)
    seen("through that", crossing(owner, event, opener, again.value))


@case(bare=True)
def events_of_one_that_stays(seen: Seen, start: Start) -> None:
    """One side of an interprocess event goes through a checkpoint while the other runs on and records."""
    owner, opener = start(0), start(0)
    event = owner.event_create(INTERPROCESS)
    handle = owner.event_ipc_get(event)
    opened = opener.event_ipc_open(handle)
    calls.init()
    for label, away, stays, held in (("owner", owner, opener, opened), ("opener", opener, owner, event)):
        seen(f"{label}: down", drive(away, "lock", "checkpoint"))
        seen(f"{label} away: record and query", [asked(stays, "event_record", held), asked(stays, "ctx_sync"),
                                                 asked(stays, "event_query", held)])
        seen(f"{label}: up", drive(away, "restore", "unlock"))
        seen(f"{label} back: the owner records", crossing(owner, event, opener, opened))
        seen(f"{label} back: the opener records", crossing(opener, opened, owner, event))


@case(bare=True)
def locked_peer_stalls(seen: Seen, start: Start) -> None:
    """A rank that waits for a locked one cannot be locked: why ranks are quiesced before the first lock."""
    first, second = start(0), start(0)
    block, imported = shared(first, second)
    first.write(block["address"], [0])
    need(calls.init(), "cuInit")
    need(calls.cp_lock(first.pid), "lock")
    second.kernel("gs_wait_flag", [imported["address"], 1], second.stream_create())
    seen("lock of the waiting rank", calls.cp_lock(second.pid, 1000))
    seen("unlock the first", calls.cp_unlock(first.pid))
    first.write(block["address"], [1])
    seen("lock once it can go on", calls.cp_lock(second.pid, 30_000))
    seen("unlock", calls.cp_unlock(second.pid))


@case(bare=True)
def context_beside_a_kernel(seen: Seen, start: Start) -> None:
    """A new context beside a kernel that waits: in a restored process it ends both."""
    worker = start(0)
    for label in ("fresh", "restored"):
        kernel = Running(worker)
        time.sleep(BEGINS_S)
        answer = worker.job_answer(worker.job("ctx_create", 0), HANG_S)
        seen(f"{label}: create", HANGS if answer is None else answer[0])
        kernel.end()
        seen(f"{label}: the kernel", asked(worker, "stream_sync", kernel.stream))
        if label == "fresh":
            calls.init()
            seen("cycle", drive(worker, "lock", "checkpoint", "restore", "unlock"))


@case()
def again_and_again(seen: Seen, start: Start) -> None:
    """Three cycles."""
    worker = start(0)
    worker.fill(worker.alloc(4 * MIB), 4 * MIB, 1)
    for turn in range(3):
        seen(f"cycle {turn}", drive(worker, "lock", "checkpoint", "restore", "unlock"))
        seen(f"content {turn}", worker.verify())
