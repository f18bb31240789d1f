"""The driver's checkpoint calls as the supervisor makes them: on several processes at once, each wait with a deadline.

Owns the client side of the driver process and the calls that commands left behind.  Must not know phases, and never
loads CUDA itself.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from gpususpend import driver_process, errors, helpers, origin, processes
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS, OLDEST_DRIVER, OLDEST_DRIVER_FOR_MAP
from gpususpend.helpers import Helper, HelperFailed, HelperGone, HelperLate, Message
from gpususpend.statedir import StateDir

MODULE = "gpususpend.driver_process"
SIMULATED_LIBRARY = Path(__file__).resolve().parent / "simcuda"
_LOOK_S = 0.25
# What would make the driver process see fewer GPUs than the group, or use streams that it does not need.
_UNWANTED = ("CUDA_VISIBLE_DEVICES", "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM")

GpuPairs = Sequence[tuple[str, str]]


class DriverState(IntEnum):
    """The states that every driver knows; a newer one may answer others, which stay numbers."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


@dataclass(frozen=True)
class DriverResult:
    """What one call on one process came to.

    `code` 0 is success, -1 a call that was not made; `finished` false is a call that had not returned at its deadline
    and goes on: nothing else in the result means anything then.  `value` is a state or a thread id.
    """

    code: int
    name: str
    seconds: float
    finished: bool
    value: int = 0

    @property
    def ok(self) -> bool:
        """Tell whether the call returned, and with success."""
        return self.finished and self.code == 0


@dataclass(frozen=True)
class DriverVersion:
    """The driver: its release such as 580.159.04 ("" where it cannot be read), and the CUDA version as a number."""

    driver: str
    cuda: int
    simulated: bool

    @property
    def branch(self) -> int:
        """Return the release's first number, 0 where it is unknown."""
        first = self.driver.split(".")[0]
        return int(first) if first.isdigit() else 0


@dataclass(frozen=True)
class Leftover:
    """Driver calls that a command left behind, in a driver process that may still run; `results` by (call, pid)."""

    file: str
    pid: int
    start_time: int
    boot_id: str
    results: dict[tuple[str, int], DriverResult]

    def alive(self) -> bool:
        """Tell whether the process still waits for a call."""
        return self.boot_id == helpers.boot_id() and processes.is_alive(self.pid, self.start_time)


class DriverProcess:
    """A driver process of this command.  Used by one thread at a time; the calls on several pids run at once.

    Guarantees that no call is ever broken off: one that is past its deadline goes on in the driver process, which then
    outlives `close`.
    """

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._next = 1
        self._version: DriverVersion | None = None
        self._gone = False  # it has hung up
        # Asked now and then with the pids of calls that have not returned; false: they are abandoned now.
        self.keep_waiting: Callable[[list[int]], bool] = lambda pids: True
        self.start_time = processes.read_process(helper.pid).start_time

    @classmethod
    def start(cls, state_dir: Path, simulated: bool = False, deadline: Deadline | None = None) -> DriverProcess:
        """Start a driver process and initialise the driver in it.

        Raises what `Helper.start` does, NoDriver, and DriverTooOld for a driver without these calls.
        """
        process = cls(Helper.start("driver", MODULE, state_dir, _environment(os.environ, simulated)))
        try:
            process._init(simulated, deadline or Deadline(LIMITS.driver_start_s))
        except BaseException:
            process.close()
            raise
        return process

    @property
    def pid(self) -> int:
        """Return the driver process's pid."""
        return self._helper.pid

    def version(self) -> DriverVersion:
        """Return the driver's version."""
        assert self._version is not None
        return self._version

    def require_map(self) -> None:
        """Raise DriverTooOld unless the driver can restore on other GPUs."""
        self._require(OLDEST_DRIVER_FOR_MAP, "--gpu-map")

    def states(self, pids: Iterable[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Return the checkpoint state of each process as `value`."""
        return self._on_each("state", pids, deadline)

    def restore_threads(self, pids: Iterable[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Return the thread that must run during checkpoint and restore as `value`."""
        return self._on_each("restore_thread", pids, deadline)

    def lock(self, pids: Iterable[int], timeout_s: float) -> dict[int, DriverResult]:
        """Lock each process; the driver itself gives up after `timeout_s` and answers 600 NOT_READY."""
        return self._on_each("lock", pids, Deadline(timeout_s + LIMITS.helper_grace_s), max(1, int(timeout_s * 1000)))

    def checkpoint(self, pids: Iterable[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Checkpoint each locked process."""
        return self._on_each("checkpoint", pids, deadline)

    def restore(self, pids: Iterable[int], gpu_pairs: GpuPairs, deadline: Deadline) -> dict[int, DriverResult]:
        """Restore each checkpointed process; `gpu_pairs` (old UUID, new UUID) name every GPU, or are empty."""
        return self._on_each("restore", pids, deadline, [list(pair) for pair in gpu_pairs])

    def unlock(self, pids: Iterable[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Unlock each process."""
        return self._on_each("unlock", pids, deadline)

    def devices(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Return the driver's GPUs: `uuid`, `name`, `bytes`, `integrated`, `compute`.  Raises HelperFailed."""
        devices: list[dict[str, Any]] = self._one("devices", deadline)
        return devices

    def simulated_usage(self, index: int, deadline: Deadline) -> dict[int, int]:
        """Return the bytes used on a simulated GPU, by pid.  Raises HelperFailed."""
        return {int(pid): int(size) for pid, size in self._one("usage", deadline, index)}

    def ended(self) -> bool:
        """Tell whether the process has ended by itself, or is about to."""
        return not self._helper.closed and (self._gone or self._helper.ended(Deadline(0)))

    def close(self) -> None:
        """Let go of the process: it ends at once, or when the last call that it is in returns."""
        if self._helper.closed:
            return
        self._helper.hang_up()
        # What it is in, it writes into the state directory before it answers; then nothing is left to wait for.
        with contextlib.suppress(HelperGone, HelperLate):
            while "abandoned" not in (message := self._helper.receive(Deadline(LIMITS.helper_grace_s))):
                pass
            if not message["abandoned"]:
                # Collected here; in a container nobody else might.
                self._helper.ended(Deadline(LIMITS.helper_grace_s))
        self._helper.close()

    def __enter__(self) -> DriverProcess:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the process."""
        self.close()

    def _init(self, simulated: bool, deadline: Deadline) -> None:
        result, value = self._calls([("init", 0, [])], deadline)[0]
        if not result.finished:
            raise errors.NoDriver(detail=f"cuInit did not return within {deadline.seconds} s")
        if result.code == driver_process.NOT_CALLED:
            raise errors.NoDriver(detail=f"it cannot be loaded: {result.name}")
        if result.code:
            raise errors.NoDriver(detail=f"cuInit answers {result.code} {result.name}")
        self._version = DriverVersion(value["driver"], value["cuda"], value["simulated"])
        if simulated and not self._version.simulated:
            raise errors.NoDriver(detail=f"the simulated driver is not in {SIMULATED_LIBRARY}; run `make native`")
        self._require(OLDEST_DRIVER, "suspending processes")

    def _require(self, branch: int, feature: str) -> None:
        version = self.version()
        if version.branch < branch:
            raise errors.DriverTooOld(version=version.driver or "unknown", feature=feature, needed=branch)

    def _one(self, call: str, deadline: Deadline, *arguments: object) -> Any:
        result, value = self._calls([(call, 0, list(arguments))], deadline)[0]
        if not result.ok:
            detail = f"{result.code} {result.name}" if result.finished else "it does not answer"
            raise HelperFailed(helper="driver", detail=f"{call}: {detail}")
        return value

    def _on_each(
        self, call: str, pids: Iterable[int], deadline: Deadline, *arguments: object
    ) -> dict[int, DriverResult]:
        wanted = list(dict.fromkeys(pids))
        answers = self._calls([(call, pid, [pid, *arguments]) for pid in wanted], deadline)
        return {pid: result for pid, (result, _) in zip(wanted, answers, strict=True)}

    def _calls(self, calls: Sequence[tuple[str, int, list[Any]]], deadline: Deadline) -> list[tuple[DriverResult, Any]]:
        """Make all calls at once and wait for all; those that nobody waits for any longer are abandoned."""
        numbers = range(self._next, self._next + len(calls))
        self._next += len(calls)
        answers: dict[int, Message] = {}
        try:
            for number, (call, pid, arguments) in zip(numbers, calls, strict=True):
                self._helper.send({"id": number, "do": call, "pid": pid, "arguments": arguments})
            pids = {number: pid for number, (_, pid, _) in zip(numbers, calls, strict=True)}
            self._await(pids, answers, deadline)
        except HelperGone as gone:
            self._gone = True
            if calls and calls[0][0] in ("init", "state", "restore_thread", "devices", "usage"):
                raise HelperFailed(helper="driver", detail=str(gone)) from None
            # Whether a call that changes something took effect is not known: it counts as not finished.
        return [_result(answers.get(number)) for number in numbers]

    def _await(self, pids: Mapping[int, int], answers: dict[int, Message], deadline: Deadline) -> None:
        while left := [number for number in pids if number not in answers]:
            try:
                self._take(answers, self._helper.receive(deadline.within(_LOOK_S)))
            except HelperLate:
                if deadline.passed() or not self.keep_waiting([pids[number] for number in left if pids[number]]):
                    self._abandon(left, answers)
                    return

    def _abandon(self, numbers: list[int], answers: dict[int, Message]) -> None:
        self._helper.send({"do": "abandon", "ids": numbers})
        with contextlib.suppress(HelperLate):
            # An answer that comes before the acknowledgement still counts.
            while self._take(answers, self._helper.receive(Deadline(LIMITS.helper_grace_s))):
                pass

    def _take(self, answers: dict[int, Message], message: Message) -> bool:
        if "abandoned" in message:
            return False
        answers[message["id"]] = message
        return True


def failure(step: str, pid: int, answer: DriverResult) -> errors.StepFailed:
    """Return the error of a call that did not succeed; one that was not made is no error of the driver's."""
    if answer.code == driver_process.NOT_CALLED:
        return errors.StepFailed(step=step, pid=pid, detail=f"the driver was not called: {answer.name}")
    return errors.DriverError(step=step, pid=pid, cuda=answer.code, cuda_name=answer.name)


def leftovers(state_dir: Path) -> list[Leftover]:
    """Return the calls that earlier commands left behind, as far as they have returned by now.

    Those of another namespace are left out: their pids mean other processes here.
    """
    found = []
    with StateDir.open(os.fspath(state_dir), create=False) as directory:
        for name in directory.names():
            if name.startswith("driver-") and name.endswith(".json"):
                with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, errors.UnsafeStateDir):
                    data = json.loads(directory.read(name))
                    if not origin.other(str(data.get("origin", ""))):
                        found.append(_leftover(name, data))
    return found


def forget(state_dir: Path, leftover: Leftover) -> None:
    """Remove the file of calls that were dealt with; that of a living process comes back when its calls return."""
    with StateDir.open(os.fspath(state_dir), create=False) as directory:
        with contextlib.suppress(errors.StateNotWritten):  # read again next time, and dealt with by then
            directory.remove(leftover.file)


def _leftover(name: str, data: dict[str, Any]) -> Leftover:
    results = {
        (str(call["call"]), int(call["pid"])): _result(call if call["finished"] else None)[0] for call in data["calls"]
    }
    return Leftover(name, int(data["pid"]), int(data["start_time"]), str(data["boot_id"]), results)


def _result(answer: Message | None) -> tuple[DriverResult, Any]:
    if answer is None:
        return DriverResult(0, "not returned", 0.0, finished=False), None
    value = answer["value"]
    number = value if isinstance(value, int) else 0
    return DriverResult(int(answer["code"]), str(answer["name"]), float(answer["seconds"]), True, number), value


def _environment(environment: Mapping[str, str], simulated: bool) -> dict[str, str]:
    result = {name: value for name, value in environment.items() if name not in _UNWANTED}
    if simulated:
        others = result.get("LD_LIBRARY_PATH")
        result["LD_LIBRARY_PATH"] = f"{SIMULATED_LIBRARY}:{others}" if others else str(SIMULATED_LIBRARY)
    return result
