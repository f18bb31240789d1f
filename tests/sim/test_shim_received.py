"""Descriptors that were received and are in no use: never imported, or imported and dropped again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.programs.client import Worker
from tests.sim.shim_control import GRANULE, PLACEHOLDER, Group, ask, rows, used_bytes

Start = Callable[..., Worker]
both_ways = pytest.mark.parametrize("imported_before", [False, True])


def received(owner: Worker, other: Worker, imported_before: bool) -> tuple[dict[str, Any], int]:
    """Return a block and the number of a descriptor of it that only the other one holds."""
    block = owner.block(GRANULE)
    owner.fill(block["address"], GRANULE, 1)
    exported = owner.mem_export(block["handle"])
    number = owner.hand(exported, other)
    owner.close_fd(exported)
    if imported_before:
        other.drop_block(other.import_block(number, GRANULE))
    return block, number


def stands_for(owner: Worker, other: Worker, block: dict[str, Any], number: int) -> None:
    """Check that the descriptor is the owner's memory of now, in both directions."""
    view = other.import_block(number, GRANULE)
    other.expect(view["address"], GRANULE, [1])
    other.check()
    owner.write(block["address"], [7])
    assert other.read(view["address"]) == [7]
    owner.fill(block["address"], GRANULE, 1)
    other.drop_block(view)


@both_ways
def test_cycles(start_worker: Start, imported_before: bool) -> None:
    """The number is a placeholder while suspended and the owner's memory afterwards, in a third process, too."""
    owner, other, third = start_worker(), start_worker(), start_worker(1)
    block, number = received(owner, other, imported_before)
    copy = other.dup_fd(number)
    with Group([owner, other, third]) as group:
        for _ in range(2):
            group.suspend()
            assert PLACEHOLDER in other.readlink(number) and PLACEHOLDER in other.readlink(copy)
            assert ask(other.pid, "status")["imports"] == "0"
            group.resume()
            assert ask(other.pid, "status")["objects"] == "0" and rows(other.pid, "fds") == []
            stands_for(owner, other, block, number)
            passed_on = other.hand(copy, third)
            view = third.import_block(passed_on, GRANULE)
            assert [int(row["pid"]) for row in rows(third.pid, "imports")] == [owner.pid]
            third.drop_block(view)
            third.close_fd(passed_on)


@both_ways
def test_nothing_keeps_the_memory(start_worker: Start, imported_before: bool) -> None:
    """Once the descriptor is closed and the owner frees the memory, it is free."""
    owner, other = start_worker(), start_worker()
    before = used_bytes(owner)
    block, number = received(owner, other, imported_before)
    with Group([owner, other]) as group:
        group.cycle()
    owner.drop_block(block)
    assert used_bytes(owner) == before + GRANULE, "the descriptor alone keeps it"
    other.close_fd(number)
    assert used_bytes(owner) == before


@both_ways
@pytest.mark.parametrize(("released", "sealed"), [
    ((0,), ()), ((1,), ()), ((0, 1), ()), ((0, 1), (0,)), ((0, 1), (1,)), ((0, 1), (0, 1)),
])
def test_rollback(start_worker: Start, imported_before: bool, released: tuple[int, ...],
                  sealed: tuple[int, ...]) -> None:
    """Turned back after some have released, or after all have and some have sealed."""
    workers = [start_worker(), start_worker()]
    owner, other = workers
    block, number = received(owner, other, imported_before)
    with Group(workers) as group:
        group.arenas()
        group.quiesce()
        for at in released:
            ask(workers[at].pid, "release")
        for at in sealed:
            ask(workers[at].pid, "seal")
        group.resume()
        owner.check()
        stands_for(owner, other, block, number)
        group.cycle()
        stands_for(owner, other, block, number)


def test_one_that_comes_between_release_and_seal(start_worker: Start) -> None:
    """CPU threads run between the two: what they receive then is looked for at seal."""
    owner, other = start_worker(), start_worker()
    block = owner.block(GRANULE)
    owner.fill(block["address"], GRANULE, 1)
    exported = owner.mem_export(block["handle"])
    with Group([owner, other]) as group:
        group.arenas()
        group.quiesce()
        group.release()
        number = owner.hand(exported, other)
        ask(other.pid, "seal")
        ask(owner.pid, "seal")
        assert PLACEHOLDER in other.readlink(number)
        group.resume()
    stands_for(owner, other, block, number)


@both_ways
def test_the_exporter_is_gone_meanwhile(start_worker: Start, imported_before: bool) -> None:
    """The number stays a placeholder that can be closed; status says so until the next suspend."""
    owner, other = start_worker(), start_worker()
    _, number = received(owner, other, imported_before)
    with Group([owner, other]) as group:
        group.suspend()
    owner.kill()
    with Group([other]) as group:
        group.resume()
        assert ask(other.pid, "status")["lost_fds"] == "1"
        assert other.readlink(number) == "/dev/null"
        other.close_fd(number)
        group.cycle()
        assert ask(other.pid, "status")["lost_fds"] == "0"
