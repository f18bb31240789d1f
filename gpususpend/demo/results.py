"""The form of the demo's results: one JSON object for machines and records, one table for people.

The schema is documented in docs/results/README.md, which is generated from such objects.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpususpend import __version__

SCHEMA = "gpushare-demo/1"
GB = 1e9


def commit() -> str | None:
    """Return the commit of the source tree that this runs from, with -dirty where it was changed; None if unknown.

    GPUSHARE_COMMIT names it where a tree was copied without its history.
    """
    named = os.environ.get("GPUSHARE_COMMIT")
    if named:
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def header(command: list[str], machine: dict[str, Any]) -> dict[str, Any]:
    """Return what every result begins with: the schema, what ran, where, and when."""
    return {
        "schema": SCHEMA,
        "version": __version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        **machine,
        "host": {
            "machine": platform.machine(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
    }


def phases(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the phases of a command's report, which here is always about one group."""
    return [phase for group in report["groups"] for phase in group["phases"]]


def rates(cycle: dict[str, Any]) -> list[tuple[str, str, float, int | None]]:
    """Return the rows of a cycle: command, phase, seconds, and bytes where the phase moves any."""
    rows: list[tuple[str, str, float, int | None]] = []
    for verb in ("suspend", "resume"):
        for phase in phases(cycle[verb]["report"]):
            rows.append((verb, phase["name"], phase["seconds"], phase.get("bytes")))
        rows.append((verb, "whole command", cycle[verb]["seconds"], None))
    return rows


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table."""
    title = "simulated, no GPU: times say nothing about a GPU" if result["simulated"] else result["gpus"][0]["name"]
    table = Table(title=f"{len(result['ranks'])} ranks, {result['rank_bytes'] / GB:.2f} GB each ({title})")
    for name in ("cycle", "command", "phase"):
        table.add_column(name)
    for name in ("seconds", "bytes", "GB/s"):
        table.add_column(name, justify="right")
    for cycle in result["cycles"]:
        for verb, phase, seconds, moved in rates(cycle):
            rate = f"{moved / seconds / GB:.2f}" if moved and seconds else ""
            table.add_row(str(cycle["cycle"]), verb, phase, f"{seconds:.3f}", f"{moved:,}" if moved else "", rate)
        table.add_section()
    console.print(table)
