"""Whole suspends and resumes: the rate of their copies, the stop, and the bare driver's cycle beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gpususpend.deadline import Deadline
from gpususpend.driver import DriverProcess, DriverResult
from tests.bench.gpu.case import GB, LINK_GBS, MIB, Bench, Run, allocate, command
from tests.bench.gpu.rates import arena_of, copy_lines, own_rate
from tests.bench.line import Line
from tests.programs.client import Worker

WAYS = {"pages": ("--depth", "pages"), "in place": ("--in-place",), "process": ()}
"""Ways to suspend, and their options: the last two are of one depth, with host memory that no dump can take or that can
be dumped."""

BEYOND_S = {"pages": 0.15, "in place": 1.0, "process": 1.0}
"""What a suspend or a resume may take more than the copy at the link's rate."""

TIMES = {"suspend": 8, "resume": 3}
"""How many times as fast as the bare driver each has to be."""


def stop_of(down: Run) -> float:
    """Return the seconds from the first gate that closes until everything is away, as the command saw it."""
    phases = down.phases()
    return phases[-1].ended - next(one.begun for one in phases if one.name == "quiesce")


def way_back_of(up: Run) -> float:
    """Return the seconds from the first step until the gates are open."""
    phases = up.phases()
    return phases[-1].ended - phases[0].begun


def locking_adds(down: Run, up: Run, copying_s: float) -> float:
    """Return the seconds by which a load that locks plain pages is longer than its copies: the two overlap."""
    return max(0.0, up.locking() - copying_s) if down.plain_pages() else 0.0


def limit_line(verb: str, way: str, title: str, seconds: float, bytes_a_gpu: int, note: str) -> Line:
    """Return a stop, or a way back, beside what it may take."""
    beyond = BEYOND_S[way]
    most = bytes_a_gpu / (LINK_GBS * GB) + beyond
    limit = f"<= bytes / {LINK_GBS} GB/s + {beyond} s"
    return Line(f"{verb}, {title}", seconds, "s", limit, most, limit, seconds <= most, note)


def steps(run: Run) -> str:
    """Return the phases with their seconds, for a note."""
    return ", ".join(f"{one.name} {one.seconds:.3f}" for one in run.phases())


Rates = dict[str, float]


def cycle(bench: Bench, ranks: list[Worker], way: str, mib: int, own: Rates, two: Rates) -> None:
    """Suspend and resume once, and tell everything about it."""
    title = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}, {mib} MiB each, {way}"
    pids = [rank.pid for rank in ranks]
    down = command(bench, "suspend", *WAYS[way], *pids)
    bench.fact(f"arenas, {title}", {str(pid): arena_of(pid) for pid in pids})
    up = command(bench, "resume", *pids)
    copy_lines(bench, f"release, {title}", down, own["out"], two.get("out", 0), "out")
    copy_lines(bench, f"load, {title}", up, own["in"], two.get("in", 0), "in")
    bench.tell(limit_line("suspend", way, f"{title}: stop", stop_of(down), mib * MIB, steps(down)))
    back, added = way_back_of(up), locking_adds(down, up, mib * MIB / GB / own["in"])
    if added:
        bench.tell(Line(f"resume, {title}: what locking plain pages adds to the copies", added, "s",
                        "whole way back", back))  # fmt: skip
    words = "way back without that" if added else "way back"
    bench.tell(limit_line("resume", way, f"{title}: {words}", back - added, mib * MIB, steps(up)))
    for verb, run in (("suspend", down), ("resume", up)):
        bench.tell(Line(f"{verb}, {title}: whole command", run.seconds, "s", "", None))


def small(bench: Bench) -> None:
    """Of a small model: one rank and two, in every way."""
    own = own_rate(bench, [0], min(bench.sizes[0], 1024))
    two = own_rate(bench, [0, 1], min(bench.sizes[0], 1024)) if bench.setting.devices > 1 else {}
    for count in (1, 2)[: bench.setting.devices]:
        with bench.workers(count) as ranks:
            for rank in ranks:
                allocate(rank, bench.sizes[0])
            for _ in range(bench.rounds):
                for way in WAYS:
                    cycle(bench, ranks, way, bench.sizes[0], own, two)


def large(bench: Bench) -> None:
    """Of a large one: as many ranks as GPUs, at most two."""
    own = own_rate(bench, [0], min(bench.sizes[0], 1024))
    two = own_rate(bench, [0, 1], min(bench.sizes[0], 1024)) if bench.setting.devices > 1 else {}
    with bench.workers(min(2, bench.setting.devices)) as ranks:
        for rank in ranks:
            allocate(rank, bench.sizes[1])
        for way in WAYS:
            cycle(bench, ranks, way, bench.sizes[1], own, two)


# --- the driver alone


def required(answers: dict[int, DriverResult]) -> None:
    """Raise unless each call has succeeded."""
    for pid, answer in answers.items():
        if not answer.ok:
            raise RuntimeError(f"the driver answers {answer.name} for pid {pid}")


def bare_cycle(driver: DriverProcess, pids: list[int]) -> dict[str, float]:
    """Checkpoint and restore with the driver alone; return the seconds of both."""

    def timed(*calls: Callable[[], dict[int, DriverResult]]) -> float:
        begun = time.monotonic()
        for call in calls:
            required(call())
        return time.monotonic() - begun

    return {
        "suspend": timed(lambda: driver.lock(pids, 60), lambda: driver.checkpoint(pids, Deadline(120))),
        "resume": timed(lambda: driver.restore(pids, (), Deadline(120)), lambda: driver.unlock(pids, Deadline(30))),
    }


def bare(bench: Bench) -> None:
    """A cycle in place with the shim, and the second of the driver's own with the same memory: its first is slower."""
    count, mib = min(2, bench.setting.devices), bench.sizes[1]
    title = f"{count} rank{'s' * (count > 1)}, {mib} MiB each"
    with bench.workers(count) as ranks:
        for rank in ranks:
            allocate(rank, mib)
        ours = {"suspend": stop_of(command(bench, "suspend", "--in-place", *(rank.pid for rank in ranks))),
                "resume": way_back_of(command(bench, "resume", *(rank.pid for rank in ranks)))}  # fmt: skip
    theirs: dict[str, float] = {}
    with bench.workers(count, shim=False) as ranks:
        for rank in ranks:
            allocate(rank, mib)
        with DriverProcess.start(Path(bench.tool.state_dir), bench.setting.simulated) as driver:
            for number in (1, 2):
                theirs = bare_cycle(driver, [rank.pid for rank in ranks])
                bench.fact(f"bare driver, cycle {number}", theirs)
    for verb, times in TIMES.items():
        held = theirs[verb] >= times * ours[verb]
        bench.tell(Line(f"{verb}, {title}", ours[verb], "s", "bare driver, second cycle", theirs[verb],
                        f"bare driver takes >= {times} times as long", held,
                        f"{theirs[verb] / ours[verb]:.1f} times"))  # fmt: skip
