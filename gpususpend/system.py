"""System calls that a container's profile may deny, by name: what the kernel says does not tell which call it answers.

Owns what becomes of an error of the system that nobody foresaw.  Must not know what the calls are for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpususpend import errors

NOTHING_CHANGED = "; nothing was changed"
_DENIED = "A seccomp filter or a security module denies that: run the command where it is allowed"
LARGER_FILES = "allow this command larger files (ulimit -f)"
_WAYS_OUT = {
    errno.EPERM: _DENIED,
    errno.EACCES: _DENIED,
    errno.ENOSYS: _DENIED,
    errno.EFBIG: f"The command may not write files of that size: {LARGER_FILES}",
    errno.ENOMEM: "Free memory, or let this command have more (ulimit -v, ulimit -d, its cgroup)",
}
# Of this process: by option of `ulimit`, and where /proc/self/statm has the pages that count.
_MEMORY_LIMITS = ((resource.RLIMIT_AS, "-v", 0), (resource.RLIMIT_DATA, "-d", 5))
# A stack, and what a thread needs to come up: one that finds no memory for that is waited for without an end.
_THREAD_BYTES = 16 << 20


@contextlib.contextmanager
def named(call: str) -> Iterator[None]:
    """Put the name of a system call into the OSError that it raises."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # no answer of the system: a time limit of Python's
            raise
        raise OSError(error.errno, f"{call} is answered with {error.strerror}") from None


def denied(error: OSError) -> bool:
    """Tell whether that is how a filter or a security module answers, and nothing that passes."""
    return _WAYS_OUT.get(error.errno or 0) == _DENIED


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two sockets that are connected, for whole messages."""
    with named("socketpair"):
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(connection: socket.socket, size: int) -> bytes:
    """Return what the kernel knows of who made the socket at the other end."""
    with named("getsockopt"):
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process."""
    with named("pidfd_open"):
        return os.pidfd_open(pid)


def send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process of a descriptor; 0 only asks whether it may be sent."""
    with named("pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)


def try_lock(fd: int) -> None:
    """Lock an open file; raises BlockingIOError where another process has it locked."""
    with named("flock"):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def memfd_create(name: str, flags: int) -> int:
    """Return a file in memory."""
    with named("memfd_create"):
        return os.memfd_create(name, flags)


def set_size(fd: int, size: int) -> None:
    """Set the size of a file."""
    with named("ftruncate"):
        os.ftruncate(fd, size)


def descriptor_limits() -> tuple[int, int]:
    """Return how many descriptors this process may open, and how far it may raise that."""
    with named("prlimit64"):
        return resource.getrlimit(resource.RLIMIT_NOFILE)


def limit_descriptors(soft: int, hard: int) -> None:
    """Set how many descriptors this process may open."""
    with named("prlimit64"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_file_size(size: int) -> None:
    """Refuse to begin with what needs a file of `size` bytes, if this process may write none so large.

    Raises SystemCall.
    """
    with named("prlimit64"):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size > limit:
        error = OSError(errno.EFBIG, f"a file of {size} bytes is needed, and {limit} are allowed")
        raise refusal(error)


def start(thread: threading.Thread) -> None:
    """Start a thread.  Raises SystemCall where the system lets this process have no more."""
    with starting():
        thread.start()


@contextlib.contextmanager
def starting(threads: int = 1) -> Iterator[None]:
    """Look whether this process may have so many threads more, and raise SystemCall where it gets none."""
    left, option = memory_left()
    if left < threads * _THREAD_BYTES:
        raise _no_thread(f"Let this command have more memory (ulimit {option})")
    try:
        yield
    except RuntimeError:  # says no more than that
        raise _no_thread(
            "Let this command have more (ulimit -u, pids.max of its cgroup), or allow clone3 where a seccomp filter "
            "denies that"
        ) from None


def _no_thread(way_out: str) -> errors.SystemCall:
    return errors.SystemCall(detail="no thread can be started", state="", errno=None, way_out=way_out)


def memory_left(limits: Sequence[tuple[int, str, int]] = _MEMORY_LIMITS) -> tuple[float, str]:
    """Return the bytes that this process may still have, infinity without a limit, and the option of `ulimit`."""
    found = [(math.inf, "")]
    for number, option, column in limits:
        with named("prlimit64"):
            limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY:
            with open("/proc/self/statm", encoding="ascii") as file:
                pages = int(file.read().split()[column])
            found.append((max(0, limit - pages * resource.getpagesize()), option))
    return min(found)


def address_space_left() -> float:
    """Return the bytes of any kind that this process may still map."""
    return memory_left(_MEMORY_LIMITS[:1])[0]


def refusal(error: OSError | MemoryError, state: str = "") -> errors.SystemCall:
    """Return an error that nobody foresaw as one for the user; `state` says what things are in now."""
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)).with_traceback(error.__traceback__)
    detail = error.strerror or str(error) or type(error).__name__
    if isinstance(error.filename, str):  # and no descriptor, whose number says nothing
        detail = f"{error.filename}: {detail}"
    elif place := _place(error):
        detail = f"{detail}, in {place}"
    way_out = _WAYS_OUT.get(error.errno or 0, "See to the cause, then try again")
    return errors.SystemCall(detail=detail, state=state, way_out=way_out, errno=errno.errorcode.get(error.errno or 0))


def unasked(pid: int, error: OSError) -> errors.SystemCall:
    """Return the refusal of a process whose shim the system does not let this command ask."""
    return refusal(OSError(error.errno, f"pid {pid}: its shim cannot be asked: {error.strerror}"), NOTHING_CHANGED)


def _place(error: OSError) -> str:
    """Return where an error was raised, nothing for one that names its call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename == __file__:
        return ""
    code = trace.tb_frame.f_code
    return f"{Path(code.co_filename).stem}.{code.co_name}"
