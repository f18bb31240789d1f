"""A check finds every damage and names whom it hits; a clean one lets saves believe what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from chunkstore import How, Store, Verify, errors, fsck, report, roots, save
from chunkstore.transfer import Progress
from tests.store.test_gc import age
from tests.store.tools import SIZE, chunk_file, content, error, files_of, load, memory
from tests.store.tools import save as make


def damage(store: Store, number: int, how: str) -> str:
    """Damage the chunk of that content, and return its hash."""
    chunk = store.put(memory(content(number))).chunk
    path = chunk_file(store, chunk)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"content": content(99), "size": content(number)[:-1], "long": bytes(SIZE * 2)}[how])
    return str(chunk.hash)


HOWS = ["missing", "content", "size", "long"]


def test_nothing_wrong(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ckpt", [1, 0, 2])
    store.put(memory(content(3)))
    seen: list[Progress] = []
    checked = fsck.check(store, report=seen.append)
    assert checked.clean
    assert (checked.chunks, checked.bytes, checked.unneeded_chunks, checked.bad) == (3, 3 * SIZE, 1, ())
    assert seen[-1] == Progress(3, 3, 3 * SIZE, 3 * SIZE)


@pytest.mark.parametrize("how", HOWS)
def test_fr63_damage_is_listed_by_checkpoint_and_others_are_not_hit(store: Store, tmp_path: Path, how: str) -> None:
    for name, numbers in (("one", [1, 2]), ("two", [2, 3]), ("three", [3])):
        make(store, tmp_path / name, numbers)
    name = damage(store, 2, how)
    checked = fsck.check(store)
    assert not checked.clean
    hit = (str(tmp_path / "one"), str(tmp_path / "two"))
    assert [(bad.hash, bad.checkpoints) for bad in checked.bad] == [(name, hit)]
    assert load(store, tmp_path / "three") == [content(3)]
    for checkpoint, bad in (("one", 1), ("three", 0)):
        opened = roots.Checkpoint.open(tmp_path / checkpoint)
        assert len(fsck.check_checkpoint(store, opened)) == bad


@pytest.mark.parametrize("how", HOWS)
def test_repair_from_another_store(store: Store, tmp_path: Path, how: str) -> None:
    other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
    for number in (1, 2, 3):
        other.put(memory(content(number)))
    make(store, tmp_path / "ckpt", [1, 2, 3])
    names = {damage(store, 1, how), damage(store, 2, how)}
    damage(other, 2, "content")
    checked = fsck.check(store, repair_from=other)
    assert {bad.hash: bad.repaired for bad in checked.bad if bad.repaired}.keys() < names
    assert "damaged too" in next(bad.detail for bad in checked.bad if not bad.repaired)
    assert not checked.clean
    chunk_file(other, other.put(memory(content(2))).chunk).write_bytes(content(2))
    assert fsck.check(store, repair_from=other).clean
    assert fsck.check(store).bad == ()
    assert load(store, tmp_path / "ckpt") == [content(1), content(2), content(3)]


def test_damaged_chunk_that_nobody_needs_is_named_too(store: Store) -> None:
    name = damage(store, 1, "content")
    assert [(bad.hash, bad.checkpoints) for bad in fsck.check(store).bad] == [(name, ())]


def test_unreachable_checkpoint_is_not_clean(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ckpt", [1])
    (tmp_path / "ckpt").rename(tmp_path / "moved")
    checked = fsck.check(store)
    assert [path for path, _ in checked.unreachable] == [str(tmp_path / "ckpt")]
    assert not checked.clean
    assert checked.bad == ()


def compared(path: str | Path, number: int, verify: Verify) -> bool:
    """Tell whether a save in a fresh process reads the existing chunk of that content."""
    reads: list[str] = []

    def note(name: str, *arguments: Any) -> None:
        if name == "read":
            reads.append(name)

    later = Store.open(path, verify_existing=verify, files=files_of(note))
    assert later._last_clean_ns() >= 0
    reads.clear()
    assert later.put(memory(content(number))).how is How.KNOWN
    return bool(reads)


def test_saves_believe_what_was_there_at_the_last_clean_check(store: Store) -> None:
    store.put(memory(content(1)))
    assert compared(store.path, 1, Verify.NEW)
    age(Path(store.path) / "chunks", 10)
    assert fsck.check(store).clean
    assert not compared(store.path, 1, Verify.NEW)
    assert not compared(store.path, 1, Verify.NEW), "a lease does not make it new again"
    assert compared(store.path, 1, Verify.ALL)
    store.put(memory(content(2)))
    assert compared(store.path, 2, Verify.NEW)
    assert not compared(store.path, 2, Verify.NONE)


def later_than(store: Store, time_ns: int) -> None:
    """Wait until the store's clock, which moves in steps, has gone on."""
    while store.place.clock_ns() <= time_ns:
        pass


def test_chunk_that_comes_during_a_check_counts_as_not_checked(store: Store) -> None:
    """What a check lists is what was there when it began."""
    store.put(memory(content(1)))

    def put(progress: Progress) -> None:
        if progress.done_chunks == 0:
            chunk = store.put(memory(content(2))).chunk
            later_than(store, os.stat(chunk_file(store, chunk)).st_mtime_ns)

    checked = fsck.check(store, report=put)
    assert checked.clean and checked.chunks == 1
    assert compared(store.path, 2, Verify.NEW)


def test_chunk_that_gets_its_name_after_a_check_counts_as_not_checked(store: Store) -> None:
    """However long ago it was written: its time is when it was published."""

    def check(name: str, *arguments: Any) -> None:
        if name == "link":
            later_than(store, os.stat(arguments[0]).st_mtime_ns)
            assert fsck.check(store).clean

    Store.open(store.path, files=files_of(check)).put(memory(content(1)))
    assert compared(store.path, 1, Verify.NEW)


def test_check_is_no_use(store: Store, tmp_path: Path) -> None:
    """Else a store that is checked every night would never lose what nobody needs."""
    make(store, tmp_path / "ckpt", [1])
    chunk = store.put(memory(content(2))).chunk
    age(Path(store.path))
    before = os.stat(chunk_file(store, chunk)).st_atime_ns
    fsck.check(store)
    assert store.chunks.compare(chunk, memory(content(2))).value == "sound"
    assert store.chunks.compare(chunk, memory(content(3))).value == "other"
    store.get(chunk, memory(SIZE))
    assert os.stat(chunk_file(store, chunk)).st_atime_ns == before


def test_chunks_of_another_user_are_read_all_the_same(store: Store) -> None:
    chunk = store.put(memory(content(1))).chunk

    def refuse(name: str, *arguments: Any) -> None:
        if name == "open" and arguments[1] & os.O_NOATIME:
            raise PermissionError(1, "not yours")

    later = Store.open(store.path, files=files_of(refuse))
    later.get(chunk, memory(SIZE))
    assert later.put(memory(content(1))).how is How.KNOWN


def test_check_that_finds_damage_leaves_the_last_clean_one(store: Store) -> None:
    store.put(memory(content(1)))
    fsck.check(store)
    before = (Path(store.path) / "fsck.json").read_bytes()
    damage(store, 2, "content")
    fsck.check(store)
    assert (Path(store.path) / "fsck.json").read_bytes() == before


def test_record_of_another_store_is_not_believed(store: Store, tmp_path: Path) -> None:
    other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
    fsck.check(other)
    os.replace(tmp_path / "other" / "fsck.json", Path(store.path) / "fsck.json")
    store.put(memory(content(1)))
    age(Path(store.path) / "chunks")
    assert compared(store.path, 1, Verify.NEW)


def test_chunk_collected_during_the_check_is_no_damage(store: Store) -> None:
    chunk = store.put(memory(content(1))).chunk
    store.put(memory(content(2)))

    def collect(name: str, *arguments: Any) -> None:
        if name == "open" and arguments[0].endswith(str(chunk.hash)):
            chunk_file(store, chunk).unlink(missing_ok=True)

    assert fsck.check(Store.open(store.path, files=files_of(collect))).clean


def test_disk_that_fails_is_damage_and_not_the_end(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ckpt", [1, 2])

    def fail(name: str, *arguments: Any) -> None:
        if name == "read" and len(arguments[1]) == SIZE:
            raise error(5)

    checked = fsck.check(Store.open(store.path, files=files_of(fail)))
    assert len(checked.bad) == 2
    with pytest.raises(errors.Damaged, match="the kernel's log"):
        load(Store.open(store.path, files=files_of(fail)), tmp_path / "ckpt")
    assert load(store, tmp_path / "ckpt") == [content(1), content(2)]


def test_reports_count_what_is_shared(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "one", [1, 0, 2, 2])
    make(store, tmp_path / "two", [2, 3])
    store.put(memory(content(4)))
    used = report.usage(store)
    assert [(item.unique_bytes, item.shared_bytes) for item in used.checkpoints] == [(SIZE, SIZE), (SIZE, SIZE)]
    assert (used.stored_bytes, used.unneeded_bytes, used.unread) == (4 * SIZE, SIZE, ())
    listed = report.list_checkpoints(store)
    assert [(Path(item.path).name, item.ranks) for item in listed] == [("one", 1), ("two", 1)]
    assert listed[0].sizes == report.Sizes(memory_bytes=4 * SIZE, zero_bytes=SIZE, stored_bytes=2 * SIZE)
    (shown,) = report.show(roots.Checkpoint.open(tmp_path / "one"))
    assert (shown.inner_pid, shown.allocations, shown.sizes) == (7, 4, listed[0].sizes)
    (tmp_path / "two").rename(tmp_path / "moved")
    assert report.usage(store).unread == (str(tmp_path / "two"),)
    assert report.list_checkpoints(store)[1].sizes is None
    save.remove(store, tmp_path / "one")
    assert [item.path for item in report.list_checkpoints(store)] == [str(tmp_path / "two")]
