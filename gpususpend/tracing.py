"""Stopping threads of other processes by ptrace, from one thread of one process.

Owns the ptrace calls, the table of threads that are stopped, and the reasons why the kernel refuses.  Must not know who
orders a stop or why.  SIGSTOP is never used: it would stop the shim's control thread too, and be seen by parents.

All of it must run in one thread, since the kernel takes requests from the thread that seized and from no other.  When
that thread ends, however it ends, the kernel lets every stopped thread run on, and hands over held signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpususpend import processes
from gpususpend.deadline import Deadline
from gpususpend.processes import PROC

_SEIZE, _INTERRUPT, _CONTINUE, _DETACH = 0x4206, 0x4207, 7, 17
_WALL = 0x40000000  # waitid(2): threads too
_CAP_SYS_PTRACE = 1 << 19
_POLL_S = 0.05
_NAMED_THREADS = 16


@dataclass(frozen=True)
class Target:
    """One process to stop, but for some of its threads."""

    pid: int
    start_time: int  # clock ticks after boot: tells a reused pid apart
    keep_tids: frozenset[int] = frozenset()


class TraceDenied(Exception):
    """The system does not let this process stop a thread; `setting` is what decides that."""

    def __init__(self, pid: int, detail: str, setting: str) -> None:
        super().__init__(f"pid {pid}: {detail} ({setting})")
        self.pid, self.detail, self.setting = pid, detail, setting


class StopLate(Exception):
    """Threads did not stop in time; `threads` maps a pid to descriptions of these."""

    def __init__(self, threads: Mapping[int, Sequence[str]]) -> None:
        super().__init__(f"threads of pid {', '.join(map(str, threads))} do not stop")
        self.threads = threads


def _load_ptrace() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).ptrace
    function.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_long
    return function


_libc_ptrace = _load_ptrace()


def _ptrace(request: int, tid: int, data: int = 0) -> None:
    ctypes.set_errno(0)
    if _libc_ptrace(request, tid, 0, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class ChildSignals:
    """Wakes a poll when the kernel reports something about a traced thread, or asks this process to end."""

    def __init__(self) -> None:
        self.end_requested = False
        self._read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)

    def _end(self, *_: object) -> None:
        self.end_requested = True

    def wait(self, seconds: float | None, *others: int) -> None:
        """Wait for a signal, for one of the descriptors to be readable, or for the time to pass."""
        poller = select.poll()
        for fd in (self._read_fd, *others):
            poller.register(fd, select.POLLIN)
        poller.poll(None if seconds is None else seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)


@dataclass
class Tracer:
    """The threads that this process holds.

    Guarantees that after `stop` returned every thread of every living target is stopped, except those to keep; and
    that after it raised, and after `go`, no thread is held that can be let go.
    """

    signals: ChildSignals
    # Stopped threads, each with the signal that it was about to receive: given back when it goes on.
    _held: dict[int, int] = field(default_factory=dict)
    # Seized threads that have not reported a stop yet.
    _arriving: set[int] = field(default_factory=set)
    _owner: dict[int, int] = field(default_factory=dict)
    _wanted: bool = False

    def stop(self, targets: Sequence[Target], keep_names: Collection[str], deadline: Deadline) -> None:
        """Stop all threads of the targets; raises TraceDenied or StopLate, everything runs again then."""
        self._wanted = True
        try:
            quiet_scans = 0
            # A listing that is read while threads come and go can miss one; a second look at a still process cannot.
            while quiet_scans < 2:
                found = self._seize_new(targets, keep_names, deadline)
                quiet_scans = 0 if found else quiet_scans + 1
                self._await_stops(deadline)
                if self._arriving or deadline.passed():
                    raise StopLate(self._describe_arriving())
        except BaseException:
            self.go(deadline)
            raise

    def go(self, deadline: Deadline) -> list[int]:
        """Let every thread go on; return the ids of those that are still to stop before they can be let go."""
        self._wanted = False
        for tid in list(self._held):
            self._detach(tid, self._held.pop(tid))
        self._await_stops(deadline)
        return sorted(self._arriving)

    def counts(self) -> dict[int, int]:
        """Return how many threads are held, by process."""
        counts: dict[int, int] = {}
        for tid in self._held:
            counts[self._owner[tid]] = counts.get(self._owner[tid], 0) + 1
        return counts

    def collect(self) -> None:
        """Take in what the kernel reports; without it a dead target would stay a zombie for its parent."""
        while True:
            try:
                tid, status = os.waitpid(-1, _WALL | os.WNOHANG)
            except ChildProcessError:
                tid = 0
            if tid == 0:
                break
            if os.WIFSTOPPED(status):
                self._stopped(tid, status)
            else:
                self._forget(tid)

    def _stopped(self, tid: int, status: int) -> None:
        self._arriving.discard(tid)
        # Unknown only after an exec, which gives the calling thread its process's id.
        self._owner.setdefault(tid, tid)
        # With an event in the upper bits it is our interrupt (or a group stop that goes on by itself); without one
        # the thread was about to receive a signal, which is ours to hand on.
        pending = 0 if status >> 16 else os.WSTOPSIG(status)
        if self._wanted:
            self._held[tid] = pending
        else:
            self._detach(tid, pending)

    def _detach(self, tid: int, pending: int) -> None:
        # A thread that was killed while it was stopped has nothing to be let go from; `collect` sees its end.
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_DETACH, tid, pending)
            self._owner.pop(tid, None)

    def _forget(self, tid: int) -> None:
        self._arriving.discard(tid)
        self._held.pop(tid, None)
        self._owner.pop(tid, None)

    def _seize_new(self, targets: Sequence[Target], keep_names: Collection[str], deadline: Deadline) -> int:
        found = 0
        for target in targets:
            if not lives(target):
                continue
            for tid in _threads(target.pid):
                if deadline.passed():
                    return found
                known = tid in self._held or tid in self._arriving or tid in target.keep_tids
                if not known and _thread_name(target.pid, tid) not in keep_names:
                    found += self._seize(target.pid, tid)
        return found

    def _seize(self, pid: int, tid: int) -> bool:
        try:
            _ptrace(_SEIZE, tid)
        except ProcessLookupError:
            return False
        except OSError as error:
            if _thread_state(pid, tid) in "ZX":
                return False
            raise refusal(pid, tid, error) from None
        self._arriving.add(tid)
        self._owner[tid] = pid
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_INTERRUPT, tid)
        return True

    def _await_stops(self, deadline: Deadline) -> None:
        """Wait until no thread is arriving any more, or until the deadline."""
        while True:
            before = len(self._arriving)
            self.collect()
            if len(self._arriving) == before:
                self._drop_ended()
            if not self._arriving or deadline.passed():
                return
            self.signals.wait(min(_POLL_S, deadline.left()))

    def _drop_ended(self) -> None:
        """Forget leaders that ended before their threads: these report nothing until the threads have ended too."""
        for tid in list(self._arriving):
            if _thread_state(self._owner[tid], tid) in "ZX":
                self._arriving.discard(tid)

    def _describe_arriving(self) -> dict[int, list[str]]:
        threads: dict[int, list[str]] = {}
        for tid in sorted(self._arriving)[:_NAMED_THREADS]:
            pid = self._owner[tid]
            where = _read(f"{PROC}/{pid}/task/{tid}/wchan") or "?"
            text = f"thread {tid} ({_thread_name(pid, tid)}) in state {_thread_state(pid, tid)} at {where}"
            threads.setdefault(pid, []).append(text)
        return threads


def start_time(pid: int) -> int:
    """Return a process's start time in clock ticks after boot, 0 when there is none."""
    words = _read(f"{PROC}/{pid}/stat").rpartition(")")[2].split()
    return int(words[19]) if words else 0


def lives(target: Target) -> bool:
    """Tell whether that very process has a living thread; its leader may have ended before the others."""
    return start_time(target.pid) == target.start_time and any(
        _thread_state(target.pid, tid) not in "ZX" for tid in _threads(target.pid)
    )


def check(target: Target, holders: Collection[int] = ()) -> None:
    """Raise TraceDenied if `stop` would be refused once these holders have ended; touches no thread."""
    _check_seccomp(target.pid)
    for tid in _threads(target.pid):
        tracer = _tracer(target.pid, tid, holders)
        if tracer:
            raise _already_traced(target.pid, tid, tracer)
    try:
        # The kernel asks the same question for this as for a seize, the security modules included.
        os.close(os.open(f"{PROC}/{target.pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError as error:
        # One that is ending is shown as root's.
        if processes.is_alive(target.pid, target.start_time):
            raise refusal(target.pid, target.pid, error, holders) from None
    except (FileNotFoundError, ProcessLookupError):
        pass


def refusal(pid: int, tid: int, error: OSError, holders: Collection[int] = ()) -> TraceDenied:
    """Return why the kernel refused to seize a thread; that one of these holders traces it is no reason."""
    tracer = _tracer(pid, tid, holders)
    if tracer:
        return _already_traced(pid, tid, tracer)
    try:
        _check_seccomp(pid)
    except TraceDenied as denied:
        return denied
    if int(_status("self").get("CapEff", "0"), 16) & _CAP_SYS_PTRACE:
        return TraceDenied(pid, f"the kernel says {error.strerror}", "a security module, or another user namespace")
    if set(_status(str(pid)).get("Uid", "").split()[:3]) != {str(os.geteuid())}:
        return TraceDenied(pid, "it runs as another user, and CAP_SYS_PTRACE is missing", "CAP_SYS_PTRACE")
    scope = _read(f"{PROC}/sys/kernel/yama/ptrace_scope")
    if scope not in ("", "0"):
        what = {
            "1": "only a process's ancestors may trace it",
            "2": "only a process with CAP_SYS_PTRACE may trace",
        }.get(scope, "nobody may trace")
        return TraceDenied(pid, what, f"kernel.yama.ptrace_scope={scope}")
    if os.stat(f"{PROC}/{pid}").st_uid != os.geteuid():
        return TraceDenied(pid, "the process is not dumpable", "prctl PR_SET_DUMPABLE")
    return TraceDenied(pid, f"the kernel says {error.strerror}, and CAP_SYS_PTRACE is missing", "CAP_SYS_PTRACE")


def _check_seccomp(pid: int) -> None:
    try:
        # No process has this id: without a filter the answer is ESRCH.
        _ptrace(_CONTINUE, 0)
    except ProcessLookupError:
        pass
    except OSError as error:
        raise TraceDenied(pid, f"the call ptrace is answered with {error.strerror}", "seccomp filter") from None


def _already_traced(pid: int, tid: int, tracer: int) -> TraceDenied:
    name = _read(f"{PROC}/{tracer}/comm") or "?"
    return TraceDenied(pid, f"thread {tid} is traced by pid {tracer} ({name})", "TracerPid")


def _tracer(pid: int, tid: int, holders: Collection[int] = ()) -> int:
    tracer = int(_status(f"{pid}/task/{tid}").get("TracerPid", "0"))
    return 0 if tracer == os.getpid() or tracer in holders else tracer


def _status(path: str) -> dict[str, str]:
    rows = (line.partition(":") for line in _read(f"{PROC}/{path}/status").splitlines())
    return {name: value.strip() for name, _, value in rows}


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"{PROC}/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _thread_name(pid: int, tid: int) -> str:
    return _read(f"{PROC}/{pid}/task/{tid}/comm")


def _thread_state(pid: int, tid: int) -> str:
    """Return the state's letter; X for a thread that is gone."""
    words = _read(f"{PROC}/{pid}/task/{tid}/stat").rpartition(")")[2].split()
    return words[0] if words else "X"


def _read(path: str) -> str:
    """Return a small file's text without the last newline, nothing where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""
