"""A store keeps what is put and gives it back; a checkpoint says what belongs together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chunkstore import Allocation, Checkpoint, Chunk, How, Save, Source, Store, Verify, errors, format
from chunkstore.format import Rank, encode
from tests.programs.setting import ROOT
from tests.store.tools import SIZE, chunk_file, content, load, memory, save


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("where", ["tmp_path", "disk_path"])
def test_fr59_any_size_at_any_address(where: str, shift: int, request: pytest.FixtureRequest) -> None:
    store = Store.create(request.getfixturevalue(where) / "store", chunk_size_bytes=SIZE)
    for size in (1, 511, 4095, 4096, 4097, SIZE - 1, SIZE):
        room = memory(size + shift)
        room[shift:] = content(size, size)
        put = store.put(room[shift:])
        assert (put.how, put.chunk.size_bytes) == (How.NEW, size)
        assert chunk_file(store, put.chunk).read_bytes() == content(size, size)
        for more in (SIZE, 0):
            into = memory(size + shift + more)
            assert store.get(put.chunk, into[shift:]) is Source.STORE
            assert bytes(into[shift : shift + size]) == content(size, size)
            assert not any(into[shift + size :])


def test_zeros_are_recorded_and_not_stored(store: Store, tmp_path: Path) -> None:
    put = store.put(memory(SIZE))
    assert (put.how, put.chunk.hash) == (How.ZERO, None)
    assert not list((tmp_path / "store" / "chunks").glob("*/*"))
    into = memory(content(1))
    assert store.get(put.chunk, into) is Source.ZERO
    assert not any(into)


def test_one_byte_is_not_zero(store: Store) -> None:
    for at in (0, 1, 4095, 4096, SIZE - 1):
        view = memory(SIZE)
        view[at] = 1
        assert store.put(view).how is How.NEW


def test_same_content_is_stored_once(store: Store) -> None:
    first = store.put(memory(content(1)))
    status = os.stat(chunk_file(store, first.chunk))
    again = store.put(memory(content(1)))
    assert (first.how, again.how) == (How.NEW, How.KNOWN)
    assert again.chunk == first.chunk
    after = os.stat(chunk_file(store, first.chunk))
    assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_existing_chunk_is_marked_as_used_now(store: Store) -> None:
    path = chunk_file(store, store.put(memory(content(1))).chunk)
    os.utime(path, (1, 1))
    store.put(memory(content(1)))
    assert os.stat(path).st_mtime == 1
    assert os.stat(path).st_atime > 1


def test_too_much_and_too_little_are_no_chunks(store: Store) -> None:
    for size in (0, SIZE + 1):
        with pytest.raises(ValueError, match="no chunk"):
            store.put(memory(size))
    with pytest.raises(ValueError, match="too few"):
        store.get(store.put(memory(content(1))).chunk, memory(SIZE - 1))


def test_checkpoint_comes_back(store: Store, tmp_path: Path) -> None:
    properties = {"type": 1, "name": "größe", "nested": [1, None, True]}
    with Save.begin(store, tmp_path / "ckpt", {"driver": "580"}) as begun:
        chunks = tuple(store.put(memory(content(n, size))).chunk for n, size in ((1, SIZE), (0, SIZE), (2, 100)))
        big = Allocation("GPU-1", 2**64 - 4096, 2 * SIZE + 100, chunks, properties, ({"device": 1, "rw": True},))
        begun.add(12, big)
        begun.add_rank(12, {"nonce": "ab"})
        begun.add_rank(13)
        assert not (tmp_path / "ckpt" / "manifest.json").exists()
        begun.commit()
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["gpu-12.json", "gpu-13.json", "manifest.json"]
    found = Checkpoint.open(tmp_path / "ckpt")
    assert found.manifest.facts == {"driver": "580"}
    assert found.manifest.kind == "memory"
    assert found.rank(12) == Rank(12, (big,), {"nonce": "ab"})
    assert found.rank(13) == Rank(13)
    assert load(store, tmp_path / "ckpt") == [content(1), bytes(SIZE), content(2, 100)]


def test_allocation_needs_all_its_chunks(store: Store, tmp_path: Path) -> None:
    chunk = store.put(memory(content(1))).chunk
    with Save.begin(store, tmp_path / "ckpt") as begun:
        for size in (SIZE - 1, SIZE + 1, 2 * SIZE):
            with pytest.raises(ValueError, match="do not make up"):
                begun.add(1, Allocation(0, 4096, size, (chunk,)))
        begun.add(1, Allocation(0, 4096, SIZE, (chunk,)))
        begun.commit()
    with pytest.raises(ValueError, match="ended"):
        begun.add(1, Allocation(0, 4096, SIZE, (chunk,)))
    with pytest.raises(ValueError, match="ended"):
        begun.commit()


def test_save_that_is_not_committed_leaves_nothing(store: Store, tmp_path: Path) -> None:
    with Save.begin(store, tmp_path / "ckpt") as begun:
        begun.add(1, Allocation(0, 4096, SIZE, (store.put(memory(content(1))).chunk,)))
    assert not (tmp_path / "ckpt").exists()
    assert not os.listdir(tmp_path / "store" / "roots")


def test_directory_that_was_there_stays(store: Store, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    with Save.begin(store, tmp_path / "ckpt") as begun:
        begun.add_rank(1)
    assert os.listdir(tmp_path / "ckpt") == []


def test_fr67_second_checkpoint_in_another_directory_and_none_over_the_first(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path / "one", [1, 2])
    save(store, tmp_path / "two", [1, 3])
    before = (tmp_path / "one" / "manifest.json").read_bytes()
    with pytest.raises(errors.CheckpointExists, match="one holds checkpoint"):
        Save.begin(store, tmp_path / "one")
    assert (tmp_path / "one" / "manifest.json").read_bytes() == before
    assert load(store, tmp_path / "one") == [content(1), content(2)]
    assert load(store, tmp_path / "two") == [content(1), content(3)]
    assert len(list((tmp_path / "store" / "chunks").glob("*/*"))) == 3
    assert not os.listdir(tmp_path / "store" / "tmp")


def test_b24_directories_are_made_but_not_their_parents(tmp_path: Path) -> None:
    with pytest.raises(errors.WriteFailed, match="nowhere"):
        Store.create(tmp_path / "nowhere" / "store")
    store = Store.create(tmp_path / "store")
    assert store.chunk_size_bytes == 64 << 20
    with pytest.raises(errors.NotAStore, match="nowhere is not there"):
        Save.begin(store, tmp_path / "nowhere" / "ckpt")


class TestOpening:
    """Which stores are opened, and what is said of those that are not."""

    def test_again(self, store: Store) -> None:
        assert Store.open(store.path).id == store.id
        assert Store.create(store.path, chunk_size_bytes=SIZE).id == store.id

    def test_missing(self, tmp_path: Path) -> None:
        for name in ("nothing", "file/below"):
            (tmp_path / "file").touch()
            with pytest.raises(errors.NotAStore, match="name a store, or mount it"):
                Store.open(tmp_path / name)

    def test_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(errors.NotAStore, match=r"notes\.txt"):
            Store.create(tmp_path)
        assert os.listdir(tmp_path) == ["notes.txt"]

    def test_other_parameters(self, store: Store) -> None:
        with pytest.raises(errors.Incompatible, match="chunk size 65536, not 67108864"):
            Store.create(store.path)

    def test_unknown_hash(self, tmp_path: Path) -> None:
        with pytest.raises(errors.NoHash, match="known are xxh3-128, blake3"):
            Store.create(tmp_path / "store", hash="md5")
        assert not (tmp_path / "store").exists()

    def test_hash_without_its_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The extra that brings it is named, and there is one."""
        monkeypatch.setitem(sys.modules, "blake3", None)
        with pytest.raises(errors.NoHash, match=re.escape("pip install 'gpushare[blake3]'")):
            Store.create(tmp_path / "store", hash="blake3")
        assert 'blake3 = ["blake3>=' in (ROOT / "pyproject.toml").read_text()

    def test_later_version(self, store: Store) -> None:
        (Path(store.path) / "store.json").write_bytes(encode("gpushare-store/2", {"id": store.id}))
        with pytest.raises(errors.UnknownVersion, match="gpushare-store/2"):
            Store.open(store.path)

    @pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 200, b'{"format": 3}', b"[" * 100000])
    def test_fr61_damaged(self, store: Store, damage: bytes) -> None:
        (Path(store.path) / "store.json").write_bytes(damage)
        with pytest.raises((errors.DocumentDamaged, errors.UnknownVersion), match=r"store\.json"):
            Store.open(store.path)

    def test_many_makers_agree(self, tmp_path: Path) -> None:
        program = f"from chunkstore import Store; print(Store.create({str(tmp_path / 'store')!r}).id)"
        makers = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(4)]
        assert len({maker.communicate(timeout=100)[0] for maker in makers}) == 1


class TestDamage:
    """Damage is found by whoever meets it."""

    def test_changed_byte(self, store: Store) -> None:
        chunk = store.put(memory(content(1))).chunk
        with open(chunk_file(store, chunk), "r+b") as file:
            file.seek(SIZE - 1)
            file.write(bytes([content(1)[-1] ^ 1]))
        with pytest.raises(errors.ChunkDamaged, match="hash"):
            store.get(chunk, memory(SIZE))
        assert store.get(chunk, memory(SIZE), verify=False) is Source.STORE

    def test_fr60_right_size_and_zeros(self, store: Store) -> None:
        chunk = store.put(memory(content(1))).chunk
        chunk_file(store, chunk).write_bytes(bytes(SIZE))
        with pytest.raises(errors.ChunkDamaged):
            store.get(chunk, memory(SIZE))

    @pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
    @pytest.mark.parametrize("verify", [True, False])
    def test_fr62_other_size(self, store: Store, size: int, verify: bool) -> None:
        chunk = store.put(memory(content(1))).chunk
        os.truncate(chunk_file(store, chunk), size)
        with pytest.raises(errors.ChunkDamaged, match=f"{size} bytes instead of {SIZE}"):
            store.get(chunk, memory(SIZE), verify=verify)

    def test_missing(self, store: Store) -> None:
        chunk = store.put(memory(content(1))).chunk
        chunk_file(store, chunk).unlink()
        with pytest.raises(errors.ChunkMissing, match="fsck"):
            store.get(chunk, memory(SIZE))

    @pytest.mark.parametrize("verify", list(Verify))
    @pytest.mark.parametrize("damage", ["content", "size"])
    def test_save_replaces_it_from_the_bytes_at_hand(self, store: Store, verify: Verify, damage: str) -> None:
        chunk = store.put(memory(content(1))).chunk
        chunk_file(store, chunk).write_bytes(content(2, SIZE if damage == "content" else 5))
        told: list[str] = []
        later = Store.open(store.path, verify_existing=verify)
        later.files._notify = told.append
        trusted = verify is Verify.NONE and damage == "content"
        assert later.put(memory(content(1))).how is (How.KNOWN if trusted else How.REPAIRED)
        assert bool(told) is not trusted
        if not trusted:
            later.get(chunk, memory(SIZE))

    def test_what_one_save_compared_the_next_compares_again(self, store: Store, tmp_path: Path) -> None:
        save(store, tmp_path / "one", [1])
        (chunk,) = Checkpoint.open(tmp_path / "one").stored_chunks().values()
        assert store.put(memory(content(1))).how is How.KNOWN
        chunk_file(store, chunk).write_bytes(content(2))
        assert store.put(memory(content(1))).how is How.KNOWN, "compared twice in one save"
        with Save.begin(store, tmp_path / "two"):
            assert store.put(memory(content(1))).how is How.REPAIRED

    @pytest.mark.parametrize("size", [SIZE, 100])
    def test_two_contents_with_one_hash(self, store: Store, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        chunk = store.put(memory(content(1))).chunk
        monkeypatch.setattr("chunkstore.store.chunk_of", lambda data, digest: Chunk(chunk.hash, len(data)))
        later = Store.open(store.path)
        with pytest.raises(errors.HashCollision, match="blake3"):
            later.put(memory(content(2, size)))
        later.get(chunk, memory(SIZE))

    @pytest.mark.parametrize("name", ["manifest.json", "gpu-7.json"])
    @pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
    def test_fr61_documents_of_a_checkpoint(self, store: Store, tmp_path: Path, name: str, damage: str) -> None:
        save(store, tmp_path / "ckpt", [1])
        path = tmp_path / "ckpt" / name
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:-9], "changed": whole.replace(b"7", b"8"), "emptied": b""}[damage])
        with pytest.raises(errors.DocumentDamaged, match=name):
            Checkpoint.open(tmp_path / "ckpt").load()

    def test_rank_file_missing(self, store: Store, tmp_path: Path) -> None:
        save(store, tmp_path / "ckpt", [1])
        (tmp_path / "ckpt" / "gpu-7.json").unlink()
        with pytest.raises(errors.Damaged, match=r"gpu-7\.json"):
            Checkpoint.open(tmp_path / "ckpt").load()

    @pytest.mark.parametrize("name", ["../../../etc/passwd", "AB" * 16, "ab" * 15, 5, "ab" * 15 + "/x"])
    def test_hash_that_is_none_becomes_no_path(self, store: Store, tmp_path: Path, name: object) -> None:
        body = {"device": 0, "address": "0x1000", "size_bytes": 5, "properties": {}, "access": [], "chunks": [name]}
        text = encode(format.RANK, {"inner_pid": 1, "facts": {}, "allocations": [body]})
        with pytest.raises(format.FormatError, match="names no chunk"):
            Rank.decode(text, SIZE, 32)


def test_read_only_directory_serves_loads(store: Store, tmp_path: Path) -> None:
    """Nothing is opened for writing; a read-only mount is in test_mounts."""
    save(store, tmp_path / "ckpt", [1, 0, 2])
    before = {path: os.stat(path).st_mtime_ns for path in [*tmp_path.rglob("*"), tmp_path]}
    assert load(Store.open(tmp_path / "store"), tmp_path / "ckpt") == [content(1), bytes(SIZE), content(2)]
    assert {path: os.stat(path).st_mtime_ns for path in [*tmp_path.rglob("*"), tmp_path]} == before


def test_what_is_written_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE, cache=tmp_path / "cache")
        save(store, tmp_path / "ckpt", [1])
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert os.stat(path).st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("name", ["store/sweep.lock", "store/chunks", "ckpt/save.lock"])
def test_symbolic_link_in_the_place_of_a_file_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    chunk = store.put(memory(content(1))).chunk
    target = tmp_path / "victim"
    target.write_bytes(content(1))
    (tmp_path / "ckpt").mkdir()
    path = chunk_file(store, chunk) if name == "store/chunks" else tmp_path / name
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    with pytest.raises(errors.StoreError, match="symbolic links"):
        save(store, tmp_path / "ckpt", [1])
    with pytest.raises(errors.StoreError):
        load(store, tmp_path / "ckpt")
    assert target.read_bytes() == content(1)
