"""The holder as the supervisor sees it: stop and continue the threads of the group, keep them stopped, end that.

Owns the client side and the records of kept holders.  Must not know how threads are stopped (tracing.py), and sends no
signal to anything but a holder, whose pid is checked against its start time first.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpususpend import cgroup, errors, helpers, holder_process, origin, processes, system, tracing
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.helpers import Helper, HelperGone, HelperLate, Message
from gpususpend.statedir import StateDir

MODULE = "gpususpend.holder_process"
# Threads that always go on: the shim's, which answer the supervisor while everything else stands still.
KEEP_NAMES = (processes.CONTROL_THREAD,)


@dataclass(frozen=True)
class HoldTarget:
    """A process to stop.  `keep_tids` go on (the driver's restore thread); `start_time` 0 means: as it is now."""

    pid: int
    keep_tids: frozenset[int] = frozenset()
    start_time: int = 0


@dataclass(frozen=True)
class HoldReport:
    """What is held: number of stopped threads by pid, and the targets that have ended."""

    threads: dict[int, int]
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class HolderRecord:
    """A holder that outlives its command.  `targets` are pids with their start times, `leases` pids with a lease."""

    pid: int
    start_time: int
    boot_id: str
    state_dir: str
    targets: dict[int, int]
    leases: tuple[int, ...] = ()
    origin: str = ""  # where its pids and start times were read; empty in records of before

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        targets = [[pid, start_time] for pid, start_time in self.targets.items()]
        return {**self.__dict__, "targets": targets, "leases": list(self.leases)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HolderRecord:
        """Return the record that `to_dict` wrote; raises ValueError for anything else."""
        try:
            return cls(
                pid=int(data["pid"]),
                start_time=int(data["start_time"]),
                boot_id=str(data["boot_id"]),
                state_dir=str(data["state_dir"]),
                targets={int(pid): int(start_time) for pid, start_time in data["targets"]},
                leases=tuple(int(pid) for pid in data["leases"]),
                origin=str(data.get("origin", "")),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"damaged holder record: {error!r}") from None

    def alive(self) -> bool:
        """Tell whether that very holder still runs."""
        return self.boot_id == helpers.boot_id() and processes.is_alive(self.pid, self.start_time)


@dataclass(frozen=True)
class HolderResult:
    """How a holder ended.  `found`: it still lived; `killed`: it did not end by itself and was killed.

    In every case its threads go on, since the kernel continues what a dead tracer held.  `gone` are targets that ended
    while they were held, as far as the holder could say.
    """

    found: bool
    killed: bool
    continued: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


class Holder:
    """A holder that belongs to this command.  Used by one thread at a time.

    Guarantees that all threads go on when this process ends or calls `close`, unless `keep` has returned.
    """

    def __init__(self, helper: Helper, state_dir: Path, keep_names: Collection[str]) -> None:
        self._helper = helper
        self._state_dir = state_dir
        self._keep_names = tuple(keep_names)
        self._targets: list[int] = []
        self._requests = 0

    @classmethod
    def start(cls, state_dir: Path, keep_names: Collection[str] = KEEP_NAMES) -> Holder:
        """Start a holder; threads with a name of `keep_names` are never stopped.

        Raises what `Helper.start` does when no process can be made: nothing was started then, and nothing is signalled.
        """
        return cls(Helper.start("holder", MODULE, state_dir, os.environ), state_dir, keep_names)

    @property
    def pid(self) -> int:
        """Return the holder's pid."""
        return self._helper.pid

    def check(self, targets: Sequence[HoldTarget], deadline: Deadline, holders: Sequence[int] = ()) -> None:
        """Raise CannotTrace if `stop` would be refused once these kept holders have ended; touches no thread."""
        self._targets = [target.pid for target in targets]
        self._ask("check", deadline, targets=[_plain(target) for target in targets], holders=list(holders))

    def stop(self, targets: Sequence[HoldTarget], deadline: Deadline) -> HoldReport:
        """Stop every thread of the targets, but for those to keep; those stopped already stay so.

        Raises CannotTrace, DeadlinePassed or HolderFailed; every thread goes on then.  A target that has ended is
        reported, not an error.
        """
        self._targets = [target.pid for target in targets]
        plain = [_plain(target) for target in targets]
        return _report(self._ask("stop", deadline, targets=plain, keep_names=self._keep_names))

    def go(self, deadline: Deadline) -> HoldReport:
        """Let every thread go on."""
        return _report(self._ask("go", deadline))

    def keep(self, deadline: Deadline | None = None) -> HolderRecord:
        """Detach the holder from this command; it keeps its threads stopped until `end`.

        Raises HolderFailed, with the threads still stopped and the holder still this command's.
        """
        reply = self._ask("keep", deadline or Deadline(LIMITS.helper_grace_s * 2))
        record = HolderRecord.from_dict({**reply, "state_dir": os.fspath(self._state_dir)})
        self._helper.close()
        return record

    def ended(self) -> bool:
        """Tell whether the process has ended by itself."""
        return not self._helper.closed and self._helper.ended(Deadline(0))

    def close(self) -> None:
        """End the holder, if it was not kept: every thread goes on."""
        if self._helper.closed:
            return
        self._helper.hang_up()
        if not self._helper.ended(Deadline(LIMITS.helper_kill_s)):
            # Safe: the kernel continues what a dead tracer held.
            self._helper.kill()
            self._helper.ended(Deadline(LIMITS.helper_kill_s))
        self._helper.close()

    def __enter__(self) -> Holder:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the holder, if it was not kept."""
        self.close()

    def _ask(self, verb: str, deadline: Deadline, **fields: object) -> Message:
        self._requests += 1
        try:
            self._helper.send({"id": self._requests, "do": verb, "seconds": deadline.left(), **fields})
            patience = Deadline(deadline.left() + LIMITS.helper_grace_s)
            # The answer to an earlier request, which nobody waited for any more, may come first.
            while (reply := self._helper.receive(patience))["id"] != self._requests:
                pass
        except (HelperGone, HelperLate) as error:
            raise errors.HolderFailed(step=f"holder: {verb}", pid=self._targets or self.pid, detail=error) from None
        if "error" in reply:
            raise self._error(verb, deadline, reply)
        return reply

    def _error(self, verb: str, deadline: Deadline, reply: Message) -> errors.GpushareError:
        if reply["error"] == "denied":
            return errors.CannotTrace.of_threads(reply["pid"], reply["detail"], reply["setting"])
        if reply["error"] == "late":
            pids = [pid for pid, _ in reply["threads"]] or self._targets or [self.pid]
            detail = "; ".join(thread for _, threads in reply["threads"] for thread in threads) or "it is too busy"
            return errors.DeadlinePassed(step=f"holder: {verb}", seconds=deadline.seconds, pid=pids, detail=detail)
        return errors.HolderFailed(step=f"holder: {verb}", pid=self._targets or self.pid, detail=reply["detail"])


def end(
    record: HolderRecord, deadline: Deadline, tell: Callable[[str], None] = lambda text: None
) -> HolderResult:
    """End a kept holder: its threads go on.  A holder that does not end by the deadline is killed, to the same effect.

    `tell` is called once with whom is waited for, where that takes long.  Returns what it left as its result; one of
    another namespace, whose life cannot be told from here, is left alone.  Raises UnsafeStateDir, and HolderFailed if
    not even the kill ends it.
    """
    if origin.other(record.origin):
        return HolderResult(found=False, killed=False)
    pidfd = _open_holder(record)
    killed = False
    if pidfd is not None:
        try:
            system.send_signal(pidfd, signal.SIGTERM)
            system.send_signal(pidfd, signal.SIGCONT)  # one that somebody keeps stopped would not hear of it
            if not helpers.wait_ended(pidfd, deadline.within(LIMITS.stopped_s)) and not deadline.passed():
                by = processes.stopped_by(record.pid)
                tell(f"waiting for the holder, pid {record.pid}" + (f" (stopped {by})" if by else ""))
            if not helpers.wait_ended(pidfd, deadline):
                killed = True
                system.send_signal(pidfd, signal.SIGKILL)
                if not helpers.wait_ended(pidfd, Deadline(LIMITS.helper_kill_s)):
                    by = processes.stopped_by(record.pid)
                    detail = f"it is stopped {by} and cannot be killed: let it run" if by else "it cannot be killed"
                    raise errors.HolderFailed(step="holder: end", pid=record.pid, detail=detail)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
            # It is this process's child where the same process started it.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(record.pid, os.WNOHANG)
    result = _take_result(record)
    return HolderResult(pidfd is not None, killed, tuple(result.get("continued", ())), tuple(result.get("gone", ())))


def check_end(record: HolderRecord) -> None:
    """Raise OSError if `end` would be denied, HolderFrozen if it would do nothing; the holder notices nothing."""
    pidfd = _open_holder(record)
    if pidfd is not None:
        try:
            with contextlib.suppress(ProcessLookupError, errors.ProcessGone):
                system.send_signal(pidfd, 0)
                if group := cgroup.frozen_by(record.pid, versions=(1,)):
                    raise errors.HolderFrozen(pid=record.pid, cgroup=group)
        finally:
            os.close(pidfd)


def records(state_dir: Path) -> list[HolderRecord]:
    """Return the records in the state directory: of living holders, and of such that were killed.

    Those of another namespace are left out: their pids mean other processes here.
    """
    found = []
    with StateDir.open(os.fspath(state_dir), create=False) as directory:
        for name in directory.names():
            if name.startswith("holder-") and name.endswith(".json") and not name.endswith(".result.json"):
                with contextlib.suppress(FileNotFoundError, ValueError, errors.UnsafeStateDir):
                    data = json.loads(directory.read(name))
                    found.append(HolderRecord.from_dict({**data, "state_dir": os.fspath(state_dir)}))
    return [record for record in found if not origin.other(record.origin)]


def _open_holder(record: HolderRecord) -> int | None:
    """Return a pidfd of the recorded holder, or None when it has ended, its pid reused or not."""
    try:
        pidfd = system.pidfd_open(record.pid)
    except ProcessLookupError:
        return None
    # Only now can the pid no longer pass to another process unseen.
    if record.alive():
        return pidfd
    os.close(pidfd)
    return None


def _take_result(record: HolderRecord) -> dict[str, Any]:
    try:
        with StateDir.open(record.state_dir, create=False) as directory:
            name = holder_process.result_name(record.pid, record.start_time)
            try:
                result: dict[str, Any] = json.loads(directory.read(name))
            finally:
                directory.remove(name)
                directory.remove(holder_process.record_name(record.pid, record.start_time))
            return result
    except (FileNotFoundError, ValueError, errors.StateNotWritten):
        return {}


def _plain(target: HoldTarget) -> list[object]:
    return [target.pid, target.start_time or tracing.start_time(target.pid), sorted(target.keep_tids)]


def _report(reply: Message) -> HoldReport:
    threads: Iterable[tuple[int, int]] = reply["threads"]
    return HoldReport({int(pid): int(count) for pid, count in threads}, tuple(reply["gone"]))
