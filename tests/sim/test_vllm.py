"""`tests.gpu.vllm` from end to end, with a stand-in for vLLM whose answers come out of simulated GPU memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_checkpoint_nccl import free_port
from tests.gpu.vllm.server import session
from tests.programs.setting import ROOT, Setting

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.timeout(600)]

# Every token reads all weights: no more of them than it takes for a rank's to be an allocation of its own.
CONFIG = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip

LONG = 60
PAGE_LOCKING_MS = 250  # as the real driver, the simulated one takes its time then: requests begin meanwhile


class Harness:
    """The harness on this test's machine."""

    def __init__(self, machine: Setting, folder: Path) -> None:
        self._machine, self.folder = machine, folder
        machine.inject(";".join(f"cuMemHostRegister_v2 {nth} delay {PAGE_LOCKING_MS}" for nth in range(1, 40)))
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))

    def run(self, *words: str, out: str = "run.json", code: int = 0) -> dict[str, Any]:
        """Run to the end; return the record."""
        command = [sys.executable, "-m", "tests.gpu.vllm", "--model", str(self.folder / "model"), "--port", free_port(),
                   "--site", str(ROOT / "tests" / "programs" / "standin"), "--out", str(self.folder / out),
                   "--start-timeout", "60", "--long", str(LONG), "--short", "5", "--wait", "0.2", *words]
        environ = self._machine.environ() | {
            "GPUSHARE_DRIVER": "sim", "NVSNAP_GPU_SUSPEND_STATE_DIR": str(self.folder / "state"),
            "GPUSHARE_COMMIT": "test"}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=580, check=False)
        log = "".join(path.read_text()[-3000:] for path in self.folder.glob("**/*.server.log"))
        self.said = f"{done.stdout}\n{done.stderr}\n{log}"
        assert done.returncode == code, self.said
        print(self.said)
        path = self.folder / out
        return dict(json.loads(path.read_text())) if path.is_file() else {}


@pytest.fixture
def harness(machine: Setting, tmp_path: Path) -> Harness:
    """The harness."""
    os.mkdir(tmp_path / "state", 0o700)
    return Harness(machine, tmp_path)


def test_cycles_and_negative_controls(harness: Harness) -> None:
    """Nothing differs after four cycles; a bit in a weight and one in a live block are noticed; then nothing again."""
    record = harness.run("--mode", "shim", "--in-place", "--cycles", "4", "--negative-controls")
    assert record["ok"] and record["simulated"] and record["alone"]["repeats"] and record["alone"]["long_repeats"]
    _, many, _, single = record["cycles"]
    assert many["in_flight_while_suspended"] == 16 and many["agreement"]["requests_equal"] == 16
    assert single["in_flight_while_suspended"] == 1 and single["same_long_alone"]
    assert all(one["same_alone"] and one["suspended_mib"] == [0] for one in record["cycles"])
    controls = record["negative_controls"]
    weight, block = controls["weight"], controls["kv_block"]
    assert weight["answer"]["differs"] and weight["answer"]["first_token_that_differs"] == 0
    assert weight["bytes"] == CONFIG["hidden_size"] * CONFIG["intermediate_size"]
    assert controls["weight_back"]["address"] == weight["address"]
    assert controls["weight_back"]["after"] == weight["before"] != weight["after"]
    assert block["answer"]["differs"] and block["in_flight_while_suspended"] == 1
    assert 0 < block["answer"]["first_token_that_differs"] < LONG
    # Keys and values of all tokens, in blocks of a page each.
    assert 2 <= block["changed_pages"] <= 2 * (LONG // 16 + 1)
    assert controls["afterwards"] == {"same_alone": True, "same_in_flight": True}


def test_through_a_store(harness: Harness) -> None:
    """The second save writes nothing that lies in a weight; a server started afresh finds its weights there."""
    places = ("--store", str(harness.folder / "places"), "--cache", str(harness.folder / "cache"))
    record = harness.run("--all", "--parts", "shim,fresh", "--cycles", "1", *places, out="all")
    assert record == {}
    first, second = (json.loads((harness.folder / "all" / f"vllm-{part}.json").read_text())
                     for part in ("shim", "fresh"))
    assert first["ok"] and second["ok"] and len(first["cycles"]) == 1 and not second["cycles"]
    one, again = first["stored"]
    weights = CONFIG["hidden_size"] * CONFIG["intermediate_size"] * CONFIG["num_hidden_layers"]
    assert one["bytes"]["new"] > 2 * weights and "new_chunks_in_weights" not in one
    assert again["new_chunks_in_weights"] == [] and 0 < again["bytes"]["new"] < one["bytes"]["new"]
    assert again["suspended_mib"] == [0] and again["same_alone"] and list((harness.folder / "cache").iterdir())
    [fresh] = second["stored"]
    assert fresh["shared"]["share"] == 1.0 and fresh["shared"]["in_own_allocations"] == 2 * weights
    # The stand-in has one matrix a layer and its configuration more of them.
    assert fresh["shared"]["share_of_weights"] < 0.9 and fresh["shared"]["reason"]


def test_one_rank(harness: Harness) -> None:
    """A server with one rank: cycles, negative controls and the store are the same."""
    record = harness.run("--mode", "shim", "--ranks", "1", "--cycles", "2", "--negative-controls", "--store",
                         str(harness.folder / "places"))
    assert record["ok"] and record["ranks"] == 1 and "--tensor-parallel-size 1" in " ".join(record["command"])
    assert record["cycles"][1]["in_flight_while_suspended"] == 16
    assert record["negative_controls"]["weight"]["bytes"] == 2 * CONFIG["hidden_size"] * CONFIG["intermediate_size"]
    assert record["stored"][1]["new_chunks_in_weights"] == []


def test_load_with_the_shim_and_without(harness: Harness) -> None:
    """Three servers are up at once and asked in turns; what each gave is on record."""
    record = harness.run("--mode", "load", "--rounds", "3", "--long", "10")
    assert record["schema"] == "gpushare-vllm-load/1" and "gpususpend run" in " ".join(record["command"])
    assert {name: len(rates) for name, rates in record["tokens_per_second"].items()} == {
        "first": 3, "shim": 3, "plain": 3}
    speed, order, memory = record["lines"]
    assert speed["limit"] and speed["within_limit"] is None and 0.1 < speed["ratio"] < 10
    assert not order["limit"] and memory["within_limit"] is None
    assert record["used_mib"]["shim"] >= record["used_mib"]["plain"] > 0


def test_all_within_a_budget(harness: Harness) -> None:
    """A server past its time is interrupted and its record kept; what there is no time for is said and not begun."""
    harness.run("--all", "--parts", "bare,off", "--long", "5000", "--budget", "90", out="all", code=1)
    record = json.loads((harness.folder / "all" / "vllm-bare.json").read_text())
    assert record["mode"] == "bare" and record["error"] == "interrupted" and record["alone"]["repeats"]
    assert session(record["session"]) == [], "the server is still there"
    assert "off: not begun" in harness.said


def test_without_the_shim(harness: Harness) -> None:
    """With transports off the driver alone brings the server back, otherwise it cannot: what the shim is for."""
    harness.run("--all", "--parts", "off,bare", "--cycles", "2", out="all")
    off, bare = (json.loads((harness.folder / "all" / f"vllm-{part}.json").read_text()) for part in ("off", "bare"))
    assert off["ok"] and [one["same_alone"] for one in off["cycles"]] == [True, True]
    assert off["cycles"][1]["in_flight_while_suspended"] == 16
    assert "NCCL_P2P_DISABLE=1" in off["differences"] and "--disable-custom-all-reduce" in off["differences"]
    assert not bare.get("ok") and "restore" in bare["error"]
    assert "weights are dummies" in bare["differences"][-1] and bare["environment"]["GPUSHARE_COMMIT"] == "test"
