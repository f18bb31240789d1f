"""The command line tool on a disk that answers many at a time only: `python -m tests.programs.together CALL N WORD...`.

CALL is `read` or `write`. Each of a piece waits until N pieces are at it at once, and fails if they do not come.
"""

from __future__ import annotations

import sys
import threading

from chunkstore.system import System
from gpususpend.cli import main

PIECE = 1 << 16  # documents are smaller
WAIT_S = 60


def hold(call: str, count: int) -> None:
    """Have every one of these calls wait for so many."""
    all_there, real = threading.Barrier(count), getattr(System, call)

    def held(system: System, fd: int, view: memoryview, offset: int) -> int:
        if len(view) >= PIECE:
            try:
                all_there.wait(WAIT_S)
            except threading.BrokenBarrierError:
                raise TimeoutError(f"no {count} pieces at a time") from None
        moved: int = real(system, fd, view, offset)
        return moved

    setattr(System, call, held)


if __name__ == "__main__":
    hold(sys.argv[1], int(sys.argv[2]))
    main(sys.argv[3:])
