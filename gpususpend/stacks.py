"""What the threads of a process are in, as far as the kernel tells: for whoever has to find out why a deadline passed.

Owns reading the kernel's files about threads.  Must not know why it is asked, nor fail: what may not be read is left
out.  Nothing is stopped for it.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import struct
from collections import Counter

from gpususpend.processes import PROC

MOST_THREADS = 4096
MOST_KINDS = 64  # of what threads are in, for each process: those that most are in
_STACK_BYTES = 8192
_MOST_LIBRARIES = 8

Code = list[tuple[int, int, str]]  # where a file's code is mapped: from, to, its name; in order


def threads(pid: int, proc: str = PROC) -> dict[str, int]:
    """Return what the threads of a process are in, in words, and how many threads are in each, most first.

    A thread's words are its name, its state, the function of the kernel that it waits in, and the files to whose code
    the words on top of its stack point, the innermost first.  That is no unwinding: an address may be left over from a
    call that has returned.
    """
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        code = _code(pid, proc)
        for tid in os.listdir(f"{proc}/{pid}/task")[:MOST_THREADS]:
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[_thread(pid, tid, code, proc)] += 1
    return dict(found.most_common(MOST_KINDS))


def _thread(pid: int, tid: str, code: Code, proc: str) -> str:
    name, rest = _read(f"{proc}/{pid}/task/{tid}/stat").rsplit(")", 1)
    words = [f"{name.split('(', 1)[1]} ({rest.split()[0]})"]
    where = ""
    with contextlib.suppress(OSError):
        where = _read(f"{proc}/{pid}/task/{tid}/wchan")
    if where.strip("0"):
        words.append(f"in {where}")
    with contextlib.suppress(OSError, ValueError, IndexError, struct.error):
        libraries = _libraries(pid, _read(f"{proc}/{pid}/task/{tid}/syscall").split(), code, proc)
        if libraries:
            words.append(f"from {' < '.join(libraries)}")
    return " ".join(words)


def _libraries(pid: int, call: list[str], code: Code, proc: str) -> list[str]:
    """Return the files whose code a thread that waits in a system call came from."""
    top, at = int(call[-2], 16), int(call[-1], 16)  # of one that runs neither is told: a ValueError or an IndexError
    with open(f"{proc}/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(top)
        data = memory.read(_STACK_BYTES)
    found: list[str] = []
    for address in (at, *struct.unpack(f"{len(data) // 8}Q", data[: len(data) // 8 * 8])):
        name = _file_at(address, code)
        if name and name not in found:
            found.append(name)
    return found[:_MOST_LIBRARIES]


def _code(pid: int, proc: str) -> Code:
    """Return where code of files is mapped; nothing if it may not be looked into."""
    found: Code = []
    with contextlib.suppress(OSError):
        for line in _read(f"{proc}/{pid}/maps").splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and "x" in words[1] and words[5].startswith("/"):
                begin, end = (int(word, 16) for word in words[0].split("-"))
                found.append((begin, end, os.path.basename(words[5])))
    return found


def _file_at(address: int, code: Code) -> str:
    at = bisect.bisect_right(code, address, key=lambda one: one[0]) - 1
    return code[at][2] if at >= 0 and address < code[at][1] else ""


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
