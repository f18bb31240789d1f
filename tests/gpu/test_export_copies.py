"""Exported descriptors that the application keeps, their copies, and those it received (B25, pitfall 14, FR-8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.conftest import Group
from tests.programs.client import Worker

MIB = 1 << 20
SIZE = 4 * MIB


def test_b25_kept_descriptors(start_worker: Callable[..., Worker], group: Group) -> None:
    """No descriptor of the driver is left after a suspend; afterwards every number works and can be closed."""
    owner, other = start_worker(0), start_worker(0)
    block = owner.block(SIZE)
    owner.fill(block["address"], SIZE, 1)
    exported = owner.mem_export(block["handle"])
    copy = owner.dup_fd(exported)
    received = owner.hand(exported, other)
    back = other.hand(received, owner)  # sent to itself by way of a peer, as FlashInfer does
    imported = other.import_block(received, SIZE)
    other.expect(imported["address"], SIZE, [1])
    for _ in range(2):
        group.cycle(owner, other)
        for holder, number in ((owner, exported), (owner, copy), (owner, back), (other, received)):
            assert "nvidia" in holder.readlink(number), f"fd {number} is no export any more"
        handed = owner.hand(copy, other)
        fresh = other.import_block(handed, SIZE)
        other.expect(fresh["address"], SIZE, [1])
        other.check()
        other.drop_block(fresh)
        other.close_fd(handed)
    for holder, number in ((owner, exported), (owner, copy), (owner, back), (other, received)):
        holder.close_fd(number)
    again = owner.mem_export(block["handle"])
    fresh = other.import_block(owner.hand(again, other), SIZE)
    other.expect(fresh["address"], SIZE, [1])
    other.check()


def test_b33_export_before_map(start_worker: Callable[..., Worker], group: Group) -> None:
    """B33: NCCL's windows export memory before anybody maps it, and map it late, on some ranks after a cycle."""
    owner, other = start_worker(0), start_worker(0)
    handle = owner.mem_create(SIZE)
    received = owner.hand(owner.mem_export(handle), other)
    group.cycle(owner, other)
    there = other.import_block(received, SIZE)
    group.cycle(owner, other)
    here = owner.map_block(handle, SIZE)
    owner.fill(here["address"], SIZE, 7)
    other.expect(there["address"], SIZE, [7])
    group.cycle(owner, other)
    other.check()


def test_sent_to_oneself_and_never_closed(start_worker: Callable[..., Worker], group: Group) -> None:
    """FlashInfer's way: each rank sends its export to all, itself included, maps what it gets, and closes nothing."""
    ranks = [start_worker(0), start_worker(1)]
    blocks = [rank.block(SIZE, ordinal=at % group.machine.devices) for at, rank in enumerate(ranks)]
    views = []
    for at, (owner, block) in enumerate(zip(ranks, blocks, strict=True)):
        owner.fill(block["address"], SIZE, at + 1)
        sent = owner.mem_export(block["handle"])
        for rank in ranks:
            view = rank.import_block(owner.hand(sent, rank), SIZE)
            rank.expect(view["address"], SIZE, [at + 1])
            views.append((at, rank, view))
    for turn in range(3):
        group.cycle(*ranks)
        for at, rank, view in views:
            seed = 100 * (turn + 1) + at
            rank.fill(view["address"], SIZE, seed)
            for other, reader, seen in views:
                if other == at:
                    reader.expect(seen["address"], SIZE, [seed])
            ranks[at].expect(blocks[at]["address"], SIZE, [seed])
        for rank in ranks:
            rank.check()
    for _, rank, view in views:
        rank.drop_block(view)
    group.cycle(*ranks)


@pytest.mark.parametrize("imported_before", [False, True])
def test_received_without_an_import(start_worker: Callable[..., Worker], group: Group, imported_before: bool) -> None:
    """A process keeps a descriptor that it never imported, or of which it dropped the import long ago."""
    owner, other = start_worker(0), start_worker(0)
    block = owner.block(SIZE)
    owner.fill(block["address"], SIZE, 1)
    received = owner.hand(owner.mem_export(block["handle"]), other)
    if imported_before:
        other.drop_block(other.import_block(received, SIZE))
    group.cycle(owner, other)
    fresh = other.import_block(received, SIZE)
    other.expect(fresh["address"], SIZE, [1])
    other.check()


def test_number_used_for_something_else(start_worker: Callable[..., Worker], group: Group) -> None:
    """A number that was closed before the suspend and means another file now is left alone."""
    owner = start_worker(0)
    block = owner.block(SIZE)
    owner.fill(block["address"], SIZE, 1)
    number = owner.mem_export(block["handle"])
    other_file = owner.dup_fd(2)
    owner.close_fd(number)
    reused = owner.dup_fd(other_file)
    before = owner.readlink(reused)
    group.cycle(owner)
    assert owner.readlink(reused) == before


def test_b25_own_import(start_worker: Callable[..., Worker], group: Group) -> None:
    """A process that imports its own export maps the same memory twice afterwards too."""
    owner = start_worker(0)
    block = owner.block(SIZE)
    owner.fill(block["address"], SIZE, 1)
    fd = owner.mem_export(block["handle"])
    mine = owner.import_block(fd, SIZE)
    owner.expect(mine["address"], SIZE, [1])
    group.cycle(owner)
    owner.fill(mine["address"], SIZE, 2)
    owner.expect(block["address"], SIZE, [2])
    owner.check()
    owner.close_fd(fd)
