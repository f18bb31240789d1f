"""What the tests of the store share: aligned memory, contents by number, a system whose calls fail."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chunkstore import Allocation, Checkpoint, Chunk, Files, Save, Store
from chunkstore.system import System

SIZE = 64 << 10
"""The chunk size of the tests' stores: several blocks, and quick."""

CHANGING = ("write", "truncate", "datasync", "sync", "link", "rename", "unlink", "mkdir", "mark_used", "mark_published")
"""Calls that change something on a disk."""


def memory(content: bytes | int) -> memoryview:
    """Return page-aligned memory that holds a content, or that many zeros."""
    size = content if isinstance(content, int) else len(content)
    view = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    if not isinstance(content, int):
        view[:] = content
    return view


def content(number: int, size: int = SIZE) -> bytes:
    """Return the content of that number: none is all zeros but number 0."""
    return bytes(size) if number == 0 else random.Random(number).randbytes(size)


class Faulty(System):
    """A system whose calls a function may stop: it is called with name and arguments before each.

    It may raise, or return what the call is to return; None lets the call happen.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __getattribute__(self, name: str) -> Any:
        real = super().__getattribute__(name)
        if name.startswith("_") or name == "before" or not callable(real):
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            answer = self.before(name, *arguments)
            return real(*arguments, **named) if answer is None else answer

        return call


def failing_nth(names: Iterable[str], number: int, code: int) -> Faulty:
    """Return a system whose `number`-th call (from 0) to one of these fails with an error number; -1: none does."""
    wanted, count = set(names), [0]

    def before(name: str, *arguments: Any) -> None:
        if name in wanted:
            count[0] += 1
            if count[0] - 1 == number:
                raise OSError(code, os.strerror(code))

    system = Faulty(before)
    system.__dict__["_count"] = count
    return system


def counted(system: Faulty) -> int:
    """Return how many of the calls that `failing_nth` counts were made."""
    return int(system.__dict__["_count"][0])


def save(store: Store, directory: Path, numbers: list[int], inner_pid: int = 7) -> Checkpoint:
    """Save a checkpoint of one rank with an allocation for each content."""
    with Save.begin(store, directory) as begun:
        begun.add_rank(inner_pid)
        for index, number in enumerate(numbers):
            put = store.put(memory(content(number)))
            begun.add(inner_pid, Allocation(0, 0x7F0000000000 + index * SIZE, SIZE, (put.chunk,)))
        return begun.commit()


def load(store: Store, directory: Path) -> list[bytes]:
    """Return the content of every chunk of a checkpoint."""
    into = memory(store.chunk_size_bytes)
    contents = []
    for chunk in Checkpoint.open(directory).all_chunks():
        store.get(chunk, into)
        contents.append(bytes(into[: chunk.size_bytes]))
    return contents


def chunk_file(root: Store | Path, chunk: Chunk) -> Path:
    """Return where a chunk lies in a store or a cache."""
    path = Path(root.path) if isinstance(root, Store) else root
    return path / "chunks" / str(chunk.hash)[:2] / str(chunk.hash)


def files_of(before: Callable[..., Any], told: list[str] | None = None) -> Files:
    """Return files over a system whose calls `before` may stop."""
    return Files(Faulty(before), None if told is None else told.append)


def error(code: int) -> OSError:
    """Return the OSError of an error number."""
    return OSError(code, errno.errorcode[code])
