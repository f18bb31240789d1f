"""`suspend --store` with places that cannot be used: refused in one line before anything has changed, or done without.

Stores and checkpoints are refused. A cache is never needed: it is told and done without, but for another store's.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from chunkstore import Store, fsck
from tests.programs.setting import ROOT
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import Pair, records, running
from tests.sim.places import CHUNK, Places, mounted

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

OPTIONS = ("--store", "--ckpt-dir", "--cache")
BAD = {
    "no/where": "no is not there|no: No such file", "file/x": "Not a directory", "file": "Not a directory",
    "loop": "Too many levels|Not a directory", "loop/x": "Too many levels", "x" * 300: "File name too long",
}  # fmt: skip


def named(places: Places, option: str, path: str | Path) -> list[str]:
    """Return the words of a suspend in which one place is another one."""
    given = {"--store": str(places.store), "--ckpt-dir": str(places.directory()), option: str(path)}
    return [word for pair in given.items() for word in pair]


def lying(places: Places) -> list[str]:
    """Return what lies in the folder of all places, and in the store but for what every save writes there."""
    return sorted(str(path) for path in places.root.rglob("*") if "store/" not in str(path))


def require_refused(places: Places, answer: Answer, option: str) -> str:
    """Check the end of a suspend with a place that cannot be used; return what was told."""
    if option == "--cache":
        (told,) = answer.expect(0).json["warnings"]
        assert told.startswith("there is no cache: ")
        return str(told)
    error = answer.expect(3).json["error"]
    assert error["code"] == "store-refused" and not records(places.tool)
    assert not (places.root / "one").exists()
    return str(error["message"])


@pytest.mark.parametrize("option", OPTIONS)
def test_no_directory_can_be_there(pair: Pair, places: Places, tool: Tool, option: str) -> None:
    """A parent that is missing, a file, a loop of links, a name that is too long."""
    (places.root / "file").touch()
    os.symlink("loop", places.root / "loop")
    before = lying(places)
    for path, detail in BAD.items():
        words = ("--depth", "pages", *named(places, option, places.root / path))
        told = require_refused(places, tool.suspend(*pair.pids, options=words), option)
        assert any(word in told for word in detail.split("|")), told
        if option == "--cache":
            tool.resume(*pair.pids).expect(0)
            tool.run("store", "rm", places.store, places.directory()).expect(0)
        assert lying(places) == before
    running(tool)
    pair.check()


@pytest.mark.parametrize("option", OPTIONS)
def test_nothing_can_be_written_there(pair: Pair, places: Places, tool: Tool, option: str) -> None:
    """A read-only filesystem, and a directory of somebody else's."""
    (places.root / "there").mkdir()
    words = ("suspend", "--depth", "pages", *named(places, option, places.root / "there" / "x"), *pair.pids)
    told = require_refused(places, mounted(places, f"mount -t tmpfs -o ro none {places.root}/there", *words), option)
    assert "read-only" in told
    if option == "--cache":
        tool.resume(*pair.pids).expect(0)
        tool.run("store", "rm", places.store, places.directory()).expect(0)
    if option == "--store":
        shutil.rmtree(places.store)
    answer = places.program("faulty", "mkdir", "P", *words)
    if option == "--cache":  # it is not the only directory that cannot be made then
        assert "cannot begin a checkpoint" in answer.expect(3).json["error"]["message"]
    else:
        assert "Permission denied" in require_refused(places, answer, option)
    running(tool)
    pair.check()


def test_relative_paths_and_links(pair: Pair, places: Places, tool: Tool) -> None:
    """They are recorded as absolute ones, for commands that run elsewhere; links to directories are fine."""
    os.symlink("store", places.root / "to-store")
    os.symlink("one", places.root / "to-one")
    store, directory = (os.path.relpath(places.root / name, ROOT) for name in ("to-store", "to-one"))
    stored = tool.suspend(*pair.pids, options=("--store", store, "--ckpt-dir", directory)).expect(0)
    found = stored.json["groups"][0]["stored"]
    assert (found["store"], found["directory"]) == (str(places.root / "to-store"), str(places.directory()))
    tool.resume(*pair.pids, env={"PYTHONPATH": str(ROOT)}).expect(0)
    pair.check()


def test_places_of_another_kind(pair: Pair, places: Places, tool: Tool) -> None:
    """A store taken for a cache, a cache of another store, a store's own folder: nothing of them is changed."""
    before = lying(places)
    words = ("--depth", "pages", *named(places, "--cache", places.store))
    told = require_refused(places, tool.suspend(*pair.pids, options=words), "--cache")
    assert "it is store" in told and not (places.store / "cache.json").exists()
    assert tool.run("cache-gc", places.store, 0).expect(3).json["reason"] == "not-a-store"
    tool.resume(*pair.pids).expect(0)
    tool.run("store", "rm", places.store, places.directory()).expect(0)
    Store.create(places.root / "other", cache=places.root / "cache")
    words = named(places, "--cache", places.root / "cache")
    assert tool.suspend(*pair.pids, options=words).expect(3).json["reason"] == "wrong-store"
    for path in ("store/tmp", "store/chunks/ab", "store/roots/x"):
        told = require_unbegun(tool.suspend(*pair.pids, options=named(places, "--ckpt-dir", places.root / path)))
        assert "belongs to store" in told
    shutil.rmtree(places.root / "other")
    shutil.rmtree(places.root / "cache")
    assert lying(places) == before and fsck.check(Store.open(places.store)).clean
    running(tool)
    pair.check()


def test_a_cache_of_another_store_at_a_resume(pair: Pair, places: Places, tool: Tool) -> None:
    """The store is fine: what is named is refused, and what was recorded and is another's by now is done without."""
    cache, others = places.root / "cache", places.root / "others"
    places.suspend(*pair.pids, options=("--cache", str(cache))).expect(0)
    Store.create(places.root / "other", cache=others)
    answer = tool.resume(*pair.pids, options=("--cache", str(others))).expect(3)
    assert answer.json["reason"] == "other-cache", answer
    assert "name another cache, or none" in answer.json["error"]["message"]
    assert tool.run("status").json["groups"][0]["state"] == "suspended"
    shutil.rmtree(cache)
    others.rename(cache)
    (told,) = tool.resume(*pair.pids).expect(0).json["warnings"]
    assert told.startswith("there is no cache: ") and "belongs to store" in told
    running(tool)
    pair.check()


def test_a_suspend_that_is_refused_makes_no_cache(pair: Pair, places: Places, tool: Tool) -> None:
    """Nor a store: a cache that lies there cannot be a new one's, and one that is made belongs to the store named."""
    before = lying(places)
    options = ("--cache", str(places.root / "cache"), "--ring", "1KiB")
    require_unbegun(places.suspend(*pair.pids, options=options), "ring-too-small")
    assert lying(places) == before
    Store.create(places.root / "other", cache=places.root / "cache")
    words = (*named(places, "--store", places.root / "new"), "--cache", str(places.root / "cache"))
    require_unbegun(tool.suspend(*pair.pids, options=words), "wrong-store")
    assert not (places.root / "new").exists()
    running(tool)


def require_unbegun(answer: Answer, reason: str = "not-a-store") -> str:
    """Check that a suspend was refused before it was a group's, and before any step; return what was told."""
    assert answer.expect(3).json["reason"] == reason and answer.json["groups"] == [], answer
    return str(answer.json["error"]["message"])


def test_places_that_lie_in_each_other(pair: Pair, places: Places, tool: Tool) -> None:
    """One is another, or lies where a collection removes files or commands look for records: also of a new store."""
    before = lying(places)
    state, new = Path(tool.state_dir), places.root / "new"
    one = {"--store": places.store, "--ckpt-dir": places.directory()}
    bad: list[tuple[str, dict[str, Path]]] = [
        ("is store", {**one, "--ckpt-dir": places.store}),
        ("is store", {"--store": new, "--ckpt-dir": new}),
        ("belongs to store", {"--store": new, "--ckpt-dir": new / "tmp"}),
        ("is cache", {**one, "--cache": places.directory()}),
        ("belongs to cache", {**one, "--cache": new, "--ckpt-dir": new / "chunks" / "x"}),
        ("is store", {"--store": state, "--ckpt-dir": places.directory()}),
        ("is cache", {**one, "--cache": state}),
        ("lies in state directory", {**one, "--ckpt-dir": state}),
        ("lies in state directory", {**one, "--ckpt-dir": state / "x"}),
        ("lies in state directory", {"--store": state / "store", "--ckpt-dir": places.directory()}),
        ("lies in state directory", {**one, "--cache": state / "cache"}),
    ]
    for why, given in bad:
        words = [str(word) for option in given.items() for word in option]
        told = require_unbegun(tool.suspend(*pair.pids, options=tuple(words)))
        assert why in told and "; name a" in told and lying(places) == before, told
    for name in ("chunks", "roots", "tmp"):
        (places.store / name).chmod(0o700)
        words = ("--depth", "pages", "--state-dir", str(places.store / name), *places.words())
        assert "belongs to store" in require_unbegun(tool.suspend(*pair.pids, options=words))
        (places.store / name / "journal.lock").unlink(missing_ok=True)
    words = ("--depth", "pages", *named(places, "--cache", places.store / "tmp"))
    assert "belongs to store" in require_refused(places, tool.suspend(*pair.pids, options=words), "--cache")
    tool.resume(*pair.pids).expect(0)
    answer = tool.run("store", "copy", places.store, places.directory(), new, places.store / "tmp" / "x").expect(3)
    assert "belongs to store" in answer.json["error"]["message"]
    running(tool)
    pair.check()


@pytest.mark.parametrize("path", ["/", "//", "/.", "no/where", "file", "file/x", "loop"])
def test_a_store_is_not_made_for_a_directory_that_cannot_be(
    pair: Pair, places: Places, tool: Tool, path: str
) -> None:
    """The root, where everything lies; a parent that is missing; a file."""
    (places.root / "file").touch()
    os.symlink("loop", places.root / "loop")
    before, new = lying(places), places.root / "new"
    directory = path if path.startswith("/") else str(places.root / path)
    told = require_unbegun(tool.suspend(*pair.pids, options=("--store", str(new), "--ckpt-dir", directory)))
    assert "; name a" in told or "is not there; mount what it is on, or make it" in told, told
    assert lying(places) == before and not Path("/manifest.json").exists()
    running(tool)
    if path in ("/", "no/where"):
        places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
        tool.resume(*pair.pids).expect(0)
        answer = tool.run("store", "copy", places.store, places.directory(), new, directory).expect(3)
        assert answer.json["error"]["message"] == told and not new.exists(), answer


def test_a_directory_with_a_checkpoint(pair: Pair, places: Places, tool: Tool) -> None:
    """It is refused before anything has begun, also for a store that is not there yet, which is not made then."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    tool.resume(*pair.pids).expect(0)
    before = lying(places)
    for store in (places.store, places.root / "new"):
        words = ("--store", str(store), "--ckpt-dir", str(places.directory()))
        told = require_unbegun(tool.suspend(*pair.pids, options=words), "checkpoint-exists")
        assert "name another directory" in told and lying(places) == before, told
    running(tool)


def test_a_place_that_fails_at_the_last_moment(pair: Pair, places: Places, tool: Tool) -> None:
    """What nobody can tell before it is tried: the group's record was made, no step has begun, and none is shown."""
    answer = places.program("faulty", "mkdir", "P", "suspend", *places.words(), *pair.pids)
    assert answer.expect(3).json["reason"] == "write-failed" and not records(tool)
    assert [group["phases"] for group in answer.json["groups"]] == [[]], answer
    running(tool)


def test_a_ring_that_holds_too_little(pair: Pair, places: Places, tool: Tool) -> None:
    """A suspend and a resume say what will do, and that does."""
    least = 2 * 2 * CHUNK
    for size in ("1KiB", "0", f"{least - 1}B"):
        told = require_unbegun(places.suspend(*pair.pids, options=("--ring", size)), "ring-too-small")
        assert f"--ring {'0B' if size == '0' else size}: " in told, told  # as it can be given again
        assert f"need {least >> 20}MiB at least" in told and f"give --ring {least >> 20}MiB or more" in told, told
    places.suspend(*pair.pids, options=("--ring", f"{least >> 20}MiB")).expect(0)
    answer = tool.resume(*pair.pids, options=("--ring", "1KiB")).expect(3)
    assert answer.json["reason"] == "ring-too-small" and answer.json["groups"][0]["state"] == "suspended", answer
    tool.resume(*pair.pids, options=("--ring", f"{least >> 20}MiB")).expect(0)
    running(tool)
    pair.check()


def test_other_hash_than_the_stores(pair: Pair, places: Places, tool: Tool) -> None:
    """Who asks for a hash gets it or nothing; who does not takes the store as it is."""
    answer = places.suspend(*pair.pids, options=("--hash", "blake3")).expect(3)
    assert answer.json["reason"] == "incompatible" and "xxh3-128" in answer.json["error"]["message"]
    running(tool)
    places.suspend(*pair.pids, options=("--hash", "xxh3-128")).expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()


def test_a_hash_without_its_package(pair: Pair, places: Places, tool: Tool) -> None:
    """The message names what brings it, and nothing speaks of a checkpoint or a store: there is none."""
    modules = places.root / "modules"
    modules.mkdir()
    (modules / "blake3.py").write_text("raise ImportError('not installed')")
    shutil.rmtree(places.store, ignore_errors=True)
    options = ("--hash", "blake3", *places.words())
    answer = tool.suspend(*pair.pids, options=options, json_out=False, env={"PYTHONPATH": str(modules)}).expect(3)
    assert "pip install 'gpushare[blake3]'" in answer.stderr and "memory: " not in answer.stdout, answer
    assert not places.store.exists() and not places.directory().exists()
    running(tool)


def test_chunks_that_are_too_large_for_a_ring(pair: Pair, places: Places, tool: Tool) -> None:
    """The library makes such stores; a shim could not page-lock a place for them in one piece."""
    shutil.rmtree(places.store)
    Store.create(places.store, chunk_size_bytes=(1 << 30) + 1)
    answer = places.suspend(*pair.pids).expect(3)
    assert answer.json["reason"] == "incompatible" and "at most" in answer.json["error"]["message"]
    running(tool)


@pytest.mark.parametrize(
    "words",
    [
        ("--store", "x"), ("--ckpt-dir", "x"), ("--cache", "x"), ("--ring", "lots"), ("--ring", "1GiB"),
        ("--hash", "md5"), ("--hash", "blake3"), ("--verify-existing", "all"), ("--require-room",),
        ("--store", "", "--ckpt-dir", ""), ("--store", "x", "--ckpt-dir", "y", "--cache", ""),
        ("--store", "file:///x", "--ckpt-dir", "y"), ("--store", "x", "--ckpt-dir", "s3://b/y"),
        ("--store", "s3://b/x", "--ckpt-dir", "y", "--cache", "s3://b/c"), ("--state-dir", "s3://b/state"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_options_that_make_no_sense(tool: Tool, words: tuple[str, ...]) -> None:
    """Exit 2 before anything is looked at; none is passed over."""
    tool.suspend(1, options=words).expect(2)
