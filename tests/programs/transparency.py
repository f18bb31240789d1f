"""Compare what a program sees with and without the shim, with the list of differences that are meant.

`python -m tests.programs.transparency` writes docs/reference/transparency.md from docs/reference/transparency.json.
"""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from tests.programs.setting import ROOT, Setting

FOLDER = ROOT / "docs" / "reference"
LIST, PAGE = FOLDER / "transparency.json", FOLDER / "transparency.md"
DEADLINE_S = 120


@dataclass(frozen=True)
class Allowed:
    """A difference that is meant: which questions, the two answers, and why."""

    question: str
    without: Any
    with_shim: Any
    why: str


def allowed() -> dict[str, list[Allowed]]:
    """Return the committed list, by kind of driver."""
    known = json.loads(LIST.read_text())
    return {
        driver: [Allowed(row["question"], row["without"], row["with"], row["why"]) for row in rows]
        for driver, rows in known.items()
    }


def answers(machine: Setting, *, with_shim: bool) -> dict[str, Any]:
    """Run the program that asks everything."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.programs.attributes"], env=machine.environ(with_shim=with_shim), cwd=ROOT,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(f"the program ended with {result.returncode}:\n{result.stderr}")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def unexplained(without: dict[str, Any], with_shim: dict[str, Any], rows: list[Allowed]) -> list[str]:
    """Say which answers differ and should not, and which differences of the list are not there.

    A row is not missed where this machine itself never gives the answer that the row is about: one device has no
    peers, and one GPU of a host no multicast.
    """
    told: list[str] = []
    used = [
        row for row in rows
        if all(without[question] != row.without for question in fnmatch.filter(without, row.question))
    ]
    for question in sorted(without.keys() | with_shim.keys()):
        pair = without.get(question, "not asked"), with_shim.get(question, "not asked")
        if pair[0] == pair[1]:
            continue
        fitting = [
            row
            for row in rows
            if fnmatch.fnmatchcase(question, row.question) and (row.without, row.with_shim) == pair
        ]
        used += fitting
        if not fitting:
            told.append(f"{question}: {pair[0]!r} without the shim, {pair[1]!r} with it")
    return told + [f"{row.question}: listed, and there is no such difference" for row in rows if row not in used]


def page() -> str:
    """Return the page that prints the list."""
    lines = [
        "# What a program can see of the shim",
        "",
        "<!-- Generated from transparency.json. Regenerate: python -m tests.programs.transparency -->",
        "",
        "`python -m tests.programs.attributes` asks the driver for every attribute of devices, pairs of devices, the",
        "context and addresses, and for what it knows of memory: of `cuMemAlloc`, cuMem, pools, host and managed",
        "memory, and of memory opened by its IPC handle. A test runs it with and without the shim; the answers may",
        "differ in what stands here and in nothing else. Of addresses and handles the program prints what they are,",
        "and of identities whether they are the same all over a piece of memory, not their numbers. Not asked: how",
        "much memory is free.",
    ]
    for driver, rows in allowed().items():
        lines += ["", f"## On a {driver} driver", "", "| question | without | with | why |", "|---|---|---|---|"]
        lines += [f"| `{row.question}` | {row.without} | {row.with_shim} | {row.why} |" for row in rows]
    lines += ["", "There is no recorded run on a GPU yet.", ""] if "real" not in allowed() else [""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
