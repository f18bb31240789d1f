"""A collection takes what nobody needs, and nothing else, whatever happens beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from chunkstore import Allocation, Busy, Checkpoint, Chunk, Files, How, Save, Store, errors, fsck, gc, roots, save
from chunkstore.cache import collect as collect_cache
from chunkstore.chunks import chunk_of
from chunkstore.roots import State
from tests.store.tools import SIZE, Faulty, chunk_file, content, counted, error, failing_nth, files_of, load, memory
from tests.store.tools import save as make


def age(path: Path, seconds: float = 1e6) -> None:
    """Make a file, or everything in a directory, older."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            status = os.stat(file)
            os.utime(file, (status.st_atime - seconds, status.st_mtime - seconds))


def names(store: Store) -> set[str]:
    """Return the chunks that a store has."""
    return {entry.hash for entry in store.chunks.entries()}


def test_what_no_checkpoint_needs_goes(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "one", [1, 2])
    make(store, tmp_path / "two", [2, 3])
    save.remove(store, tmp_path / "one")
    assert not (tmp_path / "one").exists()
    age(Path(store.path))
    expected = gc.collect(store, dry_run=True)
    assert len(names(store)) == 3
    assert gc.collect(store) == expected
    assert (expected.removed_chunks, expected.removed_bytes) == (1, SIZE)
    assert (expected.needed_chunks, expected.needed_bytes, expected.checkpoints) == (2, 2 * SIZE, 1)
    assert load(store, tmp_path / "two") == [content(2), content(3)]
    assert gc.collect(store).removed_chunks == 0


def test_grace_counts_from_publication_and_from_use(store: Store) -> None:
    published, used, old = (store.put(memory(content(n))).chunk for n in (1, 2, 3))
    age(chunk_file(store, used))
    age(chunk_file(store, old))
    store.put(memory(content(2)))
    swept = gc.collect(store, grace_s=1000)
    assert names(store) == {published.hash, used.hash}
    assert (swept.removed_chunks, swept.young_chunks) == (1, 2)


def test_save_under_way_keeps_all_it_put_however_long_it_takes(store: Store, tmp_path: Path) -> None:
    kept = store.put(memory(content(1))).chunk
    age(Path(store.path) / "chunks", 2e6)
    with Save.begin(store, tmp_path / "ckpt") as begun:
        begun.add(1, Allocation(0, 0, SIZE, (store.put(memory(content(1))).chunk,)))
        begun.add(1, Allocation(0, SIZE, SIZE, (store.put(memory(content(2))).chunk,)))
        age(Path(store.path))  # a day and more goes by
        assert gc.collect(store).removed_chunks == 0
        assert kept.hash in names(store)
        begun.commit()
    assert load(store, tmp_path / "ckpt") == [content(1), content(2)]


class TestDeadSaves:
    """A save whose process ended without a word."""

    @pytest.fixture
    def dead(self, store: Store, tmp_path: Path) -> Path:
        """Its directory."""
        begun = Save.begin(store, tmp_path / "dead")
        begun.add(1, Allocation(0, 0, SIZE, (store.put(memory(content(1))).chunk,)))
        assert begun._lock_fd is not None
        os.close(begun._lock_fd)  # as the kernel does
        begun._lock_fd = None
        return tmp_path / "dead"

    def test_is_dropped_after_the_grace(self, store: Store, dead: Path) -> None:
        assert [item.state for item in roots.find_all(store)] == [State.ABORTED]
        assert gc.collect(store).dropped_roots == ()
        age(Path(store.path))
        swept = gc.collect(store)
        assert (swept.dropped_roots, swept.removed_chunks) == ((str(dead),), 1)
        assert not roots.find_all(store)

    def test_is_cleared_by_the_next_save_there(self, store: Store, dead: Path) -> None:
        (dead / "gpu-99.json").write_text("left")
        (dead / f"{'0' * 16}.tmp").write_text("left")
        (dead / "notes").write_text("the user's")
        make(store, dead, [1])
        assert sorted(os.listdir(dead)) == ["gpu-7.json", "manifest.json", "notes"]
        assert [item.state for item in roots.find_all(store)] == [State.COMPLETE]

    def test_can_be_removed(self, store: Store, dead: Path) -> None:
        save.remove(store, dead)
        assert not dead.exists()
        assert not roots.find_all(store)


class TestUnreachable:
    """A checkpoint that cannot be read may need anything: nothing is collected until somebody says that it is gone."""

    @pytest.fixture(params=["moved", "empty mount point", "damaged", "rank missing", "another one", "record damaged"])
    def lost(self, request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Path:
        """Its directory, or what stands for it."""
        path = tmp_path / "ckpt"
        id = make(store, path, [1]).id
        if request.param in ("moved", "empty mount point", "another one"):
            path.rename(tmp_path / "elsewhere")
        if request.param == "empty mount point":
            path.mkdir()
        if request.param == "another one":
            make(store, path, [2])
        if request.param == "damaged":
            (path / "manifest.json").write_bytes(b"?")
        if request.param == "rank missing":
            (path / "gpu-7.json").unlink()
        if request.param == "record damaged":
            (Path(store.path) / "roots" / f"{id}.json").write_bytes(b"")
            path = Path(id)
        store.put(memory(content(9)))
        age(Path(store.path))
        return path

    def test_nothing_goes(self, store: Store, lost: Path) -> None:
        before = names(store)
        with pytest.raises(errors.UnreachableRoots, match="forget"):
            gc.collect(store)
        assert names(store) == before

    def test_forgotten_it_goes(self, store: Store, lost: Path) -> None:
        assert len(roots.forget(store, lost)) == 1
        swept = gc.collect(store)
        assert swept.removed_chunks == 2
        assert swept.checkpoints == len(roots.find_all(store))


def test_moved_checkpoint_is_adopted(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ckpt", [1])
    (tmp_path / "ckpt").rename(tmp_path / "moved")
    roots.adopt(store, tmp_path / "moved")
    age(Path(store.path))
    assert gc.collect(store).needed_chunks == 1
    assert [item.root.path for item in roots.find_all(store)] == [str(tmp_path / "moved")]


def test_what_can_be_read_is_not_forgotten(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ckpt", [1])
    with pytest.raises(errors.StillThere):
        roots.forget(store, tmp_path / "ckpt")
    with Save.begin(store, tmp_path / "other"), pytest.raises(errors.StillThere):
        roots.forget(store, tmp_path / "other")
    with pytest.raises(errors.NotAStore, match="knows no checkpoint"):
        roots.forget(store, tmp_path / "third")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["manifest.json", "gpu-7.json", "save.lock"])
def test_what_cannot_be_looked_at_is_not_forgotten(store: Store, tmp_path: Path, name: str, number: int) -> None:
    """It is not gone: only what is not there is."""
    ckpt = tmp_path / "ckpt"
    make(store, ckpt, [1])
    if name == "save.lock":
        (ckpt / "manifest.json").unlink()

    def before(call: str, *arguments: Any) -> None:
        if call == "open" and arguments[0] == str(ckpt / name):
            raise OSError(number, os.strerror(number))

    blind = Store.open(store.path, files=Files(Faulty(before)))
    with pytest.raises(errors.Unreachable, match=os.strerror(number)):
        roots.forget(blind, ckpt)
    assert [item.root.path for item in roots.find_all(store)] == [str(ckpt)]


def test_fr65_leftovers_of_dead_writers_go_and_those_of_living_stay(store: Store) -> None:
    temporary = Path(store.path) / "tmp"
    (temporary / "dead.tmp").write_bytes(bytes(100))
    (temporary / "young.tmp").write_bytes(bytes(100))
    age(temporary / "dead.tmp")
    with store.files.temporary(str(temporary), memory(5)) as (_, path):
        age(Path(path))
        assert fsck.check(store).temporary_bytes == 205
        assert gc.collect(store).temporary_bytes == 100
        assert set(os.listdir(temporary)) == {"young.tmp", Path(path).name}


def test_one_collector_at_a_time(store: Store) -> None:
    with store.files.locked(os.path.join(store.path, "gc.lock"), True, ""), pytest.raises(Busy, match="collector"):
        gc.collect(store)


def test_without_locks_nothing_is_collected_and_saves_work(tmp_path: Path) -> None:
    def no_locks(name: str, *arguments: Any) -> None:
        if name == "try_lock":
            raise error(95)

    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE, files=files_of(no_locks))
    make(store, tmp_path / "ckpt", [1, 1])
    assert load(store, tmp_path / "ckpt") == [content(1)] * 2
    with pytest.raises(errors.NoLocks):
        gc.collect(store)


def test_locks_of_a_network_filesystem(tmp_path: Path) -> None:
    """NFS locks a file for one holder only where it is open for writing, and for several only where for reading."""

    def as_nfs(name: str, *arguments: Any) -> None:
        if name == "try_lock":
            mode = fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_ACCMODE
            if mode not in (os.O_RDWR, os.O_WRONLY if arguments[1] else os.O_RDONLY):
                raise error(errno.EBADF)

    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE, cache=tmp_path / "cache", files=files_of(as_nfs))
    make(store, tmp_path / "kept", [1, 2])
    make(store, tmp_path / "gone", [2, 3])
    assert load(store, tmp_path / "gone") == [content(2), content(3)]
    save.remove(store, tmp_path / "gone")
    assert gc.collect(store, grace_s=0).removed_chunks == 1
    assert store.cache is not None
    assert collect_cache(store.cache, SIZE).removed_chunks == 2
    assert load(store, tmp_path / "kept") == [content(1), content(2)]


def test_fr63_chunk_reused_while_it_is_being_collected(store: Store) -> None:
    """The collector has chosen the chunk; a save leases it before the collector looks again."""
    chunk = store.put(memory(content(1))).chunk
    age(Path(store.path))
    hows: list[How] = []

    collecting = Store.open(store.path)
    real = collecting.chunks.remove

    def remove(chosen: Any, still: Any) -> Any:
        assert list(chosen) == [chunk.hash]
        hows.append(store.put(memory(content(1))).how)
        return real(chosen, still)

    collecting.chunks.remove = remove  # type: ignore[method-assign]
    assert gc.collect(collecting).removed_chunks == 0
    assert hows == [How.KNOWN]
    store.get(chunk, memory(SIZE))


def test_fr63_a_lease_waits_for_a_removal_and_then_writes_again(store: Store) -> None:
    """The collector is between looking and removing; the save must not believe what it sees."""
    chunk = store.put(memory(content(1))).chunk
    age(Path(store.path))
    hows: list[How] = []
    thread = threading.Thread(target=lambda: hows.append(Store.open(store.path).put(memory(content(1))).how))

    def start(name: str, *arguments: Any) -> None:
        if name == "unlink" and str(chunk.hash) in arguments[0]:
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()  # it waits for the lock

    assert gc.collect(Store.open(store.path, files=files_of(start))).removed_chunks == 1
    thread.join(60)
    assert hows == [How.NEW]
    store.get(chunk, memory(SIZE))


def test_commit_looks_for_every_chunk_once_more(store: Store, tmp_path: Path) -> None:
    begun = Save.begin(store, tmp_path / "ckpt")
    chunk = store.put(memory(content(1))).chunk
    begun.add(1, Allocation(0, 0, SIZE, (chunk,)))
    chunk_file(store, chunk).unlink()
    with pytest.raises(errors.WriteFailed, match=f"{chunk.hash} is no longer in"):
        begun.commit()
    assert not (tmp_path / "ckpt").exists()
    assert not roots.find_all(store)


class TestRemoval:
    """A removal cut off at any point can be repeated, and nothing else suffers."""

    def test_of_another_store(self, store: Store, tmp_path: Path) -> None:
        make(store, tmp_path / "ckpt", [1])
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
        with pytest.raises(errors.WrongStore):
            save.remove(other, tmp_path / "ckpt")
        assert load(store, tmp_path / "ckpt") == [content(1)]

    def test_of_nothing(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(errors.NotAStore):
            save.remove(store, tmp_path / "ckpt")

    def test_of_a_damaged_one(self, store: Store, tmp_path: Path) -> None:
        make(store, tmp_path / "ckpt", [1])
        (tmp_path / "ckpt" / "manifest.json").write_bytes(b"?")
        save.remove(store, tmp_path / "ckpt")
        assert not (tmp_path / "ckpt").exists()
        assert not roots.find_all(store)

    def test_during_a_save_there(self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(save, "LOCK_WAIT_S", 0.0)
        with Save.begin(store, tmp_path / "ckpt"):
            with pytest.raises(Busy):
                save.remove(store, tmp_path / "ckpt")
            with pytest.raises(Busy):
                Save.begin(store, tmp_path / "ckpt")

    @pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
    def test_a_call_that_fails(self, store: Store, tmp_path: Path, code: int) -> None:
        """Each in turn: until the store has let go all is as it was; from then on the removal is repeated."""
        path, kept, number = tmp_path / "ckpt", 0, 0
        while True:
            make(store, path, [1, 3])
            names = {"save.lock", *os.listdir(path)}
            system = failing_nth(("truncate", "datasync", "sync", "unlink", "rename"), number, code)
            try:
                save.remove(Store.open(store.path, files=Files(system)), path)
            except errors.WriteFailed:
                gc.collect(store, grace_s=0)
                if roots.with_path(store, path):
                    kept += 1
                    assert {"save.lock", *os.listdir(path)} == names and load(store, path) == [content(1), content(3)]
                else:
                    assert not (path / "manifest.json").exists()
                save.remove(store, path)
            assert not path.exists() and not roots.find_all(store)
            if counted(system) <= number:
                break
            number += 1
        assert kept >= 6

    def test_cut_off_anywhere(self, store: Store, tmp_path: Path) -> None:
        make(store, tmp_path / "kept", [1, 2])
        for cut in range(100):
            make(store, tmp_path / "ckpt", [1, 3])
            count = [0]

            def stop(name: str, *arguments: Any, count: list[int] = count, cut: int = cut) -> None:
                if name in ("write", "truncate", "datasync", "sync", "unlink", "rename"):
                    count[0] += 1
                    if count[0] > cut:
                        raise KeyboardInterrupt

            try:
                save.remove(Store.open(store.path, files=files_of(stop)), tmp_path / "ckpt")
            except KeyboardInterrupt:
                states = {item.state for item in roots.with_path(store, tmp_path / "ckpt")}
                assert states <= {State.COMPLETE, State.ABORTED}
                if State.COMPLETE in states:
                    assert load(store, tmp_path / "ckpt") == [content(1), content(3)]
                gc.collect(store, grace_s=0)
                if (tmp_path / "ckpt" / "manifest.json").exists():  # what can be read is whole
                    assert load(store, tmp_path / "ckpt") == [content(1), content(3)]
                else:
                    assert not roots.with_path(store, tmp_path / "ckpt")
                if os.listdir(tmp_path / "ckpt"):
                    save.remove(store, tmp_path / "ckpt")
            else:
                break
        else:
            pytest.fail("it never ended")
        assert [item.root.path for item in roots.find_all(store)] == [str(tmp_path / "kept")]
        assert load(store, tmp_path / "kept") == [content(1), content(2)]


def test_two_checkpoints_at_once_in_one_store(store: Store, tmp_path: Path) -> None:
    with Save.begin(store, tmp_path / "one") as one, Save.begin(store, tmp_path / "two") as two:
        for begun, number in ((one, 1), (two, 1)):
            begun.add(1, Allocation(0, 0, SIZE, (store.put(memory(content(number))).chunk,)))
        assert {item.state for item in roots.find_all(store)} == {State.SAVING}
        one.commit()
        two.commit()
    assert load(store, tmp_path / "one") == load(store, tmp_path / "two") == [content(1)]


def test_checkpoint_of_zeros_only(store: Store, tmp_path: Path) -> None:
    with Save.begin(store, tmp_path / "ckpt") as begun:
        begun.add(1, Allocation(0, 0, SIZE, (Chunk(None, SIZE),)))
        begun.commit()
    assert not Checkpoint.open(tmp_path / "ckpt").stored_chunks()
    assert load(store, tmp_path / "ckpt") == [bytes(SIZE)]


def test_save_that_begins_while_the_collector_reads_the_roots(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in none of the roots that the collector saw, and relies on an old chunk that nobody else needs."""
    put = store.put(memory(content(1)))
    age(Path(store.path))
    real = roots.find_all

    def find_all(asked: Store) -> list[roots.Found]:
        found = real(asked)
        make(store, tmp_path / "ckpt", [1])
        now_ns = store.files.clock_ns(str(tmp_path))
        while store.files.clock_ns(str(tmp_path)) == now_ns:  # the filesystem's clock is a coarse one
            pass
        return found

    monkeypatch.setattr(roots, "find_all", find_all)
    assert gc.collect(store, grace_s=0).removed_chunks == 0
    store.get(put.chunk, memory(SIZE))
    assert load(store, tmp_path / "ckpt") == [content(1)]


def test_save_in_a_directory_without_locks_counts_as_alive_until_it_is_removed(store: Store, tmp_path: Path) -> None:
    def no_locks(name: str, *arguments: Any) -> None:
        if name == "try_lock" and os.readlink(f"/proc/self/fd/{arguments[0]}").endswith("save.lock"):
            raise error(95)

    opened = Store.open(store.path, files=files_of(no_locks))
    begun = Save.begin(opened, tmp_path / "ckpt")
    chunk = opened.put(memory(content(1))).chunk
    assert begun._lock_fd is not None
    os.close(begun._lock_fd)
    begun._lock_fd = None
    age(Path(store.path))
    assert [item.state for item in roots.find_all(opened)] == [State.SAVING]
    assert gc.collect(opened).removed_chunks == 0
    store.get(chunk, memory(SIZE))
    save.remove(opened, tmp_path / "ckpt")
    assert gc.collect(opened).removed_chunks == 1


def test_commit_brings_back_its_root_and_leases_its_chunks_again(store: Store, tmp_path: Path) -> None:
    """Somebody removed the record of a save under way; from then on nothing told a collector of its chunks."""
    with Save.begin(store, tmp_path / "ckpt") as begun:
        chunk = store.put(memory(content(1))).chunk
        begun.add(1, Allocation(0, 0, SIZE, (chunk,)))
        roots.drop(store, begun.id)
        age(Path(store.path))
        before = os.stat(chunk_file(store, chunk)).st_atime
        begun.commit()
        assert os.stat(chunk_file(store, chunk)).st_atime > before
    assert [item.state for item in roots.find_all(store)] == [State.COMPLETE]


@pytest.mark.parametrize("kept", [True, False])
def test_lease_holds_where_access_times_are_not_kept(store: Store, kept: bool) -> None:
    chunk = store.put(memory(content(1))).chunk
    age(Path(store.path))
    old = os.stat(chunk_file(store, chunk)).st_mtime_ns

    def ignore(name: str, *arguments: Any) -> Any:
        return True if name == "mark_used" and not kept else None

    later = Store.open(store.path, files=files_of(ignore))
    assert later.put(memory(content(1))).how is How.KNOWN
    assert (os.stat(chunk_file(store, chunk)).st_mtime_ns == old) is kept
    assert gc.collect(store).removed_chunks == 0
    assert not os.listdir(Path(store.path) / "tmp")


def test_what_a_failed_save_wrote_is_taken_back(store: Store, tmp_path: Path) -> None:
    """But for what a checkpoint, or a save under way, needs by then."""
    with Save.begin(store, tmp_path / "failed") as failed:
        written = {str(store.put(memory(content(number))).chunk.hash) for number in (1, 2, 3)}
        age(Path(store.path) / "chunks", 10)
        make(store, tmp_path / "other", [1])
        other = Save.begin(store, tmp_path / "under way")
        store.put(memory(content(2)))
        failed.abort()
    beside = store.put(memory(content(4))).chunk
    assert gc.take_back(store, written) == SIZE
    assert names(store) == {str(chunk_of(memory(content(number)), store.hash).hash) for number in (1, 2, 4)}
    assert beside.hash in names(store)
    other.abort()
