"""`suspend --store`: memory goes to a checkpoint on disk and comes back, byte for byte; real processes, real files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkstore import Cache, Files, Store
from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, Pair, records, running
from tests.sim.places import CHUNK, Places

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]
Start = Callable[..., Worker]


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_cycle(pair: Pair, places: Places, tool: Tool, depth: str) -> None:
    """Two ranks that share memory; status knows where it is, and a plain resume finds it and writes nothing there."""
    down = places.suspend(*pair.pids, options=("--depth", depth)).expect(0).json["groups"][0]
    assert down["state"] == "suspended" and down["stored"]["directory"] == str(places.directory())
    known = tool.run("status").expect(0).json["groups"][0]
    assert known["stored"]["store"] == str(places.store)
    assert all(rank["arena_bytes"] == 0 for rank in known["ranks"])
    for worker in pair.both:
        assert "gpushare-arena" not in Path(f"/proc/{worker.pid}/maps").read_text()
    checkpoint = places.checkpoint()
    assert sorted(checkpoint.inner_pids) == sorted(pair.pids)
    before = places.seen()
    up = tool.resume(*pair.pids).expect(0).json["groups"][0]
    assert up["state"] == "running" and places.seen() == before
    assert up["bytes"] == down["bytes"] == sum(chunk.size_bytes for chunk in checkpoint.all_chunks())
    running(tool)
    pair.check()


def test_what_a_checkpoint_says_of_memory(start_worker: Start, places: Places, tool: Tool) -> None:
    """Device, address, size, properties, access; chunks begin at offset 0 of an allocation, the last one is short."""
    worker = start_worker(1)
    block = worker.block(6 * MIB, ordinal=1)
    worker.fill(block["address"], 6 * MIB, 1)
    large = worker.alloc(3 * MIB)
    worker.fill(large, 3 * MIB, 2)
    places.suspend(worker.pid, options=("--depth", "pages")).expect(0)
    rank = places.checkpoint().rank(worker.pid)
    of_block = next(item for item in rank.allocations if item.address == block["address"])
    assert of_block.size_bytes == 6 * MIB and len(of_block.chunks) == 6 and str(of_block.device).startswith("GPU-")
    assert of_block.properties["handle_types"] == 1 and of_block.properties["object"]
    assert of_block.access == ({"type": 1, "id": 1, "flags": 3},)
    assert large in [item.address for item in rank.allocations]
    assert rank.facts["comm"] == "python"
    tool.resume(worker.pid).expect(0)
    worker.check()


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 100_000])
def test_many_pieces(start_worker: Start, places: Places, tool: Tool, chunk_bytes: int) -> None:
    """More than one page of them; chunks that are no whole pages."""
    shutil.rmtree(places.store)
    Store.create(places.store, chunk_size_bytes=chunk_bytes)
    worker = start_worker(0)
    worker.fill(worker.alloc(40 * MIB), 40 * MIB, 1)
    places.suspend(worker.pid, options=("--depth", "pages")).expect(0)
    assert len(list(places.checkpoint().all_chunks())) > 400
    tool.resume(worker.pid).expect(0)
    worker.check()


def test_each_content_once(start_worker: Start, places: Places, tool: Tool) -> None:
    """The same in two ranks at other addresses, again in the next checkpoint, and zeros: written once, or never."""
    ranks = [start_worker(0), start_worker(1)]
    ranks[1].alloc(5 * MIB)
    for worker in ranks:
        worker.fill(worker.alloc(8 * MIB), 8 * MIB, 5)
        zeros = worker.alloc(4 * MIB)
        worker.memset_d32(zeros, 0, MIB)
        worker.expect(zeros, 4 * MIB, [])
    own = ranks[0].alloc(2 * MIB)
    ranks[0].fill(own, 2 * MIB, 6)
    pids = [worker.pid for worker in ranks]
    first = places.suspend(*pids).expect(0).json["groups"][0]["stored"]["bytes"]
    assert first["new"] == 10 * MIB and first["known"] == 8 * MIB and first["zero"] >= 8 * MIB, first
    chunks = places.chunks()
    assert len(chunks) == 10
    back = tool.resume(*pids).expect(0).json["groups"][0]["stored"]["bytes"]
    assert back["store"] == 18 * MIB and back["zero"] == first["zero"]
    for worker in ranks:
        worker.check()
    ranks[0].fill(own, MIB, 7)
    second = places.suspend(*pids, name="two").expect(0).json["groups"][0]["stored"]["bytes"]
    assert second["new"] == MIB and second["known"] == 17 * MIB and len(places.chunks() - chunks) == 1, second
    tool.resume(*pids).expect(0)
    ranks[1].check()
    assert places.checkpoint("one").id != places.checkpoint("two").id


def test_zeros_come_back_without_the_ring(start_worker: Start, places: Places, tool: Tool) -> None:
    """They are set on the GPU, a step of its own; a rank that has nothing else gets no ring."""
    ranks = [start_worker(0), start_worker(1)]
    for worker in ranks:
        worker.memset_d32(address := worker.alloc(24 * MIB), 0, 6 * MIB)
        worker.expect(address, 24 * MIB, [])
    full = ranks[0].alloc(3 * MIB)
    ranks[0].fill(full, 3 * MIB, 5)
    pids = [worker.pid for worker in ranks]
    places.suspend(*pids, options=("--depth", "pages")).expect(0)
    zero = sum(chunk.size_bytes for chunk in places.checkpoint().all_chunks() if chunk.hash is None)
    assert zero >= 48 * MIB
    up = tool.resume(*pids).expect(0).json["groups"][0]
    steps = {phase["name"]: phase for phase in up["phases"]}
    assert steps["zeros"]["bytes"] == up["stored"]["bytes"]["zero"] == zero
    assert steps["load"]["bytes"] == 3 * MIB and list(steps["prepare"]["ranks"]) == [str(pids[0])]
    for worker in ranks:
        worker.check()


def test_store_that_is_made(pair: Pair, places: Places, tool: Tool) -> None:
    """B24: store and directory, with the hash that was named; not the directories above them."""
    shutil.rmtree(places.store)
    answer = places.suspend(*pair.pids, name="no/where").expect(3)
    assert answer.json["reason"] == "not-a-store" and answer.json["error"]["code"] == "store-refused"
    running(tool)
    assert not places.store.exists()
    nowhere = ("--store", str(places.root / "no/where"), "--ckpt-dir", str(places.directory()))
    answer = tool.suspend(*pair.pids, options=nowhere).expect(3)
    assert answer.json["reason"] == "write-failed" and f"{places.root}/no" in answer.json["error"]["message"]
    running(tool)
    places.suspend(*pair.pids, options=("--depth", "pages", "--hash", "blake3")).expect(0)
    store = Store.open(places.store)
    assert store.facts.hash == "blake3" and store.chunk_size_bytes == 64 << 20
    tool.resume(*pair.pids).expect(0)
    pair.check()


def test_b27_cache(pair: Pair, places: Places, tool: Tool) -> None:
    """A suspend writes through it, a resume reads it first and never fills it; another one may be named at a resume."""
    places.suspend(*pair.pids, options=("--cache", str(places.root / "cache"))).expect(0)
    assert tool.run("status").json["groups"][0]["stored"]["cache"] == str(places.root / "cache")
    cached = list((places.root / "cache/chunks").glob("*/*"))
    assert {path.name for path in cached} == places.chunks()
    back = tool.resume(*pair.pids).expect(0).json["groups"][0]["stored"]["bytes"]
    assert back["cache"] and "store" not in back
    pair.check()
    places.suspend(*pair.pids, name="two").expect(0)
    Cache.open(str(places.root / "other"), Store.open(places.store).facts, Files(), Store.open(places.store).hash)
    missed = tool.resume(*pair.pids, options=("--cache", str(places.root / "other"))).expect(0)
    assert missed.json["groups"][0]["stored"]["bytes"]["store"]
    assert not list((places.root / "other/chunks").glob("*/*"))
    pair.check()


def test_a_load_makes_no_cache(pair: Pair, places: Places, tool: Tool) -> None:
    """Neither one that the command names nor one that is recorded and has gone: told, and done without."""
    new, cache = places.root / "new", places.root / "cache"
    for path, options in ((new, ("--cache", str(new))), (cache, ())):
        places.suspend(*pair.pids, name=f"of-{path.name}", options=("--cache", str(cache))).expect(0)
        if path == cache:
            shutil.rmtree(cache)
        answer = tool.resume(*pair.pids, options=options).expect(0)
        assert any(f"there is no cache: {path}: " in warning for warning in answer.json["warnings"]), answer
        assert not path.exists(), path
    pair.check()


def test_a_cache_that_rots_is_told_once(pair: Pair, places: Places, tool: Tool) -> None:
    """With the number of chunks at the end, and not each."""
    cache = places.root / "cache"
    places.suspend(*pair.pids, options=("--cache", str(cache))).expect(0)
    chunks = list((cache / "chunks").glob("*/*"))
    for chunk in chunks:
        chunk.write_bytes(b"rot")
    told = [text for text in tool.resume(*pair.pids).expect(0).json["warnings"] if str(cache) in text]
    assert len(told) == 2 and "The cache drops it" in told[0], told
    assert told[1].startswith(f"{len(chunks)} chunks in all"), told
    pair.check()


def test_fr65_cache_that_cannot_be_used(pair: Pair, places: Places, tool: Tool) -> None:
    """It is told and done without, in both directions."""
    (places.root / "file").touch()
    words = ("--cache", str(places.root / "file" / "cache"))
    assert any("no cache" in text for text in places.suspend(*pair.pids, options=words).expect(0).json["warnings"])
    assert any("no cache" in text for text in tool.resume(*pair.pids).expect(0).json["warnings"])
    pair.check()


def test_other_places_are_refused(pair: Pair, places: Places, tool: Tool) -> None:
    """Another store, another directory, host memory: one line, nothing changes; the same ones are fine."""
    tool.suspend(*pair.pids).expect(0)
    answer = places.suspend(*pair.pids).expect(3)
    assert answer.json["reason"] == "other-store" and "host memory" in answer.json["error"]["message"]
    assert tool.resume(*pair.pids, options=places.words()).expect(3).json["reason"] == "other-store"
    tool.resume(*pair.pids).expect(0)
    places.suspend(*pair.pids).expect(0)
    before = records(tool)
    assert places.suspend(*pair.pids).expect(0).json["already"] is True
    assert places.suspend(*pair.pids, name="two").expect(3).json["reason"] == "other-store"
    elsewhere = ("--store", str(places.root / "two"), "--ckpt-dir", str(places.directory()))
    for words in (places.words("two"), elsewhere):
        refused = tool.resume(*pair.pids, options=words).expect(3).json
        assert refused["reason"] == "other-store" and str(places.root / "two") in refused["error"]["message"], refused
    assert records(tool) == before
    tool.resume(*pair.pids, options=places.words()).expect(0)
    pair.check()


def test_places_that_have_moved(pair: Pair, places: Places, tool: Tool) -> None:
    """The checkpoint's id decides: it is found where the command says, also by those that come after it."""
    for name in ("one", "two"):
        places.suspend(*pair.pids, name=name).expect(0)
        if name == "one":
            tool.resume(*pair.pids).expect(0)
    away, link = places.root / "away", places.root / "link"
    places.directory("two").rename(away)
    link.symlink_to(places.store)
    message = tool.resume(*pair.pids).expect(6).json["error"]["message"]
    assert str(places.directory("two")) in message and "name the directory" in message, message
    wrong = tool.resume(*pair.pids, options=places.words("one")).expect(3).json
    assert wrong["reason"] == "other-checkpoint" and "--ckpt-dir" in wrong["error"]["message"], wrong
    moved = ("--store", str(link), "--ckpt-dir", str(away))
    (away / "manifest.json").rename(away / "kept")
    tool.resume(*pair.pids, options=moved).expect(3)
    (away / "kept").rename(away / "manifest.json")
    chunks = places.store / "chunks"
    chunks.rename(places.store / "gone")
    tool.resume(*pair.pids, options=moved).expect(6)
    (places.store / "gone").rename(chunks)
    assert records(tool)[0]["stored"]["directory"] == str(away)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_directory_that_holds_a_checkpoint(pair: Pair, places: Places, tool: Tool) -> None:
    """Refused before anything changes; the checkpoint there stays."""
    places.suspend(*pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    kept = places.seen()
    answer = places.suspend(*pair.pids).expect(3)
    assert answer.json["reason"] == "checkpoint-exists" and str(places.directory()) in answer.json["error"]["message"]
    assert places.seen() == kept
    running(tool)
    pair.check()


def test_lost_record(pair: Pair, places: Places, tool: Tool) -> None:
    """The shims know which checkpoint they need: it has to be named, and no other is taken for it."""
    places.suspend(*pair.pids).expect(0)
    tool.run("stop", *pair.pids).expect(0)
    for path in Path(tool.state_dir).glob("group-*"):
        path.unlink()
    answer = tool.resume(*pair.pids).expect(3)
    assert answer.json["reason"] == "no-store-named" and "--ckpt-dir" in answer.json["error"]["message"]
    shutil.copytree(places.directory(), places.directory("two"))
    manifest = places.directory("two") / "manifest.json"
    other = "0" * 32
    body = json.loads(manifest.read_text())["body"] | {"id": other}
    from chunkstore import format

    manifest.write_bytes(format.encode(format.CHECKPOINT, body))
    answer = tool.resume(*pair.pids, options=places.words("two")).expect(3)
    assert answer.json["reason"] == "other-checkpoint" and other in answer.json["error"]["message"]
    tool.resume(*pair.pids, options=places.words()).expect(0)
    running(tool)
    pair.check()


def test_rank_that_owns_nothing(start_worker: Start, places: Places, tool: Tool) -> None:
    """It gets no ring, and a file that says so; the memory that it opened is there again."""
    owner, other = start_worker(0), start_worker(1)
    block = owner.alloc(3 * MIB)
    owner.fill(block, 3 * MIB, 1)
    other.expect(other.ipc_open(owner.ipc_get(block)), 3 * MIB, [1])
    places.suspend(owner.pid, other.pid).expect(0)
    assert not places.checkpoint().rank(other.pid).allocations
    tool.resume(owner.pid, other.pid).expect(0)
    running(tool)
    owner.check()
    other.check()


def test_fr70_ring_is_shared_out(start_worker: Start, tool: Tool, places: Places) -> None:
    """More memory than the ring, in both ranks: it passes through, and the command never holds more than the ring."""
    ranks = [start_worker(0), start_worker(1)]
    size = 160 * MIB
    for number, worker in enumerate(ranks):
        worker.fill(worker.alloc(size), size, number)
    pids = [worker.pid for worker in ranks]
    shutil.rmtree(places.store)
    Store.create(places.store, chunk_size_bytes=8 * CHUNK)
    peak = {}
    for name, words in {
        "suspend": ("suspend", "--depth", "pages", *places.words(), "--ring", "32MiB", *pids),
        "resume": ("resume", "--ring", "32MiB", *pids),
    }.items():
        answer = places.program("peak", *words).expect(0)
        peak[name] = int(answer.stderr.rpartition("peak ")[2].split()[0])
    print(peak)
    assert max(peak.values()) < 32 * MIB + 150 * MIB
    for worker in ranks:
        worker.check()
    assert os.path.exists(places.directory())


def test_pieces_go_side_by_side(start_worker: Start, tool: Tool, places: Places) -> None:
    """Both ranks, and both places of each: while one piece is written or read, another is hashed and copied."""
    ranks = [start_worker(0), start_worker(1)]
    for number, worker in enumerate(ranks):
        worker.fill(worker.alloc(8 * MIB), 8 * MIB, number)
    pids = [worker.pid for worker in ranks]
    ring = ("--ring", "4MiB")
    places.program("together", "write", "4", "suspend", "--depth", "pages", *places.words(), *ring, *pids).expect(0)
    places.program("together", "read", "4", "resume", *ring, *pids).expect(0)
    for worker in ranks:
        worker.check()


def test_checkpoint_that_a_group_needs_stays(pair: Pair, places: Places, tool: Tool) -> None:
    """While it is the only copy of memory, `store rm` and `store forget` refuse; also where it was moved meanwhile."""
    places.suspend(*pair.pids).expect(0)

    def refused(verb: str, directory: Path) -> None:
        answer = tool.run("store", verb, places.store, directory).expect(3)
        assert answer.json["reason"] == "checkpoint-needed" and str(pair.pids[0]) in answer.json["error"]["message"]

    before = places.seen()
    refused("rm", places.directory())
    assert places.seen() == before
    places.directory().rename(places.directory("two"))
    refused("forget", places.directory())
    refused("rm", places.directory("two"))
    places.directory("two").rename(places.directory())
    tool.resume(*pair.pids).expect(0)
    pair.check()
    tool.run("store", "rm", places.store, places.directory()).expect(0)
    places.suspend(*pair.pids).expect(0)
    for worker in pair.both:
        worker.kill()
    tool.run("store", "rm", places.store, places.directory()).expect(0)


def test_pitfall41_host_memory_is_locked_once(start_worker: Start, places: Places, tool: Tool, tmp_path: Path) -> None:
    """One ring, however many allocations pass through it; and pitfall 43: a chunk is its bytes, not packed."""
    worker = start_worker(0, env={"SIMCUDA_TRACE": str(tmp_path / "trace")})
    for number in range(40):
        worker.fill(worker.alloc(3 * MIB), 3 * MIB, number)
    places.suspend(worker.pid, options=("--depth", "pages")).expect(0)
    tool.resume(worker.pid).expect(0)
    calls = (tmp_path / "trace").read_text().split()
    assert sum("cuMemHostRegister" in call for call in calls) == 2  # down and up
    chunks = {path.stat().st_size for path in (places.store / "chunks").glob("*/*")}
    assert chunks == {CHUNK}
    worker.check()
