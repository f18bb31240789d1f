"""Threads that fork or end, and a process that ends, while calls wait at the gates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, Pair, Start, more, running, standing

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

# Copies all the time in threads of its own, and ends when its input does.
ENDS = """
import sys, threading
from tests.programs import calls
from tests.programs.calls import need
need(calls.init())
context = need(calls.primary_retain(0))
need(calls.ctx_set(context))
memory = need(calls.alloc(1 << 20))
def copies():
    need(calls.ctx_set(context))
    while True:
        need(calls.memset_d8(memory, 1, 1 << 20))
for _ in range(3):
    threading.Thread(target=copies, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_threads_that_fork_while_others_wait(pair: Pair, tool: Tool, depth: str) -> None:
    """The children come and go; at depth pages they do so all the time."""
    first = pair.first
    gated = {kind: first.loop_start(kind) for kind in ("launches", "copies", "graphs")}
    forks = [first.loop_start("forks") for _ in range(2)]
    for _ in range(3):
        tool.run("suspend", "--driver", "sim", "--depth", depth, "--tree", first.pid, pair.second.pid).expect(0)
        if depth == "pages":
            before = standing(first, list(gated.values()))
            for loop in forks:
                more(first, loop)
            assert before == [first.loop_state(loop)["count"] for loop in gated.values()]
        tool.resume(*pair.pids).expect(0)
        for loop in (*gated.values(), *forks):
            more(first, loop)
    for loop in (*gated.values(), *forks):
        assert first.loop_stop(loop)["errors"] == []
    running(tool)
    pair.check()


def test_a_process_that_ends_while_its_threads_wait(
    start_worker: Start, tool: Tool, machine: Setting, tmp_path: Path
) -> None:
    """Nothing holds it up; the resume names it, and the other one runs again."""
    other = start_worker(1)
    other.fill(other.alloc(MIB), MIB, 1)
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(
        [sys.executable, "-c", ENDS], cwd=ROOT, env=machine.environ(with_shim=True), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=log,
    ) as process:  # fmt: skip
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            tool.run("suspend", "--driver", "sim", "--depth", "pages", process.pid, other.pid).expect(0)
            process.stdin.close()
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
    answer = tool.resume(other.pid).expect(5)
    assert answer.json["error"]["facts"]["lost"] == [process.pid]
    other.check()
    running(tool)
