"""Any memory in chunks of any size: cut from its start, each content once, zeros nowhere, and all of it comes back."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore import Allocation, Checkpoint, How, Save, Source, Store, fsck
from chunkstore.hashing import DEFAULT_HASH
from tests.store.conftest import SHM
from tests.store.tools import chunk_file, memory

RUNS = st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 2)), min_size=1, max_size=6)


def content(runs: list[tuple[int, int]]) -> bytes:
    """Return runs of bytes one after the other, of zeros for kind 0; a kind begins in the same way each time."""
    return b"".join(random.Random(kind).randbytes(size) if kind else bytes(size) for size, kind in runs)


def save(store: Store, directory: Path, contents: list[bytes], shift: int) -> list[How]:
    """Save an allocation of each content, from memory that begins so far behind a page; return what was done."""
    hows = []
    with Save.begin(store, directory) as begun:
        for number, data in enumerate(contents):
            room = memory(shift + len(data))
            room[shift:] = data
            starts = range(0, len(data), store.chunk_size_bytes)
            puts = [store.put(room[shift + start :][: store.chunk_size_bytes]) for start in starts]
            hows += [put.how for put in puts]
            begun.add(1, Allocation(0, number, len(data), tuple(put.chunk for put in puts)))
        begun.commit()
    return hows


@settings(max_examples=60, deadline=None)
@given(
    chunk_bytes=st.one_of(st.integers(1000, 20000), st.sampled_from([4096, 8192])),
    memories=st.lists(RUNS, min_size=1, max_size=4),
    shift=st.sampled_from([0, 1, 4095]),
    digest=st.sampled_from([DEFAULT_HASH, "blake3"]),
)
def test_any_memory_comes_back(
    chunk_bytes: int, memories: list[list[tuple[int, int]]], shift: int, digest: str
) -> None:
    contents = [content(runs) for runs in memories]
    path = Path(tempfile.mkdtemp(prefix="gpushare-test-store-", dir=SHM if SHM.is_dir() else None))
    try:
        store = Store.create(path / "store", chunk_size_bytes=chunk_bytes, hash=digest, cache=path / "cache")
        save(store, path / "one", contents, shift)
        assert How.NEW not in save(store, path / "two", contents, 0), "other addresses, the same chunks"
        names: dict[bytes, str | None] = {}
        for data, allocation in zip(contents, Checkpoint.open(path / "one").rank(1).allocations, strict=True):
            for number, chunk in enumerate(allocation.chunks):
                piece = data[number * chunk_bytes :][:chunk_bytes]
                assert chunk.size_bytes == len(piece) and (chunk.hash is None) is not any(piece)
                assert names.setdefault(piece, chunk.hash) == chunk.hash
                into = memory(b"\xff" * (shift + chunk_bytes))
                assert store.get(chunk, into[shift:]) is (Source.CACHE if chunk.hash else Source.ZERO)
                assert into[shift:][: len(piece)] == piece
                if chunk.hash:
                    assert chunk_file(store, chunk).read_bytes() == piece
            assert sum(chunk.size_bytes for chunk in allocation.chunks) == len(data)
        kept = [name for name in names.values() if name is not None]
        assert sorted(entry.hash for entry in store.chunks.entries()) == sorted(set(kept)) == sorted(kept)
        assert fsck.check(store, threads=1).clean
    finally:
        shutil.rmtree(path)
