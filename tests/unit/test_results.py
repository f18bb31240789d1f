"""The results page is what its script makes of the recorded runs, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.programs.setting import ROOT

SCRIPT = ROOT / "docs" / "results" / "generate.py"


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, on an empty folder."""
    spec = importlib.util.spec_from_file_location("generate_results", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "raw").mkdir()
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "README.md")
    return module


def report(phase: dict[str, Any]) -> dict[str, Any]:
    """Return a command's report with one phase."""
    return {"groups": [{"phases": [phase]}]}


def record(**changes: Any) -> dict[str, Any]:
    """Return a recorded run of two cycles on one GPU."""
    release = {"name": "release", "bytes": 8 * 10**9}
    cycles = [
        {
            "cycle": number,
            "suspend": {"seconds": 1.0, "report": report({**release, "seconds": seconds})},
            "resume": {"seconds": 2.0, "report": report({"name": "unlock", "bytes": 0, "seconds": 0.002})},
            "suspended": {"unreturned_bytes": number << 20},
            "checked_bytes": 10**9,
            "steps": 5,
        }
        for number, seconds in ((1, 0.2), (2, 0.3), (3, 0.1))
    ]
    base = {
        "schema": "gpushare-demo/1", "version": "1", "commit": "0123456789ab", "date": "2026-01-01T00:00:00+00:00",
        "command": ["python", "-m", "gpususpend.demo"], "driver": {"kind": "real", "version": "580.1"},
        "simulated": False, "gpus": [{"name": "GPU X"}], "ranks": [{"rank": 0, "device": 0}, {"rank": 1, "device": 0}],
        "rank_bytes": 4 * 10**9, "cycles": cycles,
    }  # fmt: skip
    return base | changes


def write(generate: ModuleType, name: str, content: dict[str, Any]) -> None:
    """Put a recorded run where the script looks."""
    (generate.FOLDER / "raw" / f"{name}.json").write_text(json.dumps(content))


def test_committed_page_is_what_the_script_makes() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_page_shows_commit_driver_command_median_and_every_sample(generate: ModuleType) -> None:
    """Pitfall 54: no number without what it was measured with."""
    write(generate, "one", record())
    page = generate.page()
    for part in ("## one", "`0123456789ab`", "driver 580.1", "`python -m gpususpend.demo`", "GPU X", "at most 3 MiB"):
        assert part in page
    assert "| suspend | release | 0.200 | 8.00 | 40.0 | 0.200, 0.300, 0.100 |" in page
    assert "| resume | whole command | 2.000 |  |  | 2.000, 2.000, 2.000 |" in page


def test_page_shows_a_measurement_of_the_store(generate: ModuleType) -> None:
    line = {
        "what": "save", "value": 1.8, "unit": "GB/s", "baseline": "bare writes", "baseline_value": 2.0, "ratio": 0.9,
        "limit": "ratio >= 0.95", "within_limit": False, "note": "",
    }  # fmt: skip
    bench = {
        "schema": "gpushare-store-bench/1", "commit": "fedcba987654", "date": "2026-01-01", "filesystem": "ext4",
        "host": {"cpus": 2, "machine": "x86_64", "kernel": "6.1", "python": "3.11"}, "load": 0.5, "nice": 0,
        "command": ["python", "-m", "tests.bench.store"], "lines": [line],
    }  # fmt: skip
    write(generate, "disk", bench)
    page = generate.page()
    assert "No run on a GPU is recorded" in page and "None is recorded" not in page
    for part in ("## disk", "`fedcba987654`", "ext4", "`python -m tests.bench.store`"):
        assert part in page
    assert "| save | 1.80 GB/s | bare writes | 2.00 | 0.90 | ratio >= 0.95 | **missed** |" in page


def test_page_puts_servers_side_by_side(generate: ModuleType) -> None:
    """With the shim and with the driver alone, whose steps are no phases; what ended a run stands beside it."""
    counted = {"requests": 2, "requests_equal": 1, "tokens": 100, "tokens_equal_before_first_difference": 90}
    common = {
        "schema": "gpushare-vllm/1", "commit": "abcdef012345", "date": "2026-01-01", "driver": "580.1",
        "argv": ["python", "-m", "tests.gpu.vllm"], "command": ["vllm"], "environment": {"NCCL_X": "1"},
        "used_mib": [10, 11], "tokens_per_second_16": [5, 7, 6, 9], "without_suspend": counted,
    }  # fmt: skip
    down = {"groups": [{"phases": [
        {"name": "prepare", "seconds": 9.0, "bytes": 1}, {"name": "quiesce", "seconds": 0.5},
        {"name": "prepare", "seconds": 3.0, "bytes": 1}, {"name": "freeze", "seconds": 0.5},
    ]}]}  # fmt: skip
    up = {"groups": [{"phases": [{"name": "load", "seconds": 1.0, "bytes": 10**9}]}]}
    with_shim = {"suspend": {"seconds": 13.5, "report": down}, "resume": {"seconds": 1.5, "report": up},
                 "same_alone": True, "agreement": counted}  # fmt: skip
    bare = {"suspend": {"seconds": 25.0, "report": {"lock": {"codes": [0], "seconds": 1.0},
                                                    "checkpoint": {"codes": [0], "seconds": 20.0}}}}
    write(generate, "a", {**common, "mode": "shim", "cycles": [with_shim]})
    write(generate, "b", {**common, "mode": "bare", "cycles": [bare], "error": "restore answered 1"})
    page = generate.page()
    assert "| a | shim | 11 | 7 | 1 | 4.00 | 13.50 | 1.50 | 1 of 1 | 90 of 100 | 90 of 100 |  |" in page
    assert "| b | bare | 11 | 7 | 0 |  |  |  | 0 of 0 |  | 90 of 100 | restore answered 1 |" in page
    assert "| suspend | checkpoint | 20.000 |" in page


def test_simulated_run_shows_no_times(generate: ModuleType) -> None:
    write(generate, "sim", record(simulated=True))
    assert "simulated" in generate.page()
    assert "0.200" not in generate.page()


@pytest.mark.parametrize("change", [{"schema": "other/1"}, {"commit": None}])
def test_record_without_schema_or_commit_is_refused(generate: ModuleType, change: dict[str, Any]) -> None:
    """Pitfall 54."""
    write(generate, "bad", record(**change))
    with pytest.raises(generate.BadRecord, match=r"bad\.json"):
        generate.page()


def test_check_notices_a_page_edited_by_hand(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main() == 0
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 0
    generate.PAGE.write_text(generate.PAGE.read_text() + "9,999 GB/s\n")
    assert generate.main() == 1
