"""One behaviour wherever chunks lie: in a directory, in a cache, and in an object store behind a real server."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from chunkstore import (
    CHUNK_SIZE_BYTES,
    Allocation,
    Cache,
    Checkpoint,
    Chunk,
    Files,
    How,
    Save,
    Source,
    Store,
    Verify,
    errors,
    fsck,
    gc,
    objects,
    report,
    roots,
)
from chunkstore import save as saving
from chunkstore.chunks import Backend, Entry, State, chunk_of
from chunkstore.hashing import DEFAULT_HASH, hash_by_name
from chunkstore.io import LocksUnsupported
from chunkstore.place import is_url
from chunkstore.roots import State as RootState
from chunkstore.transfer import copy_checkpoint, prefetch
from tests.programs.setting import ROOT
from tests.programs.tool import Answer
from tests.store import s3
from tests.store.test_commands import REFERENCE, refused, run
from tests.store.test_gc import age
from tests.store.tools import SIZE, content, load, memory, save

DIGEST = hash_by_name(DEFAULT_HASH, "")
prefixes = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that speaks S3."""
    pytest.importorskip("moto.server", reason="the package moto, with flask, is not installed")
    pytest.importorskip("obstore", reason="the package obstore is not installed")
    with s3.serving(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test's own in a bucket there."""
    for name, value in s3.variables(request.getfixturevalue("server")).items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.BUCKET}/test-{next(prefixes)}/store"


def root_of(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where the test's store goes, by the fixture's parameter."""
    return str(request.getfixturevalue("url")) if request.param == "s3" else str(tmp_path / "store")


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store in either place."""
    return Store.create(root_of(request, tmp_path), chunk_size_bytes=SIZE)


@pytest.fixture(params=["directory", "cache", "s3"])
def chunks(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """The chunks of a store in either place, or of a cache."""
    if request.param == "cache":
        store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE, cache=tmp_path / "cache")
        assert isinstance(store.cache, Cache)
        return store.cache.chunks
    return Store.create(root_of(request, tmp_path), chunk_size_bytes=SIZE).chunks


def put(chunks: Backend, number: int, size: int = SIZE) -> Chunk:
    """Write a content; return its chunk."""
    data = memory(content(number, size))
    chunk = chunk_of(data, DIGEST)
    assert chunks.write(chunk, data)
    return chunk


class TestChunks:
    """What every backend does."""

    @pytest.mark.parametrize("size", [1, 4095, SIZE])
    def test_what_was_written_is_read(self, chunks: Backend, size: int) -> None:
        chunk = put(chunks, 1, size)
        into = memory(size)
        chunks.read(chunk, into)
        assert bytes(into) == content(1, size)
        entry = chunks.lookup(str(chunk.hash))
        assert entry is not None and (entry.hash, entry.size_bytes) == (chunk.hash, size)
        assert chunks.lease(str(chunk.hash)) is not None
        chunks.settle(str(chunk.hash))

    def test_in_pieces_at_a_time(self, chunks: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(objects, "PIECE_BYTES", 10_000)
        chunk = put(chunks, 1)
        into = memory(SIZE)
        chunks.read(chunk, into)
        assert bytes(into) == content(1)
        assert chunks.compare(chunk, memory(content(1))) is State.SOUND

    def test_what_is_there_is_not_written_over(self, chunks: Backend) -> None:
        chunk = put(chunks, 1)
        assert not chunks.write(chunk, memory(content(2)))
        assert chunks.compare(chunk, memory(content(1))) is State.SOUND
        assert chunks.write(chunk, memory(content(2)), replace=True)
        assert chunks.compare(chunk, memory(content(1))) is State.DAMAGED
        assert chunks.compare(chunk, memory(content(2))) is State.SOUND

    def test_what_is_missing(self, chunks: Backend) -> None:
        chunk = chunk_of(memory(content(1)), DIGEST)
        assert chunks.lookup(str(chunk.hash)) is None
        assert chunks.lease(str(chunk.hash)) is None
        assert chunks.compare(chunk, memory(content(1))) is State.MISSING
        with pytest.raises(errors.ChunkMissing):
            chunks.read(chunk, memory(SIZE))

    @pytest.mark.parametrize("size", [1, SIZE - 1, SIZE * 2])
    def test_wrong_size_is_damage(self, chunks: Backend, size: int) -> None:
        chunk = put(chunks, 1)
        assert chunks.write(chunk, memory(content(1, size)), replace=True)
        assert chunks.compare(chunk, memory(content(1))) is State.DAMAGED
        with pytest.raises(errors.ChunkDamaged, match="instead of"):
            chunks.read(chunk, memory(SIZE))

    def test_other_content_with_its_own_name_is_no_damage(self, chunks: Backend) -> None:
        chunk = put(chunks, 1)
        assert chunks.compare(chunk, memory(content(2))) is State.OTHER

    def test_entries(self, chunks: Backend) -> None:
        assert list(chunks.entries()) == []
        sizes = {put(chunks, number, 100 * number).hash: 100 * number for number in (1, 2, 3)}
        assert {entry.hash: entry.size_bytes for entry in chunks.entries()} == sizes
        assert chunks.unfinished_bytes() == chunks.reap(1 << 62) == 0

    def test_removal(self, chunks: Backend) -> None:
        chunk = put(chunks, 1)
        if isinstance(chunks, objects.ObjectChunks):
            with pytest.raises(LocksUnsupported):
                chunks.remove([str(chunk.hash)], lambda entry: True)
            return
        assert chunks.remove([str(chunk.hash)], lambda entry: False) == []
        assert [entry.hash for entry in chunks.remove([str(chunk.hash)], lambda entry: True)] == [chunk.hash]
        assert chunks.lookup(str(chunk.hash)) is None


class TestStore:
    """What a store does wherever it lies."""

    def test_save_and_load(self, store: Store, tmp_path: Path) -> None:
        save(store, tmp_path / "ckpt", [1, 0, 2, 1])
        again = Store.open(store.path)
        assert again.facts == store.facts
        assert load(again, tmp_path / "ckpt") == [content(1), bytes(SIZE), content(2), content(1)]
        assert len(list(again.chunks.entries())) == 2
        assert [item.state for item in roots.find_all(again)] == [RootState.COMPLETE]
        assert (again.place.room().bytes is None) == is_url(store.path)

    def test_known_bytes_are_not_written_again(self, store: Store, tmp_path: Path) -> None:
        save(store, tmp_path / "one", [1])
        assert [Store.open(store.path).put(memory(content(number))).how for number in (1, 2)] == [How.KNOWN, How.NEW]

    def test_damage_is_found_and_repaired(self, store: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1, 2])
        (chunk, _) = checkpoint.stored_chunks().values()
        store.chunks.write(chunk, memory(content(3)), replace=True)
        with pytest.raises(errors.ChunkDamaged):
            load(store, tmp_path / "ckpt")
        assert [bad.hash for bad in fsck.check(store).bad] == [chunk.hash]
        careful = Store.open(store.path, verify_existing=Verify.ALL)
        assert careful.put(memory(content(1))).how is How.REPAIRED
        assert fsck.check(store).clean

    def test_repair_from_elsewhere(self, store: Store, tmp_path: Path) -> None:
        other = Store.create(tmp_path / "good", chunk_size_bytes=SIZE)
        chunk = other.put(memory(content(1))).chunk
        save(store, tmp_path / "ckpt", [1])
        store.chunks.write(chunk, memory(content(2)), replace=True)
        assert fsck.check(store, repair_from=other).clean
        assert load(store, tmp_path / "ckpt") == [content(1)]

    def test_failed_save_leaves_no_root(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt), Save.begin(store, tmp_path / "ckpt") as begun:
            begun.add(1, Allocation(0, 0, SIZE, (store.put(memory(content(1))).chunk,)))
            assert [item.state for item in roots.find_all(store)] == [RootState.SAVING]
            raise KeyboardInterrupt
        assert roots.find_all(store) == []
        assert not (tmp_path / "ckpt").exists()

    def test_lists_and_removal(self, store: Store, tmp_path: Path) -> None:
        save(store, tmp_path / "one", [1, 2])
        save(store, tmp_path / "two", [2, 3])
        used = {item.path: (item.unique_bytes, item.shared_bytes) for item in report.usage(store).checkpoints}
        assert used == {str(tmp_path / "one"): (SIZE, SIZE), str(tmp_path / "two"): (SIZE, SIZE)}
        assert saving.remove(store, tmp_path / "one")
        assert [item.path for item in report.list_checkpoints(store)] == [str(tmp_path / "two")]
        (tmp_path / "two").rename(tmp_path / "moved")
        roots.adopt(store, tmp_path / "moved")
        assert [item.root.path for item in roots.find_all(store)] == [str(tmp_path / "moved")]

    def test_collection(self, store: Store, tmp_path: Path) -> None:
        chunk = store.put(memory(content(1))).chunk
        if is_url(store.path):
            with pytest.raises(errors.NoLocks, match="object store"):
                gc.collect(store, grace_s=0)
        else:
            age(Path(store.path))
            assert gc.collect(store).removed_chunks == 1
        assert (store.chunks.lookup(str(chunk.hash)) is not None) == is_url(store.path)

    def test_prefetch_and_load_from_the_cache(self, store: Store, tmp_path: Path) -> None:
        checkpoint = save(store, tmp_path / "ckpt", [1, 2, 3])
        cached = Store.open(store.path, cache=tmp_path / "cache")
        assert prefetch(cached, checkpoint).copied_chunks == 3
        assert prefetch(cached, checkpoint).present_chunks == 3
        found = [cached.get(chunk, memory(SIZE)) for chunk in checkpoint.stored_chunks().values()]
        assert found == [Source.CACHE] * 3

    def test_copies_to_and_from_a_directory(self, store: Store, tmp_path: Path) -> None:
        near = Store.create(tmp_path / "near", chunk_size_bytes=SIZE)
        checkpoint = save(near, tmp_path / "ckpt", [1, 0, 2])
        there = copy_checkpoint(near, checkpoint, store, tmp_path / "there")
        assert (there.new_bytes, there.known_bytes) == (2 * SIZE, 0)
        assert copy_checkpoint(near, checkpoint, store, tmp_path / "twice").known_bytes == 2 * SIZE
        back = Store.create(tmp_path / "back", chunk_size_bytes=SIZE)
        copy_checkpoint(store, Checkpoint.open(tmp_path / "there"), back, tmp_path / "again")
        assert load(back, tmp_path / "again") == load(near, tmp_path / "ckpt")

    def test_of_another_kind(self, store: Store) -> None:
        with pytest.raises(errors.Incompatible):
            Store.create(store.path, chunk_size_bytes=2 * SIZE)
        assert Store.create(store.path, chunk_size_bytes=SIZE).id == store.id
        for wrong in (f"{store.path}/chunks", f"{store.path}/none"):
            with pytest.raises(errors.NotAStore):
                Store.open(wrong)
        with pytest.raises(errors.NotAStore, match="lie there"):
            Store.create(os.path.dirname(store.path))


class TestObjectStore:
    """What only an object store has: URLs, requests that fail, a client that may be missing."""

    @pytest.mark.parametrize(
        ("path", "yes"),
        [("s3://b/p", True), ("gs://b", True), ("az://c/p", True), ("abfss://c/p", True), ("/s3://b", False),
         ("s3:/b", False), ("s4://b", False), ("file:///tmp", False), ("http://x/y", False)],
    )  # fmt: skip
    def test_urls(self, path: str, yes: bool) -> None:
        assert is_url(path) == yes

    def test_known_chunks_are_not_read_back_unless_all_are_to_be(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Store.create(url, chunk_size_bytes=SIZE).put(memory(content(1)))
        read: list[Chunk] = []
        compare = objects.ObjectChunks.compare
        monkeypatch.setattr(
            objects.ObjectChunks,
            "compare",
            lambda self, chunk, data: (read.append(chunk), compare(self, chunk, data))[1],
        )
        for verify, count in ((Verify.NEW, 0), (Verify.ALL, 1)):
            assert Store.open(url, verify_existing=verify).put(memory(content(1))).how is How.KNOWN
            assert len(read) == count

    def test_requests_that_fail_are_made_again(self, url: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        made = Store.create(url, chunk_size_bytes=SIZE)
        chunk = made.put(memory(content(1))).chunk
        with s3.Unreliable(server, refused=3) as way:
            monkeypatch.setenv("AWS_ENDPOINT_URL", way.url)
            later = Store.open(url)
            assert later.put(memory(content(2))).how is How.NEW
            into = memory(SIZE)
            later.get(chunk, into)
            assert bytes(into) == content(1)
            assert way.connections > 3

    def test_answer_that_is_cut_off_is_asked_for_again(
        self, url: str, server: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chunk = Store.create(url, chunk_size_bytes=SIZE).put(memory(content(1))).chunk
        with s3.Unreliable(server, cut=1) as way:
            monkeypatch.setenv("AWS_ENDPOINT_URL", way.url)
            later, into = Store.open(url), memory(SIZE)
            later.get(chunk, into)
            assert bytes(into) == content(1)
            assert way.connections > 1

    def test_server_that_does_not_answer(self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is waited for as long as `waits` says, by every thread that asks; a signal ends `store ls`."""
        monkeypatch.setattr(objects, "PIECE_BYTES", SIZE // 4)
        waits = [True]
        with s3.running(tmp_path / "log") as server:
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
            store = Store.create(url, chunk_size_bytes=SIZE, files=Files(waits=lambda: waits[0]))
            chunk = store.put(memory(content(1))).chunk
            with server.deaf():
                waits[0] = False
                with pytest.raises(errors.Damaged, match="does not answer"):
                    store.get(chunk, memory(SIZE))
                with pytest.raises(errors.WriteFailed, match="does not answer"):
                    Save.begin(store, tmp_path / "ckpt")
                ls = [sys.executable, "-m", "gpususpend", "store", "ls", url, "--json"]
                with subprocess.Popen(ls, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as slow:
                    server.wait_for_client(slow.pid)
                    slow.send_signal(signal.SIGINT)
                    out, err = slow.communicate(timeout=60)
                refused(Answer(ls, slow.returncode, out, err), 130, "cut-off")
            waits[0] = True
            store.get(chunk, into := memory(SIZE))
            assert bytes(into) == content(1)

    def test_a_commit_looks_for_many_chunks_at_a_time(
        self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A workload may stand still meanwhile, and each look is a way to the server and back."""
        store = Store.create(url, chunk_size_bytes=SIZE)
        all_there, lookup = threading.Barrier(4), objects.ObjectChunks.lookup

        def together(chunks: objects.ObjectChunks, name: str) -> Entry | None:
            all_there.wait(60)
            return lookup(chunks, name)

        with Save.begin(store, tmp_path / "ckpt") as begun:
            for number in range(1, 9):
                begun.add(1, Allocation(0, number, SIZE, (store.put(memory(content(number))).chunk,)))
            monkeypatch.setattr(objects.ObjectChunks, "lookup", together)
            begun.commit()

    def test_ranges_are_asked_for_at_a_time(self, url: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pitfall 42: many streams, of large chunks; one uses little of the wire."""
        assert objects.RANGES * objects.PIECE_BYTES == CHUNK_SIZE_BYTES
        monkeypatch.setattr(objects, "PIECE_BYTES", 4096)
        chunk = Store.create(url, chunk_size_bytes=SIZE).put(memory(content(1))).chunk
        with s3.Unreliable(server) as way:
            monkeypatch.setenv("AWS_ENDPOINT_URL", way.url)
            later, into = Store.open(url), memory(SIZE)
            way.together = threading.Barrier(4)  # of 16 pieces
            later.get(chunk, into)
            assert bytes(into) == content(1)

    def test_server_that_has_gone_is_an_error_and_no_damage_to_what_is_there(
        self, url: str, server: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chunk = Store.create(url, chunk_size_bytes=SIZE).put(memory(content(1))).chunk
        monkeypatch.setattr(objects, "RETRIES", 1)
        with s3.Unreliable(server) as way:
            monkeypatch.setenv("AWS_ENDPOINT_URL", way.url)
            later = Store.open(url)
        with pytest.raises(errors.Damaged, match=f"cannot read {url}/chunks"):
            later.get(chunk, memory(SIZE))
        with pytest.raises(errors.StoreError, match="see the cause"):
            later.put(memory(content(2)))
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        Store.open(url).get(chunk, memory(SIZE))

    def test_bucket_that_is_missing(self, url: str) -> None:
        with pytest.raises(errors.NotAStore, match="see that the bucket is there, and name the prefix of a store"):
            Store.open("s3://no-such-bucket/store")
        with pytest.raises(errors.NotAStore, match="s3://no-such-bucket/store: there is no such bucket; make it"):
            Store.create("s3://no-such-bucket/store")

    def test_place_that_cannot_be_reached(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Refused, not damaged: without access, without a server."""
        Store.create(url, chunk_size_bytes=SIZE)
        monkeypatch.setattr(objects, "RETRIES", 0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(errors.Unreachable, match=f"{url} cannot be reached: .*credentials"):
            Store.open(url)

    @pytest.mark.parametrize(
        "path",
        ["s3://user:SECRET@b/p", "s3://SECRET@b/p", "s3://b/p?key=SECRET", "s3://b/p#SECRET",
         "abfss://c:SECRET@a.dfs.core.windows.net/p"],
    )  # fmt: skip
    def test_credentials_in_a_url(self, path: str) -> None:
        """They are refused, since the client passes them over, and shown nowhere."""
        answer = run("store", "ls", path, "--json")
        error = refused(answer, 3, "unreachable")
        assert "leave those out" in error["message"] and "SECRET" not in answer.stdout + answer.stderr

    @pytest.mark.parametrize("path", ["s3://", "s3:///p", "az://container/p", "s3://[/p"])
    def test_url_that_the_client_cannot_use(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
        refused(run("store", "ls", path, "--json"), 3, "unreachable")

    def test_what_a_url_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the reference says; Azure's account stands in the environment or in the longer form."""
        pytest.importorskip("obstore", reason="the package obstore is not installed")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "of-the-environment")
        forms = re.findall(r"`((?:s3|gs|az|abfss)://[A-Z][^`]*)`", REFERENCE)
        words = {"bucket": "BUCKET", "container_name": "CONTAINER", "account_name": "ACCOUNT"}
        for form in forms:
            store = objects.Bucket(form, lambda: True)._client.store
            named = {**store.config, "prefix": store.prefix}
            expected = {name: word for name, word in words.items() if word in form} | {"prefix": "PREFIX"}
            assert {name: str(named[name]).upper() for name in expected} == expected, form
        assert len(forms) == 4

    def test_a_write_tells_the_checksum_of_its_content(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By which the other side notices what changes on the way."""
        pytest.importorskip("obstore", reason="the package obstore is not installed")
        told: list[str] = []

        class Noting(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                told.extend([self.headers["x-amz-content-sha256"], hashlib.sha256(body).hexdigest()])
                self.send_response(200)
                self.send_header("ETag", "1")
                self.send_header("Content-Length", "0")
                self.end_headers()

        with ThreadingHTTPServer(("127.0.0.1", 0), Noting) as listener:
            threading.Thread(target=listener.serve_forever).start()
            try:
                for name, value in s3.variables(f"http://127.0.0.1:{listener.server_port}").items():
                    monkeypatch.setenv(name, value)
                put(objects.Bucket("s3://b/p", lambda: True).chunks(DIGEST), 1)
            finally:
                listener.shutdown()
        assert len(told) == 2 and told[0] == told[1]

    def test_client_that_is_not_installed(self) -> None:
        program = "import sys; sys.modules['obstore'] = None\nimport chunkstore; chunkstore.Store.open('s3://b/p')"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
        assert "NoClient: s3://b/p: object stores need the package obstore" in done.stderr

    def test_client_is_loaded_only_for_urls(self, tmp_path: Path) -> None:
        Store.create(tmp_path / "store")
        program = f"import sys, chunkstore; chunkstore.Store.open('{tmp_path}/store'); print('obstore' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
        assert done.stdout == "False\n"

    def test_commands(self, url: str, tmp_path: Path) -> None:
        near = Store.create(tmp_path / "near", chunk_size_bytes=SIZE)
        save(near, tmp_path / "ckpt", [1, 0, 2])
        copied = run("store", "copy", near.path, tmp_path / "ckpt", url, tmp_path / "far", "--json").expect().json
        assert copied["copied"]["new_bytes"] == 2 * SIZE
        listed = run("store", "ls", url, "--json").expect().json
        assert (listed["store"]["path"], listed["checkpoints"][0]["state"]) == (url, "complete")
        fetched = run("cache-prefetch", url, tmp_path / "far", tmp_path / "cache", "--json").expect().json
        assert fetched["prefetched"]["copied_chunks"] == 2
        cached = Store.open(url, cache=tmp_path / "cache", files=Files())
        assert {cached.get(chunk, memory(SIZE)) for chunk in Checkpoint.open(tmp_path / "far").all_chunks()} == {
            Source.ZERO, Source.CACHE
        }  # fmt: skip
        run("store", "fsck", url).expect()
        run("store", "du", url).expect()
        refused(run("store", "gc", url, "--json"), 3, "no-locks")
        run("store", "rm", url, tmp_path / "far").expect()
        assert run("store", "ls", url, "--json").expect().json["checkpoints"] == []
