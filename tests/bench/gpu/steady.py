"""What the shim costs a program that runs: calls, PyTorch, NCCL, memory of the GPUs and of the host.

Programs without and with the shim are started in turns, in swapped order each second time, so that what else the
machine does meets both. They are never up together: of two processes with a context on the same GPU the second one
launches small kernels slower, whichever it is (seen on an H200 with driver 580.159.04).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpususpend import processes
from gpususpend.demo.cuda import KERNELS
from tests.bench.gpu.case import LARGE, MIB, NO_MULTICAST, SMALL, Bench, NotRun, allocate
from tests.bench.line import Line
from tests.programs.client import Worker
from tests.programs.setting import ROOT
from tests.programs.usage import memory_by_pid

ANSWER_S = 60.0
ASKED = 3  # times for each start
ADDED_NS = 20
RATIO = 0.99
HOST_MIB = 64
OVERHEAD = 0.03


class Asked:
    """A program that answers each line on its stdin by a line of JSON."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], stderr: Path) -> None:
        with stderr.open("wb") as errors:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self._stderr = stderr

    def send(self) -> None:
        """Ask for a measurement."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the answer. Raises RuntimeError where none comes in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"no answer; it said: {self._stderr.read_text(errors='replace')[-300:]}")
        return dict(json.loads(line))

    def kill(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def started(bench: Bench, words: Sequence[str], extra: Sequence[dict[str, str]], shim: bool) -> Iterator[list[Asked]]:
    """Yield the programs of one side, one for each of `extra`, the variables of that one; they are ended with it."""
    port = {"MASTER_PORT": free_port()}
    group: list[Asked] = []
    try:
        for number, variables in enumerate(extra):
            environment = bench.setting.environ(with_shim=shim) | variables | port
            group.append(Asked(words, environment, bench.scratch / f"program-{shim}-{number}"))
        yield group
    finally:
        for one in group:
            one.kill()


def free_port() -> str:
    """Return a TCP port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


Answers = dict[bool, list[list[dict[str, Any]]]]
"""Without and with the shim: the answers of all programs of the side, one list for each time that they were asked."""


def in_turns(bench: Bench, words: Sequence[str], extra: Sequence[dict[str, str]], starts: int) -> Answers:
    """Start each side so many times, one side at a time, and ask it; return the answers."""
    answers: Answers = {False: [], True: []}
    for number in range(starts):
        for shim in (False, True) if number % 2 else (True, False):
            with started(bench, words, extra, shim) as group:
                for _ in range(ASKED * bench.rounds):
                    for one in group:
                        one.send()
                    answers[shim].append([one.receive() for one in group])
    return answers


def calls(bench: Bench) -> None:
    """What a launch and a small copy cost the caller."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NotRun("there is no C compiler")
    program = bench.scratch / "launches"
    source = Path(__file__).with_name("launches.c")
    subprocess.run([compiler, "-O2", "-w", "-o", program, source, "-ldl"], check=True, timeout=60)
    batches = 3 if bench.setting.simulated else 200
    answers = in_turns(bench, [str(program), str(KERNELS), str(batches)], [{}], 8)
    # Behind cuMemAlloc the shim has memory of cuMemCreate, for whose addresses the driver itself takes longer.
    kinds = {"launch": "cuLaunchKernel", "copy": "cuMemcpyDtoDAsync",
             "copy_mapped": "cuMemcpyDtoDAsync, both in memory of cuMemCreate"}  # fmt: skip
    for name, what in kinds.items():
        without, shimmed = (statistics.median(one[0][name] for one in answers[shim]) for shim in (False, True))
        added = shimmed - without
        limit = f"<= {ADDED_NS} ns added"
        bench.tell(Line(what, shimmed, "ns", "without the shim", without, limit, added <= ADDED_NS,
                        f"{added:.1f} added"))  # fmt: skip


def need_torch(bench: Bench) -> None:
    """Raise NotRun where PyTorch cannot be used."""
    if bench.setting.simulated:
        raise NotRun("PyTorch does not run on the simulated driver")
    if importlib.util.find_spec("torch") is None:
        raise NotRun("PyTorch is not installed")


def compare(
    bench: Bench, mode: str, extra: Sequence[dict[str, str]], starts: int, what: str, unit: str, scale: float = 1
) -> None:
    """Tell a rate with the shim beside the one without. A start of PyTorch takes some five seconds."""
    answers = in_turns(bench, [sys.executable, "-m", "tests.bench.gpu.torch_program", mode], extra, starts)
    without, shimmed = (
        statistics.median(min(one["value"] for one in turn) for turn in answers[shim]) * scale for shim in (False, True)
    )
    bench.fact(f"samples, {what}", {("with" if shim else "without"): turns for shim, turns in answers.items()})
    limit = f"ratio >= {RATIO}"
    bench.tell(Line(what, shimmed, unit, "without the shim", without, limit, shimmed >= RATIO * without))


def torch_launches(bench: Bench) -> None:
    """Small kernels of PyTorch."""
    need_torch(bench)
    compare(bench, "launch", [{}], 4, "PyTorch, small kernels", "thousand/s", 1e-3)


def nccl(bench: Bench) -> None:
    """NCCL's all-reduce over two GPUs."""
    need_torch(bench)
    if bench.setting.devices < 2:
        raise NotRun("NCCL needs two GPUs")
    common = NO_MULTICAST | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [common | {"RANK": str(rank)} for rank in (0, 1)]
    compare(bench, "allreduce", ranks, 2, "NCCL all-reduce, bus", "GB/s")


# --- memory


def like_a_framework(worker: Worker, mib: int) -> None:
    """Allocate as a worker of a server does: a few large blocks, many segments, some small ones."""
    allocate(worker, mib // 2)
    allocate(worker, mib // 4, LARGE)
    allocate(worker, mib // 8, SMALL)
    for number in range(64):
        worker.alloc(512 << (number % 12))


def private_bytes(pid: int, kind: str = "Pss") -> int:
    """Return what a process has in memory, each page by its share, but for shared memory, of which arenas are made.

    `kind` Pss_Anon leaves out what is read from files, as the code of libraries is.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(Pss\w*): +(\d+) kB", text, re.M)}
    return sizes.get(kind, 0) - (sizes.get("Pss_Shmem", 0) if kind == "Pss" else 0)


def gpu_bytes(bench: Bench) -> int:
    """Return what is in use on all GPUs together."""
    if bench.setting.simulated:
        return sum(memory_by_pid(bench.setting).values())
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)


class Peak:
    """The most that this process's descendants have in memory together, but for some."""

    def __init__(self, without: Sequence[int]) -> None:
        self._without = {os.getpid(), *without}
        self._over = threading.Event()
        self.bytes = 0
        self.parts = ""  # by process, and what of it is from no file
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.is_set():
            below = processes.descendants([os.getpid()], processes.all_processes())
            sizes = {one: private_bytes(one.pid) for one in below if one.pid not in self._without}
            if sum(sizes.values()) > self.bytes:
                self.bytes = sum(sizes.values())
                own = {one: private_bytes(one.pid, "Pss_Anon") for one in sizes}
                self.parts = ", ".join(f"{one.comm} {size / MIB:.1f} ({own[one] / MIB:.1f} of no file)"
                                       for one, size in sizes.items())  # fmt: skip
            time.sleep(0.01)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def memory(bench: Bench) -> None:
    """What shim and supervisor take beyond the arena, and what the shim takes of the GPUs."""
    mib, driver = bench.sizes[0], ("--driver", "sim") if bench.setting.simulated else ()
    at_work: dict[bool, list[int]] = {}
    parts = ""
    used: dict[bool, int] = {}
    for shim in (False, True):
        with bench.workers(min(2, bench.setting.devices), shim=shim) as ranks:
            pids = [rank.pid for rank in ranks]
            before = gpu_bytes(bench)
            for rank in ranks:
                like_a_framework(rank, mib)
            used[shim] = gpu_bytes(bench) - before
            at_work[shim] = [private_bytes(pid) for pid in pids]
            if not shim:
                continue
            peaks = {}
            for depth in ("pages", "process"):
                with Peak(pids) as peak:
                    bench.tool.run("suspend", "--depth", depth, *pids, *driver, deadline_s=200).expect(0)
                suspended = [private_bytes(pid) for pid in pids]
                with peak_of(peak, pids):
                    bench.tool.run("resume", *pids, *driver, deadline_s=200).expect(0)
                peaks[depth] = (peak.bytes / len(pids), max(suspended))
                parts = peak.parts
    bench.fact("memory of the supervisor's processes, MiB, at depth process", parts)
    tell_memory(bench, at_work, peaks, used)


@contextlib.contextmanager
def peak_of(peak: Peak, without: Sequence[int]) -> Iterator[None]:
    """Go on watching, into the same maximum."""
    with Peak(without) as more:
        yield
    if more.bytes > peak.bytes:
        peak.bytes, peak.parts = more.bytes, more.parts


def tell_memory(
    bench: Bench, at_work: dict[bool, list[int]], peaks: dict[str, tuple[float, int]], used: dict[bool, int]
) -> None:
    """Tell what was measured."""
    shim = max(0, max(at_work[True]) - min(at_work[False]))
    supervisor = max(each for each, _ in peaks.values())
    whole = (shim + supervisor) / MIB
    note = f"shim {shim / MIB:.1f}, supervisor {supervisor / MIB:.1f}"
    bench.tell(Line("host memory beyond the arena, a rank", whole, "MiB", "", None, f"<= {HOST_MIB} MiB",
                    whole <= HOST_MIB, note))  # fmt: skip
    for depth, (_, suspended) in peaks.items():
        what = f"host memory of a suspended rank, {depth}, without the arena"
        bench.tell(Line(what, suspended / MIB, "MiB", "at work", max(at_work[True]) / MIB))
    added = used[True] / used[False] - 1
    bench.tell(Line("GPU memory of allocations", used[True] / MIB, "MiB", "without the shim", used[False] / MIB,
                    f"< {OVERHEAD:.0%} more", added < OVERHEAD, f"{added:.2%} more"))  # fmt: skip
