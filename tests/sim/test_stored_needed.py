"""`store rm` and `store forget` ask the shims themselves: a state directory knows only what was suspended with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim import ordinary
from tests.sim.conftest import MIB, Pair, running
from tests.sim.places import Places
from tests.sim.test_other_user import PROGRAM

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]
Start = Callable[..., Worker]


@pytest.fixture
def elsewhere(tmp_path: Path) -> tuple[str, str]:
    """The words that name another state directory, which does not even exist."""
    return "--state-dir", str(tmp_path / "elsewhere")


def refused(answer: Answer, reason: str, *pids: int) -> None:
    """Check that a command was refused for this reason, and names one of the processes."""
    told = answer.expect(3).json["error"]["message"]
    assert answer.json["reason"] == reason and any(f"pid {pid}" in told for pid in pids), answer


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_removal_with_another_state_directory(
    pair: Pair, places: Places, tool: Tool, depth: str, elsewhere: tuple[str, str]
) -> None:
    """Nothing changes, and the group is resumed; also once the record is lost, or the checkpoint was moved."""
    places.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    before = places.seen()
    refused(tool.run("store", "rm", *elsewhere, places.store, places.directory()), "checkpoint-needed", *pair.pids)
    assert places.seen() == before
    places.directory().rename(places.directory("two"))
    for verb, name in (("forget", "one"), ("rm", "two")):
        answer = tool.run("store", verb, *elsewhere, places.store, places.directory(name))
        refused(answer, "checkpoint-needed", *pair.pids)
    places.directory("two").rename(places.directory())
    if depth == "pages":
        for path in Path(tool.state_dir).glob("group-*.json"):
            path.unlink()
        refused(tool.run("store", "rm", places.store, places.directory()), "checkpoint-needed", *pair.pids)
    tool.resume(*pair.pids, options=places.words()).expect(0)
    running(tool)
    pair.check()
    tool.run("store", "rm", *elsewhere, places.store, places.directory()).expect(0)


def test_other_checkpoints_go(start_worker: Start, places: Places, tool: Tool, elsewhere: tuple[str, str]) -> None:
    """A group keeps its own checkpoint only, and that no longer than it lives."""
    worker = start_worker(0)
    worker.fill(worker.alloc(MIB), MIB, 1)
    places.suspend(worker.pid, name="old").expect(0)
    tool.resume(worker.pid).expect(0)
    places.suspend(worker.pid).expect(0)
    tool.run("store", "rm", *elsewhere, places.store, places.directory("old")).expect(0)
    refused(tool.run("store", "rm", *elsewhere, places.store, places.directory()), "checkpoint-needed", worker.pid)
    worker.kill()
    tool.run("store", "rm", *elsewhere, places.store, places.directory()).expect(0)


def test_process_that_does_not_answer(pair: Pair, places: Places, tool: Tool, elsewhere: tuple[str, str]) -> None:
    """It may need the checkpoint; who does need it is named first."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    words = ("store", "rm", *elsewhere, places.store, places.directory())
    pair.first.halt()
    refused(tool.run(*words, deadline_s=60), "checkpoint-needed", pair.second.pid)
    pair.second.halt()
    answer = tool.run(*words, deadline_s=60)
    refused(answer, "no-answer", *pair.pids)
    assert "let it run" in answer.json["error"]["message"]
    pair.first.go_on()
    pair.second.go_on()
    tool.resume(*pair.pids).expect(0)
    pair.first.halt()
    refused(tool.run(*words, deadline_s=60), "no-answer", pair.first.pid)
    pair.first.go_on()
    tool.run(*words).expect(0)
    pair.check()


def test_process_that_cannot_need_it(start_worker: Start, places: Places, tool: Tool) -> None:
    """One with another pid than the checkpoint's ranks had, stopped or not; where they are not known, it may."""
    worker, other = start_worker(0), start_worker(0)
    worker.fill(worker.alloc(MIB), MIB, 1)
    for name in ("one", "two"):
        places.suspend(worker.pid, name=name).expect(0)
        tool.resume(worker.pid).expect(0)
    other.halt()
    tool.run("store", "rm", places.store, places.directory()).expect(0)
    places.directory("two").rename(places.directory("three"))
    refused(tool.run("store", "forget", places.store, places.directory("two")), "no-answer", other.pid)
    other.go_on()
    tool.run("store", "forget", places.store, places.directory("two")).expect(0)


@pytest.fixture
def other_users(machine: Setting) -> Iterator[int]:
    """The pid of another user's process under the shim."""
    python = ordinary.python()
    assert machine.state is not None
    os.chown(machine.state, ordinary.UID, ordinary.UID)
    environment = machine.environ(with_shim=True) | {"PYTHONPATH": ordinary.PACKAGES}
    command = ordinary.command_of(python, "-c", PROGRAM)
    with subprocess.Popen(
        command, env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def test_processes_of_other_users(other_users: int, places: Places, tool: Tool, elsewhere: tuple[str, str]) -> None:
    """Root asks all of them."""
    places.suspend(other_users).expect(0)
    refused(tool.run("store", "rm", *elsewhere, places.store, places.directory()), "checkpoint-needed", other_users)
    tool.resume(other_users).expect(0)
    tool.run("store", "rm", *elsewhere, places.store, places.directory()).expect(0)


def test_ordinary_user_beside_root(start_worker: Start, tool: Tool, tmp_path: Path) -> None:
    """Root's shims hang up on an ordinary user, who cannot have suspended them: told, and no reason to refuse."""
    python = ordinary.python()
    worker = start_worker(0)
    folder = Path("/tmp") / f"gpushare-{tmp_path.name}-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, ordinary.UID, ordinary.UID)
    code = (
        "import sys; from chunkstore import Store, Save\n"
        "store = Store.create(sys.argv[1] + '/store'); save = Save.begin(store, sys.argv[1] + '/one')\n"
        "save.add_rank(int(sys.argv[2])); save.commit()"
    )
    try:
        command = ordinary.command_of(python, "-c", code, str(folder), str(worker.pid))
        subprocess.run(command, env={"PYTHONPATH": ordinary.PACKAGES}, cwd="/", check=True)
        env = {"NVSNAP_GPU_SUSPEND_STATE_DIR": str(folder / "state")}
        worker.halt()
        answer = ordinary.run(tool, "store", "rm", folder / "store", folder / "one", env=env).expect(0)
        worker.go_on()
        [warning] = answer.json["warnings"]
        assert "other users" in warning and str(worker.pid) in warning
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
