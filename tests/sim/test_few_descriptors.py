"""A command that may open few descriptors: it works, or says so in one line before it has changed anything."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.programs.setting import ROOT
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import MIB, Pair, Start, records, running
from tests.sim.places import Places

pytestmark = pytest.mark.usefixtures("own_network")
LIMITS = (8, 12, 16, 20, 24, 32, 48, 64, 80)


def run_with(tool: Tool, limit: str, words: Sequence[str | int]) -> Answer:
    """Run a command under a limit of descriptors, as `ulimit -n` sets it."""
    command = ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", sys.executable, "-m", "gpususpend", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=tool.environ(), capture_output=True, text=True, timeout=90)
    return Answer(command, done.returncode, done.stdout, done.stderr)


def refused(answer: Answer, limit: int) -> bool:
    """Tell whether a command was refused for its limit, and check that it said so in one line."""
    assert "Traceback" not in answer.stderr, answer
    lines = [line for line in answer.stderr.splitlines() if line.startswith("nvsnap-gpu-suspend: ")]
    if answer.exit_code == 0:
        return False
    assert answer.exit_code == 3 and len(lines) == 1, answer
    assert f"may open {limit} descriptors" in lines[0] and advised(answer) > limit, answer
    return True


def advised(answer: Answer) -> int:
    """Return the limit that a refusal advises."""
    found = re.search(r"\(ulimit -n (\d+), ", answer.stderr)
    assert found, answer
    return int(found[1])


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("depth", ["process", "pages"])
def test_suspend_and_resume(pair: Pair, tool: Tool, limit: int, depth: str) -> None:
    """Each either way; a resume that is refused leaves the group suspended."""
    words = ["suspend", *pair.pids, "--driver", "sim", "--depth", depth]
    if refused(run_with(tool, f"-n {limit}", words), limit):
        running(tool)
        tool.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    for command in ("status", "recover", "resume"):
        rejected = refused(run_with(tool, f"-n {limit}", [command, *pair.pids, "--driver", "sim"]), limit)
        assert not rejected or [record["stage"] for record in records(tool)] == ["suspended"]
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("limit", [24, 64, 72])
@pytest.mark.parametrize("stored", [False, True])
def test_the_first_advice_is_enough(pair: Pair, places: Places, tool: Tool, limit: int, stored: bool) -> None:
    """Whatever of a command's needs was known when it was refused."""
    options = places.words() if stored else ()
    for words in (["suspend", *options], ["resume"]):
        words += ["--driver", "sim", *map(str, pair.pids)]
        answer = run_with(tool, f"-n {limit}", words)
        assert refused(answer, limit), answer
        run_with(tool, f"-n {advised(answer)}", words).expect(0)
    pair.check()


def test_processes_that_have_nothing_to_do_with_it(pair: Pair, start_worker: Start, tool: Tool) -> None:
    """Each is asked whether it shares, which no limit is too low for."""
    for _ in range(3):
        start_worker(0).alloc(MIB)
    for command in ("suspend", "resume"):
        run_with(tool, "-n 80", [command, *pair.pids, "--driver", "sim"]).expect(0)
    pair.check()


def test_only_the_soft_limit_is_low(pair: Pair, tool: Tool) -> None:
    """The command raises it for itself, as far as it may."""
    for command in ("suspend", "resume"):
        run_with(tool, "-S -n 16", [command, *pair.pids, "--driver", "sim"]).expect(0)
    pair.check()


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("words", [["gpus", "--driver", "sim"], ["store", "ls", "."], ["cache-gc", ".", "1"]], ids=str)
def test_other_commands(tool: Tool, limit: int, words: list[str]) -> None:
    """Refused for the limit, or for what they look at."""
    answer = run_with(tool, f"-n {limit}", words)
    if "descriptors" in answer.stderr or words[0] == "gpus":
        refused(answer, limit)
    else:
        assert answer.exit_code == 3 and answer.stderr.count("\n") == 1, answer
