"""A signal in the first moments of the command, while it is still being loaded."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.programs.setting import ROOT
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import Pair, records

# The command, sent a signal (and a second one at once) when it first looks for a module.
PROGRAM = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module!r} and signal.getsignal({number}) not in (signal.SIG_DFL, signal.default_int_handler):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
from gpususpend.start import main
main({words!r})
"""


def run(tool: Tool, module: str, number: int, *words: str) -> Answer:
    """Run a command that is sent a signal at a module's first look-up."""
    command = [sys.executable, "-c", PROGRAM.format(module=module, number=int(number), words=list(words))]
    done = subprocess.run(command, cwd=ROOT, env=tool.environ(), capture_output=True, text=True, timeout=60)
    return Answer(command, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("module", ["click", "click.core", "gpususpend.cli.suspend", "gpususpend.statedir"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_line_and_130(tool: Tool, module: str, number: signal.Signals) -> None:
    """Wherever the command is; with --json one document."""
    answer = run(tool, module, number, "suspend", "--driver", "sim", "1").expect(130)
    line = f"nvsnap-gpu-suspend: ended by {number.name} before it had begun; nothing was changed\n"
    assert (answer.stderr, answer.stdout) == (line, "")
    data = run(tool, module, number, "suspend", "--json", "1").expect(130).json
    assert (data["command"], data["reason"], data["exit_code"], data["next"]) == ("suspend", "not-begun", 130, "retry")


def test_while_it_looks(pair: Pair, tool: Tool) -> None:
    """The command takes note of it, and ends before it begins; the group runs, and there is no record."""
    words = ("suspend", "--driver", "sim", "--json", *map(str, pair.pids))
    answer = run(tool, "gpususpend.gpus", signal.SIGTERM, *words).expect(130)
    assert answer.json["reason"] == "not-begun" and answer.stderr.count("\n") == 1, answer
    assert records(tool) == []
    pair.check()


def test_ignored_signals_stay_ignored(tool: Tool) -> None:
    """As under nohup."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    command = [sys.executable, "-c", code + PROGRAM.format(module="click", number=1, words=["status"])]
    done = subprocess.run(command, cwd=ROOT, env=tool.environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
