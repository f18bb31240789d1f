"""An allocator that links libcuda and takes memory away from under its addresses, as vLLM's sleep mode does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import lacking
from tests.gpu.conftest import Group
from tests.programs.client import Worker
from tests.programs.foreign import compiled

MIB = 1 << 20
SIZE = 6 * MIB


class Sleeper:
    """Blocks of a worker that sleep and wake."""

    def __init__(self, worker: Worker, library: Path) -> None:
        self.worker, self._library = worker, str(library)

    def make(self, seed: int) -> int:
        """Return a block that is filled."""
        address = self._call("make", SIZE, 0)
        assert address, "no memory"
        self.worker.fill(address, SIZE, seed)
        return address

    def sleep(self, address: int) -> None:
        """Give a block's memory away."""
        self.worker.forget(address)
        assert self._call("sleep", address) == 0

    def wake(self, address: int, seed: int) -> None:
        """Put memory behind the address again, and fill it."""
        assert self._call("wake", address) == 0
        self.worker.fill(address, SIZE, seed)

    def _call(self, name: str, *arguments: int) -> int:
        return int(self.worker.foreign(self._library, f"sleeper_{name}", *arguments))


@pytest.fixture
def sleeper(start_worker: Callable[..., Worker], tmp_path: Path) -> Sleeper:
    """A worker with that allocator."""
    try:
        return Sleeper(start_worker(0), compiled("sleeper", tmp_path))
    except FileNotFoundError as error:
        lacking(f"this test needs a C compiler: {error}")


def test_asleep_and_awake_through_cycles(sleeper: Sleeper, group: Group) -> None:
    """Awake ones keep their content; ones that sleep through a cycle can be woken afterwards, at their address."""
    kept, dozing = sleeper.make(1), sleeper.make(2)
    group.cycle(sleeper.worker)
    sleeper.sleep(dozing)
    group.cycle(sleeper.worker)
    assert sleeper.worker.code("copy_dtod", dozing, kept, 4096) != 0, "there is memory where none should be"
    sleeper.wake(dozing, 3)
    group.cycle(sleeper.worker, times=2)
    sleeper.sleep(kept)
    sleeper.wake(kept, 4)
    sleeper.worker.check()


def test_calls_are_seen(sleeper: Sleeper, group: Group) -> None:
    """The memory is carried: nothing of it is the driver's to save, though nobody looked an address up."""
    before = group.tool.suspend(sleeper.worker.pid).expect(0).json["groups"][0]["bytes"]
    group.resume(sleeper.worker)
    sleeper.make(1)
    after = group.tool.suspend(sleeper.worker.pid).expect(0).json["groups"][0]["bytes"]
    group.resume(sleeper.worker)
    assert after == before + SIZE
    sleeper.worker.check()
