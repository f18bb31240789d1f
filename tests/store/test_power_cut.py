"""Only what was synced survives a power cut: of everything else the disk keeps what it likes.

`Volatile` notes, at every sync, what the disk then holds for certain: the content of a file, the names in a directory.
At the cut a new tree is made: certain names stay, later changes of names are kept or lost one by one, and a file that
was not synced holds its content, a part of it, zeros, or nothing. The seed is in the test's name.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from chunkstore import Checkpoint, Files, How, Store, errors, fsck, roots
from chunkstore.roots import State
from chunkstore.save import remove
from chunkstore.system import System
from tests.store.test_faults import NEW, OLD, save_new
from tests.store.tools import CHANGING, SIZE, content, load, memory, save

_Key = tuple[int, int]  # inode number, and how many files had it before


class Cut(BaseException):
    """The power is gone: no further call returns."""


class Volatile(System):
    """A system over the tree at `top`, whose power is cut before the call number `cut` that changes something."""

    def __init__(self, top: Path, cut: int) -> None:
        self.cut = cut
        self.calls = 0
        self._generation: dict[int, int] = {}
        self._content: dict[_Key, bytes] = {}
        self._names: dict[_Key, dict[str, _Key]] = {}
        self._directories: set[_Key] = set()
        self._top = str(top)
        for folder, _, names in os.walk(top):
            self._note_directory(folder)
            for name in names:
                self._note_file(os.path.join(folder, name))

    def __getattribute__(self, name: str) -> Any:
        if name in CHANGING:
            self.calls += 1
            if self.calls > self.cut:
                raise Cut
        return super().__getattribute__(name)

    def _key(self, path: str) -> _Key:
        """Return what a path is, even if its inode number was another file's before."""
        number = os.stat(path).st_ino
        return number, self._generation.get(number, 0)

    def _note_file(self, path: str) -> None:
        self._content[self._key(path)] = Path(path).read_bytes()

    def _note_directory(self, path: str) -> None:
        key = self._key(path)
        self._directories.add(key)
        self._names[key] = {name: self._key(os.path.join(path, name)) for name in os.listdir(path)}

    def _fresh(self, path: str) -> None:
        number = os.stat(path).st_ino
        self._generation[number] = self._generation.get(number, 0) + 1

    def open(self, path: str, flags: int) -> int:
        """Open a file, and note if it is a new one."""
        new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = super().open(path, flags)
        if new:
            self._fresh(path)
        return fd

    def mkdir(self, path: str) -> None:
        """Make a directory whose names are not certain."""
        super().mkdir(path)
        self._fresh(path)
        self._directories.add(self._key(path))
        self._names[self._key(path)] = {}

    def datasync(self, fd: int) -> None:
        """Make a content certain."""
        super().datasync(fd)
        self._note_file(f"/proc/self/fd/{fd}")

    def sync(self, fd: int) -> None:
        """Make the names in a directory certain."""
        super().sync(fd)
        self._note_directory(os.readlink(f"/proc/self/fd/{fd}"))

    def survivors(self, target: Path, chance: random.Random) -> None:
        """Write what the disk holds after the cut into a new directory."""
        now = {self._key(folder): folder for folder, *_ in os.walk(self._top)}
        self._rebuild(self._key(self._top), now, target, chance)

    def _rebuild(self, key: _Key, now: dict[_Key, str], target: Path, chance: random.Random) -> None:
        target.mkdir()
        folder = now.get(key)
        current = {name: os.path.join(folder, name) for name in os.listdir(folder)} if folder is not None else {}
        certain = self._names[key]
        for name in sorted(certain.keys() | current.keys()):
            before = certain.get(name)
            after = self._key(current[name]) if name in current else None
            kept = before if before == after else chance.choice([before, after])
            if kept is None:
                continue
            if kept in self._directories:
                self._rebuild(kept, now, target / name, chance)
            else:
                (target / name).write_bytes(self._kept(kept, current.get(name) if kept == after else None, chance))

    def _kept(self, key: _Key, path: str | None, chance: random.Random) -> bytes:
        certain = self._content.get(key)
        now = Path(path).read_bytes() if path is not None else b""
        if certain is not None and (certain == now or path is None):
            return certain
        return chance.choice([certain or b"", now, now[: len(now) // 2], bytes(len(now))])


def survive(volatile: Volatile, source: Path, target: Path, seed: int) -> None:
    """Cut, and put what survived in the place of the old tree."""
    volatile.survivors(target, random.Random(seed))
    source.rename(source.with_name("before"))
    target.rename(source)


def begun(tmp_path: Path, number: int) -> Path:
    """Make a tree with a store and a checkpoint, all of it on the disk."""
    path = tmp_path / f"run{number}" / "disk"
    path.mkdir(parents=True)
    save(Store.create(path / "store", chunk_size_bytes=SIZE, cache=path / "cache"), path / "old", OLD)
    return path


def require_whole(path: Path) -> None:
    """Check that nothing that a checkpoint needs is bad, and that every chunk is what its name says."""
    store = Store.open(path / "store")
    assert load(store, path / "old") == [content(number) for number in OLD]
    checked = fsck.check(store)
    assert not checked.bad
    assert not checked.unreachable


@pytest.mark.parametrize("seed", range(3))
def test_fr60_fr61_during_a_save(tmp_path: Path, seed: int) -> None:
    """At a third of the calls each; together the seeds cut before every one."""
    number = seed
    while True:
        path = begun(tmp_path, number)
        volatile = Volatile(path, number)
        ended = False
        try:
            save_new(path, Files(volatile))
            ended = True
        except Cut:
            pass
        except errors.WriteFailed as failure:
            pytest.fail(f"cut {number}: {failure}")
        survive(volatile, path, path.with_name("after"), seed * 1000 + number)
        require_whole(path)
        states = [item.state for item in roots.with_path(Store.open(path / "store"), path / "new")]
        exists = (path / "new" / "manifest.json").exists()
        assert exists or not ended, "a checkpoint that was committed is gone"
        assert states in ([State.COMPLETE],) if exists else ([], [State.ABORTED])
        if exists:
            assert sorted(load(Store.open(path / "store", cache=path / "cache"), path / "new")) == sorted(NEW)
        else:
            save_new(path, Files())
            require_whole(path)
        if ended:
            break
        number += 3
    assert number > 60


def test_fr60_chunk_that_another_saver_has_not_synced_yet(tmp_path: Path) -> None:
    """One saver has published a chunk; another finds it, and is done before the first could sync its directory."""
    path = begun(tmp_path, 0)
    volatile = Volatile(path, 10**9)

    class Slow(Volatile):
        """The first saver, which never gets to sync a directory. The disk is the same."""

        def sync(self, fd: int) -> None:
            raise Cut

    slow = Slow(path, 10**9)
    for name in ("_generation", "_content", "_names", "_directories"):
        setattr(slow, name, getattr(volatile, name))
    with pytest.raises(Cut):
        Store.open(path / "store", files=Files(slow)).put(memory(content(4)))
    put = Store.open(path / "store", files=Files(volatile)).put(memory(content(4)))
    assert put.how is How.KNOWN
    survive(volatile, path, path.with_name("after"), 1)
    Store.open(path / "store").get(put.chunk, memory(SIZE))


@pytest.mark.parametrize("seed", range(2))
def test_during_a_removal(tmp_path: Path, seed: int) -> None:
    number = seed
    while True:
        path = begun(tmp_path, number)
        save_new(path, Files())
        volatile = Volatile(path, number)
        ended = False
        try:
            remove(Store.open(path / "store", files=Files(volatile)), path / "new")
            ended = True
        except Cut:
            pass
        survive(volatile, path, path.with_name("after"), seed * 1000 + number)
        require_whole(path)
        store = Store.open(path / "store")
        states = [item.state for item in roots.with_path(store, path / "new")]
        assert states in ([], [State.COMPLETE], [State.ABORTED])
        if states == [State.COMPLETE]:
            assert Checkpoint.open(path / "new").load() is None
        if ended:
            assert states == []
            break
        number += 2
    assert number > 5


@pytest.mark.parametrize("seed", range(2))
def test_while_a_store_is_made(tmp_path: Path, seed: int) -> None:
    for number in [*range(seed, 14, 2), *range(250 + seed, 300, 2)]:
        path = tmp_path / f"run{number}" / "disk"
        path.mkdir(parents=True)
        volatile = Volatile(path, number)
        try:
            Store.create(path / "store", chunk_size_bytes=SIZE, files=Files(volatile))
        except Cut:
            pass
        survive(volatile, path, path.with_name("after"), seed * 1000 + number)
        store = Store.create(path / "store", chunk_size_bytes=SIZE)
        save(store, path / "old", OLD)
        require_whole(path)


@pytest.mark.parametrize("seed", range(4))
def test_just_after_the_first_save_in_a_new_store(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "run" / "disk"
    path.mkdir(parents=True)
    volatile = Volatile(path, 10**9)
    save(Store.create(path / "store", chunk_size_bytes=SIZE, files=Files(volatile)), path / "old", OLD)
    survive(volatile, path, path.with_name("after"), seed)
    require_whole(path)
