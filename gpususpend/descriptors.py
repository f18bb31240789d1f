"""Descriptors of the driver that other processes hold: finding them, and taking a copy to look at.

Owns pidfd_getfd.  Must not know groups, shims or what a descriptor stands for.  Changes nothing anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from gpususpend import processes, system
from gpususpend.processes import Node, Process

_PIDFD_GETFD = 438  # the same number on every architecture; Python has no function for it
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Copy:
    """A copy of a descriptor `node` of another process: `fd` is ours until the next one is asked for."""

    node: Node
    fd: int
    owner_pid: int  # the tag (F_SETOWN) that a shim puts on what it exports; 0 for none, or if that process is gone


class CannotTake(Exception):
    """The system does not let this process have a copy; `detail` says why."""

    def __init__(self, node: Node, detail: str) -> None:
        super().__init__(f"{node}: {detail}")
        self.node, self.detail = node, detail


def files(pid: int) -> set[tuple[int, ...]]:
    """Return which files the descriptors of the driver lead to that a process holds, however they are called there."""
    found = {_file(node) for node in _nodes(pid)}
    return {file for file in found if file is not None}


def copies(process: Process, wanted: Collection[tuple[int, ...]]) -> Iterator[Copy]:
    """Yield a copy of each descriptor that leads to one of these files, closed when the next one is asked for.

    A process whose descriptors may not be listed has none to show.  Raises CannotTake.
    """
    pidfd = None
    try:
        for node in _nodes(process.pid):
            if _file(node) not in wanted:
                continue
            if pidfd is None:
                pidfd = system.pidfd_open(process.pid)
            copy = _take(pidfd, node)
            if copy is not None:
                try:
                    yield copy
                finally:
                    os.close(copy.fd)
    except ProcessLookupError:
        return
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _file(node: Node) -> tuple[int, ...] | None:
    """Return what makes two nodes the same: a device's number, since each container has nodes of its own."""
    try:
        facts = os.stat(f"{processes.PROC}/{node.pid}/fd/{node.fd}")
    except OSError:
        return None
    return (facts.st_rdev,) if stat.S_ISCHR(facts.st_mode) else (facts.st_dev, facts.st_ino)


def _nodes(pid: int) -> list[Node]:
    with contextlib.suppress(PermissionError):
        return list(processes.open_nodes(pid))
    return []


def _take(pidfd: int, node: Node) -> Copy | None:
    """Return a copy, None for a descriptor that was closed meanwhile or leads nowhere (O_PATH)."""
    assert node.fd is not None
    fd = _libc.syscall(ctypes.c_long(_PIDFD_GETFD), ctypes.c_int(pidfd), ctypes.c_int(node.fd), ctypes.c_uint(0))
    if fd < 0:
        number = ctypes.get_errno()
        if number in (errno.EBADF, errno.ESRCH):
            return None
        raise CannotTake(node, f"pidfd_getfd is answered with {os.strerror(number)}")
    try:
        return Copy(node, fd, max(0, fcntl.fcntl(fd, fcntl.F_GETOWN)))
    except OSError:
        os.close(fd)
        return None
