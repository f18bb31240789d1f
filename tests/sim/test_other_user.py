"""Root at work on the processes of an ordinary user."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim import ordinary
from tests.sim.conftest import running

pytestmark = pytest.mark.usefixtures("own_network")

# Owns one allocation, and says what it holds whenever a line comes.
PROGRAM = """
import sys
from cuda.bindings import driver
def need(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None
need(driver.cuInit(0))
need(driver.cuCtxSetCurrent(need(driver.cuDevicePrimaryCtxRetain(0))))
block = need(driver.cuMemAlloc(1 << 20))
need(driver.cuMemsetD8(block, 0x5a, 1 << 20))
print("ready", flush=True)
for line in sys.stdin:
    content = bytearray(1 << 20)
    need(driver.cuMemcpyDtoH(content, block, 1 << 20))
    print(content == b"\\x5a" * (1 << 20), flush=True)
"""


def test_the_only_process_of_another_user(machine: Setting, tool: Tool) -> None:
    """Root's own processes come and go on the simulated machine meanwhile: it stays the user's."""
    python = ordinary.python()
    assert machine.state is not None
    os.chown(machine.state, ordinary.UID, ordinary.UID)
    environment = machine.environ(with_shim=True) | {"PYTHONPATH": ordinary.PACKAGES}
    user = ["setpriv", f"--reuid={ordinary.UID}", f"--regid={ordinary.UID}", "--clear-groups"]
    with subprocess.Popen(
        [*user, python, "-c", PROGRAM], env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(2):
                tool.suspend(process.pid).expect(0)
                assert Path(machine.state).stat().st_uid == ordinary.UID
                tool.run("gpus", "--driver", "sim").expect(0)
                tool.resume(process.pid).expect(0)
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "True\n"
            running(tool)
        finally:
            process.kill()
