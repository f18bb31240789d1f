"""Something else than a regular file where a store, a cache or a checkpoint has one: told at once, never waited for."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkstore import Checkpoint, How, Source, Store, errors, fsck, gc, roots
from chunkstore import save as saving
from tests.store.test_commands import refused, run
from tests.store.tools import SIZE, chunk_file, content, memory, save


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o020600, os.makedev(1, 5))  # /dev/zero, which never ends
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError as error:
        pytest.skip(f"devices cannot be made here: {error}")


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo, "socket": _socket, "device": _device, "directory": Path.mkdir,
}  # fmt: skip
ODD = "it is no regular file"


@pytest.fixture(params=KINDS)
def replaced(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """A function that puts something else in the place of a file."""

    def replace(path: Path) -> None:
        path.unlink()
        KINDS[request.param](path)

    return replace


@pytest.fixture
def ckpt(store: Store, tmp_path: Path) -> Path:
    """A checkpoint of two chunks."""
    save(store, tmp_path / "ckpt", [1, 2])
    return tmp_path / "ckpt"


def told(error: errors.StoreError) -> None:
    """Check what an error says."""
    assert isinstance(error, errors.Damaged) and error.facts["detail"] == ODD, error


def test_documents(store: Store, ckpt: Path, replaced: Callable[[Path], None]) -> None:
    """Of a checkpoint: it cannot be read, removed or collected past. Of a store: it is damaged."""
    for path in (ckpt / "gpu-7.json", ckpt / "manifest.json"):
        before = path.read_bytes()
        replaced(path)
        with pytest.raises(errors.Damaged) as caught:
            Checkpoint.open(ckpt).load()
        told(caught.value)
        assert ODD in fsck.check(store).unreachable[0][1]
        with pytest.raises(errors.UnreachableRoots):
            gc.collect(store, grace_s=0)
        (shutil.rmtree if path.is_dir() else os.unlink)(path)
        path.write_bytes(before)
    replaced(Path(store.path) / "store.json")
    with pytest.raises(errors.Damaged) as caught:
        Store.open(store.path)
    told(caught.value)


def test_record_of_a_root(store: Store, ckpt: Path, replaced: Callable[[Path], None]) -> None:
    """It may stand for a checkpoint: it is named, and nothing is collected past it, nor past a link."""
    record = Path(store.path) / "roots" / f"{Checkpoint.open(ckpt).id}.json"
    before = record.read_bytes()
    replaced(record)
    for _ in range(2):
        with pytest.raises(errors.UnreachableRoots, match=str(record)):
            gc.collect(store, grace_s=0)
        assert [item.root.path for item in roots.find_all(store)] == [str(record)]
        (shutil.rmtree if record.is_dir() and not record.is_symlink() else os.unlink)(record)
        record.symlink_to(ckpt / "manifest.json")
    record.unlink()
    record.write_bytes(before)
    assert gc.collect(store, grace_s=0).needed_chunks == 2


def test_a_removal_past_a_directory_for_a_record(store: Store, ckpt: Path) -> None:
    """`store rm` and `store forget` name it, with the way out, and have removed nothing."""
    record = Path(store.path) / "roots" / f"{Checkpoint.open(ckpt).id}.json"
    before = record.read_bytes()
    record.unlink()
    record.mkdir()
    for words in (("rm", store.path, ckpt), ("forget", store.path, record)):
        answer = run("store", *words, "--json")
        message = refused(answer, 6, "damaged")["message"]
        assert f"cannot remove {record}: a directory lies there; see who made it, and remove it" in message, message
        Checkpoint.open(ckpt).load()
    record.rmdir()
    record.write_bytes(before)
    run("store", "rm", store.path, ckpt).expect()


def test_locks(store: Store, ckpt: Path, replaced: Callable[[Path], None]) -> None:
    """A save or a removal that cannot lock fails."""
    (ckpt / "save.lock").touch()
    replaced(ckpt / "save.lock")
    with pytest.raises(errors.WriteFailed):
        saving.remove(store, ckpt)
    assert [item.state for item in roots.find_all(store)] == [roots.State.COMPLETE]
    sweep = Path(store.path) / "sweep.lock"
    sweep.touch()
    replaced(sweep)
    with pytest.raises(errors.WriteFailed):
        store.put(memory(content(1)))


def test_chunk(store: Store, ckpt: Path, replaced: Callable[[Path], None], tmp_path: Path) -> None:
    """It is damaged: a check lists it, and a save or a repair writes it again, but where a directory lies."""
    chunk = next(iter(Checkpoint.open(ckpt).stored_chunks().values()))
    other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
    for number in (1, 2):
        other.put(memory(content(number)))
    path = chunk_file(store, chunk)
    replaced(path)
    with pytest.raises(errors.Damaged) as caught:
        store.get(chunk, memory(SIZE))
    told(caught.value)
    [bad] = fsck.check(store).bad
    assert (bad.hash, bad.detail, bad.checkpoints) == (chunk.hash, ODD, (str(ckpt),))
    if path.is_dir():
        with pytest.raises(errors.WriteFailed, match="directory"):
            store.put(memory(content(1)))
        return
    assert [item.repaired for item in fsck.check(store, repair_from=other).bad] == [True]
    replaced(path)
    again = Store.open(store.path)
    assert {again.put(memory(content(number))).how for number in (1, 2)} == {How.REPAIRED, How.KNOWN}
    assert fsck.check(store).clean


def test_cache(store: Store, ckpt: Path, replaced: Callable[[Path], None], tmp_path: Path) -> None:
    """It is never needed: the store is read instead."""
    chunk = next(iter(Checkpoint.open(ckpt).stored_chunks().values()))
    cached = Store.open(store.path, cache=tmp_path / "cache")
    assert cached.cache is not None
    view = memory(SIZE)
    store.get(chunk, view)
    cached.cache.add(chunk, view)
    replaced(tmp_path / "cache" / "chunks" / str(chunk.hash)[:2] / str(chunk.hash))
    assert cached.get(chunk, memory(SIZE)) is Source.STORE
    replaced(tmp_path / "cache" / "cache.json")
    assert Store.open(store.path, cache=tmp_path / "cache").cache is None


def test_commands(store: Store, ckpt: Path) -> None:
    """The same from outside, each within its time."""
    chunk = chunk_file(store, next(iter(Checkpoint.open(ckpt).stored_chunks().values())))
    for path in (chunk, ckpt / "gpu-7.json", ckpt / "manifest.json", Path(store.path) / "store.json"):
        path.unlink()
        os.mkfifo(path)
        refused(run("store", "fsck", store.path, "--json"), 6, "damaged")
        if path.parent == ckpt:
            refused(run("store", "show", ckpt, "--json"), 6, "damaged")
        for name in ("ls", "du"):
            run("store", name, store.path, "--json").expect(6 if path.name == "store.json" else 0)
