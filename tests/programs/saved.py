"""The memory of a suspended process as it lies in its arena: read it, and flip a bit of it.

For tests that ask whether a comparison would notice: a bit that is flipped here is wrong on the GPU after the resume,
as it would be if it had been lost on the way. Needs what a debugger needs (the same user, or root).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpususpend.control import ControlClient
from gpususpend.deadline import Deadline

ASK_S = 20.0


class NotThere(RuntimeError):
    """The process has no such memory in an arena."""


@dataclass(frozen=True)
class Piece:
    """`size` bytes from `offset` of an allocation, which lie at `place` in the arena."""

    offset: int
    size: int
    place: int


@dataclass(frozen=True)
class Allocation:
    """One allocation: where the process has it, and its pieces in order."""

    address: int
    size: int
    pieces: tuple[Piece, ...]


class Saved:
    """A process that is suspended without a store. Raises NotThere, or ShimRefused where it is not suspended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        with ControlClient(pid, pid, os.stat(f"/proc/{pid}").st_uid) as client:
            self.allocations = self._grouped(client.listing("pieces", Deadline(ASK_S)))
            self._base = self._mapping(client.request("status", Deadline(ASK_S)).number("arena_bytes"))

    def _grouped(self, rows: list[dict[str, str]]) -> list[Allocation]:
        heads: dict[str, tuple[int, int]] = {}
        pieces: dict[str, list[Piece]] = {}
        for row in rows:
            if "at" not in row:
                raise NotThere(f"process {self.pid}: object {row['object']} is not in an arena")
            if "addr" in row:
                heads[row["object"]] = int(row["addr"], 0), int(row["size"])
            pieces.setdefault(row["object"], []).append(Piece(int(row["offset"]), int(row["bytes"]), int(row["at"])))
        found = [Allocation(*heads[name], tuple(sorted(parts, key=lambda one: one.offset)))
                 for name, parts in pieces.items()]
        return sorted(found, key=lambda one: one.address)

    def _mapping(self, size: int) -> int:
        """Return where the arena is mapped: shared memory of that size, whose name depends on its kind."""
        found = []
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if end - begin == size and line.split()[1] == "rw-s":
                found.append(begin)
        if len(found) != 1:
            raise NotThere(f"process {self.pid} has {len(found)} mappings that may be its arena of {size} bytes")
        return found[0]

    def allocation_at(self, address: int) -> Allocation:
        """Return the allocation that an address of the device lies in."""
        for one in self.allocations:
            if one.address <= address < one.address + one.size:
                return one
        raise NotThere(f"process {self.pid} has no allocation at {address:#x}")

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes from an address of the device on."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            parts = []
            for place, length in self._places(address, size):
                memory.seek(place)
                parts.append(_exactly(memory.read(length), length))
        return b"".join(parts)

    def flip(self, address: int, bit: int) -> None:
        """Flip one bit, 0 to 7, of the byte at an address of the device."""
        [(place, _)] = self._places(address, 1)
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(place)
            byte = _exactly(memory.read(1), 1)[0]
            memory.seek(place)
            memory.write(bytes([byte ^ 1 << bit]))

    def _places(self, address: int, size: int) -> list[tuple[int, int]]:
        """Return where the process maps the bytes from an address on, part by part: [place, length]."""
        one = self.allocation_at(address)
        begin = address - one.address
        if begin + size > one.size:
            raise NotThere(f"{size} bytes at {address:#x} reach beyond the allocation's {one.size}")
        found = []
        for piece in one.pieces:
            first, end = max(begin, piece.offset), min(begin + size, piece.offset + piece.size)
            if first < end:
                found.append((self._base + piece.place + first - piece.offset, end - first))
        return found


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise OSError(f"{len(data)} bytes came where {size} were asked for")
    return data
