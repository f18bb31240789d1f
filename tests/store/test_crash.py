"""kill -9 before every system call of a save, by ptrace: also those that Python or the C library make beside ours."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkstore import Files
from tests.store.test_faults import prepare, require_next_save_works, require_sound, reset, save_new

TRACEME, SYSCALL, KILL_WITH_US = 0, 24, 0x100000
SETOPTIONS = 0x4200
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def ptrace(request: int, pid: int, data: int = 0) -> None:
    """Make one request; raises OSError."""
    if _libc.ptrace(request, pid, None, data) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def killed_before(number: int, work: Callable[[], None]) -> bool:
    """Run something in a forked process that is killed before its `number`-th system call; False if it ended before."""
    pid = os.fork()
    if pid == 0:
        try:
            ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    os.waitpid(pid, 0)
    ptrace(SETOPTIONS, pid, KILL_WITH_US)
    for _ in range(2 * number + 1):  # each stops twice: before and after
        ptrace(SYSCALL, pid)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return False
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTRAP, status
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


@pytest.mark.timeout(600)
def test_fr61_killed_before_every_system_call(tmp_path: Path) -> None:
    """The checkpoint is there as a whole or not at all, the store is clean, and the next save there works."""
    prepare(tmp_path)
    number = 0
    while killed_before(number, lambda: save_new(tmp_path, Files())):
        require_sound(tmp_path, None)
        if number % 7 == 0 and not (tmp_path / "new" / "manifest.json").exists():
            require_next_save_works(tmp_path)
        reset(tmp_path)
        number += 1
    require_sound(tmp_path, True)
    assert number > 300
