"""Containers in one network namespace whose processes have the same pids: none is taken for the other, all work."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpususpend.defaults import SAME_PIDS
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool
from tests.sim.conftest import Start, running

pytestmark = [
    pytest.mark.usefixtures("own_network"),
    pytest.mark.skipif(os.geteuid() != 0, reason="unshare needs root here"),
]

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


class Container:
    """Two ranks in a pid namespace of their own; a simulated machine of its own tells processes by pid, too."""

    def __init__(self, machine: Setting, name: str) -> None:
        assert machine.state is not None
        command = [*NAMESPACE, sys.executable, "-m", "tests.programs.container", str(machine.state / name)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=machine.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.pids = self.process.stdout.readline().split()
        assert len(self.pids) == 2, "the ranks cannot share memory"

    def ask(self, *words: str) -> Any:
        """Have it check its ranks, or run a command; return what it answers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def command(self, *words: str) -> dict[str, Any]:
        """Run a command that has to succeed, without a warning."""
        answer: dict[str, Any] = self.ask(*words)
        assert (answer["exit_code"], answer["warnings"]) == (0, []), answer
        return answer

    def end(self) -> None:
        """Kill it with all that it has started."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def containers(machine: Setting) -> Iterator[list[Container]]:
    """Three containers with the same pids."""
    started: list[Container] = []
    try:
        for name in ("a", "b", "c"):
            started.append(Container(machine, name))
        assert len({tuple(one.pids) for one in started}) == 1, [one.pids for one in started]
        yield started
    finally:
        for one in started:
            one.end()


def test_pitfall31_each_is_suspended_by_itself(containers: list[Container]) -> None:
    """Legacy IPC between ranks, suspend by pid and by --all, and resume, while the others run or are suspended."""
    first, second, third = containers
    for one, depth in ((first, "process"), (second, "pages")):
        one.command("suspend", "--depth", depth, *one.pids)
        assert [rank["state"] for rank in third.command("status")["groups"][0]["ranks"]] == ["running"] * 2
    third.command("suspend", "--all")
    second.command("resume", "--all")
    assert second.ask("check") == "checked"
    first.command("resume", *first.pids)
    third.command("resume", *third.pids)
    for one in containers:
        assert one.ask("check") == "checked"
        assert [group["state"] for group in one.command("status")["groups"]] == ["running"]


def test_pitfall31_one_that_ends_leaves_its_name(containers: list[Container], machine: Setting) -> None:
    """Whoever comes next takes the first name, and those with later ones are found behind the gap."""
    first, second, third = containers
    second.command("suspend", *second.pids)
    first.end()
    third.command("suspend", *third.pids)
    fourth = Container(machine, "d")
    try:
        for one in (fourth, second, third):
            if one is fourth:
                one.command("suspend", *one.pids)
            one.command("resume", *one.pids)
            assert one.ask("check") == "checked"
    finally:
        fourth.end()


def test_checkpoint_of_the_own_container_can_be_removed(containers: list[Container], tmp_path: Path) -> None:
    """Those of the others have the pids of its ranks, and answer only in their containers: there it is refused."""
    first, second, _ = containers
    places = {name: str(tmp_path / name) for name in ("store", "checkpoint")}
    second.command("suspend", "--store", places["store"], "--ckpt-dir", places["checkpoint"], *second.pids)
    remove = ("store", "rm", places["store"], places["checkpoint"])
    assert second.ask(*remove)["error"]["code"] == "checkpoint-needed"
    second.command("resume", *second.pids)
    refused = first.ask(*remove)["error"]
    assert refused["code"] == "no-answer" and "where the checkpoint was made" in refused["message"], refused
    second.command(*remove)
    assert second.ask("check") == "checked"


@contextlib.contextmanager
def taken(names: list[str]) -> Iterator[None]:
    """Hold the names of sockets, accepting no connection: as a frozen process whose backlog is full does."""
    with contextlib.ExitStack() as stack:
        for name in names:
            listener, client = (
                stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2)
            )
            listener.bind(f"\0{name}")
            listener.listen(0)
            client.connect(f"\0{name}")
        yield


def test_frozen_stranger_with_the_name_is_not_waited_for(start_worker: Start, tool: Tool) -> None:
    """Neither by peers nor by commands: what listens under another name is found at once."""
    workers = [start_worker(device=None) for _ in range(2)]
    with taken([f"nvsnap-gpushare.{worker.pid}" for worker in workers]):
        for device, worker in enumerate(workers):
            worker.start(device)
        block = workers[0].alloc(4096)
        workers[0].fill(block, 4096, 5)
        workers[1].expect(workers[1].ipc_open(workers[0].ipc_get(block)), 4096, [5])
        pids = [worker.pid for worker in workers]
        tool.suspend(*pids).expect(0)
        tool.resume(*pids).expect(0)
        for worker in workers:
            worker.check()
    running(tool)


def test_the_shim_tries_as_many_names() -> None:
    """The number stands in the shim too."""
    text = (Path(ROOT) / "shim/wire.pxi").read_text()
    assert f"    SAME_PIDS = {SAME_PIDS}\n" in text
