"""The example of docs/reference/gpu-map.md, as it stands there (B07)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpususpend import gpus
from tests.programs.client import Worker
from tests.programs.setting import ROOT
from tests.programs.tool import Tool

pytestmark = pytest.mark.machine(driver="sim")
MIB = 1 << 20
PAGE = (ROOT / "docs" / "reference" / "gpu-map.md").read_text()
FORM, EXAMPLE = re.findall(r"```\n(.*?)```", PAGE, re.S)


def run(text: str, folder: Path, tool: Tool, pids: list[int]) -> None:
    """Run lines of shell as a user would, the command being on the path."""
    command = folder / "nvsnap-gpu-suspend"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gpususpend "$@"\n')
    command.chmod(0o755)
    env = tool.environ() | {"NVSNAP_GPU_SUSPEND_DRIVER": "sim", "PIDS": " ".join(map(str, pids))}
    env["PATH"] = f"{folder}:{env['PATH']}"
    done = subprocess.run(["bash", "-ec", text], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("elsewhere", [False, True])
def test_b07_example_of_the_gpu_map(
    start_worker: Callable[..., Worker], tool: Tool, tmp_path: Path, elsewhere: bool
) -> None:
    """B07: first as it stands, then with the second column changed, as the page says, before the resume."""
    ranks = [start_worker(device) for device in (0, 1)]
    for seed, rank in enumerate(ranks):
        rank.fill(rank.alloc(MIB), MIB, seed)
    before = [rank.device_uuid(0) for rank in ranks]
    *lines, resume = EXAMPLE.splitlines()
    assert "gpus map" in lines[0] and "--gpu-map map" in resume
    run("\n".join(lines), tmp_path, tool, [rank.pid for rank in ranks])
    pairs = gpus.read_map(tmp_path / "map")
    assert all(old == new for old, new in pairs) and len(pairs) == 2
    if elsewhere:
        (one, _), (other, _) = pairs
        (tmp_path / "map").write_text(f"{FORM.splitlines()[0]}\n{one} {other}\n{other} {one}\n")
    run(resume, tmp_path, tool, [rank.pid for rank in ranks])
    for rank in ranks:
        rank.check()
    assert ([rank.device_uuid(0) for rank in ranks] == before) is not elsewhere


def test_b07_the_form_on_the_page_is_one(tmp_path: Path) -> None:
    (tmp_path / "map").write_text(FORM)
    assert len(gpus.read_map(tmp_path / "map")) == 2
