"""The commands on stores and caches, each run as a process on a real store that the library made."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest

from chunkstore import Checkpoint, Save, Source, Store, fsck, gc
from chunkstore import errors as store_errors
from chunkstore.transfer import THREADS, prefetch
from gpususpend import defaults, errors, storage
from gpususpend.cli import group
from gpususpend.cli.options import size
from gpususpend.cli.store import COMMANDS
from gpususpend.cli.storing import rate
from tests.programs.setting import ROOT
from tests.programs.tool import Answer
from tests.store.test_cache import lying
from tests.store.test_fsck import damage
from tests.store.test_gc import age, names
from tests.store.test_package import all_errors, example
from tests.store.tools import SIZE, chunk_file, content, load, memory, save

REFERENCE = (ROOT / "docs" / "reference" / "cli.md").read_text()


def words(*arguments: object) -> list[str]:
    """Return the command line of the tool."""
    return [sys.executable, "-m", "gpususpend", *map(str, arguments)]


def run(*arguments: object, module: str = "gpususpend") -> Answer:
    """Run a command, or a program that is the tool with something wrong, to its end."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    return Answer(command, done.returncode, done.stdout, done.stderr)


SLOW = "64KiB/s"
"""A rate of a chunk a second: whoever ends a command once there is a chunk ends it in the middle, on any machine."""


def wait_for_a_chunk(command: subprocess.Popen[str], place: Path) -> None:
    """Wait until a command has written a chunk into a store or a cache."""
    until = time.monotonic() + 60
    while not list((place / "chunks").glob("*/*")):
        assert command.poll() is None and time.monotonic() < until
        time.sleep(0.01)


def refused(answer: Answer, exit_code: int, word: str) -> dict[str, Any]:
    """Return the error of a command that ended so."""
    found = answer.expect(exit_code).json
    assert (found["ok"], found["reason"], found["error"]["cause"]) == (False, word, word), answer
    assert found["error"]["message"] in answer.stderr
    assert isinstance(found["error"], dict)
    return found["error"]


@pytest.fixture
def ckpt(store: Store, tmp_path: Path) -> Path:
    """A checkpoint of four allocations, one of zeros and two alike."""
    save(store, tmp_path / "ckpt", [1, 0, 2, 1])
    return tmp_path / "ckpt"


class TestPrefetch:
    """cache-prefetch."""

    def test_loads_then_come_from_the_cache(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        save(store, tmp_path / "other", [3])
        found = run("cache-prefetch", store.path, ckpt, tmp_path / "cache", "--json").expect().json
        wanted = {"present_chunks": 0, "present_bytes": 0, "copied_chunks": 2, "copied_bytes": 2 * SIZE}
        assert (found["prefetched"], found["already"]) == (wanted, False)
        cached = Store.open(store.path, cache=tmp_path / "cache")
        chunks = Checkpoint.open(ckpt).stored_chunks().values()
        assert {cached.get(chunk, memory(SIZE)) for chunk in chunks} == {Source.CACHE}
        before = lying(tmp_path / "cache")
        again = run("cache-prefetch", store.path, ckpt, tmp_path / "cache").expect()
        assert again.stdout == "nothing to do\n0 chunks copied (0 B), 2 were there (128.0 KiB)\n"
        assert lying(tmp_path / "cache") == before

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_goes_on_where_it_was_ended(self, store: Store, tmp_path: Path, number: signal.Signals) -> None:
        count = 30
        save(store, tmp_path / "ckpt", list(range(1, count + 1)))
        command = ("cache-prefetch", store.path, tmp_path / "ckpt", tmp_path / "cache", "--threads", "1")
        slow = subprocess.Popen(
            words(*command, "--limit", SLOW, "--json"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        wait_for_a_chunk(slow, tmp_path / "cache")
        slow.send_signal(number)
        out, err = slow.communicate(timeout=100)
        if number != signal.SIGKILL:
            error = refused(Answer([], slow.returncode, out, err), 130, "cut-off")
            assert "the same command goes on from there" in error["message"]
            assert not os.listdir(tmp_path / "cache" / "tmp")
        there = len(list((tmp_path / "cache" / "chunks").glob("*/*")))
        assert 1 <= there < count
        found = run(*command, "--json").expect().json["prefetched"]
        assert (found["present_chunks"], found["copied_chunks"]) == (there, count - there)

    def test_progress_says_rate_and_time_left(self, store: Store, tmp_path: Path) -> None:
        """And that of `store copy`; both would be through before the first line if they did not heed the limit."""
        save(store, tmp_path / "ckpt", list(range(1, 41)))
        command, limit = ("cache-prefetch", store.path, tmp_path / "ckpt"), ("--limit", "1MiB/s")
        line = r"\d+/40 chunks, [\d.]+ .iB of 2.5 MiB, [\d.]+ GB/s, \d+ s left, \d+ s\n"
        places = (store.path, tmp_path / "ckpt", tmp_path / "store2", tmp_path / "copy")
        with ThreadPoolExecutor() as all_of_them:
            told = all_of_them.submit(run, *command, tmp_path / "cache", *limit)
            quiet = all_of_them.submit(run, *command, tmp_path / "other", *limit, "--quiet")
            copied = all_of_them.submit(run, "store", "copy", *places, *limit)
        assert re.search(f"prefetch: {line}", told.result().expect().stderr)
        assert re.search(f"copy: {line}", copied.result().expect().stderr)
        assert quiet.result().expect().stderr == ""

    @pytest.mark.parametrize(("how", "word"), [("content", "chunk-damaged"), ("missing", "chunk-missing")])
    def test_damage_in_the_store(self, store: Store, ckpt: Path, tmp_path: Path, how: str, word: str) -> None:
        name = damage(store, 2, how)
        error = refused(run("cache-prefetch", store.path, ckpt, tmp_path / "cache", "--json"), 6, word)
        assert error["facts"]["hash"] == name
        assert name not in {path.name for path in (tmp_path / "cache" / "chunks").glob("*/*")}

    def test_what_does_not_belong_together(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE, cache=tmp_path / "cache")
        for arguments in ((store.path, ckpt, tmp_path / "cache"), (other.path, ckpt, tmp_path / "cache")):
            refused(run("cache-prefetch", *arguments, "--json"), 3, "wrong-store")
        for arguments in ((tmp_path, ckpt, tmp_path / "cache"), (store.path, tmp_path, tmp_path / "cache")):
            refused(run("cache-prefetch", *arguments, "--json"), 3, "not-a-store")
        assert not list((tmp_path / "cache" / "chunks").glob("*/*"))

    def test_refused_it_makes_no_cache(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        """One that was made would be the wrong store's."""
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
        error = refused(run("cache-prefetch", other.path, ckpt, tmp_path / "cache", "--json"), 3, "wrong-store")
        assert error["message"].endswith("name the store that it was made with")
        assert not (tmp_path / "cache").exists()
        run("cache-prefetch", store.path, ckpt, tmp_path / "cache").expect()
        next(ckpt.glob("gpu-*.json")).unlink()
        refused(run("cache-prefetch", store.path, ckpt, tmp_path / "new", "--json"), 6, "damaged")
        assert not (tmp_path / "new").exists()

    def test_cache_that_cannot_be_made(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        error = refused(run("cache-prefetch", store.path, ckpt, tmp_path / "no/cache", "--json"), 1, "write-failed")
        assert error["facts"]["path"] == str(tmp_path / "no/cache")


class TestCacheGc:
    """cache-gc."""

    @pytest.fixture
    def cache(self, store: Store, tmp_path: Path) -> Path:
        """A cache of four chunks, the first used least recently."""
        path = tmp_path / "cache"
        checkpoint = save(store, tmp_path / "ckpt", [1, 2, 3, 4])
        prefetch(Store.open(store.path, cache=path), checkpoint)
        for time_s, chunk in enumerate(checkpoint.all_chunks(), 1000):
            os.utime(chunk_file(path, chunk), (time_s, time_s))
        return path

    def test_least_recently_used_go(self, store: Store, cache: Path) -> None:
        order = [chunk_file(cache, store.put(memory(content(number))).chunk) for number in (1, 2, 3, 4)]
        planned = run("cache-gc", cache, "128KiB", "--dry-run", "--json").expect().json
        assert planned["dry_run"] and all(path.exists() for path in order)
        done = run("cache-gc", "--json", cache, "128KiB").expect().json
        assert done["collected"] == planned["collected"]
        assert done["collected"]["removed_bytes"] == done["collected"]["kept_bytes"] == 2 * SIZE
        assert [path.exists() for path in order] == [False, False, True, True]
        assert run("cache-gc", cache, "1").expect().stdout == "0 chunks removed (0 B), 2 stay (128.0 KiB)\n"
        assert (
            run("cache-gc", cache, "0", "--dry-run").stdout == "2 chunks would be removed (128.0 KiB), 0 stay (0 B)\n"
        )

    def test_what_is_being_read_stays(self, store: Store, cache: Path) -> None:
        read = chunk_file(cache, store.put(memory(content(1))).chunk)
        with open(read, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            done = run("cache-gc", cache, "0B", "--json").expect().json["collected"]
        assert (done["removed_chunks"], done["kept_chunks"], done["in_use_chunks"]) == (3, 1, 1)
        assert read.exists()

    def test_refusals(self, store: Store, cache: Path) -> None:
        refused(run("cache-gc", store.path, "1", "--json"), 3, "not-a-store")
        with open(cache / "gc.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            answer = run("cache-gc", cache, "0", "--json")
        refused(answer, 3, "busy")
        assert answer.json["next"] == "retry"
        assert len(list((cache / "chunks").glob("*/*"))) == 4


@pytest.mark.parametrize(
    ("text", "count"),
    [("200GiB", 200 << 30), ("200", 200 << 30), ("0", 0), ("1.5TiB", 3 << 39), ("500MB", 500 * 10**6), ("7 kib", 7168),
     ("10b", 10), ("0.5", 1 << 29), ("1TB", 10**12)],
)  # fmt: skip
def test_sizes(text: str, count: int) -> None:
    assert size(text) == count
    assert not count or rate(f"{text}/s") == rate(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "nan", "inf", "200G", "2GiBs", "1..5", "0x10", "1/s", "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 200GiB or 500MB"):
        size(text)


@pytest.mark.parametrize("text", ["0", "0MiB/s", "1/h", "fast"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(click.BadParameter):
        rate(text)


class TestLists:
    """store ls, show and du."""

    @pytest.fixture(autouse=True)
    def checkpoints(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        """Make one that shares a chunk with `ckpt`, and one that is lost."""
        save(store, tmp_path / "second", [2, 3, 4])
        save(store, tmp_path / "lost", [5])
        (tmp_path / "lost" / "manifest.json").unlink()

    def test_ls(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        found = run("store", "ls", store.path, "--json").expect().json
        assert (found["command"], found["store"]["id"], found["store"]["chunk_size_bytes"]) == (
            "store ls",
            store.id,
            SIZE,
        )
        states = {item["path"]: item["state"] for item in found["checkpoints"]}
        assert states == {
            str(ckpt): "complete", str(tmp_path / "lost"): "unreachable", str(tmp_path / "second"): "complete"
        }  # fmt: skip
        first = found["checkpoints"][0]
        assert first["sizes"] == {"memory_bytes": 4 * SIZE, "zero_bytes": SIZE, "stored_bytes": 2 * SIZE}
        with Save.begin(store, tmp_path / "third"):
            text = run("store", "ls", store.path).expect().stdout
        assert re.search(rf"^{ckpt} +complete +\S+Z +1 +256.0 KiB +64.0 KiB +128.0 KiB$", text, re.M), text
        assert re.search(rf"^{tmp_path}/third +saving +", text, re.M), text
        assert f"{tmp_path}/lost: there is no manifest.json" in text

    def test_show(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        found = run("store", "show", ckpt, "--json").expect().json["checkpoint"]
        assert (found["id"], found["store"]["id"], found["kind"]) == (Checkpoint.open(ckpt).id, store.id, "memory")
        sizes = {"memory_bytes": 4 * SIZE, "zero_bytes": SIZE, "stored_bytes": 2 * SIZE}
        assert found["sizes"] == sizes
        assert found["ranks"] == [{"inner_pid": 7, "allocations": 4, "sizes": sizes}]
        text = run("store", "show", ckpt).expect().stdout
        assert found["id"] in text and re.search(r"^all +4 +256.0 KiB +64.0 KiB +128.0 KiB$", text, re.M), text
        refused(run("store", "show", tmp_path / "lost", "--json"), 3, "not-a-store")
        (ckpt / "gpu-7.json").write_bytes(b"{}")
        refused(run("store", "show", ckpt, "--json"), 6, "document-damaged")

    def test_du(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        found = run("store", "du", store.path, "--json").expect().json["usage"]
        assert {item["path"]: (item["unique_bytes"], item["shared_bytes"]) for item in found["checkpoints"]} == {
            str(ckpt): (SIZE, SIZE), str(tmp_path / "second"): (2 * SIZE, SIZE)
        }  # fmt: skip
        assert (found["stored_bytes"], found["unneeded_bytes"]) == (5 * SIZE, SIZE)
        assert found["unread"] == [str(tmp_path / "lost")]
        text = run("store", "du", store.path).expect().stdout
        assert re.search(rf"^{tmp_path}/second +128.0 KiB +64.0 KiB$", text, re.M), text

    def test_no_store(self, tmp_path: Path) -> None:
        for name in ("ls", "du", "gc", "fsck"):
            refused(run("store", name, tmp_path, "--json"), 3, "not-a-store")
        (tmp_path / "store" / "store.json").write_bytes(b"{}")
        refused(run("store", "ls", tmp_path / "store", "--json"), 6, "document-damaged")


class TestRemoving:
    """store rm, gc, forget and adopt."""

    @pytest.fixture(autouse=True)
    def _nobody_listens(self, request: pytest.FixtureRequest) -> None:
        """Shims of other tests, stopped ones too, would be asked."""
        if os.geteuid() == 0:
            request.getfixturevalue("own_network")

    def test_rm_and_gc_free_what_nobody_needs(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        id = save(store, tmp_path / "second", [2, 3]).id
        assert run("store", "rm", store.path, tmp_path / "second", "--json").expect().json["removed"] == [id]
        assert not (tmp_path / "second").exists()
        assert run("store", "gc", store.path, "--json").expect().json["collected"]["young_chunks"] == 1
        planned = run("store", "gc", store.path, "--grace", "0", "--dry-run", "--json").expect().json
        assert planned["dry_run"] and len(names(store)) == 3
        age(Path(store.path))
        done = run("store", "gc", store.path, "--json").expect().json
        assert done["collected"] == planned["collected"]
        assert (done["collected"]["removed_chunks"], done["collected"]["needed_chunks"]) == (1, 2)
        assert load(store, ckpt) == [content(1), bytes(SIZE), content(2), content(1)]
        text = run("store", "gc", store.path).expect().stdout
        assert text.splitlines()[:2] == ["0 chunks removed (0 B)", "2 are needed by 1 checkpoints (128.0 KiB)"]

    def test_rm_of_what_is_not_there_or_anothers(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
        refused(run("store", "rm", other.path, ckpt, "--json"), 3, "wrong-store")
        refused(run("store", "rm", store.path, tmp_path, "--json"), 3, "not-a-store")
        with Save.begin(store, tmp_path / "new"):
            refused(run("store", "rm", store.path, tmp_path / "new", "--json"), 3, "busy")
        assert load(store, ckpt)

    def test_fr63_gc_refuses_until_the_lost_is_forgotten(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        save(store, tmp_path / "second", [2, 3])
        (tmp_path / "second").rename(tmp_path / "elsewhere")
        age(Path(store.path))
        error = refused(run("store", "gc", store.path, "--json"), 3, "unreachable-roots")
        assert str(tmp_path / "second") in error["message"]
        assert len(names(store)) == 3
        refused(run("store", "forget", store.path, ckpt, "--json"), 3, "still-there")
        found = run("store", "forget", store.path, tmp_path / "second", "--json").expect().json["forgotten"]
        assert [root["path"] for root in found] == [str(tmp_path / "second")]
        assert run("store", "gc", store.path, "--json").expect().json["collected"]["removed_chunks"] == 1

    def test_moved_checkpoint_is_adopted(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        ckpt.rename(tmp_path / "moved")
        run("store", "gc", store.path).expect(3)
        found = run("store", "adopt", store.path, tmp_path / "moved", "--json").expect().json["adopted"]
        assert found["path"] == str(tmp_path / "moved")
        assert run("store", "gc", store.path, "--json").expect().json["collected"]["checkpoints"] == 1

    def test_one_collector_at_a_time(self, store: Store) -> None:
        with store.files.locked(os.path.join(store.path, "gc.lock"), True, ""):
            refused(run("store", "gc", store.path, "--json"), 3, "busy")


class TestFsck:
    """store fsck."""

    def test_clean(self, store: Store, ckpt: Path) -> None:
        found = run("store", "fsck", store.path, "--json").expect().json["checked"]
        assert (found["clean"], found["chunks"], found["bytes"], found["bad"]) == (True, 2, 2 * SIZE, [])
        assert run("store", "fsck", store.path).expect().stdout == "2 chunks checked (128.0 KiB)\n"

    def test_fr63_damage_is_listed_by_checkpoint(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        save(store, tmp_path / "second", [2, 3])
        save(store, tmp_path / "third", [4])
        damaged, missing = damage(store, 2, "content"), damage(store, 3, "missing")
        answer = run("store", "fsck", store.path, "--json")
        refused(answer, 6, "damaged")
        bad = {item["hash"]: set(item["checkpoints"]) for item in answer.json["checked"]["bad"]}
        assert bad == {damaged: {str(ckpt), str(tmp_path / "second")}, missing: {str(tmp_path / "second")}}
        text = run("store", "fsck", store.path).expect(6)
        lines = [line.split(maxsplit=2) for line in text.stdout.splitlines()[2:]]
        assert [(path, name) for path, name, _ in lines] == sorted(
            (path, name) for name, paths in bad.items() for path in paths
        )
        assert "2 chunks are damaged or missing, 0 checkpoints cannot be read" in text.stderr

    def test_repair_from_another_store(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        other = Store.create(tmp_path / "other", chunk_size_bytes=SIZE)
        other.put(memory(content(1)))
        names = {damage(store, 1, "content"), damage(store, 2, "missing")}
        command = ("store", "fsck", store.path, "--repair-from", other.path, "--json")
        first = run(*command)
        refused(first, 6, "damaged")
        assert sorted(item["repaired"] for item in first.json["checked"]["bad"]) == [False, True]
        other.put(memory(content(2)))
        second = run(*command).expect().json["checked"]
        assert second["clean"] and {item["hash"] for item in second["bad"]} < names
        assert load(store, ckpt)[2] == content(2)

    def test_checkpoint_that_cannot_be_read(self, store: Store, ckpt: Path) -> None:
        (ckpt / "gpu-7.json").write_bytes(b"")
        answer = run("store", "fsck", store.path)
        assert "1 checkpoints cannot be read; mount or repair these" in answer.expect(6).stderr
        assert f"{ckpt}: cannot be read: " in answer.stdout


class TestCopy:
    """store copy."""

    @pytest.mark.parametrize("digest", [None, "xxh3-128", "blake3"])
    def test_into_a_new_store(self, store: Store, ckpt: Path, tmp_path: Path, digest: str | None) -> None:
        options = ("--hash", digest) if digest else ()
        copy = ("store", "copy", store.path, ckpt, tmp_path / "other", tmp_path / "copy", "--json", *options)
        found = run(*copy).expect().json["copied"]
        assert (found["path"], found["new_bytes"], found["known_bytes"]) == (str(tmp_path / "copy"), 2 * SIZE, 0)
        other = Store.open(tmp_path / "other")
        assert (other.facts.hash, other.chunk_size_bytes) == (digest or "xxh3-128", SIZE)
        assert load(other, tmp_path / "copy") == load(store, ckpt)
        assert fsck.check(other).clean
        refused(run(*copy), 3, "checkpoint-exists")
        again = ("store", "copy", store.path, ckpt, tmp_path / "other", tmp_path / "twice", "--json")
        assert run(*again).expect().json["copied"]["known_bytes"] == 2 * SIZE

    def test_damage_makes_no_checkpoint(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        damage(store, 2, "content")
        arguments = (store.path, ckpt, tmp_path / "other", tmp_path / "copy")
        refused(run("store", "copy", *arguments, "--json"), 6, "chunk-damaged")
        assert not (tmp_path / "copy").exists()
        assert gc.collect(Store.open(tmp_path / "other")).checkpoints == 0

    def test_what_does_not_fit(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        Store.create(tmp_path / "big")
        for target, word in ((tmp_path / "big", "incompatible"), (ckpt, "not-a-store")):
            refused(run("store", "copy", store.path, ckpt, target, tmp_path / "copy", "--json"), 3, word)
        options = ("--hash", "blake3", "--json")
        refused(run("store", "copy", store.path, ckpt, store.path, tmp_path / "copy", *options), 3, "incompatible")
        assert not (tmp_path / "copy").exists()

    def test_refused_it_makes_no_store(self, store: Store, ckpt: Path, tmp_path: Path) -> None:
        target = tmp_path / "other"
        for directory, word in (
            (ckpt, "checkpoint-exists"), (target, "not-a-store"), (target / "tmp", "not-a-store"),
            (tmp_path / "store" / "chunks", "not-a-store"),
        ):  # fmt: skip
            refused(run("store", "copy", store.path, ckpt, target, directory, "--json"), 3, word)
            assert not target.exists(), directory
        next(ckpt.glob("gpu-*.json")).unlink()
        refused(run("store", "copy", store.path, ckpt, target, tmp_path / "copy", "--json"), 6, "damaged")
        assert not target.exists()

    def test_ended_by_a_signal_makes_no_checkpoint(self, store: Store, tmp_path: Path) -> None:
        save(store, tmp_path / "ckpt", list(range(1, 31)))
        slow = subprocess.Popen(
            words("store", "copy", store.path, tmp_path / "ckpt", tmp_path / "other", tmp_path / "copy", "--json",
                  "--limit", SLOW),
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_for_a_chunk(slow, tmp_path / "other")
        slow.terminate()
        out, err = slow.communicate(timeout=100)
        refused(Answer([], slow.returncode, out, err), 130, "cut-off")
        assert not (tmp_path / "copy").exists()
        assert not os.listdir(tmp_path / "other" / "roots")


@pytest.mark.parametrize("command", ["cache-prefetch", "store copy", "store fsck"])
def test_as_many_chunks_at_a_time_as_threads(store: Store, tmp_path: Path, command: str) -> None:
    """On a disk on which less than three would never be read."""
    save(store, tmp_path / "ckpt", [1, 2, 3, 4, 5, 6])
    places = {
        "cache-prefetch": (tmp_path / "ckpt", tmp_path / "cache"), "store fsck": (),
        "store copy": (tmp_path / "ckpt", tmp_path / "other", tmp_path / "copy"),
    }  # fmt: skip
    read = ("read", 3, *command.split(), store.path, *places[command], "--threads", 3)
    run(*read, module="tests.programs.together").expect()


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(["cache-gc", "c", "much"], "cache-gc"), (["store", "ls"], "store ls"), (["store", "nothing"], "store nothing"),
     (["store", "gc", "s", "--grace", "nan"], "store gc"), (["store", "gc", "s", "--grace", "1e308"], "store gc"),
     (["store", "gc", "s", "--grace", "1e300"], "store gc"),
     (["store", "gc", "s", "--grace", "1e9"], "store gc"), (["store", "gc", "s", "--grace", "-1"], "store gc"),
     (["cache-prefetch", "s", "d", "c", "--limit", "0"], "cache-prefetch"),
     (["store", "fsck", "s", "--threads", "0"], "store fsck"),
     (["cache-prefetch", "s3://b/s", "s3://b/d", "c"], "cache-prefetch"), (["cache-gc", "s3://b/c", "1"], "cache-gc"),
     (["cache-prefetch", "s", "d", "s3://b/c"], "cache-prefetch"), (["store", "show", "s3://b/d"], "store show"),
     (["store", "copy", "s", "d", "s3://b/t", "s3://b/n"], "store copy"), (["store", "ls", "ftp://x/s"], "store ls"),
     (["store", "fsck", "s", "--repair-from", "http://x/s"], "store fsck")],
)  # fmt: skip
def test_malformed_arguments(arguments: list[str], command: str) -> None:
    answer = run(*arguments, "--json")
    refused(answer, 2, "usage")
    assert answer.json["command"] == command


def commands(of: click.Command) -> list[click.Command]:
    """Return a command and all below it."""
    names = of.list_commands(click.Context(of)) if isinstance(of, click.Group) else []
    below = [of.get_command(click.Context(of), name) for name in names] if isinstance(of, click.Group) else []
    return [of, *(one for found in below if found is not None for one in commands(found))]


def test_every_number_has_a_limit() -> None:
    """A time, or a number of threads, that nothing can work with is told as such; sizes and rates end by their form."""
    kinds = [option.type for command in commands(group) for option in command.params]
    numbers = [kind for kind in kinds if isinstance(kind, (click.types.FloatParamType, click.types.IntParamType))]
    assert len(numbers) > 10 and all(getattr(kind, "max", None) for kind in numbers), numbers


def test_every_kind_of_error_has_its_exit_code() -> None:
    exits = {"refused": 3, "busy": 3, "write-failed": 1, "damaged": 6}
    for kind in all_errors():
        base = next(code for code in ("busy", "refused", "write-failed", "damaged")
                    if code in {above.__dict__.get("code") for above in kind.__mro__})  # fmt: skip
        ours = storage.problem(example(kind))
        assert (int(ours.exit_code), ours.next_action, ours.reason) == (exits[base], kind.next_action, kind.code)


def test_every_word_of_the_store_is_documented() -> None:
    for kind in all_errors():
        code = storage.problem(example(kind)).exit_code
        assert re.search(rf"^\| `{kind.code}` \| {int(code)} \|", REFERENCE, re.M), kind.code


def test_every_command_and_option_is_documented() -> None:
    context = click.Context(group)
    below = group.get_command(context, "store")
    assert isinstance(below, click.Group)
    found = {f"store {name}": below.get_command(context, name) for name in COMMANDS}
    found |= {name: group.get_command(context, name) for name in ("cache-prefetch", "cache-gc")}
    for name, command in found.items():
        assert command is not None
        shown = " ".join([name, *(item.metavar or "" for item in command.params if item.param_type_name == "argument")])
        assert f"| `{shown}` |" in REFERENCE
        assert "Example:\n" in (command.help or "")
        for option in [word for item in command.params for word in item.opts if word.startswith("--")]:
            assert re.search(rf"^\| `{option}\b", REFERENCE, re.M), option


def test_defaults_are_those_of_the_store() -> None:
    assert (defaults.COPY_THREADS, defaults.GRACE_S) == (THREADS, gc.GRACE_S)
    assert issubclass(store_errors.Busy, store_errors.Refused) and issubclass(errors.StoreBusy, errors.StoreRefused)
