"""Fabric handles on the simulated machine: 64 bytes that name memory, between processes that have a channel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim.conftest import MIB

Start = Callable[..., Worker]

FABRIC = 8
INVALID_VALUE, NOT_PERMITTED = 1, 800
WITH_CHANNEL = {"SIMCUDA_FABRIC": "1"}
KEPT = WITH_CHANNEL | {"GPUSHARE_FABRIC": "keep"}


@pytest.fixture
def owner(start_worker: Start) -> Worker:
    """A process without the shim that has a channel."""
    return start_worker(0, shim=False, env=WITH_CHANNEL)


def mapped(worker: Worker, handle: int) -> int:
    """Map 2 MiB and return the address."""
    address = worker.mem_reserve(2 * MIB)
    worker.mem_map(address, 2 * MIB, handle)
    worker.mem_access(address, 2 * MIB, [["device", 0, 3]])
    return int(address)


def test_memory_is_shared_by_the_bytes(start_worker: Start, owner: Worker) -> None:
    handle = owner.mem_create(2 * MIB, "device", 0, FABRIC)
    text = owner.fabric_export(handle)
    assert len(bytes.fromhex(text)) == 64 and owner.fabric_export(handle) == text
    other = start_worker(0, shim=False, env=WITH_CHANNEL)
    imported = other.fabric_import(text)
    theirs, mine = mapped(other, imported), mapped(owner, handle)
    owner.fill(mine, 2 * MIB, 5)
    other.expect(theirs, 2 * MIB, [5])
    other.check()
    assert other.code("fabric_export", imported) == INVALID_VALUE, "an import cannot be exported"
    own = owner.fabric_import(text)
    assert own != handle


def test_without_a_channel(start_worker: Start, owner: Worker) -> None:
    text = owner.fabric_export(owner.mem_create(2 * MIB, "device", 0, FABRIC))
    other = start_worker(0, shim=False)
    assert other.code("fabric_import", text) == other.code("mem_create", 2 * MIB, "device", 0, FABRIC) == NOT_PERMITTED


def test_bytes_do_not_keep_memory(start_worker: Start, owner: Worker) -> None:
    handle = owner.mem_create(2 * MIB, "device", 0, FABRIC)
    text = owner.fabric_export(handle)
    owner.mem_release(handle)
    other = start_worker(0, shim=False, env=WITH_CHANNEL)
    assert other.code("fabric_import", text) == INVALID_VALUE
    assert other.code("fabric_import", "00" * 64) == INVALID_VALUE


def test_memory_that_was_not_made_for_it(owner: Worker) -> None:
    assert owner.code("fabric_export", owner.mem_create(2 * MIB, "device", 0, 1)) == INVALID_VALUE
    assert owner.code("mem_export", owner.mem_create(2 * MIB, "device", 0, FABRIC)) == INVALID_VALUE


def test_through_the_shim_hidden_or_counted(start_worker: Start, owner: Worker, tool: Tool) -> None:
    text = owner.fabric_export(owner.mem_create(2 * MIB, "device", 0, FABRIC))
    hidden, kept = start_worker(0, env=WITH_CHANNEL), start_worker(0, env=KEPT)
    assert hidden.code("fabric_import", text) == NOT_PERMITTED
    imported = kept.fabric_import(text)
    answer = tool.suspend(kept.pid).expect(3)
    assert (answer.json["reason"], answer.json["error"]["facts"]["kind"]) == ("uncarried", "fabric")
    kept.mem_release(imported)
    owner.kill()
    tool.suspend(kept.pid).expect(0)
    tool.resume(kept.pid).expect(0)
