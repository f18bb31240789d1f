"""The benchmark for GPUs, on the simulated driver: that it runs, and the form of its record; no number is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpususpend.arena import Kind
from tests.bench.gpu import __main__ as bench
from tests.bench.gpu import steady
from tests.bench.gpu.case import Bench
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.timeout(290)]


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run the benchmark; return its exit status, its record and what it printed."""
    out = folder / "record.json"
    command = [sys.executable, "-m", "tests.bench.gpu", "--driver", "sim", "--mib", "4,4", "--out", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_every_case_is_run_or_said_not_to_be(tmp_path: Path) -> None:
    """And nothing of a simulated run passes for a limit that was held."""
    code, record, printed = run(tmp_path, "--only", "calls|large|bare|torch|nccl|memory", "--budget", "270")
    assert code == 0, record
    assert record["schema"] == bench.SCHEMA and record["simulated"] is True and record["mib"] == [4, 4]
    cases = {case["name"]: case for case in record["cases"]}
    assert {name for name, case in cases.items() if case["status"] == "not run"} == {"torch", "nccl"}
    for name, case in cases.items():
        if case["status"] == "not run":
            assert "simulated" in case["reason"] and not case["lines"] and name in printed
            continue
        assert case["status"] == "run" and case["lines"], case
        for line in case["lines"]:
            assert set(line) == {"what", "value", "unit", "baseline", "baseline_value", "limit", "within_limit",
                                 "note", "ratio"}  # fmt: skip
            assert line["value"] > 0 and line["unit"] and line["within_limit"] is None
    said = {line["what"] for line in cases["large"]["lines"] if line["limit"]}
    locking = {line["what"] for line in cases["large"]["lines"] if "locking" in line["note"]}
    assert len(locking) == 4 and all(what.startswith("load") for what in locking) and not locking & said
    assert len(said) == 14 and any("both GPUs" in what for what in said) and any("stop" in what for what in said)
    assert {line["limit"] for line in cases["calls"]["lines"]} == {"<= 20 ns added"}
    arenas = next(value for name, value in cases["large"]["facts"].items() if name.startswith("arenas"))
    assert all(arena["resident_kib"] >= 4096 for arena in arenas.values())


def test_the_machines_own_rates(tmp_path: Path) -> None:
    """Of every kind of memory; what the machine does not give is said."""
    code, record, _ = run(tmp_path, "--only", "own-rates", "--budget", "270")
    (case,) = record["cases"]
    assert code == 0 and case["status"] == "run", case
    said = " ".join(line["what"] for line in case["lines"])
    assert all(word in said for word in ("cuMemHostAlloc", "plain pages, not locked", "scattered", "NUMA", "2 GPUs"))
    kinds = [f"arena of {kind.value}" for kind in Kind]
    assert all(kind in said or any(kind in name for name in case["facts"]) for kind in kinds)


PROGRAM = """\
import fcntl, json, os, sys
folder, shim = sys.argv[1], "gpushare" in os.environ.get("LD_PRELOAD", "")
lock = open(f"{folder}/lock-{os.environ['RANK']}", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
with open(f"{folder}/starts-{os.environ['RANK']}", "a") as starts:
    starts.write(f"{int(shim)}")
for _ in sys.stdin:
    print(json.dumps({"shim": shim, "pid": os.getpid(), "port": os.environ["MASTER_PORT"]}), flush=True)
"""


def test_with_and_without_the_shim_are_never_up_together(tmp_path: Path, machine: Setting) -> None:
    """Started afresh in turns, in swapped order each second time; the programs of one side are up together."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with Tool(machine) as tool:
        given = Bench(machine, tool, tmp_path, (4, 4), rounds=1)
        answers = steady.in_turns(given, words, [{"RANK": "0"}, {"RANK": "1"}], 3)
    for rank in "01":
        assert (tmp_path / f"starts-{rank}").read_text() == "100110"
    for shim, turns in answers.items():
        assert len(turns) == 3 * steady.ASKED and all(len(turn) == 2 for turn in turns)
        assert all(one["shim"] is shim for turn in turns for one in turn)
        assert all(first["port"] == second["port"] for first, second in turns)
        assert len({one["pid"] for turn in turns for one in turn}) == 6


def test_a_case_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has said until then counts, and it is not called run."""
    found = bench.measured("own-rates", ["--driver", "sim", "--mib", "4,4"], 0.2)
    assert found["status"] == "timeout" and "0 s" in found["reason"]
    assert not bench.succeeded({"simulated": True, "cases": [found]})


def test_what_fails_or_misses_is_no_success() -> None:
    line = {"within_limit": True}

    def result(status: str, simulated: bool = False, **more: Any) -> bool:
        case = {"status": status, "lines": [line | more]}
        return bench.succeeded({"simulated": simulated, "cases": [case]})

    assert result("run") and not result("run", within_limit=False) and not result("failed") and not result("timeout")
    assert not result("not run") and result("not run", simulated=True) and not result("failed", simulated=True)


def test_no_time_left_is_said(tmp_path: Path) -> None:
    code, record, _ = run(tmp_path, "--only", "calls", "--budget", "1")
    assert [case["status"] for case in record["cases"]] == ["not run"] and code == 0
    assert record["cases"][0]["reason"] == "no time left"
