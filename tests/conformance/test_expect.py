"""What a report changes in the expectations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import __main__ as suite
from tests.conformance import expect
from tests.programs.setting import Setting

FIRST = {"value": 0, "basis": "measured", "by": "580, 2 GPU, suite a"}


def report(seen: dict[str, Any], status: str = "ok", driver: str = "real", shim: bool = False) -> dict[str, Any]:
    """Return a report of one case."""
    cases = {"case.one": {"status": status, "seen": seen}}
    return {"driver": driver, "driver_version": "590", "gpu": "1 GPU", "suite": "b", "shim": shim, "cases": cases}


def merged(entry: dict[str, Any], one: dict[str, Any], basis: str = "measured") -> dict[str, Any]:
    """Return what becomes of an entry."""
    expected = {"case.one": {"answer": entry}}
    expect.merge(expected, one, basis)
    return expected["case.one"]["answer"]


def test_what_was_measured_before_keeps_its_run_unless_it_changes() -> None:
    assert merged(FIRST, report({"answer": 0})) == FIRST
    assert merged(FIRST, report({"answer": 1})) == {"value": 1, "basis": "measured", "by": "590, 1 GPU, suite b"}
    assert merged(FIRST, report({"answer": 1}, driver="sim"), "assumed") == FIRST
    assert merged(FIRST | {"basis": "assumed"}, report({"answer": 0})) == FIRST | {"by": "590, 1 GPU, suite b"}


@pytest.mark.parametrize("status", ["skipped", "failed", "timeout", "died"])
def test_a_case_that_was_not_run_to_its_end_changes_nothing(status: str) -> None:
    """Such as one that needs more GPUs than there are."""
    assert merged(FIRST, report({"answer": 1}, status)) == FIRST
    assert merged(FIRST, report({}, status)) == FIRST


def test_the_shims_answer_stands_beside_the_drivers() -> None:
    assert merged(FIRST, report({"answer": 0}, shim=True)) == FIRST
    assert merged(FIRST, report({"answer": 1}, shim=True)) == FIRST | {"shim": 1}


def test_a_report_says_who_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the form that measured/ keeps, which can be taken over as it is."""
    monkeypatch.setattr(suite, "gpu_text", lambda: "1 GPU")
    monkeypatch.setattr(suite, "kernel_driver_version", lambda: "590")
    monkeypatch.setenv("GPUSHARE_COMMIT", "b")
    out = tmp_path / "report.json"
    suite.write(out, suite.head(Setting("real", None, devices=1)), report({"answer": 0})["cases"])
    said = json.loads(out.read_text())
    assert expect.source(said) == "590, 1 GPU, suite b" and "devices" in said and not said["shim"]
    assert expect.merge({}, said, "measured") == 1
