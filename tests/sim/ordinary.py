"""Running the tool as an ordinary user, from tests that run as root."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests.programs.setting import ROOT
from tests.programs.tool import Answer, Tool

UID = 54321
PACKAGES = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])


def command_of(*words: str) -> list[str]:
    """Return the words that run a command as an ordinary user."""
    return ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *words]


@functools.cache
def interpreter() -> str | None:
    """Return a Python that an ordinary user can run with our packages, None if there is none.

    The first of a line of processes still has root's way into a folder; so the interpreter starts itself again.
    """
    code = "import gpususpend.cli, click, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    for candidate in (sys.executable, "/usr/bin/python3"):
        try:
            environment = {"PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES}
            subprocess.run(command_of(candidate, "-c", code), env=environment, check=True,
                           capture_output=True, cwd="/")
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    return None


def python() -> str:
    """Return that interpreter; skips the test where there is none, or where this user is no root."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    found = interpreter()
    if found is None:
        pytest.skip("no interpreter with our packages that an ordinary user can run")
    return found


def run(tool: Tool, *words: str | int, env: dict[str, str] | None = None) -> Answer:
    """Run the tool with --json as an ordinary user, on its own default state directory unless `env` names another."""
    command = command_of(python(), "-m", "gpususpend", *map(str, words), "--json")
    environment = tool.environ() | {"PYTHONPATH": PACKAGES} | (env or {})
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)
    return Answer(command, done.returncode, done.stdout, done.stderr)
