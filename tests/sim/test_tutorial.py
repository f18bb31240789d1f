"""The tutorial's commands, run as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.setting import ROOT, SCRUBBED, drop_state, fresh_state

PAGE = ROOT / "docs" / "tutorial" / "first-cycle.md"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the tutorial's files, and the installed commands that its reader would have."""
    shutil.copytree(PAGE.parent, tmp_path / "docs" / "tutorial")
    commands = tmp_path / "bin"
    commands.mkdir()
    python = f"'{sys.executable}'"
    for name, words in {"python": python, "nvsnap-gpu-suspend": f"{python} -m gpususpend"}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (commands / name).chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(270)
def test_first_cycle_as_it_stands(place: Path, tmp_path: Path) -> None:
    script = "set -eux\n" + "".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    state = fresh_state()
    environment = {name: value for name, value in os.environ.items() if name not in SCRUBBED} | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SIMCUDA_STATE": str(state),
        "NVSNAP_GPU_SUSPEND_STATE_DIR": str(tmp_path / "state"),
    }
    (tmp_path / "state").mkdir(mode=0o700)
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=240)
        assert shell.returncode == 0, output
        left = {path.name for path in (place / "docs" / "tutorial").iterdir()} - {"__pycache__"}
        assert left == {path.name for path in PAGE.parent.iterdir()} - {"__pycache__"}, "it leaves nothing behind"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # the pair, should the script have ended before its `kill`
        drop_state(state)
