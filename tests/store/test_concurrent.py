"""Savers, removers, collectors, loaders and checks of several processes at work on one store."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from chunkstore import Allocation, Busy, Save, Store, Verify, fsck, gc
from chunkstore.cache import collect as collect_cache
from chunkstore.save import remove
from chunkstore.transfer import prefetch
from tests.store.test_faults import in_child
from tests.store.tools import SIZE, content, load, memory, save

CONTENTS = 6
"""So few that the savers meet in almost every chunk."""


def saver(path: Path, name: str, seed: int, rounds: int) -> None:
    """Save checkpoints and remove most of them again, each checked against what was saved."""
    chance = random.Random(seed)
    for number in range(rounds):
        store = Store.open(path / "store", cache=path / "cache", verify_existing=chance.choice(list(Verify)))
        numbers = [chance.randrange(CONTENTS) for _ in range(chance.randrange(1, 8))]
        directory = path / f"{name}-{number}"
        save(store, directory, numbers)
        assert load(store, directory) == [content(index) for index in numbers]
        if chance.random() < 0.8:
            remove(store, directory)


def collector(path: Path, rounds: int) -> None:
    """Collect without any grace."""
    for _ in range(rounds):
        try:
            gc.collect(Store.open(path / "store"), grace_s=0)
        except Busy:
            pass


def cache_collector(path: Path, rounds: int) -> None:
    """Empty the cache again and again, while others read it and write to it."""
    cache = Store.open(path / "store", cache=path / "cache").cache
    assert cache is not None
    for _ in range(rounds):
        collect_cache(cache, 2 * SIZE)


def checker(path: Path, rounds: int) -> None:
    """Check the store: nothing is ever wrong."""
    for _ in range(rounds):
        checked = fsck.check(Store.open(path / "store"), threads=1)
        assert checked.bad == (), checked


def prefetcher(path: Path, rounds: int) -> None:
    """Fill the cache with what one checkpoint needs."""
    store = Store.open(path / "store", cache=path / "cache")
    checkpoint = save(store, path / "prefetched", [1, 2, 3])
    for _ in range(rounds):
        prefetch(store, checkpoint, threads=1)
        assert load(store, path / "prefetched") == [content(1), content(2), content(3)]


def together(works: list[Callable[[], None]]) -> None:
    """Run each in a process of its own; all have to succeed."""
    children = []
    for work in works:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if in_child(work) == 0 else 1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * len(works)


def test_fr63_four_savers_two_collectors_and_others(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed, file=sys.stderr)
    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE, cache=tmp_path / "cache")
    save(store, tmp_path / "kept", [1, 2, 0, 5])
    together(
        [
            *(lambda at=number: saver(tmp_path, f"saver{at}", seed + at, 30) for number in range(4)),  # type: ignore[misc]
            *(lambda: collector(tmp_path, 150) for _ in range(2)),
            lambda: cache_collector(tmp_path, 100),
            lambda: checker(tmp_path, 20),
            lambda: prefetcher(tmp_path, 40),
        ]
    )
    assert fsck.check(store).clean
    assert load(store, tmp_path / "kept") == [content(number) for number in (1, 2, 0, 5)]
    gc.collect(store, grace_s=0)
    assert fsck.check(store).clean
    assert not os.listdir(tmp_path / "store" / "tmp")


def save_and_remove(path: Path, directory: Path) -> None:
    """Save and remove a checkpoint until this process is killed."""
    while True:
        with Save.begin(Store.open(path / "store"), directory) as begun:
            for index in range(5):
                put = begun.store.put(memory(content(index)))
                begun.add(1, Allocation(0, index * SIZE, SIZE, (put.chunk,)))
            begun.commit()
        remove(Store.open(path / "store"), directory)


def test_killed_savers_beside_a_collector(tmp_path: Path) -> None:
    """Each saver is killed at some moment; the collector never takes what the last one needs."""
    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE)
    save(store, tmp_path / "kept", [1, 2])
    chance = random.Random(5)
    for number in range(12):
        pid = os.fork()
        if pid == 0:
            try:
                save_and_remove(tmp_path, tmp_path / f"killed{number % 3}")
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        for _ in range(chance.randrange(1, 6)):
            gc.collect(Store.open(tmp_path / "store"), grace_s=0)
        os.kill(pid, 9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        checked = fsck.check(Store.open(tmp_path / "store"))
        assert not checked.bad
        if (tmp_path / f"killed{number % 3}" / "manifest.json").exists():
            remove(store, tmp_path / f"killed{number % 3}")
        assert load(store, tmp_path / "kept") == [content(1), content(2)]
