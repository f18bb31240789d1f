"""What memory has to hold: patterns computed by numpy, and the comparison with what the device holds.

The reference lives in the worker's own memory and never passes through the driver, so a byte lost on the way out, in
the arena or on the way back is seen whatever moved it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.programs import calls

Words = NDArray[np.uint32]


def pattern(seeds: list[int], count: int) -> Words:
    """Return `count` words that differ from place to place: the word-wise sum of the patterns of all `seeds`."""
    places = np.arange(count, dtype=np.uint32)
    total = np.zeros(count, dtype=np.uint32)
    for seed in seeds:
        total += places * np.uint32(2654435761) + np.uint32(seed * 2246822519 % (1 << 32)) + np.uint32(1)
    return total


def address_of(words: Words) -> int:
    """Return the host address of an array."""
    return int(words.ctypes.data)


def write(address: int, words: Words) -> None:
    """Copy words to the device."""
    calls.need(calls.copy_htod(address, address_of(words), words.nbytes), "copy to the device")


def read(address: int, count: int) -> Words:
    """Copy `count` words from the device."""
    words = np.full(count, 0xDEADBEEF, dtype=np.uint32)
    calls.need(calls.copy_dtoh(address_of(words), address, words.nbytes), "copy from the device")
    return words


def host_view(address: int, count: int) -> Words:
    """Return `count` words of this process's own memory, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


@dataclass(frozen=True)
class Region:
    """Memory whose content is known. `host` memory is read by the CPU, other memory through the driver."""

    address: int
    size: int
    seeds: list[int]
    host: bool = False

    def wrong(self) -> dict[str, object] | None:
        """Return where the content differs from the reference first, or None."""
        count = self.size // 4
        wanted = pattern(self.seeds, count)
        found = host_view(self.address, count) if self.host else read(self.address, count)
        places = np.flatnonzero(found != wanted)
        if not places.size:
            return None
        first = int(places[0])
        return {
            "address": hex(self.address), "size": self.size, "words_wrong": int(places.size), "first_at": first * 4,
            "found": hex(int(found[first])), "wanted": hex(int(wanted[first])),
        }
