"""Memory that is made again is of the same kind as before, seen by a process that has no shim to tell it so (FR-28)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.programs.client import Worker
from tests.sim.shim_control import GRANULE, Group, ask

Start = Callable[..., Worker]

WANTED: dict[str, list[Any]] = {
    "device": ["device", 0, 1, 0],
    "device for RDMA": ["device", 0, 1, 1],
    "second device": ["device", 1, 1, 0],
    "host": ["host_numa", 0, 1, 0],
}
"""Location, ordinal, handle types and RDMA flag of `mem_create`."""


def seen_outside(start: Start, owner: Worker, handle: int) -> Any:
    """Return what the driver itself says of exported memory to a process without the shim."""
    bare = start(0, shim=False)
    number = owner.mem_export(handle)
    imported = bare.mem_import(owner.hand(number, bare))
    owner.close_fd(number)
    properties = bare.mem_properties(imported)
    bare.kill()
    return properties


@pytest.mark.parametrize("name", WANTED)
def test_fr28_made_again_with_the_same_properties(start_worker: Start, name: str) -> None:
    """FR-28: location, handle types and flags, by the driver's own word to somebody else; and the size that it asks."""
    owner = start_worker()
    handle = owner.mem_create(2 * GRANULE, *WANTED[name])
    before = seen_outside(start_worker, owner, handle), owner.mem_properties(handle)
    with Group([owner]) as group:
        for _ in range(2):
            group.cycle()
            assert (seen_outside(start_worker, owner, handle), owner.mem_properties(handle)) == before
    address = owner.mem_reserve(2 * GRANULE)
    owner.mem_map(address, 2 * GRANULE, handle)
    owner.mem_access(address, 2 * GRANULE, [["device", 0, 3]])
    assert owner.address_range(address)[1] == 2 * GRANULE
    assert ask(owner.pid, "status")["objects"] == "1"


def test_fr28_handle_types_that_allow_no_export(start_worker: Start) -> None:
    """FR-28: what could not be exported cannot be exported afterwards either."""
    owner = start_worker()
    handle = owner.mem_create(GRANULE, "device", 0, 0)
    before = owner.code("mem_export", handle)
    assert before != 0
    with Group([owner]) as group:
        group.cycle()
    assert owner.code("mem_export", handle) == before
