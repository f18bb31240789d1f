"""What happens in the demo: sharing, steps, and cycles of suspend and resume with their proofs.

Owns the order of events and the measurements; results.py gives them their form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpususpend.demo.crew import Crew, CrewError
from gpususpend.demo.machine import Machine, Use

MIB = 1 << 20
TOLERANCE_BYTES = 50 * MIB
COMMAND_S = 300.0
MEMORY_BACK_S = 5.0  # the driver frees a checkpointed process's memory with a delay
HOLD_S = 0.2  # suspended for so long, without a step
MAX_LANE_WORDS = 4 * MIB


class DemoError(Exception):
    """A proof or a command failed; the message says which."""


@dataclass(frozen=True)
class Sizes:
    """How a rank's memory is divided, in words."""

    lane_words: int
    ballast_words: int

    @classmethod
    def of(cls, mib: int) -> Sizes:
        """Divide `mib` MiB: up to 5 lane-sized pieces for each of the two big lanes, the rest one large allocation."""
        words = mib * MIB // 4
        lane = min(MAX_LANE_WORDS, words // 20)
        return cls(lane, words - 10 * lane)


    @property
    def rank_bytes(self) -> int:
        """The bytes of one rank; its small allocations are not counted."""
        return 4 * (10 * self.lane_words + self.ballast_words)


@dataclass(frozen=True)
class Command:
    """One run of the tool: what it took as seen from outside, and its own report."""

    seconds: float
    report: dict[str, Any]


class Tool:
    """Runs ``nvsnap-gpu-suspend`` as a user would."""

    def __init__(self, environment: dict[str, str], simulated: bool) -> None:
        self.environment = environment
        self._arguments = ["--driver", "sim"] if simulated else []

    @property
    def launcher(self) -> list[str]:
        """The command that starts another one with the shim preloaded."""
        return [*self._command("run"), "--"]

    def _command(self, verb: str) -> list[str]:
        return [sys.executable, "-m", "gpususpend", verb, *self._arguments]

    def run(self, verb: str, pids: list[int]) -> Command:
        """Run one verb on `pids`. Raises DemoError with the tool's words unless it succeeds in time."""
        command = [*self._command(verb), "--json", *map(str, pids)]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"{verb} did not end in {COMMAND_S:.0f} s") from None
        seconds = time.monotonic() - start
        if done.returncode:
            raise DemoError(f"{verb} exited with {done.returncode}: {done.stderr.strip()}")
        return Command(seconds, json.loads(done.stdout))


class Traffic:
    """Steps of the crew, one after the other, in a thread, so that a suspend meets ranks at work."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._stop = threading.Event()
        self._error: CrewError | None = None
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self.steps = 0

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                step(self._crew)
                self.steps += 1
        except CrewError as error:
            self._error = error
        except OSError as error:  # the demo has failed meanwhile and closed the channels
            self._error = CrewError(f"the channels were closed: {error}")

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def wait_for(self, steps: int, deadline_s: float) -> None:
        """Wait until `steps` more have been made. Raises CrewError."""
        until, wanted = time.monotonic() + deadline_s, self.steps + steps
        while self.steps < wanted:
            if self._error:
                raise self._error
            if time.monotonic() > until:
                raise CrewError(f"no {steps} steps in {deadline_s:.0f} s")
            time.sleep(0.005)

    def end(self) -> None:
        """Finish the step under way and stop. Raises the CrewError that ended the thread, if one did."""
        self._stop.set()
        self._thread.join(timeout=2 * self._crew.deadline_s)
        if self._error:
            raise self._error


def step(crew: Crew) -> None:
    """Let all ranks publish, then all reduce."""
    crew.ask("publish")
    crew.ask("reduce")


def connect(crew: Crew, sizes: Sizes) -> list[int]:
    """Let the ranks allocate and map each other's memory; return the device of each rank."""
    look = crew.ask("look")[0]
    devices = [rank % look["devices"] if look["reach"] else 0 for rank in range(crew.ranks)]
    own = {"lane_words": sizes.lane_words, "ballast_words": sizes.ballast_words}
    answers = crew.exchange("allocate", [({"device": device, **own}, []) for device in devices])
    fds = [answer_fds for _, answer_fds in answers]
    try:
        handles = {str(rank): answer["ipc"] for rank, (answer, _) in enumerate(answers)}
        others = [[fd for peer_fds in fds[:rank] + fds[rank + 1 :] for fd in peer_fds] for rank in range(crew.ranks)]
        crew.exchange("connect", [({"ipc": handles}, theirs) for theirs in others])
    finally:
        for fd in (fd for rank_fds in fds for fd in rank_fds):
            os.close(fd)
    return devices


def check(crew: Crew) -> int:
    """Let every rank compare every byte; return how many were compared."""
    return sum(answer["checked_bytes"] for answer in crew.ask("check"))


def listed_pids(uses: list[Use]) -> set[int]:
    """Return the pids that any GPU lists."""
    return {pid for use in uses for pid in use.pids}


def prove_empty(machine: Machine, before: list[Use], running: list[Use], pids: list[int]) -> dict[str, Any]:
    """Show that the suspended processes use no GPU. Raises DemoError unless memory and pids are gone in time."""
    until = time.monotonic() + MEMORY_BACK_S
    while True:
        now = machine.use()
        left = max(use.used_bytes - old.used_bytes for use, old in zip(now, before, strict=True))
        seen = sorted(set(pids) & listed_pids(now))
        if (left <= TOLERANCE_BYTES and not seen) or time.monotonic() > until:
            break
        time.sleep(0.05)
    if seen:
        raise DemoError(f"suspended, but the driver still lists pids {seen}")
    if left > TOLERANCE_BYTES:
        raise DemoError(f"suspended, but {left / MIB:.0f} MiB of GPU memory are not back")
    # Where NVML reports the pids of another namespace their absence proves nothing, and only the memory does.
    return {
        "pids_listed_before": set(pids) <= listed_pids(running),
        "pids_listed": seen,
        "used_bytes_before": [use.used_bytes for use in running],
        "used_bytes": [use.used_bytes for use in now],
        "unreturned_bytes": max(0, left),
    }


def one_cycle(
    number: int, crew: Crew, tool: Tool, machine: Machine, before: list[Use], say: Callable[[str], None]
) -> dict[str, Any]:
    """Suspend the ranks while they step, prove the GPUs empty, resume, and check. Raises DemoError or CrewError."""
    running = machine.use()
    traffic = Traffic(crew)
    traffic.start()
    traffic.wait_for(2, crew.deadline_s)
    suspended = tool.run("suspend", crew.pids)
    empty = prove_empty(machine, before, running, crew.pids)
    made = traffic.steps
    time.sleep(HOLD_S)
    if traffic.steps > made:
        raise DemoError("suspended, but the ranks made a step")
    left = empty["unreturned_bytes"] / MIB
    say(f"cycle {number}: suspended in {suspended.seconds:.2f} s, {left:.0f} MiB left on the GPUs")
    resumed = tool.run("resume", crew.pids)
    traffic.wait_for(2, crew.deadline_s)
    traffic.end()
    checked = check(crew)
    say(f"cycle {number}: resumed in {resumed.seconds:.2f} s, {checked / MIB:.0f} MiB compared, all right")
    return {
        "cycle": number,
        "suspend": {"seconds": suspended.seconds, "report": suspended.report},
        "suspended": empty,
        "resume": {"seconds": resumed.seconds, "report": resumed.report},
        "checked_bytes": checked,
        "steps": traffic.steps,
    }
