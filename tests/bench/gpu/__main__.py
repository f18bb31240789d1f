"""``make bench-gpu``: what suspend and resume take on GPUs, and what the shim costs, each beside a baseline of the run.

    python -m tests.bench.gpu --driver real --out bench.json

Builds nothing but one small C program. Each case is a process of its own with its own time limit; what a case has
measured before it is ended counts. A short table is printed last. Exits with 1 when a limit is missed, or a case on
GPUs was not run to its end; on the simulated driver, whose times say nothing about a GPU, nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpususpend.demo import results
from gpususpend.demo.machine import describe, find_machine
from gpususpend.report import table
from tests.bench.gpu import cycles, rates, steady
from tests.bench.gpu.case import Bench, NotRun
from tests.bench.line import Line
from tests.programs import setting as where
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool

SCHEMA = "gpushare-gpu-bench/1"
NOT_RUN = 77
"""Exit status of a case that cannot be measured here."""


@dataclass(frozen=True)
class Case:
    """Something to measure, and how long it may take."""

    work: Callable[[Bench], None]
    timeout_s: float


CASES = {
    "calls": Case(steady.calls, 60),
    "small": Case(cycles.small, 90),
    "large": Case(cycles.large, 120),
    "own-rates": Case(rates.own_rates, 120),
    "layouts": Case(rates.layouts, 60),
    "bare": Case(cycles.bare, 150),
    "torch": Case(steady.torch_launches, 90),
    "nccl": Case(steady.nccl, 90),
    "memory": Case(steady.memory, 60),
}
"""In the order of what is wanted most."""


def run_case(name: str, given: argparse.Namespace) -> int:
    """Measure one case in this process, printing as it goes; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="gpushare-bench-") as scratch:
        setting = machine(given)
        os.environ.update(setting.environ())  # for a driver process of ours
        try:
            with Tool(setting) as tool:
                CASES[name].work(Bench(setting, tool, Path(scratch), sizes(given), given.rounds))
            return 0
        except NotRun as why:
            print(json.dumps({"reason": str(why)}), flush=True)
            return NOT_RUN
        except Exception as error:
            traceback.print_exc()
            lines = str(error).splitlines()
            print(json.dumps({"reason": f"{type(error).__name__}: {' '.join(lines)[:600]}"}), flush=True)
            return 1
        finally:
            if setting.state is not None:
                where.drop_state(setting.state)


def machine(given: argparse.Namespace) -> Setting:
    """Return the machine of one case: the GPUs, or simulated ones of its own with room for all that is measured."""
    shim = Path(os.environ.get("GPUSHARE_SHIM", where.SHIM)).resolve()
    if given.driver == "real":
        return Setting("real", shim, devices=where.real_devices())
    room = (4 * max(sizes(given)) << 20) + (1 << 30)
    return Setting("sim", shim, devices=2, memory_bytes=room, state=where.fresh_state())


def sizes(given: argparse.Namespace) -> tuple[int, int]:
    """Return the MiB of a rank, small and large."""
    small, large = (int(word) for word in given.mib.split(","))
    return small, large


def measured(name: str, words: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run one case as a process with a time limit; return what it told."""
    found: dict[str, Any] = {"name": name, "status": "run", "reason": "", "lines": [], "facts": {}}
    begun = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-m", "tests.bench.gpu", "--case", name, *words]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   start_new_session=True)  # fmt: skip
        try:
            code = process.wait(timeout_s)
            found["status"] = {0: "run", NOT_RUN: "not run"}.get(code, "failed")
        except subprocess.TimeoutExpired:
            found |= {"status": "timeout", "reason": f"ended after {timeout_s:.0f} s"}
        finally:
            end_session(process.pid)
            process.wait()
        out.seek(0)
        for text in out.read().decode(errors="replace").splitlines():
            take(found, text)
        err.seek(0)
        tail = err.read().decode(errors="replace")[-2000:]
    if found["status"] in ("failed", "timeout"):
        found["reason"] = found["reason"] or (tail.strip().splitlines() or ["it said nothing"])[-1]
        found["stderr"] = tail
    return {**found, "seconds": round(time.monotonic() - begun, 1)}


def end_session(session: int) -> None:
    """Kill what a case has left behind: a rank that the driver has lost outlives who started it."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, fields = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            continue


def take(found: dict[str, Any], text: str) -> None:
    """Take one line of a case's output; anything else that was printed is passed over."""
    try:
        told = json.loads(text)
    except ValueError:
        return
    if "line" in told:
        found["lines"].append(told["line"])
    elif "fact" in told:
        found["facts"][told["fact"][0]] = told["fact"][1]
    elif "reason" in told:
        found["reason"] = told["reason"]


def show(record: dict[str, Any]) -> None:
    """Print the table: what has a limit, the machine's own rates, and what was not measured."""
    rows = []
    for case in record["cases"]:
        for data in case["lines"]:
            line = Line(**{name: value for name, value in data.items() if name != "ratio"})
            if not line.limit and case["name"] != "own-rates":
                continue
            baseline = f"{line.baseline_value:.2f}" if line.baseline_value else "-"
            verdict = ", ".join(filter(None, [line.verdict, line.note[:44]]))
            rows.append((line.what, f"{line.value:.2f}", line.unit, baseline, verdict))
        if case["status"] != "run":
            rows.append((f"{case['name']}: {case['status'].upper()}", "-", "-", "-", case["reason"][:100]))
    if record["simulated"]:
        print("simulated driver: nothing is judged")
    print("\n".join(table(rows, ("WHAT", "VALUE", "UNIT", "BASELINE", ""))))


def succeeded(record: dict[str, Any]) -> bool:
    """Tell whether every limit was held, and on GPUs every case was run to its end."""
    for case in record["cases"]:
        if case["status"] in ("failed", "timeout") or (case["status"] == "not run" and not record["simulated"]):
            return False
        if any(line["within_limit"] is False for line in case["lines"]):
            return False
    return True


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    real = where.wanted_driver() == "real" or where.real_devices() > 0
    parser.add_argument("--driver", choices=("sim", "real"), default="real" if real else "sim")
    parser.add_argument("--out", type=Path, help="write the record there")
    parser.add_argument("--budget", type=float, default=400, help="seconds for everything")
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--mib", help="MiB of a rank, small and large, such as 4096,28672")
    parser.add_argument("--rounds", type=int, default=1, help="times that what is quick is repeated")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.mib = given.mib or ("4096,28672" if given.driver == "real" else "16,32")
    return given


def main() -> int:
    """Measure all cases, write the record and print the table."""
    given = arguments()
    if given.case:
        return run_case(given.case, given)
    until = time.monotonic() + given.budget
    words = ["--driver", given.driver, "--mib", given.mib, "--rounds", str(given.rounds)]
    cases = []
    for name, case in CASES.items():
        left = until - time.monotonic()
        if not re.search(given.only, name):
            continue
        if left <= 5:
            cases.append({"name": name, "status": "not run", "reason": "no time left", "lines": [], "facts": {},
                          "seconds": 0.0})  # fmt: skip
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        # Of simulated GPUs there may be many on a small machine, and nobody waits for their numbers.
        limit_s = case.timeout_s * (4 if given.driver == "sim" else 1)
        cases.append(measured(name, words, min(left, limit_s)))
    with find_machine(given.driver, 2, 64) as found:
        head = results.header(["python", "-m", "tests.bench.gpu", *sys.argv[1:]], describe(found))
    load = Path("/proc/loadavg").read_text().split()[0]
    record = {**head, "schema": SCHEMA, "mib": list(sizes(given)), "load": float(load), "cases": cases}
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    return 0 if succeeded(record) else 1


if __name__ == "__main__":
    sys.exit(main())
