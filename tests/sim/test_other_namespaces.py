"""A state directory that commands of several pid or time namespaces share: what is not of here is not judged."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs.tool import Answer, Tool
from tests.sim.conftest import Pair, end_process, records, running
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


def test_a_group_whose_shims_listen_in_another_network_is_left_alone(pair: Pair, tool: Tool) -> None:
    """The state directory is the same one; only the words to enter with are told."""
    tool.suspend(*pair.pids).expect(0)
    before = content(tool)
    for words in (("recover",), ("recover", pair.first.pid), ("resume", pair.first.pid), ("resume", "--all")):
        answer = inside(tool, ("unshare", "--net"), *words).expect(3)
        assert answer.json["reason"] == "other-net-namespace" and "nsenter" in answer.stderr, answer
        assert content(tool) == before, words
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def outside(tool: Tool, pid: int) -> tuple[dict[str, Any], str]:
    """Return what status says of the group of another namespace that has this pid, and the refusal of all commands."""
    told = [
        tool.run(*words).expect(3).json["error"]["message"]
        for words in (("recover", "--driver", "sim"), ("resume", "--driver", "sim", pid), ("stop", pid))
    ]
    group = next(group for group in tool.run("status").expect(0).json["groups"] if group["id"] is not None)
    assert set(told) == {group["note"]}, (told, group)
    return group, told[0]


def test_a_time_namespace_in_which_the_holder_lives_can_be_entered(pair: Pair, tool: Tool) -> None:
    """The refusal names a process of it, and the command that it names works."""
    holder = inside(tool, TIME, "suspend", *pair.pids).expect(0).json["groups"][0]["holder"]
    group, message = outside(tool, pair.first.pid)
    assert group["holder"] == holder and f"nsenter -t {holder} -T" in message, message
    inside(tool, ("nsenter", "-t", str(holder), "-T"), "resume", *pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_time_namespace_that_is_gone(pair: Pair, tool: Tool) -> None:
    """Its holder was killed and nobody else lives there: the refusal names the file and what to do, and that works."""
    end_process(inside(tool, TIME, "suspend", *pair.pids).expect(0).json["groups"][0]["holder"])
    group, message = outside(tool, pair.first.pid)
    path = next(Path(tool.state_dir).glob("group-*.json"))
    assert group["holder"] is None and f"delete {path}" in message and "nsenter" not in message, message
    assert "`nvsnap-gpu-suspend resume {} {}`".format(*sorted(pair.pids)) in message, message
    path.unlink()
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_group_in_a_store_whose_time_namespace_is_gone(pair: Pair, tool: Tool, places: Places) -> None:
    """The way out names store and checkpoint: the file that knew them is to be deleted."""
    holder = places.suspend(*pair.pids, prefix=TIME).expect(0).json["groups"][0]["holder"]
    end_process(holder)
    _, message = outside(tool, pair.first.pid)
    words = message.rpartition("`nvsnap-gpu-suspend ")[2].partition("`")[0].split()
    next(Path(tool.state_dir).glob("group-*.json")).unlink()
    tool.run(*words, "--driver", "sim").expect(0)
    running(tool)
    pair.check()


@contextlib.contextmanager
def somebody_in_a_pid_namespace() -> Iterator[int]:
    """Start a process in a pid namespace of its own; yield its pid here."""
    with subprocess.Popen([*PID, "sleep", "600"]) as outer:
        try:
            until, children = time.monotonic() + 60, Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            while not (found := children.read_text().split()):
                assert time.monotonic() < until and outer.poll() is None, "unshare has started nothing"
                time.sleep(0.01)
            yield int(found[0])
        finally:
            outer.kill()


def test_a_pid_namespace_that_is_seen_can_be_entered(pair: Pair, tool: Tool) -> None:
    """A process of it is named as it is called here; where none is seen, the file is."""
    tool.suspend(*pair.pids).expect(0)
    [record] = records(tool)
    tool.resume(*pair.pids).expect(0)
    path = Path(tool.state_dir) / f"group-{record['id']}.json"
    with somebody_in_a_pid_namespace() as there:
        origin = record["origin"].replace(os.readlink("/proc/self/ns/pid"), os.readlink(f"/proc/{there}/ns/pid"))
        members = [{**member, "pid": (1 << 30) + number} for number, member in enumerate(record["members"])]
        path.write_text(json.dumps({**record, "origin": origin, "members": members}))
        path.chmod(0o600)
        _, message = outside(tool, 1 << 30)
        assert f"nsenter -t {there} -p -m -n" in message and "delete" not in message, message
    _, message = outside(tool, 1 << 30)
    assert f"delete {path}" in message and "nsenter" not in message, message
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
