"""System calls that are denied, as by a container's seccomp profile.

`python -m tests.programs.denied CALL ...` is the command line tool where CALL is answered with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

_NUMBERS = {
    "clone3": {"x86_64": 435, "aarch64": 435},
    "connect": {"x86_64": 42, "aarch64": 203},
    "flock": {"x86_64": 73, "aarch64": 32},
    "getsockopt": {"x86_64": 55, "aarch64": 209},
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "pidfd_getfd": {"x86_64": 438, "aarch64": 438},
    "pidfd_open": {"x86_64": 434, "aarch64": 434},
    "pidfd_send_signal": {"x86_64": 424, "aarch64": 424},
    "poll": {"x86_64": 7, "aarch64": 73},  # of aarch64, ppoll
    "prlimit64": {"x86_64": 302, "aarch64": 261},
    "ptrace": {"x86_64": 101, "aarch64": 117},
    "socketpair": {"x86_64": 53, "aarch64": 199},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def deny(call: str) -> None:
    """Let every later call of this name, in this process and its children, fail with EPERM."""
    instructions = [
        (_LOAD, 0, 0, 0),
        (_JUMP_EQUAL, 0, 1, _NUMBERS[call][platform.machine()]),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(program), 0, 0) == 0


if __name__ == "__main__":
    from gpususpend.cli import main

    deny(sys.argv[1])
    main(sys.argv[2:])
