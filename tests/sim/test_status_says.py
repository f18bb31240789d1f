"""`status` says what is so, and the next step is the one that the command that failed has named."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkstore import format
from gpususpend import errors, processes, status
from gpususpend.deadline import Deadline
from gpususpend.holder import Holder, HoldTarget
from gpususpend.journal import Kind, Member, Stage
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import MIB, Background, Pair, Start, end_process, records, running
from tests.sim.places import Places
from tests.sim.test_depth_pages import IDLE, wait_for_program
from tests.sim.test_suspend_states import at_the_checkpoint, killed
from tests.unit.fake_shim import STATUS, FakeShim

pytestmark = pytest.mark.usefixtures("own_network")

Run = Callable[..., Background]


def shown(tool: Tool, *words: str | int) -> dict[str, Any]:
    """Return what status says of the only group, which it says to people, too."""
    [group] = tool.run("status", *words).expect(0).json["groups"]
    assert f": {group['state']} ({group['note']})" in tool.run("status", *words, json_out=False).expect(0).stdout
    return dict(group)


def told(answer: Answer) -> str:
    """Return a command's message."""
    return str(answer.json["error"]["message"])


def record(tool: Tool) -> tuple[Path, str]:
    """Return the file of the only record, and its content."""
    [path] = Path(tool.state_dir).glob("group-*.json")
    return path, path.read_text()


def put_back(path: Path, text: str) -> None:
    """Write a record as it was: as if the last command could not have changed it."""
    path.write_text(text)
    path.chmod(0o600)


def test_a_record_that_stayed_of_a_group_that_runs(pair: Pair, tool: Tool) -> None:
    """It runs, says status; `suspend` refuses in the same words, and what these name drops the record."""
    tool.suspend(*pair.pids).expect(0)
    path, text = record(tool)
    tool.resume(*pair.pids).expect(0)
    for stage in ("suspended", "resuming"):
        put_back(path, text.replace('"stage": "suspended"', f'"stage": "{stage}"'))
        group = shown(tool)
        assert (group["state"], group["not_running"], group["holder"]) == ("running", 0, None), group
        assert f"recover {pair.first.pid}" in group["note"] and f"says {stage}" in group["note"], group
        assert {rank["lease"] for rank in group["ranks"]} == {"-"}, group
    put_back(path, text)
    for words in (pair.pids, ("--all",)):
        assert told(tool.run("suspend", "--driver", "sim", *words).expect(3)) == shown(tool)["note"]
    tool.run("recover", "--driver", "sim", pair.first.pid).expect(0)
    running(tool)
    pair.check()


def test_a_lease_that_was_lost_says_nothing_of_a_process_that_runs(pair: Pair, tool: Tool) -> None:
    """The holder was killed, and the group was resumed."""
    end_process(tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"])
    assert {rank["lease"] for rank in shown(tool)["ranks"]} == {"lost"}
    up = tool.resume(*pair.pids).expect(0).json["groups"][0]
    for group in (up, tool.run("status").expect(0).json["groups"][0]):
        assert [rank["lease"] for rank in group["ranks"]] == ["-", "-"], group
    pair.check()


def test_a_group_of_which_some_run(start_worker: Start, tool: Tool) -> None:
    """Only a resume opens gates: it is not suspended, whatever the record says."""
    first, second = start_worker(0), start_worker(1)
    for worker in (first, second):
        worker.fill(worker.alloc(MIB), MIB, 1)
    tool.suspend(first.pid, second.pid).expect(0)
    path, text = record(tool)
    tool.resume(first.pid).expect(0)
    tool.suspend(second.pid).expect(0)
    record(tool)[0].unlink()
    put_back(path, text)
    group = shown(tool)
    assert (group["state"], group["not_running"]) == ("resuming", 1) and f"recover {first.pid}" in group["note"], group
    tool.run("recover", "--driver", "sim", first.pid).expect(0)
    running(tool)
    first.check()


@pytest.mark.parametrize("how", ["killed", "replaced"])
def test_a_group_that_has_ended(start_worker: Start, tool: Tool, how: str) -> None:
    """Status says so, and what drops the record; no other command calls it suspended."""
    worker = start_worker(0)
    worker.alloc(MIB)
    tool.suspend(worker.pid, options=("--depth", "pages")).expect(0)
    if how == "killed":
        worker.kill()
    else:
        worker.send("exec_program", IDLE)
        wait_for_program(worker, IDLE)
    group = shown(tool)
    assert (group["state"], group["ranks"][0]["state"]) == ("ended", "dead"), group
    assert f"recover {worker.pid}" in group["note"], group
    assert tool.run("suspend", "--driver", "sim", "--all").expect(3).json["reason"] == "nothing-found"
    assert tool.run("recover", "--driver", "sim", worker.pid).expect(5).json["reason"] == "group-gone"
    assert records(tool) == []


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_a_store_that_is_not_there(pair: Pair, places: Places, tool: Tool, depth: str) -> None:
    """The resume says that it is to be mounted, not repaired, and so does status until it has worked."""
    places.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    away = places.store.rename(places.root / "away")
    message = told(tool.resume(*pair.pids).expect(6))
    assert tool.run("recover", "--driver", "sim", *pair.pids).expect(6).json["error"]["message"] == message
    assert "mount it" in message and "repair" not in message and "?" not in message, message
    assert message in shown(tool)["note"]
    away.rename(places.store)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_store_that_is_damaged(pair: Pair, places: Places, tool: Tool) -> None:
    """Half-way, and in the same words; the command that failed does not call itself one that is at work."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    answer = places.program("faulty", "read", "rrrrrrrrrG", "resume", *pair.pids).expect(6)
    group = shown(tool)
    assert told(answer) in group["note"] and "run `nvsnap" not in group["note"], group
    assert answer.json["groups"][0]["note"] == group["note"]
    assert told(tool.suspend(*pair.pids).expect(3)) == group["note"]
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_what_a_refusal_said(pair: Pair, places: Places, tool: Tool) -> None:
    """Of a group that was left half-way; one that is suspended as a whole stays as it was, with its record."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    assert places.program("killed", "load", "resume", *pair.pids).exit_code < 0
    manifest = places.directory() / "manifest.json"
    content = manifest.read_bytes()
    body = json.loads(content)["body"] | {"id": "0" * 32}
    manifest.write_bytes(format.encode(format.CHECKPOINT, body))
    message = told(tool.run("recover", "--driver", "sim", *pair.pids).expect(3))
    assert "0" * 32 in message and message in shown(tool)["note"]
    manifest.write_bytes(content)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_what_a_cut_off_command_left(pair: Pair, tool: Tool) -> None:
    """Nothing was said: recover it is, in the words of `suspend` and `stop`."""
    killed(tool, "release", "suspend", *pair.pids)
    note = shown(tool)["note"]
    assert f"run `nvsnap-gpu-suspend recover {pair.first.pid}`" in note and "release" in note, note
    assert told(tool.suspend(*pair.pids).expect(3)) == note == told(tool.run("stop", *pair.pids).expect(3))
    tool.run("recover", "--driver", "sim").expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_a_rank_that_cannot_run_again(start_worker: Start, tool: Tool, depth: str) -> None:
    """No command helps it: it is to be ended, as the command itself says at its end, in its message and its report."""
    owner, needy = start_worker(0), start_worker(1)
    memory = owner.alloc(MIB)
    owner.fill(memory, MIB, 1)
    needy.expect(int(needy.ipc_open(owner.ipc_get(memory))), MIB, [1])
    tool.suspend(owner.pid, needy.pid, options=("--depth", depth)).expect(0)
    owner.kill()
    assert f"pid {owner.pid} has ended: a resume brings back the others" in shown(tool)["note"]
    answer = tool.resume(owner.pid, needy.pid).expect(5)
    assert told(answer).startswith(f"pid {owner.pid} (python) died while it was suspended. 2 of 2 processes"), answer
    note = shown(tool)["note"]
    for said in (told(answer), note):
        assert f"end pid {needy.pid}. " in said and said.endswith(errors.START_ANEW) and "recover" not in said, said
    assert [group["note"] for group in answer.json["groups"]] == [note], answer
    needy.kill()
    tool.run("recover", "--driver", "sim").expect(5)
    assert records(tool) == []


@pytest.mark.parametrize("held", [True, False])
def test_a_group_whose_record_is_lost(pair: Pair, tool: Tool, held: bool) -> None:
    """What recover says, named and not; by name it works where no holder is in the way."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    if not held:
        tool.run("stop", *pair.pids).expect(0)
    for path in Path(tool.state_dir).iterdir():
        path.unlink()
    assert shown(tool)["note"] == told(tool.run("recover", "--driver", "sim").expect(3))
    note = shown(tool, *pair.pids)["note"]
    if held:
        assert note == told(tool.run("recover", "--driver", "sim", *pair.pids).expect(3))
        assert note == told(tool.suspend(*pair.pids).expect(3))
        end_process(holder)
        note = shown(tool, *pair.pids)["note"]
    assert "run `nvsnap-gpu-suspend recover {} {}`".format(*sorted(pair.pids)) in note, note
    assert note == told(tool.suspend(*pair.pids).expect(3))
    tool.run("recover", "--driver", "sim", *pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_command_of_another_directory_is_at_work(
    pair: Pair, tool: Tool, machine: Setting, background: Run
) -> None:
    """It is named, and nothing is to be recovered."""
    first = at_the_checkpoint(pair, machine, background)
    with Tool(machine) as other:
        note = shown(other)["note"]
        assert f"pid {first.process.pid}" in note and "recover" not in note, note
    machine.inject("")
    first.end().expect(0)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("suspended", [True, False])
def test_a_shim_that_does_not_answer(pair: Pair, tool: Tool, suspended: bool) -> None:
    """One that is kept from it is named with what keeps it; the others are shown as they are."""
    if suspended:
        tool.suspend(*pair.pids).expect(0)
    pair.second.halt()
    answer = tool.run("status").expect(0)
    [group] = answer.json["groups"]
    states = {rank["pid"]: rank["state"] for rank in group["ranks"]}
    if suspended:
        assert states == {pair.first.pid: "suspended", pair.second.pid: "no answer"}, states
        assert group["state"] == "suspended" and f"pid {pair.second.pid} is stopped by a signal" in group["note"], group
    else:
        assert states == {pair.first.pid: "running"}, states
        assert f"pid {pair.second.pid} is passed over: it is stopped by a signal" in answer.stderr, answer
    assert f"let it run (kill -CONT {pair.second.pid}" in (group["note"] if suspended else answer.stderr), answer
    pair.second.go_on()
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_debugger_that_stops_the_shims_thread_alone(pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """Its name is told: the other threads look as if nothing were."""
    tmp_path.chmod(0o700)
    pid = pair.second.pid
    others = frozenset(map(int, os.listdir(f"/proc/{pid}/task"))) - set(
        processes.threads_named(pid, [processes.CONTROL_THREAD])
    )
    tool.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    with Holder.start(tmp_path, keep_names=()) as debugger:
        debugger.stop([HoldTarget(pid, others)], Deadline(60))
        note = shown(tool)["note"]
        by = f"by its tracer, pid {debugger.pid} (gpushare-holder)"
        assert f"pid {pid} is stopped {by}; let it run (kill -CONT {pid}, end the debugger" in note, note
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_process_without_a_shim_that_is_stopped(start_worker: Start, tool: Tool) -> None:
    """Nobody asks it anything, and the driver would wait for it."""
    bare = start_worker(0, shim=False)
    bare.alloc(MIB)
    tool.suspend(bare.pid, options=("--allow-unshimmed",)).expect(0)
    assert tool.run("status").expect(0).json["groups"][0]["note"] == ""  # the holder's stop is none
    tool.run("stop", bare.pid).expect(0)
    bare.halt()
    note = shown(tool)["note"]
    assert f"pid {bare.pid} is stopped by a signal; let it run (kill -CONT {bare.pid}" in note, note
    bare.go_on()
    tool.resume(bare.pid).expect(0)


@pytest.mark.parametrize("damage", ["cut off", "of another version"])
def test_a_record_that_cannot_be_read(pair: Pair, tool: Tool, damage: str) -> None:
    """The file is named, with what is to be done first and when it may be deleted; then nothing is warned of."""
    tool.suspend(*pair.pids).expect(0)
    path, text = record(tool)
    put_back(path, text[:-40] if damage == "cut off" else text.replace('"schema": 1', '"schema": 99'))
    [warning] = [one for one in tool.run("status").expect(0).json["warnings"] if path.name in one]
    assert ("delete that file" in warning) == (damage == "cut off"), warning
    assert ("of another version" in warning) == (damage != "cut off"), warning
    if damage == "cut off":
        assert "resume the processes of its group by their pids" in warning, warning
        tool.resume(*pair.pids).expect(0)
    else:
        put_back(path, text)
        tool.resume(*pair.pids).expect(0)
    path.unlink(missing_ok=True)
    assert tool.run("status").expect(0).json["warnings"] == []
    running(tool)
    pair.check()


def test_a_shim_that_is_busy() -> None:
    """It does not answer in time: nothing is said of its state but that."""
    answered, own = threading.Event(), processes.read_process(os.getpid())
    late = FakeShim({"status": lambda pairs: STATUS if answered.wait(60) else ""})
    try:
        member = Member(own.pid, own.start_time, own.inner_pid, own.uid, own.comm, Kind.SHIMMED, nonce="0xabc")
        ranks = status._look([member], Stage.SUSPENDED)
        assert [rank.state for rank in ranks] == ["no answer"]
        assert status._mute(ranks) == f"pid {own.pid} did not answer within 2 s: it may be busy"
    finally:
        answered.set()
        late.close()
