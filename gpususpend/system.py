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
from collections.abc import Iterator
from pathlib import Path

from gpususpend import errors

NOTHING_CHANGED = "; nothing was changed"
_DENIED = "A seccomp filter or a security module denies that: run the command where it is allowed"
_WAYS_OUT = {
    errno.EPERM: _DENIED,
    errno.EACCES: _DENIED,
    errno.ENOSYS: _DENIED,
    errno.EFBIG: "The command may not write files of that size: allow it larger ones (ulimit -f)",
}


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
    try:
        thread.start()
    except RuntimeError:  # says no more than that
        raise errors.SystemCall(
            detail="no thread can be started", state="", errno=None,
            way_out="Let this command have more (ulimit -u, ulimit -v, pids.max of its cgroup), or allow clone3 where "
            "a seccomp filter denies that",
        ) from None  # fmt: skip


def address_space_left() -> float:
    """Return the bytes that this process may still map; infinity without a limit."""
    with named("prlimit64"):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    with open("/proc/self/statm", encoding="ascii") as file:
        return max(0, limit - int(file.read().split()[0]) * resource.getpagesize())


def refusal(error: OSError, state: str = "") -> errors.SystemCall:
    """Return an error that nobody foresaw as one for the user; `state` says what things are in now."""
    detail = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
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
