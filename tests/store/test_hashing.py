"""The work on whole chunks leaves the interpreter to other threads: only so can many chunks be worked on at a time."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from chunkstore.hashing import hash_by_name, is_zero, same

SIZE = 16 << 20
TIMES = 1000


@pytest.fixture
def nobody_is_interrupted() -> Iterator[None]:
    """Let a thread run until it gives the interpreter up by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def hashing(name: str) -> Callable[[memoryview], object]:
    """Return what hashes a content."""
    digest = hash_by_name(name, "").digest
    return lambda view: digest(iter([view]))


@pytest.mark.parametrize(
    "work",
    [is_zero, lambda view: same(view, view), hashing("xxh3-128"), hashing("blake3")],
    ids=["zero test", "comparison", "xxh3-128", "blake3"],
)
@pytest.mark.usefixtures("nobody_is_interrupted")
def test_others_run_meanwhile(work: Callable[[memoryview], object]) -> None:
    """Another thread gets its turn in the middle of one of these calls, long before the last."""
    zeros = memoryview(mmap.mmap(-1, SIZE))
    begun, seen = threading.Event(), threading.Event()
    calls: list[int] = []

    def repeat() -> None:
        begun.set()
        for number in range(TIMES):
            if seen.is_set():
                return
            work(zeros)
            calls.append(number)

    thread = threading.Thread(target=repeat)
    thread.start()
    begun.wait()
    seen.set()
    thread.join()
    assert len(calls) < TIMES
