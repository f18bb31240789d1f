"""`python -m tests.conformance.compare A B`: where two reports, or a report and `expected.json`, disagree.

Exits with 1 if they do. An entry of `expected.json` is `{"value": v, "basis": "measured" | "assumed"}`, with `"shim"`
beside it where the shim changes the answer on purpose, and `"sim"` where the simulated driver does, for what a later
stage brings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

EXPECTED = Path(__file__).with_name("expected.json")


class Difference(NamedTuple):
    """One answer that differs; `basis` is what the first side's value rests on."""

    case: str
    question: str
    first: Any
    second: Any
    basis: str


class Answers(NamedTuple):
    """Answers by case and question, which cases ended, and which through the shim."""

    values: dict[str, dict[str, Any]]
    basis: dict[str, dict[str, str]]
    partial: set[str]


def load(path: Path, *, shim: bool = False, simulated: bool = False) -> Answers:
    """Read a report, or expectations as they are for this driver with or without the shim."""
    content = json.loads(path.read_text())
    if "expected" in content:
        changes = [name for name, wanted in (("shim", shim), ("sim", simulated)) if wanted]
        values = {case: {question: next((entry[name] for name in changes if name in entry), entry["value"])
                         for question, entry in questions.items()}
                  for case, questions in content["expected"].items()}
        basis = {case: {question: entry["basis"] for question, entry in questions.items()}
                 for case, questions in content["expected"].items()}
        return Answers(values, basis, set())
    ran = {case: report for case, report in content["cases"].items() if report["status"] != "skipped"}
    values = {case: report["seen"] for case, report in ran.items()}
    name = "shim" if content["shim"] else "bare"
    basis = {case: dict.fromkeys(seen, f"{content['driver']} {name}") for case, seen in values.items()}
    return Answers(values, basis, {case for case, report in ran.items() if report["status"] != "ok"})


def differences(first: Answers, second: Answers) -> list[Difference]:
    """Return what differs in cases that both sides have run."""
    found = []
    for case in sorted(first.values.keys() & second.values.keys()):
        one, other = first.values[case], second.values[case]
        for question in list(one) + [q for q in other if q not in one]:
            left, right = one.get(question, "(not seen)"), other.get(question, "(not seen)")
            if left != right:
                basis = first.basis[case].get(question) or second.basis[case].get(question, "")
                found.append(Difference(case, question, left, right, basis))
        for case_of, side in ((first, "first"), (second, "second")):
            if case in case_of.partial:
                found.append(Difference(case, f"(the case did not end well on the {side} side)", "", "", ""))
    return found


def table(found: list[Difference]) -> str:
    """Return the differences as text, one line each."""
    lines = [f"{'case':34} {'question':44} {'first':>24} {'second':>24}  basis"]
    for one in found:
        lines.append(f"{one.case:34.34} {one.question:44.44} {json.dumps(one.first):>24} {json.dumps(one.second):>24}  "
                     f"{one.basis}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Compare two files and print the table."""
    if len(arguments) != 2:
        print("usage: python -m tests.conformance.compare A B   (B may be `expected`)", file=sys.stderr)
        return 2
    paths = [EXPECTED if name == "expected" else Path(name) for name in arguments]
    reports = [json.loads(path.read_text()) for path in paths]
    through_shim = any(report.get("shim") for report in reports)
    simulated = any(report.get("driver") == "sim" for report in reports)
    found = differences(*(load(path, shim=through_shim, simulated=simulated) for path in paths))
    print(table(found) if found else "no differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
