"""`--trace FILE`: what a command did when, as Chrome's trace viewer and Perfetto read it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import MIB, Background, Pair, running
from tests.sim.places import Places

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

Event = dict[str, Any]
ROUNDING_US = 2


def events_of(path: Path) -> list[Event]:
    """Return the bars of a trace, after a check of its form (the Trace Event Format's JSON object)."""
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms" and set(document["otherData"]) >= {"version", "command", "simulated"}
    named: dict[tuple[int, int], str] = {}
    bars = []
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index")
            if event["name"] == "thread_name":
                assert named.setdefault((event["pid"], event["tid"]), event["args"]["name"]) == event["args"]["name"]
            continue
        assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["args"], dict)
        bars.append(event)
    assert {(bar["pid"], bar["tid"]) for bar in bars} <= set(named)
    return [{**bar, "row": named[bar["pid"], bar["tid"]]} for bar in bars]


def inside(inner: Event, outer: Event) -> bool:
    """Say whether one bar lies within another."""
    begins = inner["ts"] >= outer["ts"] - ROUNDING_US
    return bool(begins and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + ROUNDING_US)


def check_rows(bars: list[Event]) -> None:
    """Two bars of one row lie apart, or one within the other: a viewer could not draw anything else."""
    for one in bars:
        for other in bars:
            if one is not other and (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                apart = one["ts"] + one["dur"] <= other["ts"] + ROUNDING_US
                apart |= other["ts"] + other["dur"] <= one["ts"] + ROUNDING_US
                assert apart or inside(one, other) or inside(other, one), (one, other)


def check_trace(path: Path, answer: Answer) -> list[Event]:
    """Check that the trace says what the report says, each thing inside the one that it is a part of."""
    bars = events_of(path)
    check_rows(bars)
    command = next(bar for bar in bars if bar["name"] == answer.json["command"])
    steps = [bar for bar in bars if bar["row"] == "phases" and bar is not command and "group" in bar["args"]]
    told = [phase for group in answer.json["groups"] for phase in group["phases"]]
    assert [bar["name"] for bar in steps] == [phase["name"] for phase in told]
    ranks = [bar for bar in bars if bar["row"] == "steps"]
    copies = [bar for bar in bars if bar["row"].startswith("copies")]
    for step, phase in zip(steps, told, strict=True):
        assert inside(step, command) and abs(step["dur"] - phase["seconds"] * 1e6) <= ROUNDING_US
        mine = [bar for bar in ranks if inside(bar, step) and bar["args"]["phase"] == step["name"]]
        assert sorted({str(bar["pid"]) for bar in mine}) == sorted(phase["ranks"])
        for pid, seconds in phase["ranks"].items():
            parts = [bar["dur"] for bar in mine if str(bar["pid"]) == pid]
            assert abs(sum(parts) - seconds * 1e6) <= ROUNDING_US * len(parts)
        moved = [bar for bar in copies if bar["args"]["phase"] == step["name"] and inside(bar, step)]
        assert all(any(copy["pid"] == bar["pid"] and inside(copy, bar) for bar in mine) for copy in moved)
        if phase["name"] in ("release", "load", "save") and phase["bytes"]:
            assert sum(copy["args"]["bytes"] for copy in moved) == phase["bytes"]
    inner = [bar for bar in bars if bar["row"] != "phases"]
    assert all(any(inside(bar, step) for step in steps) for bar in inner)
    return bars


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_each_phase_rank_and_copy(pair: Pair, tool: Tool, tmp_path: Path, depth: str) -> None:
    """With bytes and rate of each copy (FR-43), on the way down and up."""
    down = tool.suspend(*pair.pids, options=("--depth", depth, "--trace", f"{tmp_path}/down.json")).expect(0)
    bars = check_trace(tmp_path / "down.json", down)
    assert {bar["pid"] for bar in bars if bar["row"].startswith("copies")} == set(pair.pids)
    assert all("GB/s" in bar["args"]["rate"] for bar in bars if bar["row"].startswith("copies"))
    parts = {"populate", "page-lock", "close-launch", "drain", "close-memory", "sharing"}
    assert parts <= {bar["name"] for bar in bars}
    up = tool.resume(*pair.pids, options=("--trace", f"{tmp_path}/up.json")).expect(0)
    bars = check_trace(tmp_path / "up.json", up)
    assert {bar["pid"] for bar in bars if bar["row"].startswith("copies")} == set(pair.pids)
    pair.check()
    again = tool.resume(*pair.pids, options=("--trace", f"{tmp_path}/up.json")).expect(0)
    assert again.json["already"] and [bar["name"] for bar in events_of(tmp_path / "up.json")] == ["resume"]
    assert sorted(path.name for path in tmp_path.glob("*.json*")) == ["down.json", "up.json"]


def test_copies_of_two_gpus_of_one_rank(
    start_worker: Callable[..., Worker], tool: Tool, machine: Setting, tmp_path: Path
) -> None:
    """Both at once, each in a row of its own."""
    rank = start_worker(0)
    rank.alloc(4 * MIB)
    rank.start(1)
    rank.alloc(6 * MIB)
    machine.inject("cuMemcpyDtoHAsync_v2 1 delay 50", rank.pid)
    down = tool.suspend(rank.pid, options=("--trace", f"{tmp_path}/down.json")).expect(0)
    copies = [bar for bar in check_trace(tmp_path / "down.json", down) if bar["row"].startswith("copies")]
    assert sorted(bar["args"]["bytes"] for bar in copies) == [4 * MIB, 6 * MIB]
    assert len({bar["row"] for bar in copies}) == len({bar["args"]["device"] for bar in copies}) == 2
    tool.resume(rank.pid).expect(0)


def test_copies_through_a_ring(pair: Pair, tool: Tool, places: Places, tmp_path: Path) -> None:
    """Each piece of a suspend into a store, down and up, where zeros are set on the GPU."""
    down = places.suspend(*pair.pids, options=("--trace", f"{tmp_path}/down.json")).expect(0)
    up = tool.resume(*pair.pids, options=("--trace", f"{tmp_path}/up.json")).expect(0)
    for name, answer, words in (("down.json", down, {"copy-out"}), ("up.json", up, {"clear", "copy-in"})):
        copies = [bar for bar in check_trace(tmp_path / name, answer) if bar["row"] == "copies"]
        assert {bar["name"] for bar in copies} == words and len(copies) > 2
    pair.check()


def test_of_a_command_that_fails(pair: Pair, tool: Tool, machine: Setting, tmp_path: Path) -> None:
    """With what was done until then, the rollback among it, and the error."""
    machine.inject("cuMemcpyDtoHAsync_v2 1 999", pair.second.pid)
    answer = tool.suspend(*pair.pids, options=("--trace", f"{tmp_path}/down.json")).expect(4)
    machine.inject("", pair.second.pid)
    bars = check_trace(tmp_path / "down.json", answer)
    assert {"release", "load", "open"} <= {bar["name"] for bar in bars}
    assert answer.json["error"]["message"] in next(bar for bar in bars if bar["name"] == "suspend")["args"]["error"]
    pair.check()


def test_of_a_recover(pair: Pair, tool: Tool, background: Callable[..., Background], machine: Setting,
                      tmp_path: Path) -> None:
    machine.inject("cuMemcpyDtoHAsync_v2 1 hold", pair.second.pid)
    command = background("suspend", *pair.pids)
    command.wait_for_step("release")
    machine.wait_until_held()
    command.kill()
    machine.inject("", pair.second.pid)
    options = ("--driver", "sim", "--trace", f"{tmp_path}/recover.json")
    answer = tool.run("recover", *pair.pids, *options).expect(0)
    assert "open" in {bar["name"] for bar in check_trace(tmp_path / "recover.json", answer)}
    pair.check()


@pytest.mark.parametrize("where", ["missing/trace.json", ".", "fifo", "link"])
def test_a_place_that_cannot_be_written_is_refused(pair: Pair, tool: Tool, tmp_path: Path, where: str) -> None:
    """Before anything has changed, and nothing is left behind."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("precious")
    os.mkfifo(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    answer = tool.suspend(*pair.pids, options=("--trace", str(tmp_path / where))).expect(3)
    assert answer.json["reason"] == "bad-file" and str(tmp_path / where) in answer.json["error"]["message"]
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "target").read_text() == "precious"
    running(tool)
    pair.check()


def test_a_place_that_vanishes_is_a_warning(
    pair: Pair, tool: Tool, background: Callable[..., Background], machine: Setting, tmp_path: Path
) -> None:
    """A trace never makes a command fail that has begun."""
    (tmp_path / "folder").mkdir()
    machine.inject("cuMemcpyDtoHAsync_v2 1 hold", pair.second.pid)
    command = background("suspend", *pair.pids, "--trace", tmp_path / "folder" / "down.json")
    command.wait_for_step("release")
    machine.wait_until_held()
    shutil.rmtree(tmp_path / "folder")
    machine.inject("", pair.second.pid)
    answer = command.end().expect(0)
    assert any("the trace was not written" in warning for warning in answer.json["warnings"]), answer
    tool.resume(*pair.pids).expect(0)
    pair.check()


def lying_in(places: Places, where: str) -> Path:
    """Return the path of a file in a place of the suspend, or of the one before."""
    chunk = next((places.store / "chunks").glob("*/*"))
    return {
        "manifest": places.directory() / "manifest.json", "rank": next(places.directory().glob("gpu-*.json")),
        "beside the manifest": places.directory() / "trace.json", "chunk": chunk,
        "store": places.store / "store.json", "below the store": places.store / "traces.json",
        "record": Path(places.tool.state_dir) / "trace.json",
    }[where]  # fmt: skip


OWNED = ("manifest", "rank", "beside the manifest", "chunk", "store", "below the store", "record")


@pytest.mark.parametrize("where", OWNED)
def test_no_file_of_a_store_or_a_checkpoint_is_replaced(pair: Pair, places: Places, tool: Tool, where: str) -> None:
    """Not by the trace of any command, nor by a GPU map: here lies the only copy of the memory."""
    places.suspend(*pair.pids).expect(0)
    path, before = lying_in(places, where), places.seen()
    link = places.root / "link"
    for named in (path, link / path.name):
        trace = ("--driver", "sim", "--trace", str(named))
        for words in (("suspend", *pair.pids, *trace), ("resume", *pair.pids, *trace), ("recover", *trace),
                      ("gpus", str(named), "--driver", "sim")):  # fmt: skip
            answer = tool.run(*words).expect(3)
            told = answer.json["error"]["message"]
            assert answer.json["reason"] == "bad-file" and "name a file elsewhere" in told, told
            assert str(path.parent) in told or str(places.store) in told, told
        if named == path:
            assert places.seen() == before
            link.symlink_to(path.parent)
    link.unlink()
    tool.resume(*pair.pids).expect(0)
    pair.check()


@pytest.mark.parametrize("place", ["store", "ckpt", "cache"])
def test_nor_put_where_one_is_to_be_made(pair: Pair, places: Places, tool: Tool, place: str) -> None:
    """Such as `--ckpt-dir D --trace D/manifest.json`: whether D is missing, empty, or D itself is FILE."""
    new = places.root / "new"
    named = ("--store", new / "store", "--ckpt-dir", new / "ckpt", "--cache", new / "cache")
    new.mkdir()
    folder, name = new / place, {"store": "store.json", "ckpt": "manifest.json", "cache": "cache.json"}[place]
    for path in (folder / name, folder / "deep" / name, folder):
        for made in (False, True):
            if made:
                folder.mkdir()
            answer = tool.suspend(*pair.pids, options=(*map(str, named), "--trace", str(path))).expect(3)
            assert answer.json["reason"] == "bad-file" and "it lies in" in answer.json["error"]["message"], answer
            assert [*new.rglob("*")] == [folder] * made
            if made:
                folder.rmdir()
    running(tool)
    tool.suspend(*pair.pids, options=(*map(str, named), "--trace", str(new / "trace.json"))).expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()


@pytest.mark.parametrize("name", ["manifest.json", "gpu-1.json", "save.lock"])
def test_what_is_left_of_a_checkpoint_counts(tool: Tool, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    answer = tool.run("gpus", tmp_path / "map", "--driver", "sim").expect(3)
    assert f"it lies in checkpoint {tmp_path}" in answer.json["error"]["message"]
    tool.run("gpus", tmp_path / "folder" / "map", "--driver", "sim").expect(0)


def test_another_state_directory_counts(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "journal.lock").touch()
    answer = tool.run("gpus", tmp_path / "map", "--driver", "sim").expect(3)
    assert f"it lies in state directory {tmp_path}" in answer.json["error"]["message"]
