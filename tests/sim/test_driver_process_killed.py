"""The driver process of a command is killed: told as what it is, and never as suspended processes that run."""

from __future__ import annotations

import pytest

from gpususpend import processes
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import MIB, Pair, Run, Start, end_process, records, running, stopped_threads
from tests.unit.fake_shim import sleeper

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

# Questions to the driver about each of two ranks: before the way up, at its beginning, and at its end.
BEFORE, BEGUN, AT_THE_END = 1, 3, 5


def kill_at(machine: Setting, number: int) -> None:
    """Have the driver process die in its question of this number; another one begins to count anew."""
    machine.inject(f"cuCheckpointProcessGetState {number} kill")


def warned(answer: Answer) -> None:
    """Check that a command has done all that it was to do, and says what has happened besides."""
    told = [warning for warning in answer.expect(0).json["warnings"] if "the driver process failed" in warning]
    assert len(told) == 1 and "runs all the same" in told[0], answer


def test_at_the_end_of_a_resume(pair: Pair, tool: Tool, machine: Setting) -> None:
    """Everything runs: exit 0, a warning, and no record is left; the member without CUDA runs as well."""
    with sleeper() as plain:
        tool.suspend(*pair.pids, plain.pid).expect(0)
        kill_at(machine, AT_THE_END)
        warned(tool.resume(*pair.pids))
        assert not stopped_threads(plain.pid)
        machine.inject("")
        running(tool)
        pair.check()


def test_at_the_end_of_a_resume_without_shims(start_worker: Start, tool: Tool, machine: Setting) -> None:
    """Where the driver alone knows that the process runs, it is asked anew."""
    bare = start_worker(0, shim=False)
    bare.fill(bare.alloc(MIB), MIB, 4)
    tool.suspend(bare.pid, options=("--allow-unshimmed",)).expect(0)
    kill_at(machine, 3)  # half as many questions
    warned(tool.resume(bare.pid))
    assert records(tool) == []
    bare.check()


def test_at_the_end_of_a_recover(pair: Pair, tool: Tool, machine: Setting) -> None:
    """The same of the other command that brings a group back."""
    tool.suspend(*pair.pids).expect(0)
    kill_at(machine, AT_THE_END - 2)  # it does not ask first
    warned(tool.run("recover", "--driver", "sim", "--to", "running"))
    machine.inject("")
    running(tool)
    pair.check()


@pytest.mark.parametrize("number", [BEFORE, BEFORE + 1])
def test_before_a_suspend(pair: Pair, tool: Tool, machine: Setting, number: int) -> None:
    """Also where one answer has come already: it ended, and was not too slow."""
    kill_at(machine, number)
    message = tool.suspend(*pair.pids).expect(3).json["error"]["message"]
    assert "the driver process failed" in message and " within " not in message, message
    machine.inject("")
    pair.check()


@pytest.mark.parametrize("number", [BEFORE, BEFORE + 1, BEGUN, BEGUN + 1])
def test_before_anything_runs(pair: Pair, tool: Tool, machine: Setting, number: int) -> None:
    """Nothing runs, which is told as it is, and the next resume brings it back."""
    tool.suspend(*pair.pids).expect(0)
    kill_at(machine, number)
    answer = tool.resume(*pair.pids).expect(8)
    left = "Left in phase resuming" if number >= BEGUN else "Still suspended"
    assert f"{left}: 2 of 2 processes" in answer.json["error"]["message"], answer
    machine.inject("")
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_in_a_suspend(pair: Pair, tool: Tool, machine: Setting) -> None:
    """The way back has a driver process of its own."""
    kill_at(machine, AT_THE_END - 2)  # once all are checkpointed
    answer = tool.suspend(*pair.pids).expect(4)
    assert "the driver process failed" in answer.json["error"]["message"], answer
    machine.inject("")
    running(tool)
    pair.check()


@pytest.mark.parametrize("call", ["Lock", "Checkpoint", "Restore", "Unlock"])
def test_in_a_call_that_changes_something(pair: Pair, tool: Tool, machine: Setting, call: str) -> None:
    """A suspend turns back.  A resume goes on once with another driver process; when that is killed as well, nobody
    knows what became of it: exit 7, and recover goes on from where it is.
    """
    up = call in ("Restore", "Unlock")
    if up:
        tool.suspend(*pair.pids).expect(0)
    machine.inject(f"cuCheckpointProcess{call} 1 kill")
    answer = tool.resume(*pair.pids).expect(7) if up else tool.suspend(*pair.pids).expect(4)
    error = answer.json["error"]
    assert error["step"] == call.lower() and error["pid"] in pair.pids, answer
    told = f"{call.lower()} was cut off on pid {error['pid']}. driver process {error['facts']['driver_pid']} has ended"
    assert told in error["message"] and " within " not in error["message"], answer
    machine.inject("")
    if up:
        assert "was cut off by the end of driver process" in error["message"], answer
        [warning] = [one for one in answer.json["warnings"] if "Another driver process went on" in one]
        assert f"driver process {error['facts']['driver_pid']} has ended" not in warning, answer
        tool.run("recover", "--driver", "sim", "--to", "running").expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("call", ["Restore", "Unlock"])
def test_another_one_goes_on(pair: Pair, tool: Tool, machine: Setting, background: Run, call: str) -> None:
    """Killed once in a call of the way up: the resume itself brings everything back, and says so."""
    tool.suspend(*pair.pids).expect(0)
    machine.inject(f"cuCheckpointProcess{call} 1 hold")
    command = background("resume", *pair.pids)
    machine.wait_until_held()
    below = processes.descendants([command.process.pid], processes.all_processes())
    [driver] = [one for one in below if one.comm == "gpushare-driver"]
    end_process(driver.pid)
    machine.inject("")  # not before: the call would return
    answer = command.end().expect(0)
    [warning] = [one for one in answer.json["warnings"] if f"driver process {driver.pid} has ended. Another" in one]
    assert "was cut off on pid" in warning and " within " not in warning, warning
    running(tool)
    pair.check()
