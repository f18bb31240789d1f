"""A state directory that commands of several pid or time namespaces share: what is not of here is not judged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.programs.tool import Answer, Tool
from tests.sim.conftest import Pair, records, running
from tests.sim.places import Places

pytestmark = pytest.mark.usefixtures("own_network")

PID = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
TIME = ("unshare", "--time", "--boottime", "100000", "--monotonic", "5000")
SCHEMES = [(PID, "other-pid-namespace"), (TIME, "other-time-namespace")]


def content(tool: Tool) -> dict[str, str]:
    """Return the files of the state directory but for locks, which name their last holder."""
    return {path.name: path.read_text() for path in Path(tool.state_dir).iterdir() if path.suffix != ".lock"}


def inside(tool: Tool, prefix: tuple[str, ...], *words: str | int) -> Answer:
    """Run a command in another namespace."""
    if prefix is TIME and not Path("/proc/self/ns/time").exists():
        pytest.skip("this kernel has no time namespaces")
    driver = () if words[0] in ("status", "stop") else ("--driver", "sim")
    return tool.run(*words, *driver, prefix=prefix)


@pytest.mark.parametrize(("prefix", "word"), SCHEMES)
def test_a_group_of_another_namespace_is_left_alone(
    pair: Pair, tool: Tool, prefix: tuple[str, ...], word: str
) -> None:
    """Its members look dead from there, and are not: nothing is forgotten, and `status` says where it belongs."""
    tool.suspend(*pair.pids).expect(0)
    before = content(tool)
    first = pair.first.pid
    for words in (("recover",), ("recover", first), ("resume", first), ("resume", "--all"), ("stop", first)):
        answer = inside(tool, prefix, *words).expect(3)
        assert answer.json["reason"] == word, answer
        assert content(tool) == before, words
    found = inside(tool, prefix, "status").expect(0).json["groups"][0]
    assert {rank["state"] for rank in found["ranks"]} == {"unknown"} and "namespace" in found["note"], found
    assert content(tool) == before
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_numbers_that_mean_ranks_of_here(pair: Pair, tool: Tool) -> None:
    """A record of another namespace that has the same pids stands in nobody's way, named or found in a tree."""
    tool.suspend(*pair.pids).expect(0)
    record = records(tool)[0]
    other = {**record, "id": "0123abcd", "origin": record["origin"].replace("pid:[", "pid:[1")}
    other["members"] = [{**member, "nonce": "0x1"} for member in record["members"]]
    path = Path(tool.state_dir) / "group-0123abcd.json"
    path.write_text(json.dumps(other))
    path.chmod(0o600)
    for named in (pair.pids, ("--tree", pair.first.pid, "--tree", pair.second.pid)):
        assert [group["id"] for group in tool.run("status", *named).expect(0).json["groups"]] == [record["id"]]
        assert tool.suspend(*pair.pids).expect(0).json["already"] is True
        tool.run("resume", "--driver", "sim", *named).expect(0)
        pair.check()
        record["id"] = tool.suspend(*pair.pids).expect(0).json["groups"][0]["id"]
    assert tool.run("resume", "--driver", "sim", "--all").expect(3).json["reason"] == "other-pid-namespace"
    pair.check()
    assert json.loads(path.read_text()) == other


def test_a_group_restored_in_another_container_is_of_here(pair: Pair, tool: Tool) -> None:
    """The shims know themselves again, by nonce, wherever the record was written."""
    tool.suspend(*pair.pids).expect(0)
    tool.run("stop", *pair.pids).expect(0)
    path = next(Path(tool.state_dir).glob("group-*.json"))
    origin = json.loads(path.read_text())["origin"]
    path.write_text(path.read_text().replace(origin, origin.replace("pid:[", "pid:[1")))
    assert tool.run("status").expect(0).json["groups"][0]["ranks"][0]["state"] == "suspended"
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("origin", ["", "another-boot pid:[1] time:[1]"])
def test_a_dead_group_of_before_is_dropped(pair: Pair, tool: Tool, origin: str) -> None:
    """Of another boot nothing lives, and a record without a place was judged by start times."""
    tool.suspend(*pair.pids).expect(0)
    path = next(Path(tool.state_dir).glob("group-*.json"))
    path.write_text(path.read_text().replace(records(tool)[0]["origin"], origin))
    for worker in pair.both:
        worker.kill()
    assert tool.run("recover", "--driver", "sim").expect(5).json["reason"] == "group-gone"
    assert records(tool) == []


def test_driver_calls_of_another_namespace_are_left_alone(pair: Pair, tool: Tool) -> None:
    """Their process looks dead from here, and their pids are those of other processes."""
    tool.suspend(*pair.pids).expect(0)
    here = records(tool)[0]["origin"]
    calls = [{"call": "checkpoint", "pid": pair.first.pid, "finished": False}]
    other = {"pid": 4, "start_time": 1, "boot_id": here.split()[0], "origin": here.replace("pid:[", "pid:[1")}
    path = Path(tool.state_dir) / "driver-4-1.json"
    path.write_text(json.dumps({**other, "calls": calls}))
    os.chmod(path, 0o600)
    tool.resume(*pair.pids).expect(0)
    assert path.exists()
    pair.check()


def test_a_checkpoint_that_a_group_of_another_namespace_needs_stays(pair: Pair, tool: Tool, places: Places) -> None:
    """It is the only copy of its memory, as far as anybody can tell; the shims cannot be asked from there either."""
    places.suspend(*pair.pids).expect(0)
    before = places.seen()
    answer = tool.run("store", "rm", places.store, places.directory(), prefix=(*PID, "--net")).expect(3)
    assert answer.json["reason"] == "checkpoint-needed" and places.seen() == before
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()
