"""The command line tool, held up when it has noted a step until a file is gone: `... paused STEP FILE WORD...`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from gpususpend.cli import main
from gpususpend.journal import Journal, Record


def arm(step: str, path: str) -> None:
    """Wait for the end of the file `path` once `step` has been written down."""
    write = Journal.write

    def patient(self: Journal, record: Record) -> Any:
        result = write(self, record)
        while record.step == step and os.path.exists(path):
            time.sleep(0.01)
        return result

    Journal.write = patient  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(sys.argv[1], sys.argv[2])
    main(sys.argv[3:])
