"""What the scenarios share: a full cycle with its checks, and a picture of the application's objects around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.gpu.checkpoint import checkpoint  # noqa: F401  (a fixture)
from tests.programs.client import Worker
from tests.programs.setting import Setting, wanted_driver
from tests.programs.stepping import Stepping
from tests.programs.tool import Answer, Tool
from tests.programs.usage import memory_by_pid

MIB = 1 << 20
LARGE = 64 * MIB if wanted_driver() == "real" else 8 * MIB
"""Memory that is no part of anything else; that of simulated GPUs is filled and compared by a small machine."""


class Group:
    """Workers that are suspended and resumed together."""

    def __init__(self, machine: Setting, tool: Tool) -> None:
        self.machine = machine
        self.tool = tool

    def suspend(self, *workers: Worker) -> Answer:
        """Suspend, and check that nothing of the driver is left: descriptors, memory."""
        answer = self.tool.suspend(*(one.pid for one in workers)).expect(0)
        for one in workers:
            assert one.alive(), one._story("died in a suspend")
            assert one.nvidia_fds() == [], f"worker {one.pid} keeps descriptors of the driver"
        using = memory_by_pid(self.machine)
        assert not using.keys() & {one.pid for one in workers}, f"still on a GPU: {using}"
        return answer

    def resume(self, *workers: Worker) -> Answer:
        """Resume."""
        answer = self.tool.resume(*(one.pid for one in workers)).expect(0)
        for one in workers:
            assert one.alive(), one._story("died in a resume")
        return answer

    @contextmanager
    def suspended(self, *workers: Worker) -> Iterator[None]:
        """Suspend around a block; afterwards every worker sees the same objects and the same content."""
        before = [one.snapshot() for one in workers]
        self.suspend(*workers)
        yield
        self.resume(*workers)
        for one, picture in zip(workers, before, strict=True):
            same_picture(picture, one.snapshot())
            one.check()

    def cycle(self, *workers: Worker, times: int = 1) -> None:
        """Suspend and resume, with all checks."""
        for _ in range(times):
            with self.suspended(*workers):
                pass

    def cycle_at_work(self, ranks: Stepping, more: int) -> None:
        """Suspend and resume ranks of a framework three times; they do `more` steps after each."""
        for _ in range(3):
            self.tool.suspend(*ranks.pids).expect(0)
            assert not memory_by_pid(self.machine).keys() & set(ranks.pids)
            stopped = ranks.steps()
            time.sleep(0.5)
            assert ranks.steps() == stopped, "ranks run while suspended"
            self.tool.resume(*ranks.pids).expect(0)
            ranks.wait_for_more(more, 60)


def same_picture(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fail on the first object of which the driver says something else than before."""
    for kind, objects in before.items():
        if isinstance(objects, dict):
            assert set(objects) == set(after[kind]), f"{kind}: not the same objects"
            for name, seen in objects.items():
                assert after[kind][name] == seen, f"{kind} {name}: was {seen}, is {after[kind][name]}"
        else:
            assert after[kind] == objects, f"{kind}: was {objects}, is {after[kind]}"


@pytest.fixture
def group(machine: Setting, tool: Tool) -> Group:
    """The group of this test."""
    return Group(machine, tool)


@pytest.fixture
def share(start_worker: Callable[..., Worker]) -> Callable[..., tuple[dict[str, int], dict[str, int]]]:
    """A function that shares a block between two workers by descriptor and returns both sides of it."""

    def do(owner: Worker, other: Worker, size: int, seed: int = 1, *, keep_fds: bool = False,
           access: list[list[Any]] | None = None) -> tuple[dict[str, int], dict[str, int]]:
        block = owner.block(size)
        owner.fill(block["address"], size, seed)
        fd = owner.mem_export(block["handle"])
        there = owner.hand(fd, other)
        imported = other.import_block(there, size, access=access)
        other.expect(imported["address"], size, [seed])
        if not keep_fds:
            owner.close_fd(fd)
            other.close_fd(there)
        return block, imported

    return do
