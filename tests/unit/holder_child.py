"""What test_holder_refusals runs in a process of its own, as another user or behind a filter."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpususpend import errors
from gpususpend.deadline import Deadline
from gpususpend.holder import Holder, HoldTarget

_PTRACE = {"x86_64": 101, "aarch64": 117}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def deny_ptrace() -> None:
    """Let every later ptrace of this process and its children fail with EPERM."""
    instructions = [
        (_LOAD, 0, 0, 0),
        (_JUMP_EQUAL, 0, 1, _PTRACE[platform.machine()]),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(program), 0, 0) == 0


def attempt(state_dir: Path, pid: int) -> dict[str, Any]:
    """Check, then stop a process and let it go; return the facts of what was refused."""
    said: dict[str, Any] = {}
    targets = [HoldTarget(pid)]
    with Holder.start(state_dir) as held:
        steps: dict[str, Callable[[], object]] = {
            "check": lambda: held.check(targets, Deadline(20)),
            "stop": lambda: held.stop(targets, Deadline(20)),
        }
        for name, step in steps.items():
            try:
                step()
                said[name] = {}
            except errors.GpushareError as error:
                said[name] = {"code": error.code, **error.facts}
    return said
