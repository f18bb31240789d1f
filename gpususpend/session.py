"""One command at work on one group: what its steps share.

Owns the bookkeeping around a step (journal, progress, deaths and interruption seen at every barrier), the helper
processes of the command, which are started when first needed, and the rules for their answers.  Must not know the order
of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpususpend import errors, holder, phases, processes, stacks
from gpususpend.control import LOOK_S, Reply, Silence, number
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS, Limits
from gpususpend.driver import DriverProcess, DriverResult, failure
from gpususpend.group import Group, Rank
from gpususpend.holder import Holder, HolderRecord, HoldTarget
from gpususpend.interrupt import Interrupts
from gpususpend.journal import Journal, Kind, Member, PendingCall, Record, StorePlaces
from gpususpend.phases import PhaseTime, Slot, Span
from gpususpend.preflight import Plan, total
from gpususpend.processes import Process
from gpususpend.progress import Progress
from gpususpend.statedir import StateDir
from gpususpend.tools import Tools

if TYPE_CHECKING:
    from gpususpend.gpus import GpuUsage
    from gpususpend.stored import StoredMemory

T = TypeVar("T")

NOT_INITIALIZED = 3
STATE_PAUSE_S = 0.1
STOP_PAUSE_S = 0.02  # that threads run on for which were stopped in an unlucky place


@dataclass(frozen=True)
class StoreOptions:
    """What a command was told about stores; `named` are the places that it was given."""

    named: StorePlaces | None = None
    ring_bytes: int | None = None  # None: nobody asked for a size
    hash: str | None = None  # that the store has to have
    verify_existing: str = "new"
    verify: bool = True
    require_room: bool = False


@dataclass
class Context:
    """What a command was given: its options, its places and its means."""

    directory: StateDir
    tools: Tools
    progress: Progress
    interrupts: Interrupts
    simulated: bool = False
    limits: Limits = LIMITS
    warnings: list[str] = field(default_factory=list)
    store: StoreOptions = StoreOptions()

    @property
    def journal(self) -> Journal:
        """Return the journal in the state directory."""
        return Journal(self.directory, self.warn)

    def forget(self, record: Record) -> None:
        """Drop the record of a group that runs, or of which nothing is left."""
        try:
            self.journal.remove(record)
        except errors.StateNotWritten as problem:
            self.warn(f"the record of group {record.id} stays: {problem}")

    def end_holders(self, record: Record) -> bool:
        """End the holders of a group, so that its threads go on; return whether there was one that still held them.

        One that is kept from ending is waited for no longer than --timeout, then killed.
        """
        deadline = Deadline(min(self.limits.threads_s, self.limits.timeout_s))
        return self.tools.end_holders(record, deadline, self.warn, self.progress.say)

    def warn(self, text: str) -> None:
        """Remember a warning for the report, once."""
        if text not in self.warnings:
            self.warnings.append(text)


class CallsPending(errors.DeadlinePassed):
    """Driver calls that were still running at their deadline, or when their process ended."""

    code = "call-pending"
    next_action = "operator"
    template = "{step} {how} on pid {pid}{why}"


class Session:
    """A group, its record and the means to work on it.

    `interruptible` is true while a signal may still turn the command back; `turning_back` is false while a suspend may
    still do so by itself; `changed` from the first change to the workload on; `driver_used` once the driver's state of
    a process may be another than RUNNING.
    """

    def __init__(self, context: Context, group: Group, record: Record) -> None:
        self.context = context
        self.limits = context.limits
        self.group = group
        self.record = record
        self.times: list[PhaseTime] = []
        self.usage: dict[str, tuple[int, int]] = {}  # bytes used on each GPU before and after the suspend
        self.gone: list[Member] = []  # of the record, with CUDA, ended before this command began to change anything
        self.ended: list[Member] = []  # without CUDA, ended before or during this command: no loss
        self.bereft: list[Member] = []  # alive, but what they need cannot be brought back
        self.losses: list[errors.StepFailed] = []  # how members were lost that do not come back
        self.expected: Collection[tuple[int, int]] | None = None  # with --all: who was there (pid, start time)
        self.interruptible = False
        self.turning_back = True
        self.changed = False
        self.driver_used = False
        self.went_on = False  # with another driver process, after the first was ended in a call of the way back
        self.stored: StoredMemory | None = None  # the way of the memory to a store and back, if it is kept in one
        self.watch = processes.Watch(group.processes)
        self._driver: DriverProcess | None = None
        self._holder: Holder | None = None
        self._patience: Deadline | None = None  # with processes that are kept stopped in a driver call

    # Helper processes

    @property
    def driver(self) -> DriverProcess:
        """Return the driver process, started on first use, and anew if somebody has killed it.

        What it was in then was told as a call whose end nobody knows.
        """
        if self._driver is not None and self._driver.ended():
            self._driver.close()
            self._driver = None
        if self._driver is None:
            self._driver = self.context.tools.start_driver()
            self._driver.keep_waiting = self.keep_waiting
        return self._driver

    @property
    def holder(self) -> Holder:
        """Return the holder, started on first use, and anew if somebody has killed it: its threads run then."""
        if self._holder is not None and self._holder.ended():
            self._holder.close()
            self._holder = None
        if self._holder is None:
            self._holder = self.context.tools.start_holder()
        return self._holder

    def keep_holder(self) -> None:
        """Leave the holder behind with the threads stopped, and write it down."""
        record = self.holder.keep()
        self._holder = None
        self.note(holder=record.to_dict(), frozen=True)

    def thaw(self) -> None:
        """Let the threads of the whole group go on, whoever holds them."""
        if self._holder is not None:
            self.holder.go(Deadline(self.limits.threads_s))
        self.context.end_holders(self.record)
        if self.record.frozen or self.record.holder is not None:
            self.note(holder=None, frozen=False)

    def targets(self, everybody: bool) -> list[HoldTarget]:
        """Return what the holder shall stop: all members, or those with a shim."""
        members = self.group.members if everybody else [rank.member for rank in self.group]
        restore = self.restore_threads() if everybody else {}
        return [
            HoldTarget(
                member.pid,
                frozenset(tid for tid in [restore.get(member.pid, 0)] if tid),
                member.start_time,
            )
            for member in members
        ]

    def restore_threads(self) -> dict[int, int]:
        """Return the driver's restore threads by pid: these must run while the others are stopped."""
        self.awake("restore-thread", self.group.cuda_pids)
        answers = self.driver.restore_threads(self.group.cuda_pids, Deadline(self.limits.driver_quick_s))
        return {pid: answer.value for pid, answer in answers.items() if answer.ok}

    def close(self) -> None:
        """End the helpers, unless a driver call is still running, and hang up everywhere."""
        for helper in (self._holder, self._driver):
            if helper is not None:
                helper.close()
        self._holder = self._driver = None
        if self.stored is not None:
            self.stored.close()
        self.watch.close()
        self.group.close()

    def is_cuda(self, pid: int) -> bool:
        """Ask the driver whether a process has initialised it."""
        self.awake("restore-thread", [pid])
        return self.driver.restore_threads([pid], Deadline(self.limits.driver_quick_s))[pid].ok

    # What is known of the members

    @property
    def members(self) -> dict[int, Member]:
        """Return the members that this session still works on, by pid."""
        return {member.pid: member for member in self.group.members}

    @property
    def arena_total(self) -> int:
        """Return the bytes of all arenas together."""
        return sum(member.arena_bytes for member in self.group.members)

    @property
    def carried(self) -> dict[str, int]:
        """Return by GPU what the shims re-create at load."""
        return total(member.device_bytes for member in self.group.members)

    def measured(self, usage: Mapping[str, GpuUsage]) -> None:
        """Take what the driver says that each member uses into the record: what a restore needs again."""

        def told(member: Member) -> Member:
            used = {uuid: gpu.by_pid.get(member.pid, 0) for uuid, gpu in usage.items()}
            return replace(member, used_bytes={uuid: count for uuid, count in used.items() if count})

        for rank in self.group.ranks:
            rank.member = told(rank.member)
        self.group.others = [told(member) for member in self.group.others]
        members = self.group.members
        self.note(members=members, gpus=list(usage), room_bytes=total(member.used_bytes for member in members))

    def learn(self, plans: Mapping[int, Plan]) -> None:
        """Take what the shims plan to save into the record."""
        for rank in self.group.ranks:
            plan = plans[rank.pid]
            rank.member = replace(
                rank.member,
                arena_bytes=plan.arena_bytes,
                host_bytes=plan.host_bytes,
                device_bytes=plan.device_bytes,
            )
        self.note(members=self.group.members)

    def lose(self, death: errors.RankDied) -> None:
        """Go on without members that have died.  They stay in the record until the end of the way back."""
        self.losses.append(death)
        self.group = self.group.without(death.pids)

    def surviving(self, look: Callable[[], T]) -> T:
        """Return what a look at the group finds; who dies meanwhile is gone, as if that had been before the command."""
        while True:
            try:
                with self.explained():
                    return look()
            except errors.RankDied as death:
                self.gone += [self.members[pid] for pid in death.pids]
                self.group = self.group.without(death.pids)

    def take_in(self, members: Sequence[Member]) -> None:
        """Go on with members more that use no CUDA."""
        for member in members:
            self.watch.add(member.process)
        self.group = Group(self.group.ranks, [*self.group.others, *members])
        self.note(members=[*self.record.members, *members])

    def let_go(self, members: Sequence[Member]) -> None:
        """Go on without members that have ended and used no CUDA.  The next note tells the record."""
        if not members:
            return
        pids = [member.pid for member in members]
        self.ended += members
        self.group = self.group.without(pids)
        self.record = replace(self.record, members=[one for one in self.record.members if one.pid not in pids])

    def leave(self, member: Member, loss: errors.MemoryGone) -> None:
        """Go on without a member that cannot be brought back; it stays as it is."""
        self.losses.append(loss)
        self.bereft.append(member)
        self.group = self.group.without([member.pid])

    # Bookkeeping

    def note(self, **changes: Any) -> None:
        """Change the record on disk.

        Raises StateNotWritten on the way down.  On the way back nobody is left suspended for want of a file: what the
        shims and the driver say suffices to finish it.
        """
        self.record = replace(self.record, **changes)
        try:
            self.context.journal.write(self.record)
        except errors.StateNotWritten as problem:
            if not self.turning_back:
                raise
            self.context.warn(f"{problem}. Going on without")

    def barrier(self, step: str) -> None:
        """Raise if a member has died, or if a signal came while the command can still turn back."""
        death = self.death(step)
        if death is not None:
            raise death
        if self.interruptible:
            self.context.interrupts.check(step)

    def dead(self) -> list[Process]:
        """Return the members with CUDA that have died, buried or not; others that have ended are let go."""
        dead = self.watch.dead()
        self.let_go([one for one in self.group.others if one.kind is Kind.PLAIN and one.process in dead])
        no_loss = [member.process for member in self.ended]
        return [process for process in dead if process not in no_loss]

    def death(self, step: str) -> errors.RankDied | None:
        """Return the death of members that this session has not buried yet."""
        dead = [process for process in self.dead() if process.pid in self.members]
        if not dead:
            return None
        return errors.RankDied(step=step, pid=dead[0].pid, comm=dead[0].comm, pids=[one.pid for one in dead])

    def halt(self, step: str) -> errors.RankStopped | None:
        """Return that somebody keeps a process with CUDA stopped."""
        stops = {pid: processes.stopped_by(pid) for pid in self.group.cuda_pids}
        found = [errors.RankStopped(step=step, pid=pid, by=by) for pid, by in stops.items() if by]
        return found[0] if found else None

    @contextmanager
    def explained(self, step: str = "") -> Iterator[None]:
        """Tell that members have died, or that somebody keeps one stopped, in place of a failure that comes of it.

        It explains every other failure, wherever that showed first; but a driver call that is still running on a
        process that lives has to be dealt with before anything else.
        """
        try:
            yield
        except (errors.RankDied, errors.Outcome):
            raise
        except (errors.GpushareError, OSError) as error:
            step = step or self.record.step
            reason = self.death(step) or (self.halt(step) if isinstance(error, errors.DriverError) else None)
            if reason is None or (isinstance(error, CallsPending) and not set(error.pids) <= set(reason.pids)):
                raise
            reason.facts["also"] = [str(error)]
            raise reason from error

    @contextmanager
    def timed(self, name: str, ranks: int, total_bytes: int = 0) -> Iterator[PhaseTime]:
        """Journal, show and time one phase; look for deaths and signals before it and after it."""
        self.barrier(name)
        self.note(step=name)
        self.context.progress.begin(name, ranks, total_bytes)
        phase = PhaseTime(name, time.monotonic())
        self.times.append(phase)
        try:
            with self.explained(name):
                yield phase
        except errors.DeadlinePassed as late:
            self._show_threads(late)
            raise
        finally:
            phase.seconds = time.monotonic() - phase.begun
            self.context.progress.end()
        self.barrier(name)

    def _show_threads(self, late: errors.DeadlinePassed) -> None:
        """Tell what the threads of all ranks are in while it can be seen: any of them may be the cause (FR-21)."""
        found = {str(pid): stacks.threads(pid) for pid in self.group.cuda_pids}
        late.facts["threads"] = found
        for pid, kinds in found.items():
            for words, count in kinds.items():
                self.context.progress.say(f"pid {pid}: {count} x {words}")

    def waiting(self, pids: Sequence[int], bytes_done: int = 0) -> None:
        """Show whom the phase waits for, and what keeps those from answering."""
        stops = [(pid, processes.stopped_by(pid)) for pid in pids]
        whom = [f"pid {pid} (stopped {by})" if by else f"pid {pid}" for pid, by in stops]
        self.context.progress.waiting(whom, bytes_done)

    # Steps over all ranks

    def shims(self, step: str, ask: Callable[[Rank], Reply], moved: str = "", total_bytes: int = 0) -> dict[int, Reply]:
        """Run `ask` for all ranks at once and wait for all; return the replies by pid.

        `moved` names the field of a reply that counts bytes.  Raises the failure that says most.
        """
        with self.timed(step, len(self.group.ranks), total_bytes) as phase:
            slots = phases.parallel(self.group.ranks, ask, self.waiting)
            phase.took(slots)
            if moved:
                phase.copies = [copy for slot in slots for copy in copies_of(slot, step)]
            replies = phases.results(step, slots)
            if moved:
                phase.bytes = sum(reply.number(moved) for reply in replies.values())
                phase.copy_seconds = {pid: reply.number("copy_us") / 1e6 for pid, reply in replies.items()}
                phase.lock_seconds = {pid: reply.number("lock_us") / 1e6 for pid, reply in replies.items()}
        return replies

    def verb(self, verb: str, seconds: float, moved: str = "", total_bytes: int = 0, **values: Any) -> dict[int, Reply]:
        """Send one long verb to all shims at once; the shims are told the time limit."""
        deadline = Deadline(seconds)

        def ask(rank: Rank) -> Reply:
            return rank.ask(verb, deadline, timeout_ms=phases.timeout_ms(deadline), **values)

        return self.shims(verb, ask, moved, total_bytes)

    def quick(self, verb: str, ranks: Sequence[Rank] | None = None, **values: Any) -> dict[int, Reply]:
        """Send a verb that is answered at once; not a phase of its own in the report."""
        deadline = Deadline(self.limits.request_s)
        chosen = self.group.ranks if ranks is None else ranks
        return phases.results(verb, phases.parallel(chosen, lambda rank: rank.ask(verb, deadline, **values)))

    @property
    def keepers(self) -> list[HolderRecord]:
        """Return the living holders that were kept for the group."""
        return [one for one in self.context.tools.holders_of(self.record) if one.alive()]

    def check_keepers(self) -> list[HolderRecord]:
        """Refuse where the holders of the group may not be ended, and return them.  Raises OSError."""
        kept = self.keepers
        for one in kept:
            holder.check_end(one)
        return kept

    def check_threads(self, everybody: bool = False) -> None:
        """Refuse where the holders of the group may not be ended, or the threads not be stopped after that.

        Raises OSError, CannotTrace.
        """
        kept = self.check_keepers()
        self.holder.check(self.targets(everybody), Deadline(self.limits.threads_s), [one.pid for one in kept])

    def stop_threads(self, step: str, everybody: bool = False) -> None:
        """Stop the threads of the shimmed processes (or of everybody) such that all shims still answer.

        A thread may be stopped with a lock in its hands without which its shim answers nobody: in the middle of a fork,
        for one.  Then all have to run on, and are stopped again a little later.
        """
        deadline = Deadline(self.limits.threads_s)
        while True:
            self.holder.stop(self.targets(everybody), deadline)
            slots = phases.parallel(self.group.ranks, lambda rank: rank.status(deadline.within(self.limits.answer_s)))
            if all(slot.error is None for slot in slots):
                return
            self.holder.go(Deadline(self.limits.threads_s))
            if deadline.passed() or not any(isinstance(slot.error, errors.DeadlinePassed) for slot in slots):
                phases.results(step, slots)
            deadline.sleep(STOP_PAUSE_S)

    @contextmanager
    def stopped(self, step: str) -> Iterator[None]:
        """Stop the threads of the shimmed processes for a moment."""
        self.stop_threads(step)
        try:
            yield
        finally:
            self.holder.go(Deadline(self.limits.threads_s))

    # Driver calls

    def keep_waiting(self, pids: Sequence[int]) -> bool:
        """Show whom driver calls wait for; false once none of them lives, or all were stopped all through --timeout."""
        self.waiting(pids)
        if pids and {process.pid for process in self.dead()}.issuperset(pids):
            return False
        if not pids or not all(processes.stopped_by(pid) for pid in pids):
            self._patience = None
            return True
        self._patience = self._patience or Deadline(self.limits.timeout_s)
        return not self._patience.passed()

    def awake(self, step: str, pids: Sequence[int]) -> None:
        """Raise RankStopped if somebody keeps one of these stopped: a driver call on it would not return."""
        waits = [Silence(pid, step) for pid in pids]
        while any(wait.look() for wait in waits):
            time.sleep(LOOK_S)

    def states(self, pids: Sequence[int] | None = None) -> dict[int, int]:
        """Return the driver's checkpoint state of every CUDA process; never asked one after the other."""
        chosen = self.group.cuda_pids if pids is None else list(pids)
        if not chosen:
            return {}
        self.awake("state", chosen)
        deadline, patience = Deadline(self.limits.driver_quick_s), Deadline(self.limits.driver_patience_s)
        while True:
            answers = self.driver.states(chosen, deadline)
            # Seen once on two idle GPUs (580.159.04): 3 for processes that were suspended, and fine afterwards.
            late = {pid for pid, answer in answers.items() if answer.finished and answer.code == NOT_INITIALIZED}
            if not late or late & {process.pid for process in self.dead()} or patience.passed():
                break
            patience.sleep(STATE_PAUSE_S)
        self.require("state", answers, self.limits.driver_quick_s)
        return {pid: answer.value for pid, answer in answers.items()}

    def driver_step(
        self,
        step: str,
        pids: Sequence[int],
        seconds: float,
        call: Callable[[DriverProcess, Deadline], dict[int, DriverResult]],
    ) -> None:
        """Make one driver call on all of `pids` at once; nothing to do is a step too, but no call."""
        with self.timed(step, len(pids)) as phase:
            if pids:
                self.awake(step, pids)
                self._patience = None
                begun = time.monotonic()
                answers = call(self.driver, Deadline(seconds))
                waited = time.monotonic() - begun
                phase.parts = [
                    Span(pid, step, begun, answer.seconds if answer.finished else waited)
                    for pid, answer in answers.items()
                ]
                self.require(step, answers, round(min(seconds, waited), 1))

    def require(self, step: str, answers: dict[int, DriverResult], seconds: float) -> None:
        """Raise unless every call returned success: CallsPending before DriverError, since its process is stuck."""
        pending = [pid for pid, answer in answers.items() if not answer.finished]
        if pending:
            driver = self._driver  # that very one, also if it has ended
            assert driver is not None
            calls = [PendingCall(pid, step, driver.pid, driver.start_time) for pid in pending]
            self.note(calls=[*self.record.calls, *calls])
            stop, over = self.halt(step), driver.ended()
            how = "was cut off" if over else f"did not return within {seconds} s"
            why = f"driver process {driver.pid} has ended" if over else str(stop or "")
            raise CallsPending(
                step=step, how=how, pid=pending[0], pids=pending, seconds=seconds, why=f". {why}" if why else "",
                driver_pid=driver.pid, driver_ended=over, also=[] if stop is None else [str(stop)],
            )  # fmt: skip
        failed = [failure(step, pid, answer) for pid, answer in answers.items() if answer.code != 0]
        if failed:
            raise phases.worst(failed)


def copies_of(slot: Slot[Reply], name: str) -> list[Span]:
    """Return the copies that a shim tells of, one for each GPU; it counts the time from when it began."""
    return [
        Span(
            slot.rank.pid, name, slot.begun + number(group, "at_us") / 1e6, number(group, "us") / 1e6,
            number(group, "bytes"), group["device"],
        )
        for reply in slot.values
        for group in reply.groups
    ]  # fmt: skip
