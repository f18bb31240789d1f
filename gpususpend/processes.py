"""Facts about processes, read from /proc: identity, namespaces, threads, trees, and signs of CUDA.

Owns every look into /proc/PID.  Must not know the control protocol, the driver or what a command does with the facts.
A pid alone identifies nothing: a `Process` carries the start time too, and every later use compares it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpususpend import cgroup, errors, system

CONTROL_THREAD = "nvsnap-gpushare"
SHIM_LIBRARY = "libnvsnap_gpushare.so"
SIMULATED_GPU_THREAD = "simcuda-gpu"
PROC = "/proc"

# The kernel's flag of a task that is on its way out.  It has no memory any more then, and is shown as root's.
_EXITING = 0x4

# How often one who has a lock is looked for in vain before it counts as one that cannot be seen.
_LOCK_LOOKS = 5

# Device nodes of the driver, and the files by which the simulated driver stands in for them.  Libraries whose names
# contain "nvidia" are mapped by any program that links them and are no sign of use.
_NODE = re.compile(r"^/dev/nvidia|/nvidia(\d+|ctl[^/]*)$")


@dataclass(frozen=True)
class Process:
    """One process, as the caller's pid namespace sees it; `inner_pid` is its pid in its own namespace."""

    pid: int
    start_time: int  # clock ticks after boot, from /proc/PID/stat
    inner_pid: int
    uid: int  # effective
    parent: int
    comm: str


@dataclass(frozen=True)
class Node:
    """A device node that a process holds: as descriptor `fd`, or mapped (`fd` is None)."""

    pid: int
    path: str
    fd: int | None = None

    def __str__(self) -> str:
        """Return it as one phrase for a message."""
        return f"{self.path} " + ("mapped" if self.fd is None else f"open as descriptor {self.fd}")


def read_process(pid: int, proc: str = PROC) -> Process:
    """Read the facts about one process.

    Raises NoSuchProcess if there is none (one that is ending counts as none) and ThreadId if the number is a thread's.
    """
    try:
        with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        start_time, state, parent = _stat(pid, proc)
    except (FileNotFoundError, ProcessLookupError):
        raise errors.NoSuchProcess(pid=pid) from None
    owner = int(status["Tgid"])
    if owner != pid:
        raise errors.ThreadId(pid=pid, owner=owner)
    if _is_over(pid, state, proc):
        raise errors.NoSuchProcess(pid=pid)
    inner_pid = int(status.get("NSpid", str(pid)).split()[-1])
    # A name may hold what a terminal takes for commands.
    name = "".join(letter if letter.isprintable() else "?" for letter in status["Name"])
    return Process(pid, start_time, inner_pid, int(status["Uid"].split()[1]), parent, name)


def _stat(pid: int, proc: str = PROC, tid: int = 0) -> tuple[int, str, int]:
    """Return start time, state (X once it is ending) and parent of a process, or of a thread of it."""
    path = f"{proc}/{pid}/task/{tid}/stat" if tid else f"{proc}/{pid}/stat"
    with open(path, encoding="utf-8", errors="replace") as file:
        # The name before them may hold any character.
        words = file.read().rpartition(")")[2].split()
    return int(words[19]), "X" if int(words[6]) & _EXITING else words[0], int(words[1])


def _is_over(pid: int, state: str, proc: str) -> bool:
    """Tell whether a process in this state has ended: its first thread may end before the others."""
    return state in "ZX" and not _living_threads(pid, proc)


def _living_threads(pid: int, proc: str) -> list[int]:
    living = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if _stat(pid, proc, int(name))[1] not in "ZX":
                    living.append(int(name))
    return living


def is_headless(pid: int, proc: str = PROC) -> bool:
    """Tell whether a process goes on without its first thread, by which /proc shows descriptors, memory and more."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _stat(pid, proc)[1] in "ZX" and bool(_living_threads(pid, proc))
    return False


def _is_ending(pid: int, proc: str) -> bool:
    try:
        return _is_over(pid, _stat(pid, proc)[1], proc)
    except (OSError, ValueError, IndexError):
        return True


def is_same(process: Process, proc: str = PROC) -> bool:
    """Tell whether the process still lives: same pid, same start time, not ending."""
    try:
        start_time, state, _ = _stat(process.pid, proc)
    except (OSError, ValueError, IndexError):
        return False
    return start_time == process.start_time and not _is_over(process.pid, state, proc)


def is_alive(pid: int, start_time: int, proc: str = PROC) -> bool:
    """Tell whether the process with this pid and start time still lives."""
    return is_same(Process(pid, start_time, pid, 0, 0, ""), proc)


def check_reachable(process: Process, proc: str = PROC, own_uid: int | None = None) -> None:
    """Refuse a process that this command cannot work on: another user's, or in another pid or network namespace."""
    uid = os.geteuid() if own_uid is None else own_uid
    if uid not in (0, process.uid):
        raise errors.OtherUser(pid=process.pid, uid=process.uid, own_uid=uid)
    shown = f"{proc}/{process.pid}"
    if is_headless(process.pid, proc):
        shown += "".join(f"/task/{tid}" for tid in _living_threads(process.pid, proc)[:1])
    for name, error in (("pid", errors.OtherPidNamespace.of_process), ("net", errors.OtherNetNamespace)):
        try:
            theirs = os.readlink(f"{shown}/ns/{name}")
            ours = os.readlink(f"{proc}/self/ns/{name}")
        except PermissionError:
            if not is_same(process, proc):
                raise errors.ProcessGone(pid=process.pid) from None
            raise closed(process, proc) from None
        except FileNotFoundError:
            raise errors.ProcessGone(pid=process.pid) from None
        if theirs != ours:
            raise error(pid=process.pid, inner_pid=process.inner_pid)


def closed(process: Process, proc: str = PROC) -> errors.CannotTrace:
    """Return the refusal of a process whose namespaces or descriptors the kernel does not show.

    It shows them to those who may trace: not where the process gave up being dumpable, or has more capabilities.
    """
    shim = bool(threads_named(process.pid, [CONTROL_THREAD], proc))
    return errors.CannotTrace.of_process(process.pid, process.comm, shim)


def all_processes(proc: str = PROC) -> list[Process]:
    """Return every process that can be seen now; those that end meanwhile are left out."""
    found = []
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(errors.Refused, OSError, KeyError, ValueError, IndexError):
                found.append(read_process(int(name), proc))
    return sorted(found, key=lambda process: process.pid)


def descendants(roots: Iterable[int], everything: Iterable[Process]) -> list[Process]:
    """Return the processes below `roots`, the roots themselves left out."""
    children: dict[int, list[Process]] = {}
    for process in everything:
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child.pid not in found:
                found[child.pid] = child
                waiting.append(child.pid)
    return [found[pid] for pid in sorted(found)]


def own_line(proc: str = PROC) -> set[int]:
    """Return this process and its ancestors: what must not be frozen by it."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        try:
            pid = _stat(pid, proc)[2]
        except (OSError, IndexError, ValueError):
            break
    return line


def threads_named(pid: int, names: Iterable[str], proc: str = PROC) -> list[int]:
    """Return the ids of the threads of a process that bear one of these names."""
    wanted = set(names)
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError), open(f"{proc}/{pid}/task/{name}/comm", "rb") as file:
                if file.read().rstrip(b"\n").decode("utf-8", "replace") in wanted:
                    found.append(int(name))
    return sorted(found)


def tracer(pid: int, proc: str = PROC) -> int:
    """Return the process that traces a thread of this one, 0 if none does."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError):
                if keeper := _tracer_of(pid, name, proc):
                    return keeper
    return 0


def _tracer_of(pid: int, tid: int | str, proc: str) -> int:
    """Return the process that traces a thread, 0 if none does that is shown here.  Raises OSError."""
    with open(f"{proc}/{pid}/task/{tid}/status", encoding="utf-8", errors="replace") as file:
        found = re.search(r"^TracerPid:\t(\d+)$", file.read(), re.M)
    return int(found[1]) if found else 0


def stopped_by(pid: int, proc: str = PROC, each_thread: bool = False) -> str:
    """Return what keeps a process from answering, nothing if it can answer: a signal, or a tracer or cgroup by name.

    A holder's stops do not count: it lets the shim's threads run, and a process without a shim has nothing to answer.
    `each_thread` finds a debugger, too, that has stopped the shim's thread and not the first one.
    """
    try:
        first = _stat(pid, proc)[1]  # the cheap look, since all threads are stopped together
        look = each_thread or first in "TtZX"
        for tid in (threads_named(pid, [CONTROL_THREAD], proc) or [pid]) if look else []:
            state = _stat(pid, proc, tid)[1]
            if state == "T":
                return "by a signal"
            if state == "t" and tid != pid:
                return f"by its tracer, {_tracer_named(pid, tid, proc)}"
        # A frozen thread looks as if it slept, or as if it were stopped if it was.
        if first != "R" and (group := cgroup.frozen_by(pid)):
            return f"by the freezer of cgroup {group}"
    except (OSError, ValueError, IndexError, errors.ProcessGone):
        pass  # it has ended
    return ""


def _tracer_named(pid: int, tid: int, proc: str) -> str:
    """Return who traces a thread, by pid and name; one outside of this pid namespace has none here."""
    keeper = _tracer_of(pid, tid, proc)
    if not keeper:
        return "which is not shown here"
    with contextlib.suppress(errors.Refused, OSError):
        return f"pid {keeper} ({read_process(keeper, proc).comm})"
    return f"pid {keeper}"


def lock(fd: int) -> int | None:
    """Lock an open file; return who has it locked where another process has: 0 for one that cannot be seen from here.

    One that lets go of it between the two looks was not seen either: so both are taken again.
    """
    for _ in range(_LOCK_LOOKS):
        try:
            system.try_lock(fd)
        except BlockingIOError:
            if holder := lock_holder(os.fstat(fd).st_ino):
                return holder
        else:
            return None
    return 0


def lock_holder(inode: int, proc: str = PROC) -> int:
    """Return the process that has a file locked (flock), 0 if it cannot be seen from here."""
    with contextlib.suppress(OSError), open(f"{proc}/locks", encoding="ascii", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                return int(words[4])
    return 0


def environment(pid: int, proc: str = PROC) -> dict[str, str]:
    """Return the environment that a process was started with; nothing where it may not be read."""
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def nvidia_nodes(pid: int, proc: str = PROC) -> list[Node]:
    """Return the device nodes that a process has open or mapped; a process that ends has none."""
    mapped = [Node(pid, path) for path in _mapped(pid, proc) if _NODE.search(path)]
    return [*dict.fromkeys(open_nodes(pid, proc)), *mapped]


def open_nodes(pid: int, proc: str = PROC) -> Iterator[Node]:
    """Yield the device nodes that a process has open; a process that ends has none.  PermissionError passes through."""
    try:
        names = os.listdir(f"{proc}/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    except PermissionError:
        if _is_ending(pid, proc):
            return
        raise
    for name in sorted(names, key=int):
        with contextlib.suppress(OSError):
            path = _plain(os.readlink(f"{proc}/{pid}/fd/{name}"))
            if _NODE.search(path):
                yield Node(pid, path, int(name))


def _mapped(pid: int, proc: str) -> dict[str, None]:
    """Return the paths of the files that a process has mapped, each once and in order."""
    try:
        with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(maxsplit=5) for line in file]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict.fromkeys(_plain(words[5]) for words in lines if len(words) == 6)


def has_library(pid: int, name: str, proc: str = PROC) -> bool:
    """Tell whether a process has loaded a library of that file name; no if it may not be looked into."""
    with contextlib.suppress(OSError):
        return any(path.endswith(f"/{name}") for path in _mapped(pid, proc))
    return False


def open_files(pid: int, proc: str = PROC) -> Iterator[str]:
    """Yield the paths that a process has open; none if it may not be looked into."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{proc}/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"{proc}/{pid}/fd/{name}")


def has_mapped(pid: int, path: str, proc: str = PROC) -> bool:
    """Tell whether a process has a file of this name mapped."""
    return path in _mapped(pid, proc)


def _plain(path: str) -> str:
    return path.removesuffix(" (deleted)")


def uses_cuda(pid: int, proc: str = PROC) -> bool:
    """Tell whether a process shows signs of an initialised driver.

    A process that merely reads NVML has the same nodes open, and (measured, driver 580) the driver calls it running as
    it does one with CUDA.  A shim tells them apart, since its threads begin with CUDA; without one this may say yes too
    often.  It never overlooks a context.  PermissionError passes to the caller.
    """
    mapped = _mapped(pid, proc)
    if not any(_NODE.search(path) for path in mapped) and not any(open_nodes(pid, proc)):
        return False
    has_shim = any(path.endswith(f"/{SHIM_LIBRARY}") for path in mapped)
    return not has_shim or bool(threads_named(pid, [CONTROL_THREAD], proc))


class Watch:
    """Sees the death of processes through pidfds, and that one is on its way out.

    A pidfd tells of the end, which comes when the memory of a process is gone: seconds after it was killed, in which
    whoever asks it gets errors already.  Guarantees that a pid which was reused is told apart: the start time is
    compared after the pidfd is open.
    """

    def __init__(self, members: Iterable[Process], opener: Callable[[int], int] = system.pidfd_open) -> None:
        self._opener = opener
        self._fds: dict[int, Process] = {}
        self._living: dict[int, Process] = {}  # by pidfd
        self._dead: list[Process] = []
        self._poll = select.poll()
        try:
            for process in members:
                self.add(process)
        except BaseException:
            self.close()
            raise

    def add(self, process: Process) -> None:
        """Watch one process more."""
        try:
            fd = self._opener(process.pid)
        except ProcessLookupError:
            self._dead.append(process)
            return
        self._fds[fd] = process
        if is_same(process):
            self._living[fd] = process
            self._poll.register(fd, select.POLLIN)
        else:
            self._dead.append(process)

    def dead(self) -> list[Process]:
        """Return the processes that have ended or are about to, in the order in which this was seen."""
        ended = [fd for fd, _ in self._poll.poll(0)]
        for fd in [*ended, *(fd for fd, process in self._living.items() if fd not in ended and not is_same(process))]:
            self._poll.unregister(fd)
            self._dead.append(self._living.pop(fd))
        return list(self._dead)

    def close(self) -> None:
        """Close the pidfds."""
        while self._fds:
            os.close(self._fds.popitem()[0])

    def __enter__(self) -> Watch:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pidfds."""
        self.close()
