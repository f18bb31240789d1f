"""Programs that count their steps in a folder, as ranks of a framework do: started, watched, ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.programs.setting import ROOT, Setting


def note(folder: Path, rank: int, step: int) -> None:
    """Write down, in a rank, the step that it has done, in a file that appears whole."""
    fresh = folder / f".rank{rank}"
    fresh.write_text(str(step))
    fresh.rename(folder / f"rank{rank}")


class Stepping:
    """`count` ranks of one program; a rank that finds a wrong result ends, and every wait notices that."""

    def __init__(self, setting: Setting, program: str, count: int, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.logs = [folder / f"log{rank}" for rank in range(count)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("wb") as out:
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-m", program, str(folder)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=out, env=setting.environ(with_shim=True) | env | {"RANK": str(rank)},
                ))
        self.pids = [process.pid for process in self.processes]

    def steps(self) -> list[int]:
        """Return the last step of every rank, 0 before the first."""
        found = []
        for rank in range(len(self.processes)):
            path = self.folder / f"rank{rank}"
            found.append(int(path.read_text()) if path.exists() else 0)
        return found

    def wait_for_more(self, count: int, timeout_s: float) -> None:
        """Wait until every rank has done `count` steps more."""
        goal = [step + count for step in self.steps()]
        until = time.monotonic() + timeout_s
        while any(step < wanted for step, wanted in zip(self.steps(), goal, strict=True)):
            self.check()
            assert time.monotonic() < until, f"no progress in {timeout_s} s: {self.steps()} of {goal}\n{self.said()}"
            time.sleep(0.05)

    def check(self) -> None:
        """Fail if a rank has ended."""
        ended = {process.pid: process.returncode for process in self.processes if process.poll() is not None}
        assert not ended, f"ranks ended: {ended}\n{self.said()}"

    def finish(self, timeout_s: float = 60) -> None:
        """Let the ranks end by themselves, which they do only if all their results were right."""
        (self.folder / "stop").touch()
        for rank, process in enumerate(self.processes):
            assert process.wait(timeout_s) == 0, self.said()
            assert (self.folder / f"done{rank}").exists()

    def kill(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)

    def said(self) -> str:
        """Return the end of what every rank printed."""
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in self.logs)
