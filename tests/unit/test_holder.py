"""The holder on real processes: stop, continue, keep, end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpususpend import errors, holder, processes
from gpususpend.deadline import Deadline
from gpususpend.holder import Holder, HolderRecord, HoldTarget
from tests.unit.threads_program import CONTROL, GPU, SIGNALS, Counting, build, wait_for


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("program"))


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


Start = Callable[..., Counting]


@pytest.fixture
def start(program: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Counting] = []

    def starter(threads: int, *modes: str) -> Counting:
        started.append(Counting(program, tmp_path, threads, *modes))
        return started[-1]

    yield starter
    for process in started:
        process.end()


def deadline(seconds: float = 60.0) -> Deadline:
    return Deadline(seconds)


def test_stops_and_continues_fifty_threads_again_and_again(state_dir: Path, start: Start) -> None:
    first, second = start(50), start(3)
    targets = [HoldTarget(first.pid), HoldTarget(second.pid)]
    with Holder.start(state_dir) as held:
        for _ in range(5):
            report = held.stop(targets, deadline())
            # The leader, and simcuda-gpu, which was not to be kept; the control thread is.
            assert report.threads == {first.pid: 52, second.pid: 5}
            first.assert_stopped()
            second.assert_stopped()
            assert held.go(deadline()).threads == {}
            first.assert_running()
            second.assert_running()
    first.assert_running()


def test_a_second_stop_keeps_what_is_stopped(state_dir: Path, start: Start) -> None:
    first, second = start(2), start(2)
    with Holder.start(state_dir) as held:
        held.stop([HoldTarget(first.pid)], deadline())
        report = held.stop([HoldTarget(first.pid), HoldTarget(second.pid)], deadline())
        assert set(report.threads) == {first.pid, second.pid}
        first.assert_stopped()
        second.assert_stopped()


def test_keeps_threads_by_name_and_by_id(state_dir: Path, start: Start) -> None:
    process = start(4)
    restore = next(
        int(tid)
        for tid in os.listdir(f"/proc/{process.pid}/task")
        if int(tid) != process.pid and Path(f"/proc/{process.pid}/task/{tid}/comm").read_text() == "threads\n"
    )
    names = (processes.CONTROL_THREAD, processes.SIMULATED_GPU_THREAD)
    with Holder.start(state_dir, names) as held:
        report = held.stop([HoldTarget(process.pid, frozenset({restore}))], deadline())
        assert report.threads == {process.pid: 4}
        at, before = process.counters(), process.plain()

        def moved() -> int:
            return sum(now != then for now, then in zip(process.plain(), before, strict=True))

        wait_for(lambda: all(process.counters()[slot] > at[slot] + 20 for slot in (CONTROL, GPU)) and moved() > 0)
        assert moved() == 1


def test_threads_that_appear_while_it_stops(state_dir: Path, start: Start) -> None:
    process = start(8, "spawn", "spawn", "spawn")
    with Holder.start(state_dir) as held:
        for _ in range(10):
            held.stop([HoldTarget(process.pid)], deadline())
            process.assert_stopped()
            held.go(deadline())
            process.assert_running()


def test_a_leader_that_has_ended(state_dir: Path, start: Start) -> None:
    process = start(3, "leaderless")
    wait_for(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/stat").read_text().split()[2] == "Z")
    with Holder.start(state_dir) as held:
        report = held.stop([HoldTarget(process.pid)], deadline())
        assert report.threads == {process.pid: 4}
        process.assert_stopped()
        held.go(deadline())
        process.assert_running()


def test_no_signal_is_lost_or_doubled(state_dir: Path, start: Start) -> None:
    process = start(20)
    sent = 0
    with Holder.start(state_dir) as held:
        for _ in range(30):
            process.send_signals(20)
            held.stop([HoldTarget(process.pid)], deadline())
            process.send_signals(20)
            sent += 40
            held.go(deadline())
    wait_for(lambda: process.counters()[SIGNALS] >= sent)
    time.sleep(0.05)
    assert process.counters()[SIGNALS] == sent


def test_no_signal_is_lost_when_the_holder_is_killed(state_dir: Path, start: Start) -> None:
    process = start(20)
    for sent in range(40, 440, 40):
        held = Holder.start(state_dir)
        process.send_signals(20)
        held.stop([HoldTarget(process.pid)], deadline())
        process.send_signals(20)
        os.kill(held.pid, signal.SIGKILL)
        held.close()
        wait_for(lambda at=sent: process.counters()[SIGNALS] >= at)  # type: ignore[misc]
        assert process.counters()[SIGNALS] == sent


def test_a_group_stop_outlives_the_hold(state_dir: Path, start: Start) -> None:
    process = start(3)
    os.kill(process.pid, signal.SIGSTOP)
    with Holder.start(state_dir) as held:
        held.stop([HoldTarget(process.pid)], deadline())
        held.go(deadline())
        # Until each has come to its stop, others may still take a step.
        wait_for(lambda: process.states() == {"T"})
        before = process.plain()
        time.sleep(0.05)
        assert process.plain() == before
    os.kill(process.pid, signal.SIGCONT)
    process.assert_running()


def test_a_continue_signal_during_the_hold_does_not_end_it(state_dir: Path, start: Start) -> None:
    process = start(3)
    with Holder.start(state_dir) as held:
        held.stop([HoldTarget(process.pid)], deadline())
        os.kill(process.pid, signal.SIGCONT)
        process.assert_stopped()
    process.assert_running()


def test_a_target_killed_while_held_is_reported_and_collected(state_dir: Path, start: Start) -> None:
    victim, other = start(10), start(10)
    with Holder.start(state_dir) as held:
        held.stop([HoldTarget(victim.pid), HoldTarget(other.pid)], deadline())
        victim.process.kill()
        # Its parent learns of it, although a tracer is between them.
        assert victim.process.wait(60) == -signal.SIGKILL
        other.assert_stopped()
        report = held.stop([HoldTarget(victim.pid), HoldTarget(other.pid)], deadline())
        assert report.gone == (victim.pid,)
        assert report.threads == {other.pid: 12}
        held.go(deadline())
        other.assert_running()


def test_targets_that_die_while_it_stops(state_dir: Path, start: Start) -> None:
    for _ in range(5):
        victim, other = start(30, "spawn"), start(3)
        with Holder.start(state_dir) as held:
            os.kill(victim.pid, signal.SIGKILL)
            report = held.stop([HoldTarget(victim.pid), HoldTarget(other.pid)], deadline())
            assert report.threads.get(other.pid) == 5
            victim.process.wait(60)
        other.assert_running()


def test_a_reused_pid_is_left_alone(state_dir: Path, start: Start) -> None:
    process = start(2)
    with Holder.start(state_dir) as held:
        report = held.stop([HoldTarget(process.pid, start_time=1)], deadline())
        assert report == holder.HoldReport({}, (process.pid,))
    process.assert_running()


def test_a_thread_that_cannot_stop_meets_the_deadline(state_dir: Path, start: Start) -> None:
    process = start(2, "vfork")
    with Holder.start(state_dir) as held:
        with pytest.raises(errors.DeadlinePassed) as caught:
            held.stop([HoldTarget(process.pid)], deadline(0.3))
        assert caught.value.facts["pid"] == [process.pid]
        assert "state D" in str(caught.value) or "state S" in str(caught.value)
        process.assert_running()
        # The late thread is let go as soon as it stops, so a later stop finds it as it is.
        process.release()
        assert held.stop([HoldTarget(process.pid)], deadline()).threads[process.pid] == 5
        held.go(deadline())
    process.assert_running()


def test_it_ends_with_the_command(state_dir: Path, start: Start) -> None:
    """A supervisor that is killed before `keep` leaves everything running."""
    process = start(5)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            held = Holder.start(state_dir)
            held.stop([HoldTarget(process.pid)], deadline())
            os.write(write_end, str(held.pid).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    holder_pid = int(os.read(read_end, 20))
    os.close(read_end)
    process.assert_stopped()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    process.assert_running()
    wait_for(lambda: not Path(f"/proc/{holder_pid}/cmdline").exists())
    assert os.listdir(state_dir) == []


def test_a_kept_holder_outlives_the_command_and_ends_on_request(state_dir: Path, start: Start) -> None:
    process = start(5)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(process.pid)], deadline())
    record = held.keep()
    held.close()
    process.assert_stopped()
    assert record.alive()
    assert HolderRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert holder.records(state_dir) == [record]
    assert os.getsid(record.pid) == record.pid
    assert {os.readlink(f"/proc/{record.pid}/fd/{fd}") for fd in (0, 1, 2)} == {"/dev/null"}
    result = holder.end(record, deadline())
    assert result == holder.HolderResult(found=True, killed=False, continued=(process.pid,), gone=())
    process.assert_running()
    assert os.listdir(state_dir) == []
    # Once more changes nothing.
    assert holder.end(record, deadline()) == holder.HolderResult(found=False, killed=False)


def test_nobody_waits_for_a_kept_holder(state_dir: Path, start: Start, tmp_path: Path) -> None:
    """A pipe that the command's caller reads ends with the command, not with the holder."""
    process = start(1)
    script = (
        "from pathlib import Path; from gpususpend.holder import *; from gpususpend.deadline import Deadline\n"
        f"h = Holder.start(Path({str(state_dir)!r})); h.stop([HoldTarget({process.pid})], Deadline(60)); h.keep()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=100)
    (record,) = holder.records(state_dir)
    process.assert_stopped()
    holder.end(record, deadline())
    process.assert_running()


def test_a_kept_holder_that_is_killed_is_noticed(state_dir: Path, start: Start) -> None:
    process = start(5)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(process.pid)], deadline())
    record = held.keep()
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.alive())
    process.assert_running()
    assert holder.records(state_dir) == [record]
    # It can be seized again.
    with Holder.start(state_dir) as again:
        again.stop([HoldTarget(process.pid)], deadline())
        process.assert_stopped()
    assert holder.end(record, deadline()) == holder.HolderResult(found=False, killed=False)
    assert holder.records(state_dir) == []


def test_a_kept_holder_says_who_died(state_dir: Path, start: Start) -> None:
    victim, other = start(2), start(2)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(victim.pid), HoldTarget(other.pid)], deadline())
    record = held.keep()
    victim.process.kill()
    assert victim.process.wait(60) == -signal.SIGKILL
    result = holder.end(record, deadline())
    assert result.gone == (victim.pid,)
    assert result.continued == (other.pid,)


def test_a_kept_holder_ends_when_nothing_is_left(state_dir: Path, start: Start) -> None:
    process = start(2)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(process.pid)], deadline())
    record = held.keep()
    process.process.kill()
    wait_for(lambda: not record.alive())
    assert holder.end(record, deadline()) == holder.HolderResult(False, False, (), (process.pid,))


def test_end_leaves_a_reused_pid_alone(state_dir: Path, start: Start) -> None:
    """The record names a pid that now belongs to another process: no signal is sent."""
    process = start(1)
    fake = HolderRecord(process.pid, 1, processes_boot_id(), str(state_dir), {})
    assert not holder.end(fake, deadline()).found
    other_boot = HolderRecord(
        process.pid, processes.read_process(process.pid).start_time, "another boot", str(state_dir), {}
    )
    assert not holder.end(other_boot, deadline()).found
    process.assert_running()


def test_a_holder_of_another_namespace_is_left_alone(state_dir: Path, start: Start) -> None:
    """Its pid means another process here, so neither its life nor its end can be told; its files are its own."""
    process = start(1)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(process.pid)], deadline())
    record = held.keep()
    path = next(state_dir.glob("holder-*.json"))
    path.write_text(path.read_text().replace("pid:[", "pid:[1"))
    assert holder.records(state_dir) == []
    elsewhere = HolderRecord.from_dict({**record.to_dict(), "origin": record.origin.replace("pid:[", "pid:[1")})
    assert not holder.end(elsewhere, deadline()).found
    process.assert_stopped()
    assert path.exists()
    assert holder.end(record, deadline()).found


def test_a_holder_that_does_not_end_is_killed(state_dir: Path, start: Start) -> None:
    process = start(2)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(process.pid)], deadline())
    record = held.keep()
    told: list[str] = []
    with Holder.start(state_dir, keep_names=()) as debugger:  # its stop stands for whatever keeps it from ending
        debugger.stop([HoldTarget(record.pid)], deadline())
        assert holder.end(record, deadline(3), told.append) == holder.HolderResult(found=True, killed=True)
    assert told == [f"waiting for the holder, pid {record.pid}"]
    process.assert_running()


def test_a_holder_that_a_signal_stops_is_let_run_to_its_end(state_dir: Path, start: Start) -> None:
    process = start(2)
    held = Holder.start(state_dir)
    held.stop([HoldTarget(process.pid)], deadline())
    record = held.keep()
    os.kill(record.pid, signal.SIGSTOP)
    result = holder.end(record, deadline())
    assert (result.found, result.killed, result.continued) == (True, False, (process.pid,))
    process.assert_running()


def test_a_check_that_fails_names_whom_it_was_about(state_dir: Path, start: Start) -> None:
    process = start(2)
    with Holder.start(state_dir) as held:
        os.kill(held.pid, signal.SIGKILL)
        with pytest.raises(errors.HolderFailed, match=f"on pid {process.pid}: "):
            held.check([HoldTarget(process.pid)], deadline())
        with pytest.raises(errors.HolderFailed, match=f"on pid {held.pid}: "):
            held.check([], deadline())


def test_unsafe_state_directories_are_refused(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    with pytest.raises(errors.UnsafeStateDir):
        Holder.start(loose)


def test_the_holder_loads_neither_cuda_nor_the_shim(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the environment would preload must not come into a process that traces others."""
    monkeypatch.setenv("LD_PRELOAD", f"/nowhere/{processes.SHIM_LIBRARY}")
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/nowhere/tool.so")
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the current directory was loaded')")
    monkeypatch.chdir(tmp_path)
    with Holder.start(state_dir) as held:
        held.check([], deadline())
        environment = Path(f"/proc/{held.pid}/environ").read_bytes()
        assert b"LD_PRELOAD" not in environment
        assert b"CUDA_INJECTION64_PATH" not in environment
        mapped = Path(f"/proc/{held.pid}/maps").read_text()
        assert "libcuda" not in mapped
        assert "cuda/bindings" not in mapped
        assert Path(f"/proc/{held.pid}/comm").read_text().strip() == "gpushare-holder"


def processes_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
