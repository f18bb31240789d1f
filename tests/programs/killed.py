"""The command line tool, killed the moment it has noted a step: `python -m tests.programs.killed STEP ...`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from gpususpend.cli import main
from gpususpend.journal import Journal, Record


def arm(step: str) -> None:
    """Let the process die when `step` has been written down."""
    write = Journal.write

    def deadly(self: Journal, record: Record) -> Any:
        result = write(self, record)
        if record.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Journal.write = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(sys.argv[1])
    main(sys.argv[2:])
