"""Suspend, rollback and resume on a model that refuses every wrong order: each step fails, dies or is interrupted."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpususpend import errors, operations, preflight, processes
from gpususpend.arena import Arena
from gpususpend.arena import Kind as ArenaKind
from gpususpend.deadline import Deadline
from gpususpend.discover import Targets
from gpususpend.driver import DriverResult, DriverState
from gpususpend.gpus import GpuUsage
from gpususpend.holder import HolderRecord
from gpususpend.journal import Depth, Journal, Kind, Member, Record, Stage
from gpususpend.progress import Progress
from gpususpend.recover import Goal, recover
from gpususpend.report import Report
from gpususpend.resume import outcome, resume
from gpususpend.statedir import StateDir
from gpususpend.suspend import suspend
from tests.unit.model import GIB, ModelDriver, ModelHolder, ModelTools, Scene, Wrong, bystander, scene

DOWN = ["plan", "arena", "close-launch", "drain", "close-memory", "orphans", "release", "seal"]
QUIESCE = ["close-launch", "drain", "close-memory"]
DOWN_DRIVER = ["driver:lock", "driver:checkpoint"]
UP_DRIVER = ["driver:restore", "driver:unlock"]
UP = ["load", "remap", "unseal", "bind", "check", "open"]


def go_down(one: Scene) -> None:
    """Suspend; it has to work."""
    with one.session() as session:
        suspend(session)
    assert one.all_suspended() and one.record.stage is Stage.SUSPENDED


def come_up(one: Scene) -> None:
    """Resume; it has to work."""
    with one.session() as session:
        session.driver_used = True
        resume(session)
    assert one.all_running() and one.context.journal.records() == []


def kept_arenas(one: Scene) -> list[int]:
    """Return the ranks that still hold an arena; each has to be told, and no other."""
    kept = [pid for pid in one.pids if one.world.shims[pid].arena]
    told = [text for text in one.context.warnings if "keeps its arena" in text]
    assert [text.split()[1] for text in told] == [str(pid) for pid in kept], one.context.warnings
    return kept


def again(one: Scene) -> None:
    """A whole cycle works afterwards."""
    one.world.fail.clear()
    one.record = one.context.journal.write(one.record)
    go_down(one)
    come_up(one)


def test_cycle_in_the_right_order(tmp_path: Path) -> None:
    """The order of the architecture, seen from outside."""
    with scene(tmp_path) as one:
        go_down(one)
        order = one.world.order(*DOWN, *DOWN_DRIVER)
        assert order == [*DOWN, *DOWN_DRIVER]
        assert one.record.room_bytes == {"GPU-a": 3 * (2 << 30)}
        one.world.calls.clear()
        come_up(one)
        assert one.world.order(*UP_DRIVER, "holder:end", *UP) == ["driver:restore", "holder:end", "driver:unlock", *UP]


@pytest.mark.parametrize("kind", [ArenaKind.PLAIN, ArenaKind.THP])
def test_plain_pages_are_told_with_what_to_do(
    tmp_path: Path, kind: ArenaKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Huge ones are not spoken of."""

    def prepare(size: int, progress: object, dumpable: bool) -> Arena:
        return Arena(os.memfd_create("model"), size, kind)

    told = io.StringIO()
    with scene(tmp_path) as one:
        one.context.progress = Progress(told)
        monkeypatch.setattr(one.context.tools, "prepare_arena", prepare)
        go_down(one)
        come_up(one)
    lines = [line for line in told.getvalue().splitlines() if "pages" in line]
    assert len(lines) == (3 if kind is ArenaKind.PLAIN else 0)
    assert all("shmem_enabled" in line and "vm.nr_hugepages" in line for line in lines), lines


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("call", [*DOWN, *DOWN_DRIVER, "driver:state"])
def test_B19_FR30_every_step_down_fails_in_turn(tmp_path: Path, call: str, rank: int) -> None:
    """Exit 4, everything runs again, and the next suspend works (B23: the outcome is told)."""
    with scene(tmp_path) as one:
        one.world.fail[f"{call} {one.pids[rank]}"] = 1
        with one.session() as session, pytest.raises(errors.RolledBack) as caught:
            suspend(session)
        assert one.all_running(), caught.value
        assert caught.value.exit_code == 4 and "all 3 processes run again" in str(caught.value)
        assert caught.value.facts["count_not_running"] == 0
        assert not kept_arenas(one) or call in QUIESCE
        assert one.context.journal.records() == []
        again(one)


def test_B19_unlocking_that_does_not_end(tmp_path: Path) -> None:
    """The shim can do nothing else meanwhile: no step is begun that has to wait for it until it is too late as well."""
    with scene(tmp_path) as one:
        call = f"arena {one.pids[1]}"
        one.world.on[f"release {one.pids[1]}"] = lambda: one.world.mute.add(call)
        with one.session() as session, pytest.raises(errors.RolledBack) as caught:
            suspend(session)
        assert f"unlock-pages did not finish within 30.0 s on pid {one.pids[1]}" in str(caught.value)
        assert one.all_running() and not one.world.order("seal")
        one.world.mute.clear()
        again(one)


@pytest.mark.parametrize("call", ["holder:stop"])
def test_B19_holder_fails(tmp_path: Path, call: str) -> None:
    """The stop for the seal is refused."""
    with scene(tmp_path) as one:
        one.world.fail[call] = 1
        with one.session() as session, pytest.raises(errors.RolledBack):
            suspend(session)
        assert one.all_running()
        again(one)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("call", [*UP_DRIVER, *UP])
def test_B14_every_step_up_fails_once_and_is_repeated(tmp_path: Path, call: str, rank: int) -> None:
    """Exit 8, the gates stay shut, and the second resume works (pitfall 9)."""
    with scene(tmp_path) as one:
        go_down(one)
        one.world.fail[f"{call} {one.pids[rank]}"] = 1
        with one.session() as session, pytest.raises(errors.StillSuspended) as caught:
            session.driver_used = True
            resume(session)
        assert caught.value.exit_code == 8 and caught.value.next_action == "retry"
        if call != "open":
            assert all(shim.gates == "closed" for shim in one.world.shims.values())
        come_up(one)


@pytest.mark.parametrize("verb", ["status", "seal", "unseal"])
def test_a_shim_that_cannot_answer_while_its_threads_stand(tmp_path: Path, verb: str) -> None:
    """One was stopped with a lock that the shim needs, or another that asks it: all run on, and it is tried again."""
    with scene(tmp_path) as one:
        pid, tries = one.pids[1], []

        def mute_at_first() -> None:
            if len(tries) < 2:
                one.world.on[f"{verb} {pid}"] = mute_at_first
                if pid in one.world.stopped:
                    tries.append(verb)
                    raise TimeoutError

        one.world.on[f"{verb} {pid}"] = mute_at_first
        go_down(one)
        come_up(one)
        assert len(tries) == 2


def test_B23_rollback_that_fails_is_told(tmp_path: Path) -> None:
    """Pitfall 51: Suspend fails, then the way back fails: still suspended, with both reasons and the count."""
    with scene(tmp_path) as one:
        one.world.fail |= {"driver:checkpoint": 1, f"remap {one.pids[1]}": 1}
        with one.session() as session, pytest.raises(errors.StillSuspended) as caught:
            suspend(session)
        assert "remap" in str(caught.value) and "3 of 3" in str(caught.value)
        assert "checkpoint" in str(caught.value.cause.facts["first"])  # type: ignore[union-attr]
        come_up(one)


@pytest.mark.parametrize("call", [*DOWN, *DOWN_DRIVER])
def test_FR2_death_of_a_rank_on_the_way_down(tmp_path: Path, call: str) -> None:
    """It is named, and the others run again."""
    with scene(tmp_path) as one:
        one.world.on[f"{call} {one.pids[1]}"] = lambda: one.kill(1)
        with one.session() as session, pytest.raises(errors.Lost) as caught:
            suspend(session)
        assert caught.value.facts["lost"] == [one.pids[1]] and caught.value.exit_code == 5
        assert str(one.pids[1]) in str(caught.value) and "other 2 run again" in str(caught.value)
        assert one.all_running()


@pytest.mark.parametrize("call", [*UP_DRIVER, "load", "remap", "unseal", "check"])
def test_FR2_death_of_a_rank_on_the_way_up(tmp_path: Path, call: str) -> None:
    """The same for resume."""
    with scene(tmp_path) as one:
        go_down(one)
        one.world.on[f"{call} {one.pids[1]}"] = lambda: one.kill(1)
        with one.session() as session, pytest.raises(errors.Lost) as caught:
            session.driver_used = True
            resume(session)
        assert caught.value.facts["lost"] == [one.pids[1]]
        assert one.all_running()


def at_call(one: Scene, number: int, act: Callable[[], None]) -> Callable[[], bool]:
    """Have something happen in the call of this number from now on; return what tells whether it has."""
    begin, calls = one.world.begin, itertools.count()
    happened = []

    def begin_or_act(call: str) -> None:
        if next(calls) == number:
            happened.append(call)
            act()
        begin(call)

    one.world.begin = begin_or_act  # type: ignore[method-assign]
    return lambda: bool(happened)


@pytest.mark.parametrize("way", ["suspend", "resume"])
def test_FR2_death_of_a_rank_at_any_moment(tmp_path: Path, way: str) -> None:
    """Whatever is asked of whom just then, the death is what is told; only after the last look nobody sees it."""
    lost: set[int] = set()
    for number in itertools.count():
        with scene(tmp_path, count=2) as one:
            if way == "resume":
                go_down(one)
            died = at_call(one, number, lambda: one.kill(1))
            with one.session() as session:
                try:
                    if way == "suspend":
                        suspend(session)
                    else:
                        session.driver_used = True
                        operations._resume(one.context, session, None)
                except errors.Lost as loss:
                    lost.add(number)
                    assert loss.facts["lost"] == [one.pids[1]] and f"pid {one.pids[1]} (rank) died" in str(loss), number
                    assert "other 1 run again" in str(loss), number
                    assert "driver" not in str(one.context.warnings), (number, one.context.warnings)
            if not died():
                break
            assert one.all_running() if number in lost or way == "resume" else one.record.stage is Stage.SUSPENDED
            assert one.context.journal.records() == [] or number not in lost
    assert number > 20 and not set(range(number - 6)).difference(lost), (number, lost)


def test_FR2_a_driver_call_on_the_dead_is_not_waited_for(tmp_path: Path) -> None:
    """The driver may never return from it; one on a process that lives is waited for."""
    with scene(tmp_path) as one, one.session() as session:
        one.kill(1)
        assert session.keep_waiting(one.pids) and session.keep_waiting([])
        assert not session.keep_waiting([one.pids[1]])


def test_members_that_a_holder_keeps_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither driver nor shim would tell of one without CUDA; the group is not said to run as a whole."""
    with scene(tmp_path) as one, bystander() as plain, one.session() as session:
        process = processes.read_process(plain.pid)
        session.take_in([Member(plain.pid, process.start_time, plain.pid, process.uid, "sleep", Kind.PLAIN)])
        keeper = HolderRecord(4711, 1, "boot", "/", {})
        monkeypatch.setattr(HolderRecord, "alive", lambda self: True)
        monkeypatch.setattr(session.context.tools, "holders_of", lambda record: [keeper])
        monkeypatch.setattr(processes, "tracer", lambda pid: 4711 if pid == plain.pid else 0)
        failure = errors.HolderFailed(step="holder: end", pid=4711, detail="it cannot be killed")
        end = outcome(session, failure)
        assert isinstance(end, errors.StillSuspended), end
        assert f"1 of 4 processes do not run ({plain.pid}: held by" in str(end)
        monkeypatch.setattr(processes, "tracer", lambda pid: 0)
        assert outcome(session, failure) is None


def test_FR2_death_while_suspended(tmp_path: Path) -> None:
    """Seen at the resume."""
    with scene(tmp_path) as one:
        go_down(one)
        one.kill(0)
        with one.session() as session, pytest.raises(errors.Lost) as caught:
            session.driver_used = True
            resume(session)
        assert caught.value.facts["lost"] == [one.pids[0]] and one.all_running()


@pytest.mark.parametrize("call", ["fill", *DOWN, *DOWN_DRIVER])
def test_interrupt_rolls_back(tmp_path: Path, call: str) -> None:
    """At the next barrier, whatever the step; exit 130."""
    with scene(tmp_path) as one:

        def interrupt() -> None:
            one.context.interrupts.received = signal.SIGTERM

        one.world.on[call] = interrupt
        with one.session() as session, pytest.raises(errors.Interrupted) as caught:
            suspend(session)
        assert caught.value.exit_code == 130 and "SIGTERM" in str(caught.value)
        assert one.all_running() and (not kept_arenas(one) or call in QUIESCE)
        if call in ("fill", "plan"):
            assert one.world.order("arena", "close-launch") == []
        one.context.interrupts.received = None
        again(one)


def test_memory_that_cannot_be_filled_is_a_refusal(tmp_path: Path) -> None:
    """The last of three: no shim has been told anything yet, and no gate is closed."""
    with scene(tmp_path) as one:
        one.world.on["fill 0"] = lambda: one.world.fail.update({"fill": 1})
        with one.session() as session, pytest.raises(errors.NotEnoughMemory):
            suspend(session)
        assert one.world.order("arena", "close-launch") == [] and one.all_running()
        assert one.context.journal.records() == []
        again(one)


@pytest.mark.parametrize("call", ["close-launch", "drain", "close-memory"])
def test_arena_that_cannot_be_taken_back_is_told(tmp_path: Path, call: str) -> None:
    """Interrupted with the arenas handed out, and the GPUs do not become quiet: everything runs, each is named."""
    with scene(tmp_path) as one:
        one.world.fail[f"{call} {one.pids[0]}"] = 1
        one.world.on[f"arena {one.pids[2]}"] = lambda: setattr(one.context.interrupts, "received", signal.SIGINT)
        with one.session() as session, pytest.raises(errors.Interrupted):
            suspend(session)
        assert one.all_running()
        assert kept_arenas(one)
        one.context.interrupts.received = None
        one.context.warnings.clear()
        again(one)
        assert not kept_arenas(one)


class FullDisk(StateDir):
    """A state directory whose disk takes so many files more; on a read-only one nothing can be removed either."""

    room, read_only = 0, False

    def write(self, name: str, content: bytes) -> None:
        """Write while there is room."""
        self.room -= 1
        if self.room < 0:
            raise errors.StateNotWritten(path=name, detail="No space left on device", way_out="wait")
        super().write(name, content)

    def remove(self, name: str) -> None:
        """Remove, unless the disk is read-only."""
        if self.read_only:
            raise errors.StateNotWritten(path=name, detail="Read-only file system", way_out="wait")
        super().remove(name)


def test_full_disk_on_the_way_down(tmp_path: Path) -> None:
    """Whichever note cannot be written: refused, or rolled back; the record goes."""
    with scene(tmp_path) as one:
        disk = FullDisk(one.context.directory.path, one.context.directory.fd)
        one.context.directory = disk
        seen = set()
        for room in range(100):
            disk.room = 1000
            one.record = one.context.journal.write(one.record)
            disk.room = room
            try:
                with one.session() as session:
                    suspend(session)
                break
            except (errors.StateNotWritten, errors.RolledBack) as failure:
                seen.add(failure.exit_code)
                assert one.all_running() and (not kept_arenas(one) or one.record.step == "quiesce"), (room, failure)
                assert one.context.journal.records() == []
        assert one.all_suspended() and room > 10 and seen == {3, 4}


@pytest.mark.parametrize("read_only", [False, True])
def test_full_disk_on_the_way_up(tmp_path: Path, read_only: bool) -> None:
    """Nobody stays suspended for want of a file; it is told."""
    with scene(tmp_path) as one:
        go_down(one)
        disk = FullDisk(one.context.directory.path, one.context.directory.fd)
        disk.read_only = read_only
        one.context.directory = disk
        with one.session() as session:
            session.driver_used = True
            resume(session)
        assert one.all_running() and "Going on without" in one.context.warnings[0]
        assert len(one.context.journal.records()) == read_only


@pytest.mark.parametrize("command", ["resume", "recover running", "recover suspended"])
@pytest.mark.parametrize(("planted", "code"), [("hang", 7), ("mute", 8)])
def test_rank_that_does_not_answer(tmp_path: Path, command: str, planted: str, code: int) -> None:
    """A state query that does not return, or a shim: told with the outcome's exit code, and the next try works."""
    with scene(tmp_path, pending_grace_s=0.1) as one:
        go_down(one)
        if planted == "hang":
            one.world.hang.add(f"driver:state {one.pids[1]}")
        else:
            one.world.mute.add(f"status {one.pids[1]}")

        def act() -> None:
            with one.session() as session:
                session.driver_used = True
                if command == "resume":
                    operations._resume(one.context, session, None)
                else:
                    recover(session, Goal(command.split()[1]))

        with pytest.raises(errors.Outcome) as caught:
            act()
        assert caught.value.exit_code == code, caught.value
        one.world.hang.clear()
        one.world.mute.clear()
        come_up(one)


def test_refusal_half_way_up_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads may not be stopped for the unseal: something has changed by then, so it is 8 and not 3."""
    with scene(tmp_path) as one:
        go_down(one)

        def refuse(self: ModelHolder, targets: object, deadline: object) -> None:
            raise errors.CannotTrace.of_threads(one.pids[0], "planted", "planted")

        with monkeypatch.context() as patch:
            patch.setattr(ModelHolder, "stop", refuse)
            with one.session() as session, pytest.raises(errors.StillSuspended):
                session.driver_used = True
                resume(session)
        come_up(one)


def test_interrupt_does_not_stop_a_resume(tmp_path: Path) -> None:
    """Half-way is nowhere to be left."""
    with scene(tmp_path) as one:
        go_down(one)
        one.context.interrupts.received = signal.SIGINT
        come_up(one)


@pytest.mark.parametrize("call", DOWN_DRIVER)
def test_driver_call_past_its_deadline_is_left_alone(tmp_path: Path, call: str) -> None:
    """Exit 7, with pid and call, in the journal; a recover later brings everything back."""
    with scene(tmp_path, pending_grace_s=0.1) as one:
        name = f"{call} {one.pids[1]}"
        one.world.hang.add(name)
        with one.session() as session, pytest.raises(errors.StateUnknown) as caught:
            suspend(session)
        assert caught.value.exit_code == 7 and str(one.pids[1]) in str(caught.value)
        assert one.record.calls[0].pid == one.pids[1] and call.endswith(one.record.calls[0].call)
        assert all(shim.gates == "closed" for shim in one.world.shims.values())
        one.world.hang.clear()
        come_up(one)


def test_fr17_no_success_before_the_driver_says_running(tmp_path: Path) -> None:
    """FR-17, pitfall 17: each pid is asked at the end; a state that nobody knows is not RUNNING, its number is told."""
    with scene(tmp_path) as one:
        with one.session() as session:
            suspend(session)
        real = ModelDriver.states

        def states(self: ModelDriver, pids: Sequence[int], deadline: Deadline) -> dict[int, DriverResult]:
            answers = real(self, pids, deadline)
            over = all(shim.phase == "running" for shim in one.world.shims.values())
            strange = {one.pids[1]: DriverResult(0, "CUDA_SUCCESS", 0.0, True, 5)} if over else {}
            return answers | strange

        with pytest.MonkeyPatch.context() as patch, one.session() as session:
            patch.setattr(ModelDriver, "states", states)
            session.driver_used = True
            with pytest.raises(errors.StillSuspended) as caught:
                resume(session)
        assert "state 5" in str(caught.value) and str(one.pids[1]) in str(caught.value)
        assert caught.value.facts["states"] == {one.pids[1]: "state 5"}


@pytest.mark.parametrize("looks", [3, 10_000])
def test_fr54_suspended_is_said_once_the_gpus_list_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """FR-54: the driver is done and memory is not back yet: waited for, and in the end no success, with pid and GPU."""
    real = ModelTools.usage
    with scene(tmp_path, memory_back_s=60 if looks < 10 else 0.4) as one:
        late = iter(range(looks))

        def usage(self: ModelTools, driver: ModelDriver) -> dict[str, GpuUsage]:
            down = all(state == DriverState.CHECKPOINTED for state in one.world.states.values())
            if down and next(late, None) is not None:
                return {"GPU-a": GpuUsage(GIB, 80 * GIB, {one.pids[2]: GIB})}
            return real(self, driver)

        monkeypatch.setattr(ModelTools, "usage", usage)
        with one.session() as session:
            if looks < 10:
                suspend(session)
                assert next(late, None) is None and one.all_suspended()
                return
            with pytest.raises(errors.RolledBack) as caught:
                suspend(session)
        assert f"pid {one.pids[2]}" in str(caught.value) and "memory on GPU GPU-a" in str(caught.value)
        assert one.all_running()


def test_pitfall2_state_query_that_hangs(tmp_path: Path) -> None:
    """All processes are asked at once and with one deadline; the one that hangs is named."""
    with scene(tmp_path) as one:
        one.world.hang.add(f"driver:state {one.pids[1]}")
        with one.session() as session, pytest.raises(errors.StateUnknown) as caught:
            suspend(session)
        assert caught.value.facts["call"] == "state" and caught.value.facts["pids"] == [one.pids[1]]
        asked = [call for call in one.world.calls if call.startswith("driver:state")]
        assert asked[:3] == [f"driver:state {pid}" for pid in one.pids]
        one.world.hang.clear()
        come_up(one)


@pytest.mark.parametrize("call", DOWN_DRIVER)
def test_driver_call_that_returns_late_is_a_rollback(tmp_path: Path, call: str) -> None:
    """Others are unlocked first (FR-4): the call may have waited for them."""
    with scene(tmp_path) as one:
        name = f"{call} {one.pids[1]}"
        one.world.hang.add(name)
        one.world.on["driver:unlock"] = one.world.hang.clear
        one.world.on["driver:state"] = one.world.hang.clear
        with one.session() as session, pytest.raises(errors.RolledBack) as caught:
            suspend(session)
        assert caught.value.next_action == "retry" and one.all_running()
        again(one)


@pytest.mark.parametrize("depth", Depth)
def test_recover_completes_the_last_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: Depth) -> None:
    """Killed when everything is away and the record does not say so: afterwards it is that of a whole suspend."""

    class Killed(BaseException):
        """What nobody catches."""

    def write(self: Journal, record: Record) -> Record:
        if record.stage is Stage.SUSPENDED:
            raise Killed
        return real_write(self, record)

    real_write = Journal.write
    with scene(tmp_path) as one:
        one.record = replace(one.record, depth=depth)
        with monkeypatch.context() as patch, one.session() as session, pytest.raises(Killed):
            patch.setattr(Journal, "write", write)
            suspend(session)
        one.record = one.context.journal.read(one.record.id)
        with one.session() as session:
            assert recover(session, Goal.SUSPENDED)
        assert one.record.stage is Stage.SUSPENDED and one.record.step == "suspended"
        each = GIB if depth is Depth.PAGES else 2 * GIB
        assert one.record.room_bytes == {"GPU-a": 3 * each}
        with one.session() as session:
            session.driver_used = depth is Depth.PROCESS
            resume(session)
        assert one.all_running()


def test_the_model_is_strict(tmp_path: Path) -> None:
    """A wrong order is an error of the test, not an answer."""
    with scene(tmp_path) as one, one.session() as session:
        with pytest.raises(errors.StepFailed, match="release"):
            session.verb("release", 5)
        with pytest.raises(Wrong):
            session.driver.lock(one.pids, 1)


def test_arena_that_is_there_is_not_charged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier command left arenas: only what is missing has to fit, and at depth pages nothing of the driver's."""
    charged: list[dict[int, int]] = []
    with scene(tmp_path) as one, one.session() as session:
        tools, limits = one.context.tools, one.context.limits
        monkeypatch.setattr(tools, "check_memory", lambda charges: charged.append(dict(charges)))
        plans, usage = preflight.plans_of(session.group, limits), tools.usage(session.driver)
        for kept in (0, GIB, 2 * GIB):
            one.world.shims[one.pids[0]].arena = kept
            for depth in Depth:
                preflight.check_memory(session.group, tools, plans, usage, depth, limits)
    whole = preflight.arena_to_hand_over(plans[one.pids[0]])
    assert [entry[os.getpid()] for entry in charged] == [3 * whole] * 2 + [2 * whole] * 4
    alone = [len(entry) == 1 for entry in charged]
    assert alone == [depth is Depth.PAGES for depth in Depth] * 3


def test_stop_of_a_group_that_comes_back_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command's resume is done when `stop` has its turn: there is no such group any more."""
    with scene(tmp_path) as one:
        go_down(one)
        held = Journal.held

        @contextlib.contextmanager
        def late(self: Journal, *arguments: Any) -> Iterator[None]:
            with held(self, *arguments):
                self.remove(one.record)
                yield

        monkeypatch.setattr(Journal, "held", late)
        with pytest.raises(errors.NotSuspended):
            operations.stop_targets(one.context, Targets(pids=(one.pids[0],)), Report("stop"))
