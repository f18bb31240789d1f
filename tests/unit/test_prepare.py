"""Which arenas are page-locked in a context of the shim's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpususpend.deadline import Deadline
from gpususpend.defaults import APART_BYTES
from gpususpend.journal import Depth
from gpususpend.prepare import give


@pytest.mark.parametrize(
    ("depth", "stored", "size", "apart"),
    [
        (Depth.PAGES, None, APART_BYTES, 1),
        (Depth.PAGES, None, APART_BYTES - 1, 0),
        (Depth.PAGES, object(), APART_BYTES, 0),  # a ring is given up while all is quiet
        (Depth.PROCESS, None, APART_BYTES, 0),  # a restored kernel keeps the GPU from other contexts
    ],
)
def test_only_large_ones_that_no_checkpoint_carries(depth: Depth, stored: object, size: int, apart: int) -> None:
    asked: dict[str, Any] = {}
    session = SimpleNamespace(record=SimpleNamespace(depth=depth), stored=stored)
    rank = SimpleNamespace(ask=lambda verb, deadline, **fields: asked.update(fields, verb=verb))
    give(cast(Any, session), cast(Any, rank), cast(Any, SimpleNamespace(fd=3, bytes=size)), Deadline(1))
    assert asked == {"verb": "arena", "fd": 3, "bytes": size, "apart": apart}
