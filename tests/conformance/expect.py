"""`python -m tests.conformance.expect REPORT assumed|measured`: take a report over into `expected.json`.

A measured answer replaces an assumed one and is replaced by another measured one only; an assumed answer replaces
nothing that was measured. What was measured before and is the same keeps the run that it was first seen in. A report
made through a shim adds its answers beside those of the bare driver where they differ, which has to be a difference
that the design wants: look at `git diff` before committing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.conformance.compare import EXPECTED

Entry = dict[str, Any]


def source(report: dict[str, Any]) -> str:
    """Return who answered, in the words of an entry."""
    if report["driver"] != "real":
        return str(report["driver_version"])
    return f"{report['driver_version']}, {report['gpu']}, suite {report['suite']}"


def merge(expected: dict[str, dict[str, Entry]], report: dict[str, Any], basis: str) -> int:
    """Take the answers of a report into the expectations; return how many changed."""
    changed = 0
    for case, one in report["cases"].items():
        if one["status"] != "ok":
            continue
        known = expected.setdefault(case, {})
        for question in known.keys() - one["seen"].keys():
            # A question that is not asked any more. Cases ask the same with and without the shim.
            del known[question]
            changed += 1
        for question, value in one["seen"].items():
            entry = known.get(question)
            if report["shim"]:
                if entry is not None and entry["value"] != value and entry.get("shim") != value:
                    entry["shim"] = value
                    changed += 1
                continue
            if entry is not None and entry["basis"] == "measured" and (basis == "assumed" or entry["value"] == value):
                continue
            fresh = {"value": value, "basis": basis, "by": source(report)}
            fresh |= {name: entry[name] for name in ("shim", "sim", "why") if entry and name in entry}
            if entry != fresh:
                known[question] = fresh
                changed += 1
    return changed


def save(expected: dict[str, dict[str, Entry]]) -> None:
    """Write the expectations, one answer a line."""
    lines = ["{", ' "expected": {']
    cases = sorted(expected)
    for at, case in enumerate(cases):
        lines.append(f"  {json.dumps(case)}: {{")
        rows = [f"   {json.dumps(question)}: {json.dumps(entry)}" for question, entry in expected[case].items()]
        lines.append(",\n".join(rows))
        lines.append("  }" + ("," if at + 1 < len(cases) else ""))
    lines += [" }", "}"]
    EXPECTED.write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> int:
    """Merge one report."""
    if len(arguments) != 2 or arguments[1] not in ("assumed", "measured"):
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    report = json.loads(Path(arguments[0]).read_text())
    if arguments[1] == "measured" and report["driver"] != "real":
        print("only a real driver measures", file=sys.stderr)
        return 2
    expected = json.loads(EXPECTED.read_text())["expected"] if EXPECTED.exists() else {}
    changed = merge(expected, report, arguments[1])
    save(expected)
    print(f"{changed} answers changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
