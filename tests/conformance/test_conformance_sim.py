"""The simulated driver, bare and through the shim, answers as `expected.json` says that the real one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.case import all_cases
from tests.conformance.compare import EXPECTED, Answers, differences, load, table
from tests.conformance.runner import run_case
from tests.programs.setting import Setting

CASES = all_cases()

THROUGH_SHIM = sorted(name for name, case in CASES.items() if not case.bare)


def against_expectation(name: str, shim: Path | None) -> None:
    """Run one case and compare."""
    case = CASES[name]
    report = run_case(case, Setting("sim", shim, devices=2))
    assert report["status"] == "ok", f"{report['status']}: {report.get('detail')}\nseen: {report['seen']}"
    wanted = load(EXPECTED, shim=shim is not None, simulated=True)
    seen = Answers({name: report["seen"]}, {name: {}}, set())
    found = differences(wanted, seen)
    assert name in wanted.values, f"expected.json knows nothing of {name}"
    assert not found, "first: expected, second: seen\n" + table(found)


@pytest.mark.machine(driver="sim")
@pytest.mark.parametrize("name", sorted(CASES))
def test_bare(name: str, machine: Setting, libcuda_path: Path) -> None:
    against_expectation(name, None)


@pytest.mark.machine(driver="sim")
@pytest.mark.parametrize("name", THROUGH_SHIM)
def test_through_the_shim(name: str, machine: Setting, libcuda_path: Path, shim_path: Path) -> None:
    against_expectation(name, shim_path)
