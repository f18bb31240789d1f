"""A cache serves, is filled by saves and prefetches alone, and is never the reason that something fails."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chunkstore import Checkpoint, Chunk, How, Source, Store, cache, errors
from chunkstore.format import SWEEP_LOCK
from chunkstore.transfer import Limiter, Progress, copy_checkpoint, prefetch
from tests.store.tools import SIZE, chunk_file, content, error, files_of, load, memory, save


@pytest.fixture
def cached(store: Store, tmp_path: Path) -> Store:
    """The store, opened with a cache."""
    return Store.open(store.path, cache=tmp_path / "cache")


def lying(path: Path) -> dict[str, tuple[int, int]]:
    """Return what lies in a directory: inode and size."""
    return {str(file): (os.stat(file).st_ino, os.stat(file).st_size) for file in path.rglob("*")}


def where(store: Store, chunk: Chunk) -> Source:
    """Return where a chunk comes from, having checked its content."""
    into = memory(SIZE)
    source = store.get(chunk, into)
    assert store.hash.digest(iter([into[: chunk.size_bytes]])) == chunk.hash
    return source


def test_save_writes_through_and_load_reads_from_it(cached: Store, tmp_path: Path) -> None:
    put = cached.put(memory(content(1)))
    assert (put.how, put.cached) == (How.NEW, True)
    assert where(cached, put.chunk) is Source.CACHE
    assert chunk_file(tmp_path / "cache", put.chunk).read_bytes() == content(1)


def test_known_chunk_is_brought_to_the_cache(store: Store, cached: Store) -> None:
    store.put(memory(content(1)))
    put = cached.put(memory(content(1)))
    assert (put.how, put.cached) == (How.KNOWN, True)
    assert where(cached, put.chunk) is Source.CACHE


def test_b27_load_adds_nothing_to_it(store: Store, cached: Store, tmp_path: Path) -> None:
    """Pitfall 44: a restore that fills the cache is slowed by it; that is what prefetching is for."""
    chunk = store.put(memory(content(1))).chunk
    before = lying(tmp_path / "cache")
    assert where(cached, chunk) is Source.STORE
    assert lying(tmp_path / "cache") == before


def test_load_sets_the_access_time(cached: Store, tmp_path: Path) -> None:
    chunk = cached.put(memory(content(1))).chunk
    path = chunk_file(tmp_path / "cache", chunk)
    os.utime(path, (1, 1))
    where(cached, chunk)
    assert os.stat(path).st_atime > 1


@pytest.mark.parametrize("call", ["mark_used", "try_lock"])
def test_load_does_without_locks_and_times(cached: Store, tmp_path: Path, call: str) -> None:
    chunk = cached.put(memory(content(1))).chunk

    def refuse(name: str, *arguments: Any) -> None:
        if name == call:
            raise error(1)

    later = Store.open(cached.path, cache=tmp_path / "cache", files=files_of(refuse))
    assert where(later, chunk) is Source.CACHE


@pytest.mark.parametrize("damage", [b"", content(2), content(1) + b"x"])
def test_damaged_chunk_is_dropped_and_the_store_read(cached: Store, tmp_path: Path, damage: bytes) -> None:
    chunk = cached.put(memory(content(1))).chunk
    path = chunk_file(tmp_path / "cache", chunk)
    path.write_bytes(damage)
    assert where(cached, chunk) is Source.STORE
    assert not path.exists()
    assert cached.put(memory(content(1))).cached
    assert where(cached, chunk) is Source.CACHE


@pytest.mark.parametrize("code", [5, 13, 28, 30])
def test_fr65_cache_that_fails_is_bypassed_and_said_once(store: Store, tmp_path: Path, code: int) -> None:
    told: list[str] = []

    inside = str(tmp_path / "cache")

    def fail(name: str, *arguments: Any) -> None:
        if name == "write" and failing and os.readlink(f"/proc/self/fd/{arguments[0]}").startswith(inside):
            raise error(code)

    failing = False
    later = Store.open(store.path, cache=tmp_path / "cache", files=files_of(fail, told))
    failing = True
    puts = [later.put(memory(content(number))) for number in (1, 2)]
    assert [(put.how, put.cached) for put in puts] == [(How.NEW, False)] * 2
    assert [line.count("bypassed") for line in told] == [1]
    assert "name another cache or none" in told[0] and "store" not in told[0].replace(str(tmp_path), ""), told
    assert {where(later, put.chunk) for put in puts} == {Source.STORE}
    assert not os.listdir(tmp_path / "cache" / "tmp")


def test_cache_that_fails_for_many_at_once_is_said_once(store: Store, tmp_path: Path) -> None:
    """Every thread of a save has a chunk under way when the disk is full."""
    told: list[str] = []
    count = 4
    all_there = threading.Barrier(count)

    def fail(name: str, *arguments: Any) -> None:
        if name == "write" and len(arguments[1]) == SIZE and "/cache/" in os.readlink(f"/proc/self/fd/{arguments[0]}"):
            all_there.wait(60)
            raise error(28)

    later = Store.open(store.path, cache=tmp_path / "cache", files=files_of(fail, told))
    with ThreadPoolExecutor(count) as threads:
        puts = list(threads.map(lambda number: later.put(memory(content(number))), range(1, count + 1)))
    assert [put.cached for put in puts] == [False] * count
    (line,) = told
    assert "free space there (cache-gc)" in line


def test_a_cache_that_cannot_be_read_is_said_once_with_a_count(cached: Store, tmp_path: Path) -> None:
    chunks, told = [cached.put(memory(content(number))).chunk for number in (1, 2, 3)], []

    def fail(name: str, *arguments: Any) -> None:
        if name == "open" and str(tmp_path / "cache" / "chunks") in arguments[0]:
            raise error(5)

    for count in (1, 3):
        told.clear()
        later = Store.open(cached.path, cache=tmp_path / "cache", files=files_of(fail, told))
        assert later.cache is not None
        assert [where(later, chunk) for chunk in chunks[:count]] == [Source.STORE] * count
        later.cache.tell_failed()
        assert "The store is read instead" in told[0], told
        assert len(told) == 1 if count == 1 else told[1:] == [
            f"3 chunks in all of cache {later.cache.path} were damaged or could not be read; the store was read"
        ], told


def test_a_cache_is_made_for_who_wants_one(store: Store, tmp_path: Path) -> None:
    told: list[str] = []
    later = Store.open(store.path, files=files_of(lambda *arguments: None, told))
    later.use_cache(tmp_path / "cache", make=False)
    assert later.cache is None and not (tmp_path / "cache").exists() and told[0].startswith("there is no cache: ")


def test_unreadable_cache_is_no_reason_to_fail(cached: Store, tmp_path: Path) -> None:
    chunk = cached.put(memory(content(1))).chunk

    def fail(name: str, *arguments: Any) -> None:
        if name == "open" and str(tmp_path / "cache" / "chunks") in arguments[0]:
            raise error(5)

    assert where(Store.open(cached.path, cache=tmp_path / "cache", files=files_of(fail)), chunk) is Source.STORE


def test_cache_of_another_store_is_refused(cached: Store, tmp_path: Path) -> None:
    other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
    with pytest.raises(errors.WrongStore, match=other.id):
        Store.open(other.path, cache=tmp_path / "cache")


@pytest.mark.parametrize("broken", ["no parent", "damaged", "no directory"])
def test_cache_that_cannot_be_opened_is_done_without(store: Store, tmp_path: Path, broken: str) -> None:
    path = tmp_path / "cache" / "below" if broken == "no parent" else tmp_path / "cache"
    if broken == "damaged":
        Store.open(store.path, cache=path)
        (path / "cache.json").write_bytes(b"?")
    if broken == "no directory":
        path.touch()
    told: list[str] = []
    later = Store.open(store.path, cache=path, files=files_of(lambda *arguments: None, told))
    put = later.put(memory(content(1)))
    assert (put.how, put.cached) == (How.NEW, None)
    assert where(later, put.chunk) is Source.STORE
    assert [line.count("no cache") for line in told] == [1]
    with pytest.raises(errors.StoreError, match="cache"):
        prefetch(later, save(store, tmp_path / "ckpt", [1]))


def little(name: str, *arguments: Any) -> Any:
    """Have room for one chunk."""
    if name == "room":
        return SimpleNamespace(f_bavail=SIZE, f_frsize=1, f_blocks=1, f_files=0, f_favail=0)
    return None


class TestCollection:
    """The least recently used goes first, what is being read stays."""

    @pytest.fixture
    def chunks(self, cached: Store, tmp_path: Path) -> list[Chunk]:
        """Four chunks, the first used longest ago; the last is short."""
        sizes = {1: SIZE, 2: SIZE, 3: SIZE, 4: 10}
        chunks = [cached.put(memory(content(number, size))).chunk for number, size in sizes.items()]
        for time, chunk in enumerate(chunks, 1):
            os.utime(chunk_file(tmp_path / "cache", chunk), (time, time))
        return chunks

    def left(self, cached: Store) -> set[str]:
        """Return what the cache still has."""
        assert cached.cache is not None
        return {entry.hash for entry in cached.cache.chunks.entries()}

    @pytest.mark.parametrize(("limit", "gone"), [(3 * SIZE + 10, 0), (3 * SIZE + 9, 1), (SIZE + 10, 2), (0, 4)])
    def test_down_to_a_size(self, cached: Store, chunks: list[Chunk], limit: int, gone: int) -> None:
        assert cached.cache is not None
        planned = cache.collect(cached.cache, limit, dry_run=True)
        assert len(self.left(cached)) == 4
        done = cache.collect(cached.cache, limit)
        assert done == planned
        assert (done.removed_chunks, done.kept_chunks, done.in_use_chunks) == (gone, 4 - gone, 0)
        assert done.kept_bytes <= limit
        assert self.left(cached) == {str(chunk.hash) for chunk in chunks[gone:]}
        for chunk in chunks:
            where(cached, chunk)

    @pytest.mark.parametrize("dry_run", [False, True])
    def test_fr65_what_is_being_written_counts(self, cached: Store, chunks: list[Chunk], dry_run: bool) -> None:
        """It takes room, too, unlike what a writer that died has left, which goes."""
        assert cached.cache is not None
        old = Path(cached.cache.path) / "tmp" / "old.tmp"
        old.write_bytes(content(7))
        os.utime(old, (1, 1))
        with cached.files.temporary(str(old.parent), memory(content(8))):
            done = cache.collect(cached.cache, 3 * SIZE + 10, dry_run)
        assert (done.removed_chunks, done.temporary_bytes) == (1, SIZE)
        assert old.exists() is dry_run

    def test_use_counts(self, cached: Store, chunks: list[Chunk]) -> None:
        assert cached.cache is not None
        where(cached, chunks[0])
        cache.collect(cached.cache, 2 * SIZE)
        assert self.left(cached) == {str(chunks[0].hash), str(chunks[3].hash)}

    def test_what_is_being_read_stays(self, cached: Store, chunks: list[Chunk], tmp_path: Path) -> None:
        """The collection runs in the middle of a read, after it has chosen by times of before."""
        collected: list[cache.Collected] = []

        def collect(name: str, *arguments: Any) -> None:
            if name == "read" and len(arguments[1]) == SIZE and not collected:
                os.utime(chunk_file(tmp_path / "cache", chunks[0]), (1, 1))
                assert cached.cache is not None
                collected.append(cache.collect(cached.cache, 0))

        later = Store.open(cached.path, cache=tmp_path / "cache", files=files_of(collect))
        assert where(later, chunks[0]) is Source.CACHE
        assert (collected[0].removed_chunks, collected[0].in_use_chunks) == (3, 1)
        assert self.left(cached) == {str(chunks[0].hash)}

    def test_what_is_used_meanwhile_stays(self, cached: Store, chunks: list[Chunk], tmp_path: Path) -> None:
        """It is read after the collection has chosen it and before it is removed."""

        def use(name: str, *arguments: Any) -> None:
            if name == "open" and str(arguments[0]).endswith(SWEEP_LOCK):
                where(cached, chunks[0])

        collector = cache.Cache.find(tmp_path / "cache", files_of(use))
        done = cache.collect(collector, 2 * SIZE)
        assert (done.removed_chunks, done.in_use_chunks) == (1, 1)
        assert self.left(cached) == {str(chunk.hash) for chunk in (chunks[0], *chunks[2:])}


class TestPrefetch:
    """What a checkpoint needs, and no more."""

    def test_exactly_the_chunks_of_the_checkpoint(self, store: Store, cached: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1, 0, 2, 1])
        save(store, tmp_path / "other", [3])
        seen: list[Progress] = []
        done = prefetch(cached, checkpoint, report=seen.append)
        assert (done.copied_chunks, done.copied_bytes, done.present_chunks) == (2, 2 * SIZE, 0)
        assert [item.done_bytes for item in seen] == [0, SIZE, 2 * SIZE]
        assert {where(cached, chunk) for chunk in checkpoint.stored_chunks().values()} == {Source.CACHE}
        assert len(list((tmp_path / "cache" / "chunks").glob("*/*"))) == 2
        before = lying(tmp_path / "cache")
        assert prefetch(cached, checkpoint).present_chunks == 2
        assert lying(tmp_path / "cache") == before

    def test_many_at_a_time(self, store: Store, tmp_path: Path) -> None:
        """As many chunks as threads are being read at once, or the first to be read waits for the others in vain."""
        checkpoint = save(store, tmp_path / "ckpt", [1, 2, 3, 4, 5, 6])
        all_there = threading.Barrier(3)

        def meet(name: str, *arguments: Any) -> None:
            if name == "read" and len(arguments[1]) == SIZE:
                all_there.wait(60)

        later = Store.open(store.path, cache=tmp_path / "cache", files=files_of(meet))
        assert prefetch(later, checkpoint, threads=3).copied_chunks == 6

    def test_resumes_after_it_was_cut_off(self, store: Store, cached: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1, 2, 3, 4])

        def stop(progress: Progress) -> None:
            if progress.done_chunks:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prefetch(cached, checkpoint, threads=1, report=stop)
        done = prefetch(cached, checkpoint)
        assert 1 <= done.present_chunks < 4
        assert done.present_chunks + done.copied_chunks == 4

    def test_short_chunk_is_copied_again(self, store: Store, cached: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1])
        prefetch(cached, checkpoint)
        (chunk,) = checkpoint.stored_chunks().values()
        os.truncate(chunk_file(tmp_path / "cache", chunk), 5)
        assert prefetch(cached, checkpoint).copied_chunks == 1
        assert where(cached, chunk) is Source.CACHE

    def test_damaged_chunk_does_not_get_in(self, store: Store, cached: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1])
        (chunk,) = checkpoint.stored_chunks().values()
        chunk_file(store, chunk).write_bytes(content(2))
        with pytest.raises(errors.ChunkDamaged):
            prefetch(cached, checkpoint)
        assert not list((tmp_path / "cache" / "chunks").glob("*/*"))

    def test_full_cache_is_an_error_here(self, store: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1])

        def full(name: str, *arguments: Any) -> None:
            if name == "write" and len(arguments[1]) == SIZE:
                raise error(28)

        later = Store.open(store.path, cache=tmp_path / "cache", files=files_of(full))
        with pytest.raises(errors.WriteFailed, match="free space there .cache-gc., or name another cache"):
            prefetch(later, checkpoint)

    def test_fr65_room_is_looked_for_first(self, store: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1, 2])
        later = Store.open(store.path, cache=tmp_path / "cache", files=files_of(little))
        with pytest.raises(errors.NoRoom, match=f"{tmp_path / 'cache'} has {SIZE} bytes free, {2 * SIZE} are needed"):
            prefetch(later, checkpoint)
        assert not list((tmp_path / "cache" / "chunks").glob("*/*"))

    def test_rate(self) -> None:
        now = [100.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        limiter = Limiter(1000, clock=lambda: now[0], sleep=sleep)
        for size in (500, 2500):
            limiter.passed(size)
        assert now[0] == 103.0
        now[0] += 50
        limiter.passed(1000)
        assert now[0] == 154.0

    def test_fr68_filled_past_the_page_cache(self, disk_path: Path) -> None:
        """By a save that writes through and by a prefetch: dirty pages would make them crawl."""
        written: list[bool] = []

        def note(name: str, *arguments: Any) -> None:
            if name == "write" and len(arguments[1]) >= SIZE:
                written.append(bool(fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT))

        files = files_of(note)
        Store.create(disk_path / "store", chunk_size_bytes=SIZE)
        through = Store.open(disk_path / "store", cache=disk_path / "one", files=files)
        checkpoint = save(through, disk_path / "ckpt", [1, 2])
        prefetch(Store.open(disk_path / "store", cache=disk_path / "two", files=files), checkpoint)
        if files.is_buffered(os.stat(disk_path).st_dev):
            pytest.skip("the filesystem of temporary files has no direct I/O")
        assert written == [True] * 6


class TestCopy:
    """A checkpoint in another store."""

    @pytest.mark.parametrize("digest", ["xxh3-128", "blake3"])
    def test_with_its_chunks(self, store: Store, tmp_path: Path, digest: str) -> None:
        if digest == "blake3":
            pytest.importorskip("blake3", reason="the package blake3 is not installed")
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE, hash=digest)
        other.put(memory(content(1)))
        checkpoint = save(store, tmp_path / "ckpt", [1, 0, 2, 2])
        copied = copy_checkpoint(store, checkpoint, other, tmp_path / "copy")
        assert (copied.new_bytes, copied.known_bytes) == (SIZE, SIZE)
        assert load(other, tmp_path / "copy") == load(store, tmp_path / "ckpt")
        assert copied.checkpoint.rank(7).facts == checkpoint.rank(7).facts

    @pytest.mark.parametrize("digest", ["xxh3-128", "blake3"])
    def test_fr65_room_is_looked_for_first(self, store: Store, tmp_path: Path, digest: str) -> None:
        """For what the other store lacks; where its names are other ones, nobody knows what that is."""
        checkpoint = save(store, tmp_path / "ckpt", [1, 0, 2, 2])
        target = Store.create(tmp_path / "other", hash=digest, chunk_size_bytes=SIZE, files=files_of(little))
        if digest == store.facts.hash:
            with pytest.raises(errors.NoRoom, match=f"other has {SIZE} bytes free, {2 * SIZE} are needed"):
                copy_checkpoint(store, checkpoint, target, tmp_path / "copy")
            assert not list(target.chunks.entries()) and not (tmp_path / "copy").exists()
        target.put(memory(content(1)))
        assert copy_checkpoint(store, checkpoint, target, tmp_path / "copy").new_bytes == SIZE

    def test_damage_leaves_nothing_there(self, store: Store, tmp_path: Path) -> None:
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
        checkpoint = save(store, tmp_path / "ckpt", [1, 2])
        chunk_file(store, store.put(memory(content(2))).chunk).write_bytes(content(3))
        with pytest.raises(errors.ChunkDamaged):
            copy_checkpoint(store, checkpoint, other, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        with pytest.raises(errors.Incompatible, match="chunk size"):
            copy_checkpoint(store, checkpoint, Store.create(tmp_path / "big"), tmp_path / "copy")

    def test_of_another_store(self, store: Store, tmp_path: Path) -> None:
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
        checkpoint = save(store, tmp_path / "ckpt", [1])
        with pytest.raises(errors.WrongStore):
            copy_checkpoint(other, checkpoint, store, tmp_path / "copy")
        assert Checkpoint.open(tmp_path / "ckpt").id == checkpoint.id


def test_store_is_no_cache(store: Store, tmp_path: Path) -> None:
    """Also where an earlier version has made one in it: whoever collects there removes what checkpoints need."""
    save(store, tmp_path / "ckpt", [1])
    before = lying(Path(store.path))
    told: list[str] = []
    assert Store.open(store.path, cache=store.path, files=files_of(lambda *arguments: None, told)).cache is None
    assert "it is store" in told[0] and lying(Path(store.path)) == before
    (Path(store.path) / "cache.json").write_bytes(store.facts.encode("gpushare-cache/1"))
    with pytest.raises(errors.NotAStore, match="it is a store"):
        cache.Cache.find(store.path)
