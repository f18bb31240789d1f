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
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=100)
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
    assert "driver" not in page.partition("## disk")[2]
    gpus = {"driver": {"kind": "real", "version": "580.1"}, "simulated": False, "gpus": [{"name": "GPU X"}]}
    write(generate, "disk", bench | gpus)
    assert "- driver 580.1, 1 x GPU X" in generate.page().partition("## disk")[2]


def test_what_was_found_out_later_stands_beside_its_record(generate: ModuleType) -> None:
    for name in generate.REMARKS:
        assert (ROOT / "docs" / "results" / "raw" / f"{name}.json").is_file()
    name = "h200-bench-1bbb973"
    write(generate, name, gpu_bench())
    assert f"- **remark**: {generate.REMARKS[name]}" in generate.page().partition(f"## {name}")[2]


def gpu_bench(**changes: Any) -> dict[str, Any]:
    """Return a record of the benchmark on GPUs."""
    line = {
        "what": "stop", "value": 1.5, "unit": "s", "baseline": "bare driver", "baseline_value": 15.0, "ratio": 0.1,
        "limit": "<= 1.6 s", "within_limit": True, "note": "huge pages",
    }  # fmt: skip
    case = {"name": "large", "status": "run", "reason": "", "seconds": 9.0, "facts": {}, "lines": [line]}
    missing = {"name": "nccl", "status": "not run", "reason": "no PyTorch", "seconds": 0.0, "facts": {}, "lines": []}
    missed = {**case, "lines": [{**line, "what": "load", "within_limit": False, "note": ""}]}
    base = {
        "schema": "gpushare-gpu-bench/1", "commit": "aaaabbbbcccc", "date": "2026-01-01", "load": 0.5,
        "host": {"cpus": 16, "machine": "x86_64", "kernel": "6.1", "python": "3.12"}, "simulated": False,
        "driver": {"kind": "real", "version": "580.1"}, "gpus": [{"name": "GPU X"}] * 2,
        "command": ["python", "-m", "tests.bench.gpu"], "cases": [case, missed, missing],
    }  # fmt: skip
    return base | changes


def test_page_shows_the_benchmark_on_gpus(generate: ModuleType) -> None:
    """With what was missed, and what was not run and why."""
    write(generate, "speed", gpu_bench())
    page = generate.page()
    for part in ("## speed", "`aaaabbbbcccc`", "2 x GPU X", "`python -m tests.bench.gpu`"):
        assert part in page
    assert "| stop | 1.50 s | bare driver | 15.00 | 0.10 | <= 1.6 s | held, huge pages |" in page
    assert "| load | 1.50 s | bare driver | 15.00 | 0.10 | <= 1.6 s | **missed** |" in page
    assert "| nccl: not run |  |  |  |  |  | no PyTorch |" in page
    write(generate, "speed", gpu_bench(simulated=True))
    assert "1.50 s" not in generate.page() and "nccl: not run" in generate.page()


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
                 "same_alone": True, "agreement": counted, "in_flight_while_suspended": 2}  # fmt: skip
    bare = {"suspend": {"seconds": 25.0, "report": {"lock": {"codes": [0], "seconds": 1.0},
                                                    "checkpoint": {"codes": [0], "seconds": 20.0}}}}
    write(generate, "a", {**common, "mode": "shim", "cycles": [with_shim]})
    write(generate, "b", {**common, "mode": "bare", "cycles": [bare], "error": "restore answered 1"})
    write(generate, "c", {**common, "mode": "off", "wrong": ["too late"], "cut": "9 s left",
                          "differences": ["NCCL_P2P_DISABLE=1", "more"],
                          "cycles": [{**with_shim, "in_flight_while_suspended": 0}]})
    write(generate, "d", {**common, "mode": "shim", "cycles": [], "simulated": True})
    page = generate.page()
    assert "| a | shim | 11 | 7 | 1 | 4.00 | 13.50 | 1.50 | 1 of 1 | 90 of 100 | 90 of 100 |  |" in page
    assert "| b | bare | 11 | 7 | 0 |  |  |  | 0 of 0 |  | 90 of 100 | restore answered 1 |" in page
    assert "| suspend | checkpoint | 20.000 |" in page
    # Requests that had ended before the suspend show nothing.
    assert "| c | off | 11 | 7 | 1 | 4.00 | 13.50 | 1.50 | 1 of 1 | whether any was is not recorded |" in page
    assert "| 90 of 100 | too late; 9 s left |" in page
    assert "- differs from a stock start: NCCL_P2P_DISABLE=1; more" in page and "### d" not in page


def test_page_shows_flipped_bits_and_stores(generate: ModuleType) -> None:
    flipped = {"address": "0x7f00", "before": "a4b2", "after": "a432"}
    command = {"seconds": 2.0, "report": report({"name": "release", "bytes": 1, "seconds": 1.0})}
    record = {
        "schema": "gpushare-vllm/1", "commit": "abcdef012345", "date": "2026-01-01", "driver": "580.1", "mode": "shim",
        "argv": ["python"], "command": ["vllm"], "environment": {}, "cycles": [],
        "negative_controls": {
            "weight": {**flipped, "answer": {"differs": True, "first_token_that_differs": 0}},
            "weight_back": flipped,
            "kv_block": {**flipped, "answer": {"differs": False, "first_token_that_differs": None}},
        },
        "stored": [
            {"suspend": command, "resume": command, "bytes": {"new": 3 * 10**9, "zeros": 10**9},
             "shared": {"share_of_weights": 0.5, "reason": {"bytes_without_an_allocation_of_their_own": 7}}},
            {"suspend": command, "resume": command, "bytes": {"known": 10**9}, "new_chunks_in_weights": []},
        ],
    }  # fmt: skip
    write(generate, "one", record)
    page = generate.page()
    assert "one bit of a weight flipped (`a4b2` to `a432` at `0x7f00`), another answer: from token 0 on" in page
    assert "one bit of a live KV block flipped" in page and "**not noticed**" in page
    assert "save 1: 3.00 GB new, 1.00 GB zeros; suspend 2.00 s, resume 2.00 s; shared with" in page
    assert '0.500 of the weights ({"bytes_without_an_allocation_of_their_own": 7})' in page
    assert "save 2: 1.00 GB known; suspend 2.00 s, resume 2.00 s; new chunks inside weights: 0" in page


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


def test_servers_at_work_stand_with_every_rate(generate: ModuleType) -> None:
    line = {"what": "vLLM", "value": 99.5, "unit": "tokens/s", "baseline": "without the shim", "baseline_value": 100.0,
            "limit": "ratio >= 0.99", "within_limit": True, "note": "", "ratio": 0.995}  # fmt: skip
    told = {
        "schema": "gpushare-vllm-load/1", "mode": "load", "date": "2026-01-01T00:00:00+00:00", "commit": "0123456789ab",
        "driver": "driver 580.1", "argv": ["python", "-m", "tests.gpu.vllm"], "command": ["serve"], "simulated": False,
        "tokens_per_second": {"shim": [99.0, 99.5], "plain": [100.0, 101.0]}, "lines": [line],
    }  # fmt: skip
    write(generate, "at-work", told)
    page = generate.page()
    for part in ("### at-work", "`0123456789ab`", "driver 580.1", "shim, tokens/s: 99, 100", "| held |"):
        assert part in page
    write(generate, "at-work", told | {"simulated": True})
    assert "at-work" not in generate.page()
