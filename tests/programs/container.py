"""Two ranks that share memory, and the commands on them, in a pid namespace like a container's.

Started as the first process of the namespace with the state folder of its simulated machine.  Prints the pids of the
ranks; then each line of its input is either `check`, or a command of the tool, and gets a line of JSON as its answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.programs.client import Worker
from tests.programs.setting import SHIM, Setting
from tests.programs.tool import Tool

SIZE = 1 << 20


def main(state: str) -> None:
    """Serve until the input ends."""
    machine = Setting(shim=Path(os.environ.get("GPUSHARE_SHIM", SHIM)), state=Path(state))
    ranks = [Worker(machine), Worker(machine)]
    for device, rank in enumerate(ranks):
        rank.start(device)
    for number, (owner, other) in enumerate((ranks, ranks[::-1])):
        block = owner.alloc(SIZE)
        owner.fill(block, SIZE, number + 1)
        other.expect(other.ipc_open(owner.ipc_get(block)), SIZE, [number + 1])
    print(*(rank.pid for rank in ranks), flush=True)
    with Tool(machine) as tool:
        for line in sys.stdin:
            words = line.split()
            if words == ["check"]:
                for rank in ranks:
                    rank.check()
                print(json.dumps("checked"), flush=True)
            else:
                driver = () if words[0] in ("status", "store") else ("--driver", "sim")
                print(json.dumps(tool.run(*words, *driver).json), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
