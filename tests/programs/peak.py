"""The command line tool, which tells the most memory that it had in use: `python -m tests.programs.peak WORD...`."""

from __future__ import annotations

import sys
from pathlib import Path

from gpususpend.cli import main

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        # Not getrusage, which counts what the process was before its exec: a copy of whoever started it.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        print(f"peak {int(status['VmHWM'].split()[0]) << 10}", file=sys.stderr)
