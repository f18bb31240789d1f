"""What the shim costs a server at work: servers with it and without it up at once, asked in turns.

Of processes with a context on one GPU the first one launches small kernels faster, whichever it is (driver facts). So
three servers come up, one after the other: one without the shim, one with it, one without. The one with it is compared
to the last; the first shows how much the order alone makes out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from tests.bench.line import Line
from tests.gpu.vllm import machine
from tests.gpu.vllm.run import STREAMS, start, told_of
from tests.gpu.vllm.server import Server, Traffic, prompts

ORDER = ("first", "shim", "plain")
RATIO = 0.99
OVERHEAD = 0.03


def run_load(given: argparse.Namespace) -> int:
    """Run all three; write the record; return 0 if no limit was missed."""
    given.out.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.budget
    servers: dict[str, Server] = {}
    used = [0]
    own: dict[str, int] = {}
    try:
        for number, name in enumerate(ORDER):
            servers[name] = start(given, "shim" if name == "shim" else "bare",
                                  given.out.with_suffix(f".{name}.log"), given.port + number)
            print(f"{name}: up after {servers[name].wait_up(given.start_timeout):.1f} s", flush=True)
            Traffic(servers[name], prompts(STREAMS), given.short).end()
            used.append(sum(machine.gpu_use()[0]))
            own[name] = used[-1] - used[-2]
        record = {"schema": "gpushare-vllm-load/1", **told_of(given, servers["shim"]), "used_mib": own,
                  "tokens_per_second": rates(given, servers, until)}
    finally:
        for server in servers.values():
            server.stop()
    lines = compared(record)
    record["lines"] = [one.data() for one in lines]
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    for one in lines:
        print(f"{one.what}: {one.value:.0f} {one.unit}, {one.baseline} {one.baseline_value:.0f}, ratio "
              f"{one.ratio:.4f} {one.limit} {one.verdict}", flush=True)
    return 1 if any(one.within_limit is False for one in lines) else 0


def rates(given: argparse.Namespace, servers: dict[str, Server], until: float) -> dict[str, list[float]]:
    """Return each server's tokens a second, round by round; each second round goes the other way about."""
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(given.rounds):
        if time.monotonic() > until:
            print(f"the time given is over after {number} rounds", flush=True)
            break
        for name in ORDER if number % 2 == 0 else reversed(ORDER):
            found[name].append(Traffic(servers[name], prompts(STREAMS), given.long).end()[1])
    return found


def compared(record: dict[str, Any]) -> list[Line]:
    """Return what the record shows, beside what was wanted."""
    median = {name: statistics.median(values) for name, values in record["tokens_per_second"].items()}
    used, judged = record["used_mib"], not record["simulated"]
    ratio, more = median["shim"] / median["plain"], used["shim"] / used["plain"] - 1
    return [
        Line(f"vLLM, {STREAMS} streams", median["shim"], "tokens/s", "without the shim", median["plain"],
             f"ratio >= {RATIO}", ratio >= RATIO if judged else None),
        Line(f"vLLM, {STREAMS} streams", median["first"], "tokens/s", "the same, started last", median["plain"],
             note="both without the shim: what the order makes out"),
        Line("GPU memory of the server", used["shim"], "MiB", "without the shim", used["plain"],
             f"< {OVERHEAD:.0%} more", more < OVERHEAD if judged else None),
    ]  # fmt: skip
