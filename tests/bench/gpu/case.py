"""What a case of the benchmark is given, and how it tells what it has measured.

A case is a process of its own, so that one that hangs costs its own time limit and nothing else. It prints a line of
JSON for everything that it knows, at once: what a case has measured before it is ended counts.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.line import Line
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool

MIB = 1 << 20
GB = 1e9
LINK_GBS = 45  # of a page-locked copy of one GPU that a suspend has to reach
TWO_LINKS_GBS = 85
LARGE, SMALL = 20 * MIB, 2 * MIB  # the segments of PyTorch's caching allocator
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class NotRun(Exception):
    """A case cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Bench:
    """The machine and the sizes: `sizes` are the MiB of a rank, the small and the large; `rounds` scale repetitions."""

    setting: Setting
    tool: Tool
    scratch: Path
    sizes: tuple[int, int]
    rounds: int

    def tell(self, line: Line) -> None:
        """Print one comparison; on the simulated driver nothing is judged."""
        data = line.data()
        if self.setting.simulated:
            data["within_limit"] = None
        print(json.dumps({"line": data}), flush=True)

    def fact(self, name: str, value: Any) -> None:
        """Print something else that is to be recorded."""
        print(json.dumps({"fact": [name, value]}), flush=True)

    @contextlib.contextmanager
    def workers(self, count: int, shim: bool = True) -> Iterator[list[Worker]]:
        """Start ranks, one on each GPU; they are killed at the end."""
        if count > self.setting.devices:
            raise NotRun(f"{count} GPUs are needed, {self.setting.devices} found")
        started = [Worker(self.setting, shim=shim, stderr=self.scratch / f"rank-{shim}-{at}") for at in range(count)]
        try:
            for at, worker in enumerate(started):
                worker.start(at)
            yield started
        finally:
            for worker in started:
                worker.kill()


def allocate(worker: Worker, mib: int, piece: int = 1 << 30) -> None:
    """Give a rank that much device memory, in allocations of `piece` bytes."""
    left = mib * MIB
    while left > 0:
        worker.alloc(min(piece, left))
        left -= piece


@dataclass(frozen=True)
class Bar:
    """A bar of a trace, in seconds from the command's beginning."""

    name: str
    pid: int
    row: str
    begun: float
    seconds: float
    bytes: int

    @property
    def ended(self) -> float:
        """Return the end."""
        return self.begun + self.seconds


@dataclass(frozen=True)
class Run:
    """One command of the tool: how long it took as a process, its answer, and the bars of its trace."""

    seconds: float
    answer: Answer
    bars: list[Bar]

    def phases(self) -> list[Bar]:
        """Return the phases in order."""
        names = {phase["name"] for group in self.answer.json["groups"] for phase in group["phases"]}
        return [bar for bar in self.bars if bar.row == "phases" and bar.name in names]

    def copies(self) -> list[Bar]:
        """Return the copies."""
        return [bar for bar in self.bars if bar.row.startswith("copies")]

    def locking(self) -> float:
        """Return the longest that a rank spent on locking pages between its copies."""
        phases = [phase for group in self.answer.json["groups"] for phase in group["phases"]]
        return max((seconds for phase in phases for seconds in phase["locking"].values()), default=0.0)

    def plain_pages(self) -> bool:
        """Say whether an arena got plain pages."""
        return "plain pages" in self.answer.stderr

    def unlocked(self) -> str:
        """Return what the tool says of memory that the driver did not page-lock, or nothing."""
        return "; ".join(re.findall(r"the driver page-locks .*", self.answer.stderr))


def command(bench: Bench, *words: str | int, deadline_s: float = 240) -> Run:
    """Run a command of the tool that has to succeed, with a trace."""
    path = bench.scratch / "trace.json"
    driver = ("--driver", "sim") if bench.setting.simulated else ()
    begun = time.monotonic()
    answer = bench.tool.run(*words, *driver, "--trace", str(path), deadline_s=deadline_s).expect(0)
    seconds = time.monotonic() - begun
    return Run(seconds, answer, bars_of(json.loads(path.read_text())))


def bars_of(document: dict[str, Any]) -> list[Bar]:
    """Return the bars of a trace."""
    events = document["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name" and e["ph"] == "M"}
    return [
        Bar(e["name"], e["pid"], rows[e["pid"], e["tid"]], e["ts"] / 1e6, e["dur"] / 1e6, e["args"].get("bytes", 0))
        for e in events if e["ph"] == "X"
    ]  # fmt: skip
