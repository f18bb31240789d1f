"""A save whose Nth call fails, or that is killed before it: older checkpoints are whole, and the next save works.

The save under test meets all kinds of chunks: known, new, zeros, repeated, short, damaged; with a cache.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkstore import Allocation, Checkpoint, Files, Save, Store, errors, fsck, gc, roots
from chunkstore.roots import State
from chunkstore.save import remove
from tests.store.test_gc import age
from tests.store.tools import CHANGING, SIZE, Faulty, chunk_file, content, counted, failing_nth, load, memory, save

OLD = [1, 2, 0, 3]
NEW = [content(2), content(4), bytes(SIZE), content(5), content(5), content(3), content(6, 1234)]


def prepare(tmp_path: Path) -> Store:
    """Make a store with a checkpoint, and damage a chunk that no checkpoint needs."""
    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE, cache=tmp_path / "cache")
    save(store, tmp_path / "old", OLD)
    chunk_file(store, store.put(memory(content(5))).chunk).write_bytes(content(99))
    return store


def save_new(path: Path, files: Files) -> None:
    """Save the second checkpoint, of two ranks, from opening the store on."""
    store = Store.open(path / "store", cache=path / "cache", files=files)
    with Save.begin(store, path / "new") as begun:
        for index, piece in enumerate(NEW):
            put = store.put(memory(piece))
            begun.add(1 + index % 2, Allocation(0, index * SIZE, len(piece), (put.chunk,)))
        begun.commit()


def require_sound(path: Path, whole: bool | None) -> None:
    """Check both checkpoints: `whole` tells whether the new one must be there, None if it may."""
    store = Store.open(path / "store")
    assert load(store, path / "old") == [content(number) for number in OLD]
    exists = (path / "new" / "manifest.json").exists()
    assert whole is None or exists is whole
    if exists:
        loaded = Store.open(path / "store", cache=path / "cache")
        assert sorted(load(loaded, path / "new")) == sorted(NEW)
    checked = fsck.check(store)
    assert not [bad for bad in checked.bad if bad.checkpoints]
    assert not checked.unreachable


def require_next_save_works(path: Path) -> None:
    """Save again where the failed save was, and then collect what that left."""
    save_new(path, Files())
    require_sound(path, True)
    age(path / "store")
    store = Store.open(path / "store")
    gc.collect(store)
    assert [item.state for item in roots.find_all(store)] == [State.COMPLETE] * 2
    needed = {name for item in roots.find_all(store) if item.checkpoint for name in item.checkpoint.stored_chunks()}
    assert {entry.hash for entry in store.chunks.entries()} == needed
    assert not os.listdir(path / "store" / "tmp")
    assert sorted(os.listdir(path / "new")) == ["gpu-1.json", "gpu-2.json", "manifest.json"]


def reset(path: Path) -> None:
    """Take away what the new checkpoint brought."""
    store = Store.open(path / "store", cache=path / "cache")
    shutil.rmtree(path / "new", ignore_errors=True)
    for item in roots.with_path(store, path / "new"):
        roots.drop(store, item.root.id)
    for entry in [*store.chunks.entries()]:
        if entry.hash not in Checkpoint.open(path / "old").stored_chunks():
            os.unlink(store.chunks.file_of(entry.hash))
    chunk_file(store, store.put(memory(content(5))).chunk).write_bytes(content(99))
    (path / "store" / "fsck.json").unlink(missing_ok=True)


CODES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS]


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_fr65_nth_call_fails(tmp_path: Path, lasting: bool) -> None:
    """In the store, the cache or the checkpoint's directory; a disk that stays full or gone, or that recovers."""
    prepare(tmp_path)
    number = 0
    while True:
        code = CODES[number % len(CODES)]
        system = failing_nth(CHANGING, number, code) if not lasting else failing_from(CHANGING, number, code)
        told: list[str] = []
        try:
            save_new(tmp_path, Files(system, told.append))
        except errors.WriteFailed as failure:
            assert str(tmp_path) in str(failure)
            require_sound(tmp_path, None if lasting else False)
        else:
            # What fails after the manifest, or in the cache, or while cleaning up, is no failure of the save.
            require_sound(tmp_path, True)
            if counted(system) <= number:
                break
        if (tmp_path / "new" / "manifest.json").exists():
            # Also where the save failed: the directory could not be synced, nor the manifest taken back.
            remove(Store.open(tmp_path / "store"), tmp_path / "new")
        if number % 10 == 0:
            require_next_save_works(tmp_path)
        reset(tmp_path)
        number += 1
    assert number > 50


def failing_from(names: tuple[str, ...], number: int, code: int) -> Faulty:
    """Return a system on which every call to one of these fails, from the `number`-th on."""
    count = [0]

    def before(name: str, *arguments: Any) -> None:
        if name in names:
            count[0] += 1
            if count[0] > number:
                raise OSError(code, os.strerror(code))

    system = Faulty(before)
    system.__dict__["_count"] = count
    return system


def killed_at(number: int) -> Callable[..., None]:
    """Return a hook that kills this process before the `number`-th call that changes anything.

    To be killed before another call leaves the same behind as before the next one that does.
    """
    count = [0]

    def before(name: str, *arguments: Any) -> None:
        if name in CHANGING or (name == "open" and arguments[1] & os.O_CREAT):
            count[0] += 1
            if count[0] > number:
                os.kill(os.getpid(), signal.SIGKILL)

    return before


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked process; returns its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fr61_killed_before_each_call(tmp_path: Path) -> None:
    """kill -9 before each call in turn: the checkpoint is there as a whole or not at all, and the store is clean."""
    prepare(tmp_path)
    number = 0
    while True:
        status = in_child(lambda at=number: save_new(tmp_path, Files(Faulty(killed_at(at)))))  # type: ignore[misc]
        assert status in (0, -signal.SIGKILL)
        require_sound(tmp_path, True if status == 0 else None)
        if status == 0:
            break
        states = {item.state for item in roots.with_path(Store.open(tmp_path / "store"), tmp_path / "new")}
        complete = (tmp_path / "new" / "manifest.json").exists()
        assert states <= ({State.COMPLETE} if complete else {State.ABORTED})
        if number % 20 == 0 and not complete:
            require_next_save_works(tmp_path)
        reset(tmp_path)
        number += 1
    assert number > 60


def test_interrupted_at_each_call(tmp_path: Path) -> None:
    """Control-C at any moment leaves a whole checkpoint or none, and nothing that a collector could not judge."""
    prepare(tmp_path)
    number = 0
    while True:
        count = [0]

        def interrupt(name: str, *arguments: Any, count: list[int] = count, at: int = number) -> None:
            if name in CHANGING or name == "open":
                count[0] += 1
                if count[0] - 1 == at:
                    raise KeyboardInterrupt

        ended = False
        try:
            save_new(tmp_path, Files(Faulty(interrupt)))
            ended = True
        except KeyboardInterrupt:
            pass
        exists = (tmp_path / "new" / "manifest.json").exists()
        states = {item.state for item in roots.with_path(Store.open(tmp_path / "store"), tmp_path / "new")}
        assert states <= ({State.COMPLETE} if exists else {State.ABORTED})
        if number % 20 == 0:
            require_sound(tmp_path, None)
            if not exists:
                require_next_save_works(tmp_path)
        if ended and count[0] <= number:
            break
        reset(tmp_path)
        number += 1
    assert number > 100


def test_aborted_save_whose_root_cannot_be_dropped_stops_the_next(tmp_path: Path) -> None:
    """Else that root would lead to a directory of another checkpoint, and nothing could be collected any more."""
    store = prepare(tmp_path)
    in_child(lambda: save_new(tmp_path, Files(Faulty(killed_at(20)))))
    (found,) = roots.with_path(store, tmp_path / "new")
    assert found.state is State.ABORTED

    def fail(name: str, *arguments: Any) -> None:
        if name == "unlink" and arguments[0] == roots.root_file(store, found.root.id):
            raise OSError(errno.EIO, "no")

    with pytest.raises(errors.WriteFailed):
        save_new(tmp_path, Files(Faulty(fail)))
    assert [item.state for item in roots.with_path(store, tmp_path / "new")] == [State.ABORTED]
    require_next_save_works(tmp_path)


@pytest.mark.parametrize(("code", "name"), [(errno.EFBIG, "-f"), (errno.ENOMEM, "-v"), (errno.EMFILE, "-n")])
def test_limits_of_this_process_are_named(code: int, name: str) -> None:
    """Whatever was about to be done with a file: what is short is the process's own."""
    for make in (errors.write_failed, errors.unreadable):
        assert f"(ulimit {name}" in str(make("cannot do it to", "/store", OSError(code, os.strerror(code))))


def test_store_that_vanishes_during_a_save(tmp_path: Path) -> None:
    store = prepare(tmp_path)
    with pytest.raises(errors.WriteFailed, match="see that it is still mounted"):
        with Save.begin(store, tmp_path / "new"):
            (tmp_path / "store").rename(tmp_path / "away")
            store.put(memory(content(7)))
    (tmp_path / "away").rename(tmp_path / "store")
    require_sound(tmp_path, False)
    require_next_save_works(tmp_path)


def test_b14_store_that_vanishes_during_a_load(tmp_path: Path) -> None:
    store = prepare(tmp_path)
    (tmp_path / "store").rename(tmp_path / "away")
    store.cache = None
    with pytest.raises(errors.ChunkMissing):
        load(store, tmp_path / "old")
    (tmp_path / "away").rename(tmp_path / "store")
    assert load(store, tmp_path / "old") == [content(number) for number in OLD]
