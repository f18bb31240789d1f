"""`suspend --store`: memory of processes that share it goes to a checkpoint on disk and comes back; content once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chunkstore import CHUNK_SIZE_BYTES, Checkpoint, Store
from tests.gpu.conftest import LARGE, Group, same_picture
from tests.programs.client import Worker
from tests.programs.usage import memory_by_pid

CHUNK = min(CHUNK_SIZE_BYTES, LARGE)
SIZE = 3 * CHUNK // 2  # two chunks, the last one short


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_through_a_store(start_worker: Callable[..., Worker], group: Group, tmp_path: Path, depth: str) -> None:
    """Two ranks with the same content and memory of each other; two cycles, one chunk changes in between."""
    ranks = [start_worker(0), start_worker(1)]
    own = []
    for at, rank in enumerate(ranks):
        same, mine = rank.alloc(SIZE), rank.alloc(SIZE)
        rank.fill(same, SIZE, 7)
        rank.fill(mine, SIZE, at + 1)
        own.append(mine)
        other = ranks[1 - at]
        other.expect(other.ipc_open(rank.ipc_get(mine)), SIZE, [at + 1])
    Store.create(tmp_path / "store", chunk_size_bytes=CHUNK)
    for number in range(2):
        pictures, before = [rank.snapshot() for rank in ranks], memory_by_pid(group.machine)
        words = ("--store", str(tmp_path / "store"), "--ckpt-dir", str(tmp_path / str(number)), "--depth", depth)
        answer = group.tool.suspend(*(rank.pid for rank in ranks), options=words).expect(0)
        after = memory_by_pid(group.machine)
        for rank in ranks:
            assert before[rank.pid] - after.get(rank.pid, 0) >= 2 * SIZE, f"{before} became {after}"
            assert "gpushare-arena" not in Path(f"/proc/{rank.pid}/maps").read_text()
        moved = answer.json["groups"][0]["stored"]["bytes"]
        print(number, depth, moved, [(one["name"], one["seconds"]) for one in answer.json["groups"][0]["phases"]])
        if number == 0:
            assert moved["new"] >= 3 * SIZE and moved["known"] >= SIZE, moved
        else:
            # Besides the chunk that has changed, what the driver keeps in memory of ours, if anything.
            assert CHUNK <= moved["new"] < 2 * CHUNK, moved
        checkpoint = Checkpoint.open(tmp_path / str(number))
        assert sorted(checkpoint.inner_pids) == sorted(rank.pid for rank in ranks)
        back = group.resume(*ranks).json["groups"][0]
        print([(one["name"], one["seconds"]) for one in back["phases"]])
        for rank, picture in zip(ranks, pictures, strict=True):
            same_picture(picture, rank.snapshot())
            rank.check()
        # The first chunk of one allocation: seen by both ranks, and once in the next checkpoint.
        ranks[0].write(own[0], [number + 100])
        assert ranks[0].read(own[0]) == [number + 100]
        ranks[0].forget(own[0])
        for address in list(ranks[1].snapshot()["opened"]):
            ranks[1].forget(int(address))
