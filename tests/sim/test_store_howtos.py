"""The commands of the how-to pages on stores, one after the other as they stand there, with other paths and pids."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import ROOT
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, running
from tests.sim.places import Places

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

TOOL = "nvsnap-gpu-suspend "


def commands(page: str) -> list[str]:
    """Return the commands of a page that need no network."""
    lines = (ROOT / "docs" / "how-to" / page).read_text().splitlines()
    found = [line.strip().removeprefix(TOOL) for line in lines if line.startswith(f"    {TOOL}")]
    return [line for line in found if "://" not in line]


def follow(tool: Tool, page: str, root: Path, pid: int) -> int:
    """Run the commands of a page; return how many there were."""
    for line in commands(page):
        words = re.sub(r"(?<= )/(mnt|nvme|backup)", rf"{root}/\1", line).replace("4700", str(pid)).split()
        tool.run(*words, env={"NVSNAP_GPU_SUSPEND_DRIVER": "sim"}).expect(0)
    return len(commands(page))


def test_what_the_pages_say(start_worker: Callable[..., Worker], places: Places, tool: Tool) -> None:
    """First to suspend into a store that is made, then to look after one with two checkpoints."""
    worker = start_worker(0)
    worker.fill(worker.alloc(3 * MIB), 3 * MIB, 1)
    for name in ("mnt/ckpt", "nvme", "backup/ckpt"):
        (places.root / name).mkdir(parents=True)
    assert follow(tool, "suspend-into-a-store.md", places.root, worker.pid) == 8
    running(tool)
    worker.check()
    for name in ("llama", "old"):
        words = ("--store", str(places.root / "mnt/store"), "--ckpt-dir", str(places.root / "mnt/ckpt" / name))
        tool.suspend(worker.pid, options=("--depth", "pages", *words)).expect(0)
        tool.resume(worker.pid).expect(0)
    assert follow(tool, "look-after-a-store.md", places.root, worker.pid) >= 10
    assert not (places.root / "mnt/ckpt/old").exists()
    worker.check()
