"""The command line tool on a filesystem whose calls fail: `python -m tests.programs.faulty CALL BEHAVIOUR WORD...`.

CALL is a method of `chunkstore.system.System`. BEHAVIOUR is a string, one letter a call: `r` goes through, `E`
fails with EIO, `F` with ENOSPC, `Q` with EDQUOT, `O` with EROFS, `P` with EACCES, `G` with ESTALE, `I` with EINVAL
if the file is open for direct I/O, `K` kills the tool, `S` sleeps for two seconds, `H` never returns. The last
letter stands for all further calls.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import sys
import time
from typing import Any

from chunkstore.system import System
from gpususpend.cli import main
from gpususpend.tools import Tools
from tests.store.tools import Faulty

CODES = {
    "E": errno.EIO, "F": errno.ENOSPC, "Q": errno.EDQUOT, "O": errno.EROFS, "P": errno.EACCES, "G": errno.ESTALE,
    "I": errno.EINVAL,
}  # fmt: skip


def system(call: str, behaviour: str) -> System:
    """Return a system whose `call` behaves so."""
    letters = itertools.chain(behaviour, itertools.repeat(behaviour[-1]))

    def before(name: str, *arguments: Any) -> None:
        letter = next(letters) if name == call else "r"
        if letter == "I" and not fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT:
            return
        if letter in CODES:
            raise OSError(CODES[letter], os.strerror(CODES[letter]))
        if letter == "K":
            os.kill(os.getpid(), signal.SIGKILL)
        if letter == "S":
            time.sleep(2)
        if letter == "H":
            time.sleep(86400)

    return Faulty(before)


if __name__ == "__main__":
    made = system(sys.argv[1], sys.argv[2])
    Tools.system = lambda self: made  # type: ignore[method-assign]
    main(sys.argv[3:])
