"""Copies: what the machine gives for each kind of host memory, and what the copies of the shim reach."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpususpend.arena import Kind
from tests.bench.gpu.case import GB, LARGE, LINK_GBS, MIB, SMALL, TWO_LINKS_GBS, Bench, Run, allocate, command
from tests.bench.line import Line
from tests.programs.setting import ROOT


class NotGiven(Exception):
    """This machine does not give such memory; the text says why."""


def own_rate(bench: Bench, devices: list[int], mib: int, **changes: Any) -> dict[str, Any]:
    """Measure the machine's own rate in a process without the shim. Raises NotGiven."""
    usual = {"host": "driver", "locked": True, "node": None, "scattered": False, "piece_mib": 1024}
    spec = {"devices": devices, "mib": mib, **usual, **changes}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.gpu.own_rates", json.dumps(spec)], cwd=ROOT, env=bench.setting.environ(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise NotGiven(lines[-1] if lines else f"exit {done.returncode}")
    return dict(json.loads(done.stdout))


def numa_nodes() -> list[int]:
    """Return the NUMA nodes that have processors."""
    found = []
    for path in Path("/sys/devices/system/node").glob("node[0-9]*"):
        if (path / "cpulist").read_text().strip():
            found.append(int(path.name.removeprefix("node")))
    return sorted(found)


def places_of_gpus() -> dict[str, Any]:
    """Return the NUMA node of each GPU as the bus tells it; -1 where it does not, as in many virtual machines."""
    import pynvml

    pynvml.nvmlInit()
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        bus = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).busId
        text = bus.decode() if isinstance(bus, bytes) else str(bus)
        path = Path("/sys/bus/pci/devices") / text.lower()[-12:] / "numa_node"
        found[f"GPU {index}"] = int(path.read_text()) if path.exists() else None
    return found


def specs(bench: Bench) -> list[tuple[str, list[int], int, dict[str, Any]]]:
    """List what is measured: the words for it, the GPUs, MiB of each, and how it differs from the driver's memory."""
    small, large = bench.sizes
    some = min(small, 2048)
    both = list(range(min(2, bench.setting.devices)))
    found: list[tuple[str, list[int], int, dict[str, Any]]] = []
    if len(both) > 1:
        found.append(("2 GPUs at once", both, some, {}))
    found += [(f"arena of {kind.value}", [0], small, {"host": kind.name}) for kind in Kind]
    found.append(("arena of plain pages, not locked", [0], some, {"host": "PLAIN", "locked": False}))
    found.append(("arena of plain pages that lie scattered", [0], some, {"host": "PLAIN", "scattered": True}))
    found += [
        (f"arena of plain pages, filled on NUMA node {node}, GPU {gpu}", [gpu], some, {"host": "PLAIN", "node": node})
        for node in numa_nodes() for gpu in both
    ]  # fmt: skip
    for piece in (SMALL, LARGE):
        words = f"arena of plain pages, {piece // MIB} MiB an allocation"
        found.append((words, [0], small, {"host": "PLAIN", "piece_mib": piece // MIB}))
    found.append(("arena of plain pages, large", [0], large, {"host": "PLAIN"}))
    if len(both) > 1:
        found.append(("arenas of plain pages, 2 GPUs at once", both, small, {"host": "PLAIN"}))
    return found


def own_rates(bench: Bench) -> None:
    """What the machine gives: kinds of pages, locked or not, NUMA nodes, sizes, layouts, GPUs."""
    bench.fact("NUMA node of GPUs", {} if bench.setting.simulated else places_of_gpus())
    bench.fact("NUMA nodes", numa_nodes())
    own = own_rate(bench, [0], min(bench.sizes[0], 2048))
    for way in ("out", "in"):
        bench.tell(Line(f"{way}, cuMemHostAlloc", own[way], "GB/s", "", None))
    for words, devices, mib, changes in specs(bench):
        try:
            found = own_rate(bench, devices, mib, **changes)
        except NotGiven as why:
            bench.fact(f"not measured: {words}", str(why))
            continue
        prepared = ", ".join(f"{word} {found[word]:.1f} GB/s" for word in ("fill", "lock") if word in found)
        for way in ("out", "in"):
            what = f"{way}, {words}, {mib} MiB a GPU"
            bench.tell(Line(what, found[way], "GB/s", "cuMemHostAlloc, 1 GPU", own[way], note=prepared))


# --- the shim's


def arena_of(pid: int) -> dict[str, Any]:
    """Return what lies behind the arena of a rank: KiB in huge pages, and KiB on each NUMA node."""
    facts: dict[str, Any] = {"huge_kib": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "gpushare-arena" in line or " /#" in line
        elif inside and (told := re.match(r"(?:ShmemPmdMapped|FilePmdMapped|Shared_Hugetlb): +(\d+)", line)):
            facts["huge_kib"] += int(told[1])
        elif inside and (told := re.match(r"Rss: +(\d+)", line)):
            facts["resident_kib"] = facts.get("resident_kib", 0) + int(told[1])
    places = Path(f"/proc/{pid}/numa_maps")
    for line in places.read_text().splitlines() if places.exists() else []:
        if "gpushare-arena" in line or "/#" in line:
            kib = int((re.findall(r"kernelpagesize_kB=(\d+)", line) or ["4"])[0])
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
                facts[f"node{node}_kib"] = facts.get(f"node{node}_kib", 0) + int(pages) * kib
    return facts


def together(run: Run) -> tuple[float, float]:
    """Return GB/s of the slowest GPU, and of all together, of a run's copies."""
    copies = run.copies()
    seconds = max(one.ended for one in copies) - min(one.begun for one in copies)
    slowest = min(one.bytes / one.seconds for one in copies if one.seconds)
    return slowest / GB, sum(one.bytes for one in copies) / seconds / GB


def copy_lines(bench: Bench, title: str, run: Run, own: float, own_two: float, way: str) -> None:
    """Tell the rates of the copies of one suspend or resume beside the machine's own.

    Copies that wait for pages to be locked are no slower than others, and are not judged; what the locking takes stands
    beside them.
    """
    slowest, whole = together(run)
    locking = run.locking()
    pages = "plain pages" if run.plain_pages() else "huge pages" if way == "out" else ""
    note = ", ".join(filter(None, [pages, run.unlocked(), f"locking {locking:.3f} s of it" if locking else ""]))
    ranks = len({one.pid for one in run.copies()})
    bench.tell(Line(f"{title}: a GPU", slowest, "GB/s", "cuMemHostAlloc, 1 GPU", own,
                    "" if locking else f">= {LINK_GBS} GB/s", slowest >= LINK_GBS, note))  # fmt: skip
    if ranks == 2:
        bench.tell(Line(f"{title}: both GPUs", whole, "GB/s", "cuMemHostAlloc, 2 GPUs", own_two,
                        "" if locking else f">= {TWO_LINKS_GBS} GB/s", whole >= TWO_LINKS_GBS, note))  # fmt: skip


def layouts(bench: Bench) -> None:
    """The same bytes in few large allocations, and in many small ones, each through a whole cycle."""
    mib = bench.sizes[0]
    own = own_rate(bench, [0], min(mib, 1024))
    for name, piece in (("1 GiB", 1 << 30), ("20 MiB", LARGE), ("2 MiB", SMALL)):
        with bench.workers(1) as ranks:
            allocate(ranks[0], mib, piece)
            title = f"{mib} MiB in allocations of {name}"
            down = command(bench, "suspend", "--depth", "pages", ranks[0].pid)
            copy_lines(bench, f"release, {title}", down, own["out"], 0, "out")
            up = command(bench, "resume", ranks[0].pid)
            copy_lines(bench, f"load, {title}", up, own["in"], 0, "in")


