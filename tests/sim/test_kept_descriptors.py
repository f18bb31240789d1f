"""Descriptors of a group's memory in processes whose shim takes no part: found before anything changes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import ROOT
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import MIB, Pair, Start, end_process, records, running

pytestmark = pytest.mark.usefixtures("own_network")


@contextlib.contextmanager
def exported(owner: Worker) -> Iterator[int]:
    """A descriptor of memory of `owner`, which closes it at the end."""
    number = owner.mem_export(owner.block(2 * MIB)["handle"])
    yield number
    owner.close_fd(number)


def cycle(pair: Pair, tool: Tool) -> None:
    """A whole cycle works."""
    tool.suspend(*pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def refused(answer: Answer, pid: int, fd: int, way_out: str) -> None:
    """Check that process, descriptor and way out are named, and that nothing was begun."""
    answer.expect(3)
    error = answer.json["error"]
    assert (answer.json["reason"], error["pid"], error["facts"]["fd"]) == ("kept-descriptor", pid, fd), answer
    assert way_out in error["message"] and "prepare" not in answer.stderr


@pytest.mark.parametrize("shim", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_one_that_was_handed_over(pair: Pair, start_worker: Start, tool: Tool, shim: bool, named: bool) -> None:
    """A broker without CUDA: it has no shim that answers, whether it was started with one or not, named or not."""
    broker = start_worker(None, shim=shim)
    with exported(pair.first) as number:
        kept = pair.first.hand(number, broker)
    answer = tool.suspend(*pair.pids, *([broker.pid] if named else []))
    refused(answer, broker.pid, kept, "close it, or end that process")
    assert answer.json["error"]["facts"]["owner"] == pair.first.pid
    running(tool)
    pair.check()
    broker.close_fd(kept)
    cycle(pair, tool)


@pytest.mark.parametrize("tree", [False, True])
def test_one_that_was_inherited(pair: Pair, tool: Tool, tree: bool) -> None:
    """A child that was forked while the descriptor was open, as a member of the group or not."""
    with exported(pair.second) as number:
        child = pair.second.fork_idle()
    answer = tool.suspend(*pair.pids, options=("--tree", str(pair.second.pid)) if tree else ())
    refused(answer, child, number, "close it, or end that process")
    running(tool)
    end_process(child)
    pair.check()
    cycle(pair, tool)


@pytest.mark.parametrize("tree", [False, True])
def test_children_on_their_way_to_a_program(pair: Pair, tool: Tool, tree: bool) -> None:
    """A rank that starts programs all the time: each child has what its parent has open until it starts one."""
    with exported(pair.first):
        pair.first.fork_often(0.1)
        for _ in range(4):
            if tree:
                tool.run("suspend", "--driver", "sim", "--tree", pair.first.pid, pair.second.pid).expect(0)
                tool.resume(*pair.pids).expect(0)
            else:
                cycle(pair, tool)


def test_one_whose_holder_has_a_shim(pair: Pair, start_worker: Start, tool: Tool) -> None:
    """Named as well, its shim replaces the descriptor, which stands for the same memory afterwards."""
    third = start_worker(1)
    block = pair.first.block(2 * MIB)
    pair.first.fill(block["address"], 2 * MIB, 4)
    number = pair.first.mem_export(block["handle"])
    kept = pair.first.hand(number, third)
    pair.first.close_fd(number)
    refused(tool.suspend(*pair.pids), third.pid, kept, "name that process too")
    tool.suspend(*pair.pids, third.pid).expect(0)
    tool.resume(third.pid).expect(0)
    view = third.import_block(kept, 2 * MIB)
    third.expect(view["address"], 2 * MIB, [4])
    third.check()
    pair.check()


def test_one_whose_exporter_is_gone(start_worker: Start, tool: Tool) -> None:
    """The tag leads nowhere any more; the rank that maps the memory knows it."""
    owner, heir, broker = start_worker(0), start_worker(1), start_worker(None, shim=False)
    with exported(owner) as number:
        heir.import_block(owner.hand(number, heir), 2 * MIB)
        kept = owner.hand(number, broker)
    owner.kill()
    answer = tool.suspend(heir.pid)
    refused(answer, broker.pid, kept, "close it, or end that process")
    assert answer.json["error"]["facts"]["owner"] == heir.pid
    broker.close_fd(kept)
    tool.suspend(heir.pid).expect(0)
    tool.resume(heir.pid).expect(0)


def test_one_that_is_handed_over_meanwhile(pair: Pair, start_worker: Start, tool: Tool, tmp_path: Path) -> None:
    """While the arenas are being filled: refused as well, and these are taken back."""
    broker, wait = start_worker(None, shim=False), tmp_path / "wait"
    wait.touch()
    words = ["prepare", str(wait), "suspend", "--driver", "sim", "--json", *map(str, pair.pids)]
    command = [sys.executable, "-m", "tests.programs.paused", *words]
    with exported(pair.first) as number:
        process = subprocess.Popen(
            command, cwd=ROOT, env=tool.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 60
        while not any(record["step"] == "prepare" for record in records(tool)) and time.monotonic() < until:
            time.sleep(0.01)
        kept = pair.first.hand(number, broker)
        wait.unlink()
        out, err = process.communicate(timeout=120)
    answer = Answer(command, process.returncode, out, err).expect(3)
    error = answer.json["error"]
    assert (answer.json["reason"], error["pid"], error["facts"]["fd"]) == ("kept-descriptor", broker.pid, kept), answer
    running(tool)
    assert {rank["arena_bytes"] for rank in tool.run("status").json["groups"][0]["ranks"]} == {0}
    pair.check()
    broker.close_fd(kept)
    cycle(pair, tool)


def test_those_of_other_groups_do_not_matter(pair: Pair, start_worker: Start, tool: Tool) -> None:
    """Two processes that share among themselves, one of which is no member of anything."""
    owner, broker = start_worker(0), start_worker(None, shim=False)
    with exported(owner) as number:
        owner.hand(number, broker)
    cycle(pair, tool)


def test_one_that_cannot_be_looked_at(pair: Pair, start_worker: Start, tool: Tool) -> None:
    """Where pidfd_getfd is denied, whatever the descriptor stands for; without one there is nothing to look at."""
    with exported(pair.first):
        bare = start_worker(0, shim=False)
        answer = tool.suspend(*pair.pids, without="pidfd_getfd").expect(3)
        error = answer.json["error"]
        assert (answer.json["reason"], error["pid"]) == ("hidden-descriptor", bare.pid), answer
        assert "pidfd_getfd" in error["message"] and "CAP_SYS_PTRACE" in error["message"]
        running(tool)
        pair.check()
        bare.kill()
        tool.suspend(*pair.pids, without="pidfd_getfd").expect(0)
        tool.resume(*pair.pids).expect(0)
        pair.check()
