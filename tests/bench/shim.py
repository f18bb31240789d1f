"""``make bench-shim``: what the shim costs a process, against the same process without it, in the same run.

Exits with 1 when a limit is exceeded. Both sides take turns, and
of each the quickest run counts: whatever else the machine does can only add.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gpususpend.demo import results
from gpususpend.demo.machine import SHIM, Machine, describe, find_machine

CALLS = """
import json, time
from gpususpend.demo.cuda import Device, call
from cuda.bindings import driver
device = Device(0)
buffer = device.allocate(1 << 20)
host = bytearray(256)
def each(count, work):
    work()
    start = time.perf_counter()
    for _ in range(count):
        work()
    device.synchronize()
    return (time.perf_counter() - start) / count
def allocate(size):
    call(driver.cuMemFree, device.allocate(size))
print(json.dumps({
    "launch": each(2000, lambda: device.launch("gs_iota", 64, buffer, 64, 0)),
    "memset": each(2000, lambda: call(driver.cuMemsetD32Async, buffer, 0, 64, device.stream)),
    "stream query": each(2000, lambda: driver.cuStreamQuery(device.stream)),
    "allocate and free 4 KiB": each(300, lambda: allocate(4096)),
    "allocate and free 64 MiB": each(50, lambda: allocate(64 << 20)),
}))
"""


@dataclass(frozen=True)
class Line:
    """One comparison, in seconds; `limit_s` is the most that the shim may add."""

    what: str
    without_s: float
    with_s: float
    limit_s: float

    @property
    def added_s(self) -> float:
        """What the shim adds."""
        return self.with_s - self.without_s

    @property
    def within_limit(self) -> bool:
        """Tell whether it stays within the limit."""
        return self.added_s <= self.limit_s


def run(command: list[str], environment: dict[str, str], shim: bool) -> str:
    """Run a command to its end, with or without the shim, and return what it prints."""
    variables = {**environment, "LD_PRELOAD": str(SHIM)} if shim else environment
    return subprocess.run(command, env=variables, check=True, capture_output=True, text=True, timeout=120).stdout


def in_turns(rounds: int, measure: Callable[[bool], float]) -> tuple[float, float]:
    """Return the quickest without and with the shim."""
    samples = [(measure(False), measure(True)) for _ in range(rounds)]
    return min(bare for bare, _ in samples), min(shimmed for _, shimmed in samples)


def start_up(environment: dict[str, str]) -> list[Line]:
    """Measure processes that never call CUDA."""
    lines = []
    for command, rounds, limit_s in ((["/bin/true"], 200, 0.001), ([sys.executable, "-c", "pass"], 50, 0.002)):

        def measure(shim: bool, command: list[str] = command) -> float:
            start = time.perf_counter()
            run(command, environment, shim)
            return time.perf_counter() - start

        name = os.path.basename(" ".join(command))
        lines.append(Line(f"start and end of {name}", *in_turns(rounds, measure), limit_s))
    return lines


def calls(environment: dict[str, str], rounds: int) -> list[Line]:
    """Measure driver calls made from Python; an allocation has the cost of the driver's virtual memory calls."""
    samples: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for shim in samples:
            samples[shim].append(json.loads(run([sys.executable, "-c", CALLS], environment, shim)))
    limits = {"allocate and free 4 KiB": 0.001, "allocate and free 64 MiB": 0.001}

    def least(shim: bool, name: str) -> float:
        return min(sample[name] for sample in samples[shim])

    return [Line(name, least(False, name), least(True, name), limits.get(name, 2e-6)) for name in samples[False][0]]


def record(machine: Machine, lines: list[Line]) -> dict[str, Any]:
    """Return the measurement for machines."""
    head = results.header(["python", "-m", "tests.bench.shim"], describe(machine))
    measured = [{**asdict(line), "within_limit": line.within_limit} for line in lines]
    return {**head, "schema": "gpushare-bench/1", "lines": measured}


def show(machine: Machine, lines: list[Line]) -> None:
    """Print the table."""
    table = Table(title="simulated driver" if machine.simulated else machine.gpus[0].name)
    for heading in ("what", "without, us", "with the shim, us", "added, us", "limit, us", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for line in lines:
        numbers = [f"{value * 1e6:.2f}" for value in (line.without_s, line.with_s, line.added_s, line.limit_s)]
        table.add_row(line.what, *numbers, "ok" if line.within_limit else "too slow")
    Console().print(table)


@click.command()
@click.option("--driver", default="auto", show_default=True, type=click.Choice(["auto", "real", "sim"]))
@click.option("--rounds", default=5, show_default=True, help="Processes measured on each side for the calls.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(driver: str, rounds: int, as_json: bool) -> None:
    """Measure what the shim costs. Example: python -m tests.bench.shim --driver sim"""
    with find_machine(driver, 2, 64) as machine:
        environment = machine.environment()
        lines = start_up(environment) + calls(environment, rounds)
        if as_json:
            click.echo(json.dumps(record(machine, lines), indent=1))
        else:
            show(machine, lines)
    sys.exit(0 if all(line.within_limit for line in lines) else 1)


if __name__ == "__main__":
    main()
