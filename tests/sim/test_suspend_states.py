"""What commands leave, and what the next command makes of it: repeated, stopped, killed, cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpususpend import errors, processes
from tests.programs.client import WorkerTimeout
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import (
    DOWN,
    MIB,
    UP,
    Background,
    Pair,
    Start,
    end_process,
    records,
    running,
    stopped_threads,
)  # fmt: skip
from tests.unit.fake_shim import sleeper

pytestmark = pytest.mark.usefixtures("own_network")

Run = Callable[..., Background]
KILL = "tests.programs.killed"


def killed(tool: Tool, step: str, *words: str | int) -> None:
    """Run a command that is killed by SIGKILL the moment it has noted `step`."""
    command = [sys.executable, "-m", KILL, step, *map(str, words), "--driver", "sim", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=tool.environ(), capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, Answer(command, done.returncode, done.stdout, done.stderr)


def at_the_checkpoint(pair: Pair, machine: Setting, background: Run) -> Background:
    """Return a suspend that is at work, and stays so until the machine's rules are taken back."""
    machine.inject("cuCheckpointProcessCheckpoint 1 hold")
    first = background("suspend", *pair.pids)
    first.wait_for_step("checkpoint")
    machine.wait_until_held()
    return first


def await_running(pair: Pair) -> None:
    """Wait until no thread of the ranks is held any more."""
    until = time.monotonic() + 60
    while any(stopped_threads(pid) for pid in pair.pids):
        assert time.monotonic() < until, "the threads stay stopped"
        time.sleep(0.01)


def recover(tool: Tool, *words: str) -> Answer:
    """Recover everything."""
    return tool.run("recover", "--driver", "sim", *words)


def test_FR84_again_changes_nothing(pair: Pair, tool: Tool) -> None:
    """Suspend of a suspended group, resume of a running one, stop of a stopped one."""
    assert tool.resume(*pair.pids).expect(0).json["already"] is True
    assert tool.suspend(*pair.pids).expect(0).json["already"] is False
    before = records(tool)
    again = tool.suspend(*pair.pids).expect(0).json
    assert again["already"] is True and again["groups"][0]["state"] == "suspended"
    assert tool.suspend(pair.first.pid).expect(0).json["already"] is True
    assert records(tool) == before
    assert tool.run("stop", pair.first.pid).expect(0).json["already"] is False
    assert tool.run("stop", pair.first.pid).expect(0).json["already"] is True
    assert tool.resume(pair.second.pid).expect(0).json["already"] is False
    assert tool.resume(*pair.pids).expect(0).json["already"] is True
    running(tool)
    pair.check()


def test_FR83_every_command_answers_in_json(pair: Pair, tool: Tool) -> None:
    """The same entries whatever happened."""
    entries = {"schema", "version", "command", "simulated", "ok", "exit_code", "already", "reason", "next", "error",
               "warnings", "groups"}
    commands: list[list[str | int]] = [
        ["status"], ["gpus", "--driver", "sim"], ["env"], ["run", "--", "/no/such/command"], ["recover"],
        ["suspend", 1 << 22], ["resume", "x"], ["stop", os.getpid()],
        ["suspend", "--driver", "sim", *pair.pids], ["stop", *pair.pids], ["resume", "--driver", "sim", *pair.pids],
    ]  # fmt: skip
    for words in commands:
        at = words.index("--") if "--" in words else len(words)
        answer = tool.run(*words[:at], "--json", *words[at:], json_out=False)
        data = answer.json
        assert entries <= set(data) and data["command"] == words[0], answer
        assert data["exit_code"] == answer.exit_code and data["ok"] == (answer.exit_code == 0)
        assert (data["error"] is None) == data["ok"] and (data["next"] is None) == data["ok"]


def test_status_of_nothing(machine: Setting, tool: Tool) -> None:
    """One line for people, an empty list for machines."""
    for words in (["status"], ["status", "--all"]):
        assert tool.run(*words).expect(0).json["groups"] == []
        told = tool.run(*words, json_out=False).expect(0).stdout
        assert told == "no group is suspended, and no process runs under the shim here\n"


def test_FR85_status_loads_nothing_heavy(pair: Pair, tool: Tool) -> None:
    """No driver, no NVML, no numpy, no drawing; asserted by what is loaded and by the libraries that are mapped."""
    code = (
        "import sys\nfrom gpususpend.cli import main\n"
        "try:\n    main(['status', '--json'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'cuda', 'numpy', 'pynvml', 'rich', 'hypothesis', 'asyncio'} & set(sys.modules)\n"
        "maps = [l for l in open('/proc/self/maps') if 'libcuda' in l]\n"
        "print(sorted(heavy), maps, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=tool.environ(), capture_output=True, text=True)
    assert done.stderr.strip() == "[] []" and str(pair.first.pid) in done.stdout


def test_everything_of_a_tree_is_frozen_and_continued(start_worker: Start, tool: Tool) -> None:
    """Pitfall 52, FR-57: the ranks below a launcher, its plain children and watchdogs; the control threads go on."""
    worker = start_worker(0)
    block = worker.alloc(MIB)
    worker.fill(block, MIB, 1)
    child = worker.fork_idle()
    with sleeper() as other:
        tool.run("suspend", "--driver", "sim", "--tree", worker.pid, other.pid).expect(0)
        assert processes.CONTROL_THREAD not in stopped_threads(worker.pid)
        for pid in (worker.pid, child, other.pid):
            assert "python" in stopped_threads(pid), pid
        kinds = {rank["pid"]: rank["kind"] for group in tool.run("status").json["groups"] for rank in group["ranks"]}
        assert kinds == {worker.pid: "shimmed", child: "plain", other.pid: "plain"}
        tool.resume(worker.pid).expect(0)
        for pid in (worker.pid, child, other.pid):
            assert stopped_threads(pid) == []
    worker.check()


def test_all_finds_every_shim(pair: Pair, tool: Tool) -> None:
    """--all suspends, is idempotent, and --all resumes."""
    data = tool.run("suspend", "--driver", "sim", "--all").expect(0).json
    assert {rank["pid"] for rank in data["groups"][0]["ranks"]} >= set(pair.pids)
    assert tool.run("suspend", "--driver", "sim", "--all").expect(0).json["already"] is True
    tool.run("resume", "--driver", "sim", "--all").expect(0)
    running(tool)
    pair.check()


UNLUCKY = """
import sys
from gpususpend import claims, cli
living = claims.living
def unlucky(record):
    if int(sys.argv[1]) in record.pids:
        raise OSError(5, "Input/output error")
    return living(record)
claims.living = unlucky
cli.main(sys.argv[2:])
"""


def test_all_tries_every_group_whatever_happens_to_one(start_worker: Start, tool: Tool) -> None:
    """An error that nobody foresaw concerns its own group: the other one runs, and this one can be resumed."""
    workers = start_worker(0), start_worker(1)
    for worker in workers:
        worker.fill(worker.alloc(MIB), MIB, 1)
        tool.suspend(worker.pid).expect(0)
    in_order = sorted(records(tool), key=lambda record: (record["created"], record["id"]))
    first, second = (record["members"][0]["pid"] for record in in_order)
    words = [sys.executable, "-c", UNLUCKY, str(first), "resume", "--driver", "sim", "--all", "--json"]
    done = subprocess.run(words, cwd=ROOT, env=tool.environ(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Input/output error" in done.stderr and ": running" in done.stderr, done
    assert [record["members"][0]["pid"] for record in records(tool)] == [first] and not stopped_threads(second)
    tool.run("resume", "--driver", "sim", "--all").expect(0)
    running(tool)
    for worker in workers:
        worker.check()


def test_stopped_group_resumes_without_its_holder(pair: Pair, tool: Tool) -> None:
    """After `stop` threads run, the gates hold, the lease was given back in good order."""
    tool.suspend(*pair.pids).expect(0)
    assert "python" in stopped_threads(pair.first.pid)
    tool.run("stop", *pair.pids).expect(0)
    assert stopped_threads(pair.first.pid) == []
    group = tool.run("status").json["groups"][0]
    assert group["state"] == "suspended" and group["holder"] is None and "stopped" in group["note"]
    assert {rank["lease"] for rank in group["ranks"]} == {"none"}
    with pytest.raises(WorkerTimeout):
        pair.first.do("memset_d8", pair.first.do("environment", "x") or 0, 0, 1, deadline_s=1)
    tool.resume(*pair.pids).expect(0)
    running(tool)


def test_killed_holder_is_noticed_and_recover_seizes_again(pair: Pair, tool: Tool) -> None:
    """The threads run when the holder dies; the gates do not open."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    end_process(holder)
    await_running(pair)
    group = tool.run("status").json["groups"][0]
    assert group["holder"] is None and "recover" in group["note"]
    assert {rank["lease"] for rank in group["ranks"]} == {"lost"}
    assert {rank["phase"] for rank in group["ranks"]} == {"sealed"}
    recovered = recover(tool).expect(0).json["groups"][0]
    assert recovered["state"] == "suspended" and recovered["holder"] not in (None, holder)
    assert "python" in stopped_threads(pair.first.pid)
    assert recover(tool).expect(0).json["groups"][0]["holder"] == recovered["holder"]
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_FR2_a_rank_that_died_is_not_forgotten_by_recover(start_worker: Start, tool: Tool) -> None:
    """The group stays suspended, its record and the warning name the dead; the resume tells the loss."""
    living, dead = start_worker(0), start_worker(1)
    for worker in (living, dead):
        worker.fill(worker.alloc(MIB), MIB, 1)
    holder = tool.suspend(living.pid, dead.pid).expect(0).json["groups"][0]["holder"]
    dead.kill()
    end_process(holder)
    for _ in range(2):
        answer = recover(tool).expect(0)
        assert any(f"pid {dead.pid}" in warning for warning in answer.json["warnings"]), answer
        states = {rank["pid"]: rank["state"] for rank in answer.json["groups"][0]["ranks"]}
        assert states == {living.pid: "suspended", dead.pid: "dead"}
    answer = tool.resume(living.pid).expect(5)
    assert answer.json["error"]["facts"]["lost"] == [dead.pid]
    living.check()
    assert records(tool) == []


@pytest.mark.parametrize("step", DOWN)
def test_command_killed_on_the_way_down(pair: Pair, tool: Tool, step: str) -> None:
    """At every step; `suspend` refuses then, and recover brings the ranks to running (pitfall 50)."""
    killed(tool, step, "suspend", *pair.pids)
    if step not in ("preflight",):
        tool.suspend(*pair.pids).expect(3)
    recover(tool).expect(0)
    running(tool)
    assert [rank["arena_bytes"] for group in tool.run("status").json["groups"] for rank in group["ranks"]] == [0, 0]
    pair.check()
    tool.suspend(*pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()


@pytest.mark.parametrize("step", UP)
def test_command_killed_on_the_way_up(pair: Pair, tool: Tool, step: str) -> None:
    """At every step; a repeated resume finishes it."""
    tool.suspend(*pair.pids).expect(0)
    killed(tool, step, "resume", *pair.pids)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("step", ["quiesce", "unlock-pages", "seal", "checkpoint", "freeze", "load"])
def test_recover_to_suspended(pair: Pair, tool: Tool, step: str) -> None:
    """From anywhere to suspended as a whole."""
    if step not in DOWN:
        tool.suspend(*pair.pids).expect(0)
        killed(tool, step, "resume", *pair.pids)
    else:
        killed(tool, step, "suspend", *pair.pids)
    data = recover(tool, "--to", "suspended").expect(0).json
    assert data["groups"][-1]["state"] == "suspended"
    assert "python" in stopped_threads(pair.first.pid)
    assert recover(tool, "--to", "running").expect(0).json["groups"][0]["state"] == "running"
    running(tool)
    pair.check()


@pytest.mark.parametrize("call", ["Checkpoint", "Restore"])
def test_command_killed_in_a_driver_call(
    pair: Pair, tool: Tool, machine: Setting, background: Run, call: str
) -> None:
    """The call goes on in its driver process: recover waits for it, and only then looks what state things are in."""
    if call == "Restore":
        tool.suspend(*pair.pids).expect(0)
    machine.inject(f"cuCheckpointProcess{call} 1 hold")
    command = background("suspend" if call == "Checkpoint" else "resume", *pair.pids)
    command.wait_for_step(call.lower())
    machine.wait_until_held()
    command.kill()
    command = background("recover")
    command.wait_for_line("driver call(s) that an earlier command left")
    machine.inject("")
    command.end().expect(0)
    running(tool)
    assert [path.name for path in Path(tool.state_dir).iterdir()] == ["journal.lock"]
    pair.check()


def test_recover_suspends_nothing_that_runs(pair: Pair, tool: Tool) -> None:
    """Refused with the command that does, whoever is named beside it; without a name there is nothing to do."""
    for words in (pair.pids, ("--tree", str(pair.first.pid))):
        answer = recover(tool, "--to", "suspended", *map(str, words)).expect(3)
        message = answer.json["error"]["message"]
        assert answer.json["reason"] == "nothing-to-recover" and str(pair.first.pid) in message
        assert "nvsnap-gpu-suspend suspend" in message
    assert recover(tool, "--to", "suspended").expect(0).json["already"] is True
    assert recover(tool, "--to", "running", *map(str, pair.pids)).expect(0).json["already"] is True
    running(tool)
    pair.check()


def test_lost_state_directory(pair: Pair, tool: Tool) -> None:
    """The shims' own state suffices, as after a restore on another machine."""
    tool.suspend(*pair.pids).expect(0)
    tool.run("stop", *pair.pids).expect(0)
    for path in Path(tool.state_dir).iterdir():
        path.unlink()
    group = tool.run("status").expect(0).json["groups"][0]
    assert group["state"] == "half-way" and group["id"] is None
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("held", [True, False])
def test_nothing_to_do_is_not_said_of_a_lost_group(pair: Pair, tool: Tool, held: bool) -> None:
    """Whatever was not named: everybody is, with what to do, and that works."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    if not held:
        tool.run("stop", *pair.pids).expect(0)
    for path in Path(tool.state_dir).iterdir():
        path.unlink()
    note = tool.run("status").expect(0).json["groups"][0]["note"]
    assert (str(holder) in note) == held and all(str(pid) in note for pid in pair.pids), note
    for words in (("recover",), ("recover", "--to", "suspended"), *([("resume", "--all")] if held else [])):
        answer = tool.run(*words, "--driver", "sim").expect(3)
        assert answer.json["reason"] == ("held-elsewhere" if held else "unrecorded"), answer
        message = answer.json["error"]["message"]
        assert all(str(pid) in message for pid in pair.pids) and (not held or f"kill {holder}" in message), message
    assert records(tool) == []
    if held:
        end_process(holder, signal.SIGTERM)
    await_running(pair)
    tool.run("resume", "--driver", "sim", "--all").expect(0)
    running(tool)
    pair.check()


def test_another_directory_s_group_does_not_stand_in_the_way(
    pair: Pair, start_worker: Start, tool: Tool, machine: Setting
) -> None:
    """Groups of here are brought back; then it is told that another one stays as it is."""
    other_worker = start_worker(0)
    with Tool(machine) as other:
        other.suspend(*pair.pids).expect(0)
        tool.suspend(other_worker.pid).expect(0)
        answer = tool.run("resume", "--driver", "sim", "--all").expect(3)
        assert answer.json["reason"] == "held-elsewhere" and [g["state"] for g in answer.json["groups"]] == ["running"]
        other_worker.check()
        other.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_nobody_is_told_of_a_command_at_work_elsewhere(
    pair: Pair, tool: Tool, machine: Setting, background: Run
) -> None:
    """A recover without a name passes over what another command, with another state directory, is at work on."""
    first = at_the_checkpoint(pair, machine, background)
    with Tool(machine) as other:
        assert other.run("recover", "--driver", "sim").expect(0).json["already"] is True
        assert other.run("resume", "--driver", "sim", "--all").expect(3).json["reason"] == "busy"
        machine.inject("")
        first.end().expect(0)
        assert other.run("recover", "--driver", "sim").expect(3).json["reason"] == "held-elsewhere"
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_damaged_record_is_recovered(pair: Pair, tool: Tool) -> None:
    """Also where nothing is named: the holder's own file says that the group is of here."""
    tool.suspend(*pair.pids).expect(0)
    record = next(Path(tool.state_dir).glob("group-*.json"))
    record.write_text(record.read_text()[:200])
    answer = tool.run("recover", "--driver", "sim").expect(0)
    assert not answer.json["already"] and [rank["state"] for rank in answer.json["groups"][0]["ranks"]] == [
        "suspended", "suspended"
    ]  # fmt: skip
    record.unlink()
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_half_of_a_group_that_is_in_no_record(pair: Pair, tool: Tool, depth: str) -> None:
    """The shims know with whom they share: the missing one is named, in both directions, and nothing is begun."""
    answer = tool.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    for path in Path(tool.state_dir).iterdir():
        path.unlink()
    if depth == "process":
        end_process(answer.json["groups"][0]["holder"], signal.SIGTERM)
        await_running(pair)
    for command in ("resume", "recover"):
        for named, missing in (pair.pids, pair.pids[::-1]):
            refused = tool.run(command, "--driver", "sim", named).expect(3)
            assert refused.json["reason"] == "half-group" and str(missing) in refused.stderr, refused
            assert records(tool) == []
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_lost_state_directory_with_a_holder(pair: Pair, tool: Tool) -> None:
    """Something cleaned /tmp: the holder is named, and ending it is the way out."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    for path in Path(tool.state_dir).iterdir():
        path.unlink()
    answer = tool.resume(*pair.pids).expect(3)
    assert answer.json["reason"] == "held-elsewhere" and f"kill {holder}" in answer.json["error"]["message"]
    end_process(holder, signal.SIGTERM)
    await_running(pair)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("content", [None, "{"])
def test_lost_record(pair: Pair, tool: Tool, content: str | None) -> None:
    """Or a damaged one: what the holder and the shims say suffices; the damage is told."""
    tool.suspend(*pair.pids).expect(0)
    record = next(Path(tool.state_dir).glob("group-*.json"))
    record.unlink()
    if content is not None:
        record.write_text(content)
    answer = tool.resume(*pair.pids).expect(0)
    assert bool(answer.json["warnings"]) == (content is not None), answer
    record.unlink(missing_ok=True)
    running(tool)
    pair.check()


def test_without_standard_streams(pair: Pair, tool: Tool) -> None:
    """Started by something that closes them all: the descriptors are nobody else's."""
    for word in ("suspend", "resume"):
        words = [sys.executable, "-m", "gpususpend", word, "--driver", "sim", *map(str, pair.pids)]
        command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words]
        assert subprocess.run(command, cwd=ROOT, env=tool.environ(), timeout=120).returncode == 0
    running(tool)
    pair.check()


def test_reused_pid_is_not_believed(pair: Pair, tool: Tool) -> None:
    """A record of a process that is gone, and another process under its pid."""
    tool.suspend(*pair.pids).expect(0)
    path = next(Path(tool.state_dir).glob("group-*.json"))
    text = path.read_text()
    tool.resume(*pair.pids).expect(0)
    with sleeper() as stranger:
        for pid in pair.pids:
            text = text.replace(f'"pid": {pid},', f'"pid": {stranger.pid},')
        path.write_text(text.replace('"kind": "shimmed"', '"kind": "plain"'))
        path.chmod(0o600)
        answer = tool.resume(stranger.pid).expect(3)
        assert answer.json["reason"] == "pid-reused" and str(stranger.pid) in answer.json["error"]["message"]
        assert stranger.poll() is None and stopped_threads(stranger.pid) == []
    assert records(tool) == []
    pair.check()


def test_one_command_at_a_time(pair: Pair, tool: Tool, machine: Setting, background: Run) -> None:
    """The second is told the pid of the first."""
    first = at_the_checkpoint(pair, machine, background)
    for words in (("resume",), ("recover",), ("suspend",)):
        answer = tool.run(*words, "--driver", "sim", *pair.pids).expect(3)
        assert answer.json["reason"] == "busy" and answer.json["next"] == "retry"
    machine.inject("")
    first.end().expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()


def test_one_command_at_a_time_whatever_its_directory(
    pair: Pair, tool: Tool, machine: Setting, background: Run
) -> None:
    """Root's and a user's, or one that was told another place: refused, and nothing is left there."""
    first = at_the_checkpoint(pair, machine, background)
    with Tool(machine) as other:
        for words in (("resume",), ("recover",), ("suspend",)):
            answer = other.run(*words, "--driver", "sim", *pair.pids).expect(3)
            assert answer.json["reason"] == "busy", answer
            assert str(first.process.pid) in answer.json["error"]["message"]
        machine.inject("")
        first.end().expect(0)
        for words in (("resume",), ("recover",)):
            assert other.run(*words, "--driver", "sim", *pair.pids).expect(3).json["reason"] == "held-elsewhere"
        assert records(other) == []
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_holder_killed_under_a_command(
    pair: Pair, tool: Tool, machine: Setting, background: Run, step: str
) -> None:
    """Another one takes its place."""
    machine.inject(f"cuCheckpointProcess{step.title()} 1 hold")
    command = background("suspend", *pair.pids)
    command.wait_for_step(step)
    machine.wait_until_held()
    pid = command.process.pid
    below = processes.descendants([pid], processes.all_processes())
    end_process(next(one.pid for one in below if one.comm == "gpushare-holder"))
    machine.inject("")
    command.end().expect(0)
    assert "python" in stopped_threads(pair.first.pid)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_dead_group_is_dropped(pair: Pair, tool: Tool) -> None:
    """Nothing lives any more: exit 5, and the record and the holder go."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    for worker in pair.both:
        worker.kill()
    answer = tool.resume(*pair.pids).expect(5)
    assert answer.json["reason"] == "group-gone" and answer.json["next"] == "cold-start"
    assert records(tool) == []
    with pytest.raises(errors.NoSuchProcess):
        processes.read_process(holder)


