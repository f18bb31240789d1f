"""Rings: how many places there are, where they lie, and that each has one user."""

from __future__ import annotations

import os
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpususpend.ring import LEAST_PLACES, MOST_PLACES, STEP_BYTES, Ring, bytes_for, place_bytes, places_for

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 64 * MIB


@pytest.mark.parametrize(
    ("ranks", "ring", "need", "places"),
    [
        (1, 2 * GIB, 100 * GIB, 32), (2, 2 * GIB, 100 * GIB, 16), (8, 2 * GIB, 100 * GIB, 4),
        (8, 256 * MIB, 100 * GIB, LEAST_PLACES), (1, 0, 9 * GIB, LEAST_PLACES), (1, 99 * GIB, 900 * GIB, MOST_PLACES),
        (2, 2 * GIB, 5 * CHUNK - 1, 5), (2, 2 * GIB, 1, LEAST_PLACES),
    ],
)  # fmt: skip
def test_fr70_shares(ranks: int, ring: int, need: int, places: int) -> None:
    """The ring is for all ranks together; nobody gets more places than chunks, and everybody two."""
    assert places_for(CHUNK, ranks, ring, need) == places


@pytest.mark.parametrize("size", [4096, 64 * MIB, 96 * MIB, GIB])
def test_no_place_lies_across_two_registrations(size: int) -> None:
    """Since a copy must not either; the ring is as large as its last place demands."""
    ends = [bytes_for(number, size) for number in range(1, 40)]
    starts = [end - size for end in ends]
    assert all(start // STEP_BYTES == (end - 1) // STEP_BYTES for start, end in zip(starts, ends, strict=True))
    assert all(after >= end for after, end in zip(starts[1:], ends, strict=False))


def test_places_are_whole_pages() -> None:
    """Whatever the chunk size is: direct I/O needs aligned memory."""
    assert [place_bytes(size) for size in (1, 4096, 100_000, CHUNK)] == [4096, 4096, 102_400, CHUNK]


def test_each_place_has_one_user() -> None:
    """Also while threads fight for them; one more than there are is refused, and nothing waits."""
    fd = os.memfd_create("test-ring")
    os.ftruncate(fd, bytes_for(3, 4096))
    ring = Ring(fd, 3, 4096)
    os.close(fd)

    def use(number: int) -> bool:
        with ring.place() as place:
            place.memory[:8] = number.to_bytes(8, "little")
            return int.from_bytes(place.memory[:8], "little") == number

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(use, range(3000)))
    with ring.place() as one, ring.place() as two, ring.place() as three:
        assert {one.at, two.at, three.at} == {0, 4096, 8192}
        with pytest.raises(queue.Empty), ring.place():
            pass
    ring.close()
