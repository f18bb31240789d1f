"""The benchmark of suspends into a store, on the simulated driver: it runs to its end, and memory stays bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.setting import ROOT


@pytest.mark.timeout(600)
def test_suspends_into_a_store(tmp_path: Path) -> None:
    """FR-70: every limit of memory is held; rates are told and not judged; zeros, new and known bytes stand apart."""
    words = ("--gpu", "--driver", "sim", "--gpu-mib", "512", "--mib", "64", "--dir", str(tmp_path), "--json")
    command = [sys.executable, "-m", "tests.bench.store", *words]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["simulated"] is True and record["driver"]["kind"] == "sim" and record["gpus"]
    lines = {line["what"]: line for line in record["lines"]}
    judged = [line for line in lines.values() if line["within_limit"] is not None and line["limit"]]
    assert len(judged) == 6 and all(line["unit"] == "MiB" for line in judged)
    for title, word in (("first save", "new"), ("second save, compared", "known")):
        assert {part.split()[0] for part in lines[f"{title}: save, not zeros"]["note"].split(", ")} == {"zero", word}
        assert lines[f"{title}: load, zeros"]["value"] > 0
    assert not list(tmp_path.iterdir())
