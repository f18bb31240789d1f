"""Streams, kernels, graphs, and which calls wait for running work."""

from __future__ import annotations

import time

from tests.conformance.case import HANG_S, MIB, Seen, Start, case, here
from tests.programs import calls, content
from tests.programs.calls import need
from tests.programs.client import Worker

SOON_S = 0.4
"""How long a call is watched before it counts as waiting for the running kernel."""


class Running:
    """A kernel that runs until told to stop: it waits for a word in host memory that only the CPU writes."""

    def __init__(self, worker: Worker, stream: int | None = None) -> None:
        self.worker = worker
        self.stream = worker.stream_create() if stream is None else stream
        self.flag = worker.alloc_host(4096, 2)
        worker.host_write(self.flag, 0)
        worker.kernel("gs_wait_flag", [self.flag, 1], self.stream)

    def end(self) -> None:
        """Let the kernel end."""
        self.worker.host_write(self.flag, 1)


def waits(worker: Worker, name: str, *arguments: object) -> bool | str:
    """Tell whether a call waits for a kernel that runs in a stream of its own."""
    running = Running(worker)
    job = worker.job(name, *arguments)
    # On a busy machine a thread may begin late: once one that began after it is done, it has had its time too.
    worker.job_answer(worker.job("driver_version"), HANG_S)
    early = worker.job_answer(job, SOON_S)
    busy = worker.code("stream_query", running.stream)
    running.end()
    late = worker.job_answer(job, HANG_S)
    worker.stream_sync(running.stream)
    if late is None:
        return "hangs"
    if late[0] != 0:
        return f"refused {late[0]}"
    if early is not None and busy != 600:
        return "the kernel ended by itself"
    return early is None


@case()
def who_waits(seen: Seen, start: Start) -> None:
    """Which calls wait for a kernel in another stream that does not use their memory."""
    worker = start(0)
    worker.kernel("gs_fill", [worker.alloc(4096), 16, 0])  # the module is loaded before a kernel runs
    worker.ctx_sync()
    small, big = worker.alloc(4096), worker.alloc(4 * MIB)
    seen("free small", waits(worker, "free", small))
    seen("free big", waits(worker, "free", big))
    seen("alloc", waits(worker, "alloc", 4 * MIB))
    block = worker.block(4 * MIB)
    seen("unmap", waits(worker, "mem_unmap", block["address"], block["size"]))
    seen("release", waits(worker, "mem_release", block["handle"]))
    seen("create", waits(worker, "mem_create", 4 * MIB))
    handle = worker.mem_create(4 * MIB)
    seen("map", waits(worker, "mem_map", block["address"], block["size"], handle))
    seen("set access", waits(worker, "mem_access", block["address"], block["size"], [["device", 0, 3]]))
    seen("export", waits(worker, "mem_export", handle))
    other = worker.alloc(4096)
    seen("memset", waits(worker, "memset_d8", other, 0, 4096))
    seen("memset in the default stream", waits(worker, "memset_d8", other, 0, 4096, 0))
    seen("context sync", waits(worker, "ctx_sync"))
    memory = worker.buffer(MIB)
    seen("host register", waits(worker, "host_register", memory, MIB))
    seen("host unregister", waits(worker, "host_unregister", memory))
    pinned = worker.alloc_host(4096)
    seen("free host", waits(worker, "free_host", pinned))
    owner = start(0)
    opened = worker.ipc_open(owner.ipc_get(owner.alloc(4 * MIB)))
    seen("IPC close", waits(worker, "ipc_close", opened))
    handle = owner.ipc_get(owner.alloc(4 * MIB))
    seen("IPC open", waits(worker, "ipc_open", handle))


@case()
def busy_streams(seen: Seen, start: Start) -> None:
    """Queries while a kernel runs."""
    worker = start(0)
    running = Running(worker)
    event = worker.event_create()
    worker.event_record(event, running.stream)
    seen("stream query", worker.code("stream_query", running.stream))
    seen("event query", worker.code("event_query", event))
    other = worker.stream_create()
    seen("another stream is idle", worker.code("stream_query", other))
    worker.stream_wait_event(other, event)
    block = worker.alloc(4096)
    worker.write(block, [0])
    worker.memset_d32(block, 9, 1, other)
    seen("a stream that waits for the event", worker.code("stream_query", other))
    running.end()
    seen("sync", worker.code("stream_sync", other))
    seen("event query afterwards", worker.code("event_query", event))
    seen("memset came after", worker.read(block))


@case()
def kernels(seen: Seen, start: Start) -> None:
    """The kernels against numpy, by every form of launch."""
    worker = start(0)
    a, b, c = (worker.alloc(MIB) for _ in range(3))
    worker.fill(a, MIB, 1)
    worker.fill(b, MIB, 2)
    words = MIB // 4
    for form in ("plain", "ex", "cooperative"):
        worker.memset_d8(c, 0, MIB)
        seen(f"launch {form}", worker.code("kernel", "gs_allreduce_step", [c, a, b, words], form=form))
        worker.expect(c, MIB, [1, 2])
        seen(f"sum {form}", worker.verify())
    worker.kernel("gs_add", [c, a, words])
    worker.expect(c, MIB, [1, 2, 1])
    seen("add", worker.verify())
    seen("checksum", worker.checksum(c, MIB) == int(content.pattern([1, 2, 1], words).sum(dtype=content.np.uint64)))
    worker.kernel("gs_iota", [c, words, (1 << 32) - 2])
    worker.forget(c)
    seen("iota", worker.read(c, 4))
    worker.kernel("gs_fill", [c, 3, 8])
    seen("fill", worker.read(c, 4))
    seen("no such kernel", worker.code("function", worker.module_load(), "gs_nothing"))
    stream = worker.stream_create()
    seen("write a word", worker.code("stream_write_value", stream, c, 77))
    seen("wait for a word", worker.code("stream_wait_value", stream, c, 77))
    worker.stream_sync(stream)
    seen("written", worker.read(c))


@case()
def graphs(seen: Seen, start: Start) -> None:
    """Recording and replay."""
    worker = start(0)
    block, other = worker.alloc(4096), worker.alloc(4096)
    worker.kernel("gs_fill", [block, 16, 0])
    worker.ctx_sync()
    stream = worker.stream_create()
    steps = [["memset_d32", block, 3, 1024], ["copy_dtod", other, block, 4096],
             ["kernel", "gs_add", [other, block, 1024]]]
    executable = worker.record_graph(stream, steps)
    seen("nothing ran while recording", worker.read(other)[0] != 6)
    seen("replay", [worker.code("graph_launch", executable, stream), worker.code("stream_sync", stream)])
    seen("result", set(worker.read(other, 1024)) == {6})
    seen("destroy", worker.code("graph_exec_destroy", executable))


def recording(worker: Worker, mode: int, name: str, *arguments: object) -> list[int]:
    """Make a call while this thread records a graph; return its code and that of the end of the recording."""
    stream = worker.stream_create()
    worker.capture_begin(stream, mode)
    code = worker.code(name, *arguments)
    return [code, worker.code("capture_end", stream)]


@case()
def while_recording(seen: Seen, start: Start) -> None:
    """Which calls break a recording, in the modes global, thread local and relaxed."""
    worker = start(0)
    for mode, label in enumerate(("global", "thread local", "relaxed")):
        seen(f"alloc {label}", recording(worker, mode, "alloc", 4096))
        block = worker.alloc(4 * MIB)
        seen(f"free {label}", recording(worker, mode, "free", block))
        seen(f"create {label}", recording(worker, mode, "mem_create", 2 * MIB))
        seen(f"context sync {label}", recording(worker, mode, "ctx_sync"))
        kept = worker.alloc(4096)
        seen(f"memset {label}", recording(worker, mode, "memset_d8", kept, 0, 4096))
        seen(f"pointer attribute {label}", recording(worker, mode, "pointer_attribute", "MEMORY_TYPE", kept))
        seen(f"IPC handle {label}", recording(worker, mode, "ipc_get", kept))
        seen(f"memory info {label}", recording(worker, mode, "mem_info"))
        memory = worker.buffer(4096)
        seen(f"host register {label}", recording(worker, mode, "host_register", memory, 4096))


@case()
def copies(seen: Seen, start: Start) -> None:
    """Every direction, synchronous and in a stream."""
    here()
    a, b = need(calls.alloc(MIB), "alloc"), need(calls.alloc(MIB), "alloc")
    words = content.pattern([1], MIB // 4)
    back = content.np.zeros_like(words)
    stream = need(calls.stream_create(), "stream")
    for label, at in (("synchronous", None), ("default stream", 0), ("stream", stream)):
        back[:] = 0
        codes = [
            calls.copy_htod(a, content.address_of(words), MIB, at), calls.copy_dtod(b, a, MIB, at),
            calls.copy_dtoh(content.address_of(back), b, MIB, at), calls.ctx_sync(),
        ]
        seen(f"typed {label}", [one.code for one in codes])
        seen(f"typed content {label}", bool((back == words).all()))
        back[:] = 0
        codes = [
            calls.copy(a, content.address_of(words), MIB, at), calls.copy(b, a, MIB, at),
            calls.copy(content.address_of(back), b, MIB, at), calls.ctx_sync(),
        ]
        seen(f"any {label}", [one.code for one in codes])
        seen(f"any content {label}", bool((back == words).all()))
        seen(f"memset {label}", calls.memset_d32(a, 5, MIB // 4, at))
        need(calls.ctx_sync(), "sync")
        need(calls.ctx_sync(), "sync")  # the next turn's stream does not wait for this one's
    seen("2D memset", calls.memset_2d_d32(a, 4096, 9, 100, 4))
    seen("2D memset content", content.read(a, 2048)[[0, 99, 100, 1024, 1123, 1124]].tolist())


@case()
def host_functions(seen: Seen, start: Start) -> None:
    """A host function runs between two kernels."""
    worker = start(0)
    loop = worker.loop_start("host_functions")
    until = time.monotonic() + HANG_S
    while worker.loop_state(loop)["count"] < 5 and time.monotonic() < until:
        time.sleep(0.01)
    found = worker.loop_stop(loop)
    seen("errors", found["errors"])
    seen("ran", found["count"] >= 5)


@case()
def pools(seen: Seen, start: Start) -> None:
    """Stream-ordered memory."""
    here()
    made = calls.alloc_async(4 * MIB)
    seen("alloc", made)
    seen("sync", calls.ctx_sync())
    if made.code == 0:
        seen.value("MEMORY_TYPE", calls.pointer_attribute("MEMORY_TYPE", made.value))
        pool = calls.pointer_attribute("MEMPOOL_HANDLE", made.value)
        seen("has a pool", pool.code or bool(pool.value))
        seen("IPC handle", calls.ipc_get(made.value))
        seen.value("IS_LEGACY_CUDA_IPC_CAPABLE", calls.pointer_attribute("IS_LEGACY_CUDA_IPC_CAPABLE", made.value))
        seen("cuMemFree", calls.free(made.value))


BEGINS_S = 0.5
"""How long a kernel takes at most until it runs, where others take turns with it."""
STILL_S = 3.0
"""How long a loop of launches stands still before its process counts as held up."""
FEW = 100  # launches, some of which only queue up: two processes that take turns manage thousands in half a second


def launched(running: Worker, loop: int, more: int) -> bool:
    """Tell whether a loop gets that many launches through, rather than stand still."""
    first = count = running.loop_state(loop)["count"]
    moved = time.monotonic()
    while count - first < more and time.monotonic() - moved < STILL_S:
        time.sleep(0.02)
        now = running.loop_state(loop)["count"]
        if now != count:
            count, moved = now, time.monotonic()
    return bool(count - first >= more)


def goes_on_beside(waiting: Worker, running: Worker) -> bool:
    """Tell whether a process gets kernels through while another's waits."""
    warm = Running(waiting)  # loads the module
    warm.end()
    waiting.stream_sync(warm.stream)
    loop = running.loop_start("launches")
    assert launched(running, loop, FEW)
    kernel = Running(waiting)
    time.sleep(BEGINS_S)
    goes_on = launched(running, loop, FEW)
    kernel.end()
    waiting.stream_sync(kernel.stream)
    running.loop_stop(loop)
    return goes_on


@case(bare=True)
def taking_turns(seen: Seen, start: Start) -> None:
    """A GPU leaves a waiting kernel for another process's work, until that kernel's context was restored."""
    first, second = start(0), start(0)
    calls.init()
    seen("fresh", goes_on_beside(first, second))
    for step in ("lock", "checkpoint", "restore", "unlock"):
        need(getattr(calls, f"cp_{step}")(first.pid), step)
    seen("beside a restored one's kernel", goes_on_beside(first, second))
    seen("the restored one beside", goes_on_beside(second, first))
    first.ctx_create(0)
    seen("beside a kernel of its new context", goes_on_beside(first, second))
