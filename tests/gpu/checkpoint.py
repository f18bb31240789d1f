"""The driver's checkpoint calls without the tool, in a process of their own: a test never becomes a CUDA process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting


class Checkpoint:
    """Drives checkpoints from a process that only calls cuInit."""

    def __init__(self, machine: Setting) -> None:
        self.driver = Worker(machine, shim=False)
        self.driver.init()

    def codes(self, step: str, *pids: int) -> list[int]:
        """Apply one step to each process in turn."""
        return [self.driver.try_(f"cp_{step}", pid, deadline_s=60).code for pid in pids]

    def down(self, *pids: int) -> list[int]:
        """Lock all, then checkpoint all; return the codes."""
        return self.codes("lock", *pids) + self.codes("checkpoint", *pids)

    def up(self, *pids: int) -> list[int]:
        """Restore all, then unlock all; return the codes."""
        return self.codes("restore", *pids) + self.codes("unlock", *pids)

    def state(self, pid: int) -> int:
        """Return the driver's state of a process."""
        return int(self.driver.cp_state(pid))


@pytest.fixture
def checkpoint(machine: Setting) -> Iterator[Checkpoint]:
    """The bare driver's checkpoint calls."""
    one = Checkpoint(machine)
    yield one
    one.driver.kill()
