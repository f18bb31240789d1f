"""Rings: memory that a shim and this command both map, in which pieces of GPU memory are handed from one to the other.

Owns the places in it and how many there are.  Must not know what is handed over, or where it goes.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
from collections.abc import Iterator
from dataclasses import dataclass

STEP_BYTES = 1 << 30  # a shim page-locks in steps of this size, and no place may lie across two of them
LEAST_PLACES = 2  # one is copied while the other is hashed and written
MOST_PLACES = 32  # each is worked on by a thread of its own


def place_bytes(chunk_bytes: int) -> int:
    """Return the size of a place for chunks of a size: direct I/O needs whole pages."""
    return -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def places_for(chunk_bytes: int, ranks: int, ring_bytes: int, need_bytes: int) -> int:
    """Return how many places a rank gets of `ring_bytes` for all ranks: as many as it has chunks, and two at least."""
    share = ring_bytes // max(1, ranks) // place_bytes(chunk_bytes)
    need = -(-need_bytes // chunk_bytes)
    return max(LEAST_PLACES, min(share, need, MOST_PLACES))


def bytes_for(places: int, size: int) -> int:
    """Return the bytes of a ring with so many places of a size."""
    return _offset(places - 1, size) + size


def _offset(number: int, size: int) -> int:
    step, place = divmod(number, max(1, STEP_BYTES // size))
    return step * STEP_BYTES + place * size


@dataclass(frozen=True)
class Place:
    """A place while it is in use: where it begins in the ring, and its memory."""

    at: int
    memory: memoryview


class Ring:
    """The ring of one shim.  Any number of threads may use it, at most as many at a time as it has places."""

    def __init__(self, fd: int, places: int, size: int) -> None:
        self.places = places
        self._map = mmap.mmap(fd, bytes_for(places, size))
        self._memory = memoryview(self._map)
        self._free: queue.SimpleQueue[Place] = queue.SimpleQueue()
        for number in range(places):
            at = _offset(number, size)
            self._free.put(Place(at, self._memory[at : at + size]))

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """Use a place that nobody uses; raises queue.Empty if there is none."""
        place = self._free.get_nowait()
        try:
            yield place
        finally:
            self._free.put(place)

    def close(self) -> None:
        """Unmap the ring here; no place is in use."""
        # The traceback of a failure may still refer to a piece of it: then it goes with that.
        with contextlib.suppress(BufferError):
            while not self._free.empty():
                self._free.get_nowait().memory.release()
            self._memory.release()
            self._map.close()
