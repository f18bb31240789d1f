"""``python -m tests.bench.store --gpu``: suspends into a store, and resumes, of ranks on GPUs or on simulated ones.

Two ranks (one where there is one GPU) share out the memory: a quarter is zeros, the rest differs from chunk to chunk.
It is saved first, saved again unchanged, and again after a clean check of the store; each time it comes back, and every
word of it is compared at the end. Beside it stands the disk's own rate with direct I/O, of the same run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.line import Line
from tests.programs import setting as machine
from tests.programs.client import Worker, workers
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Answer, Tool

MIB = 1 << 20
GB = 1e9
PIECE_MIB = 512
BEYOND_RING_MIB = 150
HOUR_S = 3600.0


def suspends(where: Path, mib: int, simulated: bool, disk: Callable[[Path], Iterator[Line]]) -> Iterator[Line]:
    """Yield every line; `disk` measures the disk in an empty folder. On a simulated driver no rate is judged."""
    with tempfile.TemporaryDirectory(prefix="gpushare-bench-", dir=where) as folder:
        (own := Path(folder, "disk")).mkdir()

        def judged(line: Line) -> Line:
            return replace(line, within_limit=None) if simulated and line.unit == "GB/s" else line

        probes = list(disk(own))
        yield from map(judged, probes)
        rates = {"save": probes[0].baseline_value or 0.0, "load": probes[1].baseline_value or 0.0}
        setting = _setting(mib, simulated)
        try:
            with Tool(setting, deadline_s=HOUR_S) as tool, workers(setting, min(2, setting.devices)) as ranks:
                yield from map(judged, _rounds(Path(folder), tool, ranks, mib, rates))
        finally:
            if setting.state is not None:
                machine.drop_state(setting.state)


def _setting(mib: int, simulated: bool) -> Setting:
    if not simulated:
        return Setting("real", machine.SHIM, devices=machine.real_devices())
    return Setting("sim", machine.SHIM, memory_bytes=(2 * mib * MIB) + (1 << 30), state=machine.fresh_state())


def _rounds(folder: Path, tool: Tool, ranks: list[Worker], mib: int, rates: dict[str, float]) -> Iterator[Line]:
    ring_mib = min(2048, max(256, mib // 4))
    for number, rank in enumerate(ranks):
        _allocate(rank, mib // len(ranks), number * 1000)
    pids = [rank.pid for rank in ranks]
    for number, title in enumerate(("first save", "second save, compared", "third save, after a clean fsck")):
        if number == 2:
            tool.run("store", "fsck", folder / "store", deadline_s=HOUR_S).expect(0)
        places = ("--store", folder / "store", "--ckpt-dir", folder / str(number))
        down, peak = _command(tool, "suspend", "--depth", "pages", "--ring", f"{ring_mib}MiB", *places, *pids)
        yield _rate(f"{title}: save, not zeros", down, "save", rates["save"] if number == 0 else None)
        yield _peak(f"{title}: suspend", peak, ring_mib)
        up, peak = _command(tool, "resume", "--ring", f"{ring_mib}MiB", *pids)
        yield _rate(f"{title}: load, not zeros", up, "load", rates["load"])
        yield _rate(f"{title}: load, zeros", up, "zeros", None)
        yield _peak(f"{title}: resume", peak, ring_mib)
    for rank in ranks:
        wrong = rank.do("verify", deadline_s=HOUR_S)
        assert not wrong, f"memory of rank {rank.pid} differs: {wrong}"


def _allocate(rank: Worker, mib: int, seed: int) -> None:
    """Give a rank that much memory, a quarter of it zeros."""
    zeros = mib // 4 * MIB
    address = rank.alloc(zeros)
    rank.memset_d32(address, 0, zeros // 4)
    left, piece = mib * MIB - zeros, PIECE_MIB * MIB
    while left > 0:
        seed += 1
        size = min(left, piece)
        rank.do("fill", rank.alloc(size), size, seed, deadline_s=HOUR_S)
        left -= size


def _command(tool: Tool, *words: Any) -> tuple[dict[str, Any], int]:
    """Run a command that has to succeed; return its group, and the most memory that it had in use, in bytes."""
    driver = ("--driver", "sim") if tool.setting.simulated else ()
    command = [sys.executable, "-m", "tests.programs.peak", *map(str, words), *driver, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | tool.environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=HOUR_S,
    )  # fmt: skip
    answer = Answer(command, done.returncode, done.stdout, done.stderr).expect(0)
    return answer.json["groups"][0], int(answer.stderr.rpartition("peak ")[2].split()[0])


def _rate(title: str, group: dict[str, Any], step: str, disk: float | None) -> Line:
    """Return the rate of a step; of a save, of what is not zeros, though all of it crosses the bus."""
    phase = next(one for one in group["phases"] if one["name"] == step)
    moved = group["stored"]["bytes"]
    size = phase["bytes"] - (moved.get("zero", 0) if step == "save" else 0)
    note = ", ".join(f"{word} {count / GB:.2f} GB" for word, count in moved.items())
    rate = size / phase["seconds"] / GB
    if disk is None:
        return Line(title, rate, "GB/s", "", None, note=note)
    held = rate >= 0.9 * disk
    return Line(title, rate, "GB/s", "bare direct I/O", disk, "ratio >= 0.9", held, note)


def _peak(title: str, peak: int, ring_mib: int) -> Line:
    most = ring_mib + BEYOND_RING_MIB
    return Line(
        f"{title}: resident memory", peak / MIB, "MiB", "ring", ring_mib, f"<= ring + {BEYOND_RING_MIB} MiB",
        peak / MIB <= most,
    )  # fmt: skip
