"""The command line tool as a user calls it: a process of its own, `--json`, a deadline on every command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gpususpend import processes
from tests.programs.setting import ROOT, Setting

OTHERS_S = 60.0
"""How long another test's stopped processes are waited for."""


@dataclass(frozen=True)
class Answer:
    """What one command returned."""

    command: list[str]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """Return the JSON that the command printed."""
        try:
            found = json.loads(self.stdout)
        except ValueError:
            raise AssertionError(f"no JSON on stdout: {self}") from None
        assert isinstance(found, dict), f"not a JSON object: {self}"
        return found

    def expect(self, *exit_codes: int) -> Answer:
        """Fail unless the command ended with one of these exit codes."""
        wanted = exit_codes or (0,)
        assert self.exit_code in wanted, f"exit code {self.exit_code}, wanted {wanted}: {self}"
        return self

    def __str__(self) -> str:
        return f"{' '.join(self.command)}\nexit {self.exit_code}\nstdout: {self.stdout}\nstderr: {self.stderr[-6000:]}"


def _of_others(answer: Answer) -> bool:
    """Tell whether a suspend was refused for the sake of processes that are not of this test."""
    if answer.exit_code != 3 or answer.json["reason"] != "may-share":
        return False
    own = {process.pid for process in processes.descendants([os.getpid()], processes.all_processes())}
    return not own.issuperset(answer.json["error"]["facts"]["others"])


class Tool:
    """Runs `nvsnap-gpu-suspend`. Its state directory is a folder of the test's own where the tool allows that."""

    def __init__(self, setting: Setting, deadline_s: float = 120) -> None:
        self.setting = setting
        self.deadline_s = deadline_s
        # A short path in a folder of our own: as root the tool wants a directory that nobody else can change.
        self.state_dir = tempfile.mkdtemp(prefix="gpushare-tool-", dir="/tmp")

    def environ(self) -> dict[str, str]:
        """Return the tool's environment: the machine's, without the shim."""
        return self.setting.environ() | {"NVSNAP_GPU_SUSPEND_STATE_DIR": self.state_dir}

    def run(self, *arguments: str | int, **how: Any) -> Answer:
        """Run one command, as `_run_once` does.

        With --allow-unshimmed a stopped CUDA process of anybody is in the way: another test's is waited for.
        """
        until = time.monotonic() + OTHERS_S
        while True:
            answer = self._run_once(*arguments, **how)
            if "--allow-unshimmed" not in arguments or time.monotonic() > until or not _of_others(answer):
                return answer
            time.sleep(0.5)

    def _run_once(self, *arguments: str | int, json_out: bool = True, deadline_s: float | None = None,
                  env: dict[str, str] | None = None, prefix: tuple[str, ...] = (), without: str = "") -> Answer:
        """Run one command and wait for it; past the deadline it is interrupted, then killed, and the test fails.

        `prefix` is what runs it: a program of the system with its options; `without` is a system call that is denied.
        """
        module = ["tests.programs.denied", without] if without else ["gpususpend"]
        command = [*prefix, sys.executable, "-m", *module, *map(str, arguments)]
        if json_out:
            command.append("--json")
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environ() | (env or {}), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        try:
            out, err = process.communicate(timeout=deadline_s or self.deadline_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # the tool's faulthandler, if any, says where it hangs
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=5)
                raise AssertionError(f"past its deadline: {Answer(command, 124, out, err)}") from None
            process.kill()
            raise AssertionError(f"past its deadline and deaf: {' '.join(command)}") from None
        return Answer(command, process.returncode, out, err)

    def suspend(self, *pids: int, options: tuple[str, ...] = (), **how: Any) -> Answer:
        """Suspend processes."""
        return self.run("suspend", *self._driver(), *options, *pids, **how)

    def resume(self, *pids: int, options: tuple[str, ...] = (), **how: Any) -> Answer:
        """Resume processes."""
        return self.run("resume", *self._driver(), *options, *pids, **how)

    def _driver(self) -> tuple[str, ...]:
        return ("--driver", "sim") if self.setting.simulated else ()

    def __enter__(self) -> Tool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self.state_dir):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.state_dir, name))
            os.rmdir(self.state_dir)
