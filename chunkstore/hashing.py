"""Hashes of chunks, and the test for zeros. Everything here leaves the GIL while it works on a whole chunk.

Owns the list of hashes; must not know files.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from chunkstore import errors

DEFAULT_HASH = "xxh3-128"

# Unlike a comparison of memoryviews or arrays, this one leaves the GIL and needs no second buffer.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


@dataclass(frozen=True)
class Hash:
    """A hash: `digest` maps the pieces of a content to lower-case hexadecimal of `digits` digits."""

    name: str
    digits: int
    digest: Callable[[Iterator[memoryview]], str]


def _xxh3_128() -> Callable[[Iterator[memoryview]], str]:
    import xxhash

    return lambda pieces: _run(xxhash.xxh3_128(), pieces)


def _blake3() -> Callable[[Iterator[memoryview]], str]:
    module = importlib.import_module("blake3")
    return lambda pieces: _run(module.blake3(), pieces)


def _run(state: Any, pieces: Iterator[memoryview]) -> str:
    for piece in pieces:
        state.update(piece)
    return str(state.hexdigest())


_HASHES = {"xxh3-128": (32, _xxh3_128, "xxhash"), "blake3": (64, _blake3, "blake3: pip install 'gpushare[blake3]'")}


def hash_by_name(name: str, path: str) -> Hash:
    """Return a hash; `path` is whose hash it is.

    Raises `NoHash` if the name is not known or the package that computes it is not installed.
    """
    if name not in _HASHES:
        raise errors.NoHash(path=path, hash=name, detail=f"known are {', '.join(_HASHES)}")
    digits, make, package = _HASHES[name]
    try:
        return Hash(name, digits, make())
    except ImportError:
        raise errors.NoHash(path=path, hash=name, detail=f"install the package {package}") from None


def address_of(view: memoryview) -> int:
    """Return the address of a view's first byte."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def is_zero(view: memoryview) -> bool:
    """Tell whether every byte is zero; stops at the first that is not."""
    if not len(view):
        return True
    address = address_of(view)
    return view[0] == 0 and _memcmp(address, address + 1, len(view) - 1) == 0


def same(one: memoryview, other: memoryview) -> bool:
    """Tell whether two views have the same bytes."""
    return len(one) == len(other) and _memcmp(address_of(one), address_of(other), len(one)) == 0
