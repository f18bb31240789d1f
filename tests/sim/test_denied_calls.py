"""System calls that a seccomp profile denies: one clear line that names the call, exit 3, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.tool import Answer, Tool
from tests.sim.conftest import Pair, end_process, records, running, stopped_threads
from tests.sim.places import Places
from tests.unit.fake_shim import sleeper

pytestmark = pytest.mark.usefixtures("own_network")


def refused(answer: Answer, call: str) -> None:
    """Check that a command was refused in one line, which names the call and says what to do."""
    answer.expect(3)
    message = answer.json["error"]["message"]
    assert answer.stderr == f"nvsnap-gpu-suspend: {message}\n", answer
    assert (answer.json["reason"], answer.json["next"]) == ("system-call", "operator"), answer
    assert f"{call} is answered with Operation not permitted; nothing was changed" in message, answer
    assert "seccomp" in message, answer


def test_nothing_is_changed(pair: Pair, tool: Tool) -> None:
    """Neither of a group that runs nor of one that is suspended."""
    words, calls = ("--driver", "sim", *pair.pids), ("pidfd_open", "flock", "prlimit64")
    for call in calls:
        refused(tool.run("suspend", *words, without=call), call)
    running(tool)
    pair.check()
    tool.suspend(*pair.pids).expect(0)
    before = records(tool)
    denials = [("resume", call) for call in (*calls, "pidfd_send_signal")]
    for command, call in [*denials, ("recover", "flock"), ("stop", "pidfd_open"), ("stop", "pidfd_send_signal")]:
        refused(tool.run(command, *words, without=call), call)
        assert records(tool) == before, (command, call)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("call", ["socketpair", "connect", "getsockopt", "clone3"])
def test_resume_without_a_call_that_every_step_needs(pair: Pair, tool: Tool, call: str) -> None:
    """No helper, no thread or no answer of a shim: refused, and not said to have failed with all still suspended."""
    tool.suspend(*pair.pids).expect(0)
    before = records(tool)
    answer = tool.resume(*pair.pids, without=call).expect(3)
    message = answer.json["error"]["message"]
    assert answer.stderr == f"nvsnap-gpu-suspend: {message}\n", answer
    assert answer.json["reason"] == "system-call" and call in message and "; nothing was changed" in message, answer
    assert records(tool) == before
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_stop_that_has_begun(pair: Pair, tool: Tool) -> None:
    """Its holder was told to end: nobody says then that nothing was changed."""
    tool.suspend(*pair.pids).expect(0)
    answer = tool.run("stop", "--driver", "sim", *pair.pids, without="poll").expect(1)
    assert "nothing was changed" not in answer.stderr and "The command had begun" in answer.stderr, answer
    assert answer.json["error"]["cause"] == "system-call", answer
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_threads_that_may_not_be_stopped_at_a_resume(pair: Pair, tool: Tool, depth: str) -> None:
    """Refused before anything is changed, as by suspend, though the group's own holder traces these threads."""
    words = ("--driver", "sim", *pair.pids)
    tool.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    before = records(tool)
    for command in (["resume"], ["recover", "--to", "running"]):
        answer = tool.run(*command, *words, without="ptrace").expect(3)
        assert answer.json["reason"] == "cannot-trace" and "(seccomp filter)" in answer.stderr, answer
        assert records(tool) == before, command
    tool.run("recover", *words, without="ptrace").expect(0)  # which has nothing to stop
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_threads_that_may_not_be_stopped_anew(pair: Pair, tool: Tool) -> None:
    """Of a group whose holder was killed."""
    holder = tool.suspend(*pair.pids).expect(0).json["groups"][0]["holder"]
    end_process(holder)
    answer = tool.run("recover", "--driver", "sim", *pair.pids, without="ptrace").expect(3)
    assert answer.json["reason"] == "cannot-trace" and records(tool)[0]["stage"] == "suspended", answer
    [group] = tool.run("status").expect(0).json["groups"]
    assert f"the last command said: {answer.json['error']['message']}; see to that, then run" in group["note"], group
    tool.run("recover", "--driver", "sim", *pair.pids).expect(0)
    [group] = tool.run("status").expect(0).json["groups"]
    assert group["note"] == "" and group["holder"], group
    tool.resume(*pair.pids).expect(0)
    pair.check()


def test_a_holder_that_may_not_be_ended(pair: Pair, tool: Tool) -> None:
    """Though nobody is left whom the driver or a shim would have to be asked about: told before anything changes."""
    with sleeper() as plain:
        tool.suspend(*pair.pids, plain.pid).expect(0)
        for worker in pair.both:
            worker.kill()
        before = records(tool)
        refused(tool.resume(plain.pid, without="pidfd_send_signal"), "pidfd_send_signal")
        assert records(tool) == before and stopped_threads(plain.pid)
        tool.resume(plain.pid).expect(5)
        assert records(tool) == [] and not stopped_threads(plain.pid)


def test_host_memory_that_may_not_be_made(pair: Pair, tool: Tool) -> None:
    """The call or the limit is named: nobody has to look for memory that is there."""
    answer = tool.suspend(*pair.pids, without="memfd_create").expect(3)
    assert "memfd_create is answered with Operation not permitted" in answer.stderr and "seccomp" in answer.stderr
    small_files = ("sh", "-c", 'ulimit -f 1024 && exec "$@"', "sh")
    limited = tool.suspend(*pair.pids, prefix=small_files).expect(3)
    assert "ftruncate is answered with File too large" in limited.stderr and "ulimit -f" in limited.stderr
    smaller = tool.suspend(*pair.pids, prefix=("sh", "-c", 'ulimit -f 1 && exec "$@"', "sh")).expect(3)
    assert "cannot be written: File too large; allow this command larger files (ulimit -f)\n" in smaller.stderr, smaller
    assert answer.json["reason"] == limited.json["reason"] == "system-call"
    running(tool)
    pair.check()


def test_a_ring_that_may_not_be_made(pair: Pair, tool: Tool, places: Places) -> None:
    """Told before the resume begins: the group stays as it was suspended."""
    tool.suspend(*pair.pids, options=places.words()).expect(0)
    before = records(tool)
    limited = ("sh", "-c", 'ulimit -f 64 && exec "$@"', "sh")
    answer = tool.resume(*pair.pids, prefix=limited).expect(3)
    assert answer.json["reason"] == "system-call" and "ulimit -f" in answer.json["error"]["message"], answer
    assert "nothing was changed" in answer.json["error"]["message"], answer
    assert records(tool) == before
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("stored", [False, True])
def test_an_address_space_that_is_too_small(pair: Pair, tool: Tool, places: Places, stored: bool) -> None:
    """The limit is the command's own (ulimit -v), and named as such; the machine has memory."""
    pair.first.alloc(1 << 30)
    limited = ("sh", "-c", 'ulimit -v 700000 && exec "$@"', "sh")
    options = places.words() if stored else ()
    answer = tool.suspend(*pair.pids, options=options, prefix=limited).expect(4 if stored else 3)
    assert "ulimit -v" in answer.json["error"]["message"] and "Error:" not in answer.stderr, answer
    assert "kernel" not in answer.stderr, answer
    running(tool)
    pair.check()


def test_no_files_may_be_written(pair: Pair, tool: Tool) -> None:
    """The limit is named, since no other directory helps; a way back needs none."""
    limited = ("sh", "-c", 'ulimit -f 0 && exec "$@"', "sh")
    answer = tool.suspend(*pair.pids, prefix=limited).expect(3)
    told = answer.json["error"]["message"]
    assert told.endswith("cannot be written: File too large; allow this command larger files (ulimit -f)"), told
    running(tool)
    tool.suspend(*pair.pids, options=("--depth", "pages")).expect(0)  # at the other, the simulated driver makes files
    up = tool.resume(*pair.pids, prefix=limited).expect(0)
    assert any("(ulimit -f)" in warning for warning in up.json["warnings"]), up
    running(tool)
    pair.check()


@pytest.mark.parametrize("kilobytes", range(24000, 52000, 4000))
def test_data_that_may_not_grow(pair: Pair, tool: Tool, kilobytes: int) -> None:
    """Each stack counts (ulimit -d): wherever it ends, the limit is named, no call is left and nobody is stuck."""
    limited = ("sh", "-c", f'ulimit -d {kilobytes} && exec "$@"', "sh")
    answer = tool.suspend(*pair.pids, prefix=limited).expect(0, 3, 4)
    assert answer.exit_code == 0 or "(ulimit -d)" in answer.json["error"]["message"], answer
    if answer.exit_code:
        running(tool)
        tool.suspend(*pair.pids).expect(0)
    answer = tool.resume(*pair.pids, prefix=limited).expect(0, 3, 8)
    assert answer.exit_code == 0 or "(ulimit -d)" in answer.json["error"]["message"], answer
    if answer.exit_code:
        tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_a_process_that_may_not_be_looked_into(pair: Pair, tool: Tool) -> None:
    """It has more capabilities, as the first process of a machine: that it is not under the shim matters most."""
    fewer = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
    with sleeper() as process:
        for words in (("status",), ("suspend", "--driver", "sim"), ("resume", "--driver", "sim"), ("stop",)):
            message = tool.run(*words, process.pid, prefix=fewer).expect(3).json["error"]["message"]
            assert "is not under the shim" in message and "CAP_SYS_PTRACE" in message, message
    message = tool.run("status", pair.first.pid, prefix=fewer).expect(3).json["error"]["message"]
    assert "not under the shim" not in message and "CAP_SYS_PTRACE" in message, message
    pair.check()


def test_a_shim_that_may_not_be_asked(pair: Pair, tool: Tool) -> None:
    """It is the system that denies it, not the shim that does not answer; nobody is taken for dead."""
    refused(tool.suspend(*pair.pids, without="connect"), "connect")
    tool.suspend(*pair.pids).expect(0)
    [group] = tool.run("status", without="connect").expect(0).json["groups"]
    assert {rank["state"] for rank in group["ranks"]} == {"denied"} and group["state"] == "suspended", group
    assert f"pid {pair.first.pid} cannot be asked: a seccomp filter" in group["note"], group
    for path in Path(tool.state_dir).glob("group-*"):
        path.unlink()
    answer = tool.resume(*pair.pids, without="connect").expect(3)
    assert answer.json["reason"] == "system-call", answer
    assert "its shim cannot be asked: connect is answered with" in answer.json["error"]["message"], answer
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()
