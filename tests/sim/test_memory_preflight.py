"""Host memory that does not suffice is found before anything changes, by the command as a user calls it (FR-7)."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs.setting import ROOT
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import MIB, Pair, drop_cgroup, running

pytestmark = pytest.mark.usefixtures("own_network")
NEEDED = 64 * MIB


@pytest.fixture
def full_pair(pair: Pair) -> Pair:
    """Two ranks with more memory than the limits of these tests allow to be saved."""
    block = pair.first.alloc(NEEDED)
    pair.first.fill(block, NEEDED, 11)
    return pair


def run_through(tool: Tool, shell: str, *pids: int) -> Answer:
    """Run a suspend through a shell line that prepares what the command finds and ends in exec "$@"."""
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "gpususpend", "suspend", "--driver", "sim", "--json",
               *map(str, pids)]
    done = subprocess.run(command, cwd=ROOT, env=tool.environ(), stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=120)
    return Answer(command, done.returncode, done.stdout, done.stderr)


def refused_for_memory(answer: Answer, limit: str) -> None:
    """Check that the refusal names both amounts and the limit, and what to do."""
    answer.expect(3)
    error = answer.json["error"]
    assert answer.json["reason"] == "not-enough-memory" and answer.json["next"] in ("retry", "operator"), answer
    assert limit in error["message"] and error["facts"]["need"] >= NEEDED > error["facts"]["available"]


def test_fr7_less_memory_than_is_needed(full_pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """FR-7, pitfall 49: needed and available bytes are told; the machine's own answer is replaced by a small one."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a mount namespace")
    small = tmp_path / "meminfo"
    small.write_text(re.sub(r"(MemAvailable:\s+)\d+", rf"\g<1>{32 << 10}", Path("/proc/meminfo").read_text()))
    inside = f'mount --make-rprivate / && mount --bind {small} /proc/meminfo && exec "$@"'
    answer = run_through(tool, f"exec unshare --mount sh -c '{inside}' sh \"$@\"", *full_pair.pids)
    refused_for_memory(answer, "MemAvailable")
    running(tool)
    full_pair.check()
    tool.suspend(*full_pair.pids).expect(0)
    tool.resume(*full_pair.pids).expect(0)
    full_pair.check()


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A real memory cgroup that is too small, version 1 or 2."""
    versions = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
    for top, limit in versions.items():
        folder = Path(top) / f"gpushare-preflight-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(NEEDED))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        yield folder
        drop_cgroup(folder)
        return
    pytest.skip("no memory cgroup can be made here")


def test_fr7_cgroup_of_the_command(full_pair: Pair, tool: Tool, small_cgroup: Path) -> None:
    """FR-7: who fills the arena is charged; below its limit it would be killed, so it refuses and names the limit."""
    answer = run_through(tool, f'echo $$ > {small_cgroup}/cgroup.procs && exec "$@"', *full_pair.pids)
    refused_for_memory(answer, small_cgroup.name)
    running(tool)
    full_pair.check()
