"""Bringing a group back to running: the one path for resume, rollback and recover.

Owns the order restore, threads, unlock, load, remap, unseal, bind, check, open.  Every step acts only on what is not
in the wanted state, so the path is right from wherever the group stands, and can be repeated.  Must not know why a
group is brought back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gpususpend import errors, phases, processes, system
from gpususpend.control import Reply, number
from gpususpend.deadline import Deadline
from gpususpend.driver import DriverState, GpuPairs
from gpususpend.group import SYSTEM_NOT_READY, Rank
from gpususpend.journal import Member, Record, Stage, StorePlaces
from gpususpend.prepare import hand_over
from gpususpend.progress import readable_bytes
from gpususpend.session import STOP_PAUSE_S, CallsPending, Session
from gpususpend.tools import state_name

# Phases of a shim in which all objects are still where the application put them.
UNTOUCHED = ("running", "quiescing", "quiesced")
# Phases in which work may run on the GPU.
RESTLESS = ("running", "quiescing")
# Phases before which nothing has been sealed.
UNSEALED = (*UNTOUCHED, "releasing", "released")
FABRIC_PAUSE_S = 0.5


def resume(session: Session, gpu_pairs: GpuPairs = ()) -> None:
    """Bring a suspended or half-way group to running.

    Raises a Refused before anything changed; StillSuspended if it can be repeated; Lost if a process cannot come back;
    StateUnknown if a driver call does not return.
    """
    session.losses += [_ended(member) for member in session.gone]
    before = session.record.stage
    session.note(stage=Stage.RESUMING, error="")
    try:
        with told(session):
            bring_back_survivors(session, gpu_pairs)
    except errors.Refused:
        session.note(stage=before)
        raise
    dismiss(session)
    if session.losses:
        raise some_lost(session)
    if session.stored is not None and before in (Stage.SUSPENDING, Stage.ROLLING_BACK):
        session.stored.abandon()


def _ended(member: Member) -> errors.RankDied:
    """Return how a member ended while its group was suspended."""
    kind = errors.RankReplaced if processes.is_same(member.process) else errors.RankDied
    return kind(step="suspended", pid=member.pid, comm=member.comm)


@contextmanager
def told(session: Session) -> Iterator[None]:
    """Turn what fails on the way back, or at a look before it, into the outcome that says where it left the group.

    A Refused or NotBegun that comes before anything has changed passes.  Where everything runs all the same, so that
    there is nothing to come back to, a failure is no more than a warning.
    """
    try:
        yield
    except errors.Outcome:
        raise
    except Exception as failure:
        cause = as_cause(session, failure)
        refused = isinstance(cause, (errors.Refused, errors.NotBegun)) and not session.changed
        end = cause if refused else outcome(session, cause)
        if end is not None:
            if not refused or not is_whole(session):  # else all is as it was, the record, too
                session.note(error=str(end))
            raise end from (failure.__cause__ if refused else failure)


def is_whole(session: Session) -> bool:
    """Tell whether the group is suspended as it was left: no earlier command was cut off, and no holder has gone."""
    record = session.record
    return record.stage is Stage.SUSPENDED and (not record.frozen or bool(session.keepers))


def as_cause(session: Session, failure: Exception) -> errors.GpushareError:
    """Return a failure as an error that names the step; one that is a defect of ours still has an outcome."""
    state = "" if session.changed else system.NOTHING_CHANGED
    if isinstance(failure, errors.SystemCall) and not failure.facts["state"]:
        return errors.SystemCall(**{**failure.facts, "state": state})
    if isinstance(failure, errors.GpushareError):
        return failure
    if isinstance(failure, (OSError, MemoryError)):
        return system.refusal(failure, state)
    detail = f"{type(failure).__name__}: {failure}"
    return errors.StepFailed(step=session.record.step, pid=session.record.pids, detail=detail)


def some_lost(session: Session) -> errors.Lost:
    """Return the outcome where processes died, or need memory that went with them, and the others run again."""
    losses = session.losses
    lost = sorted({pid for loss in losses for pid in loss.pids})
    told = [str(loss) for loss in losses[1:] if isinstance(loss, errors.MemoryGone)]
    if session.group.members:
        told.append(f"The other {len(session.group.members)} run again")
    return errors.Lost(
        cause=losses[0], lost=lost, count_lost=len(lost), count=len(session.group.members) + len(lost),
        detail="".join(f". {text}" for text in told),
        bereft={member.pid: member.comm for member in session.bereft},
    )  # fmt: skip


def bring_back_survivors(session: Session, gpu_pairs: GpuPairs = ()) -> None:
    """Bring back the group; where a process dies meanwhile, or cannot run without one that did, the others.

    Where somebody ends the driver process in a call, another one goes on once from where the processes are.
    """
    back = False
    while session.group.members and not back:
        try:
            with session.explained():
                back = bring_back_or_leave(session, gpu_pairs)
        except errors.RankDied as death:
            session.lose(death)
        except CallsPending as cut:
            if not cut.facts["driver_ended"] or session.went_on:
                raise
            session.went_on = True
            session.context.warn(f"{cut}. Another driver process went on from there")
            left = [call for call in session.record.calls if call.driver_pid != cut.facts["driver_pid"]]
            session.note(calls=left)


def bring_back_or_leave(session: Session, gpu_pairs: GpuPairs) -> bool:
    """Bring back the group; false if a process was left behind instead, since its memory went with another."""
    try:
        bring_back(session, gpu_pairs)
    except errors.ShimError as failure:
        rank = needy(session, failure)
        session.leave(rank.member, memory_gone(session, rank, failure))
        return False
    return True


def dismiss(session: Session) -> None:
    """Drop the record, since everything runs that can run; what cannot stays in it."""
    if session.bereft:
        told = [str(loss) for loss in session.losses if isinstance(loss, errors.MemoryGone)]
        session.note(members=session.bereft, error=". ".join([*told, errors.START_ANEW]))
    else:
        session.context.forget(session.record)


def needy(session: Session, failure: errors.ShimError) -> Rank:
    """Return the rank that did not get memory from its owner; raise the failure again if it is another one."""
    for rank in session.group.ranks:
        if rank.pid == failure.facts["pid"] and failure.facts.get("word") == "gone":
            return rank
    raise failure


def memory_gone(session: Session, rank: Rank, failure: errors.ShimError) -> errors.MemoryGone:
    """Return what a rank misses for good: no living member is the owner.  Raise the failure again if there is one."""
    alive = {member.inner_pid for member in [*session.group.members, *session.bereft]}
    rows = rank.listing("imports", Deadline(session.limits.request_s))
    gone = [row for row in rows if row.get("state") == "orphan" and number(row, "pid") not in alive]
    if not gone:
        raise failure
    known = {member.inner_pid: member.pid for member in [*session.record.members, *session.gone]}
    owners = sorted({known.get(number(row, "pid"), number(row, "pid")) for row in gone})
    return errors.MemoryGone(
        step=failure.facts["step"], pid=rank.pid, comm=rank.member.comm, owners=owners,
        bytes=sum(number(row, "bytes") for row in gone),
    )  # fmt: skip


def bring_back(session: Session, gpu_pairs: GpuPairs = ()) -> None:
    """Bring every member to running, from wherever it stands.  Raises StepFailed; what was done stays done."""
    limits = session.limits
    states = session.states() if session.driver_used else {}
    session.changed = True
    for pid, state in states.items():
        if state == DriverState.FAILED:
            raise errors.StepFailed(step="restore", pid=pid, detail="the driver lost it in an earlier one")
    down = [pid for pid, state in states.items() if state == DriverState.CHECKPOINTED]
    session.driver_step(
        "restore", down, limits.checkpoint_timeout_s, lambda driver, until: driver.restore(down, gpu_pairs, until)
    )
    # Threads first: measured, a process whose threads are stopped can be restored, but hangs in the unlock.
    session.thaw()
    locked = [*down, *(pid for pid, state in states.items() if state == DriverState.LOCKED)]
    session.driver_step("unlock", locked, limits.driver_quick_s, lambda driver, until: driver.unlock(locked, until))
    reload(session)
    verify(session)


def reload(session: Session) -> None:
    """Bring the objects of all shims back and open the gates."""
    if not session.group.ranks:
        return
    at = {pid: reply.text("phase") for pid, reply in session.quick("status").items()}
    now = at.values()
    limits = session.limits
    if any(phase not in UNTOUCHED for phase in now):
        load(session)
        rebuild(session, "remap")
        if any(phase not in UNSEALED for phase in now):
            in_a_stop(session, "unseal")
        rebuild(session, "bind")
        session.verb("check", limits.canary_s)
    if any(phase != "running" for phase in now):
        # While the gates are closed: the driver waits for the GPU when it unlocks pages, and holds others up meanwhile.
        give_up_arenas(session, [rank for rank in session.group.ranks if at[rank.pid] not in RESTLESS])
        # From here on some ranks run: a signal or a death changes nothing about the others being whole.
        session.shims("open", lambda rank: rank.ask("open", Deadline(limits.open_s)))


def rebuild(session: Session, verb: str) -> None:
    """Send `remap` or `bind` to all shims; again to all while the fabric is not ready, which passes (FR-26)."""
    deadline = Deadline(session.limits.fabric_s)
    while True:
        try:
            session.verb(verb, session.limits.remap_s)
            return
        except errors.ShimError as failure:
            if failure.facts.get("cuda") != SYSTEM_NOT_READY or deadline.passed():
                raise
            session.context.warn(f"asked again: {failure}")
        deadline.sleep(FABRIC_PAUSE_S)


def check_threads(session: Session) -> None:
    """Refuse a way back on which threads may not be let go, or have to be stopped, to unseal, and may not be.

    Raises OSError, CannotTrace.
    """
    if any(reply.text("phase") not in UNSEALED for reply in session.quick("status").values()):
        session.check_threads()
    else:
        session.check_keepers()


def load(session: Session) -> None:
    """Have all shims make their memory again, with its content from where each keeps it."""
    needed = stored_in(session)
    if session.stored is None or not needed:
        session.verb("load", session.limits.copy_timeout_s, "loaded_bytes", session.arena_total)
        return
    session.stored.open(needed)
    hand_over(session, session.stored.rings(session.stored.to_pass(needed)))
    session.stored.load()


def stored_in(session: Session) -> dict[int, str]:
    """Return the checkpoints in which the memory of ranks is, by pid; those whose memory is not in any are left out."""
    words = {pid: reply.text("stored", "-") for pid, reply in session.quick("status").items()}
    return {pid: word for pid, word in words.items() if word != "-"}


def attach_store(session: Session) -> None:
    """Find where the memory of the group is kept, and make sure that it can be had, before anything changes.

    The checkpoint that is needed is told by its id: it and its store may have moved to where the command says.

    Raises OtherStore, NoStoreNamed, OtherCheckpoint or OtherCache for what the command names, StoreProblem for what
    lies there, NotEnoughMemory where the ring does not fit, SystemCall where it may not be made.
    """
    named, recorded = session.context.store.named, session.record.stored
    needed = stored_in(session)
    if named is not None and not needed:
        require_same(named, session.record)
    places = merged(named, recorded)
    if places is not None:
        from gpususpend.stored import StoredMemory

        session.stored = StoredMemory(session, places, session.context.store)
    if not needed:
        return
    if session.stored is None:
        pid = min(needed)
        raise errors.NoStoreNamed(pid=pid, needed=needed[pid])
    places = session.stored.places
    moved = recorded is not None and places != replace(recorded, cache=places.cache)
    try:
        session.stored.open(needed)
    except errors.StoreProblem as problem:
        if moved:
            raise other_store(session.record, places, f": {problem}") from problem
        raise
    rings = session.stored.rings(session.stored.to_pass(needed))
    system.check_file_size(max(rings.values(), default=0))
    session.context.tools.check_memory([(os.getpid(), sum(rings.values()))])
    if moved:
        session.note(stored=places)


def require_same(named: StorePlaces, record: Record) -> None:
    """Refuse a store or a checkpoint other than the one that keeps a group's memory.  A cache may be another."""
    kept = record.stored or StorePlaces()
    told = [(one, other) for one, other in ((kept.store, named.store), (kept.directory, named.directory)) if other]
    if any(one != other for one, other in told):
        raise other_store(record, named, "; name that, or nothing: it is known")


def other_store(record: Record, named: StorePlaces, why: str) -> errors.OtherStore:
    """Return the refusal of places where a group's memory is not kept."""
    kept = record.stored
    where = f"store {kept.store}, checkpoint {kept.directory}" if kept is not None else "host memory"
    told = f"store {named.store}, checkpoint {named.directory}"
    return errors.OtherStore(pid=record.pids[0], kept=where, named=told, why=why)


def merged(named: StorePlaces | None, recorded: StorePlaces | None) -> StorePlaces | None:
    """Return the places where memory is kept: the recorded ones, but for those that the command names."""
    if recorded is None:
        return named if named is not None and named.store else None
    told = {} if named is None else {name: path for name, path in vars(named).items() if path}
    return replace(recorded, **told)


def in_a_stop(session: Session, verb: str, **fields: Any) -> dict[int, Reply]:
    """Send `seal` or `unseal` while all threads of all ranks are stopped.

    A thread may be stopped with a lock in its hands that the shim needs, or another's that asks it; then it has to run
    on, and is stopped again a little later.
    """
    deadline = Deadline(session.limits.seal_s)

    def ask(rank: Rank) -> Reply:
        attempt = deadline.within(session.limits.seal_attempt_s)
        return rank.ask(verb, attempt, timeout_ms=phases.timeout_ms(attempt), **fields)

    with session.timed(verb, len(session.group.ranks)) as phase:
        while True:
            with session.stopped(verb):
                slots = phases.parallel(session.group.ranks, ask, session.waiting)
            held = any(_is_held(slot.error) for slot in slots)
            if not held or deadline.passed():
                phase.took(slots)
                return phases.results(verb, slots)
            deadline.sleep(STOP_PAUSE_S)


def _is_held(error: Exception | None) -> bool:
    if isinstance(error, errors.ShimError):
        return error.facts.get("word") == "busy"
    return isinstance(error, errors.DeadlinePassed)


def verify(session: Session) -> None:
    """Raise unless the driver says RUNNING for every process and every shim has its gates open."""
    if session.driver_used:
        for pid, state in session.states().items():
            if state != DriverState.RUNNING:
                raise errors.StepFailed(step="verify", pid=pid, detail=f"the driver says {state_name(state)}")
    for pid, reply in session.quick("status").items():
        if reply.text("phase") != "running":
            raise errors.StepFailed(step="verify", pid=pid, detail=f"its shim is in phase {reply.text('phase')}")
        if lost := reply.number("lost_fds"):
            session.context.warn(f"pid {pid}: {lost} descriptor(s) of memory that is gone lead to /dev/null now")
        if kept := reply.number("arena_bytes") + reply.number("leftover_bytes"):
            session.context.warn(f"pid {pid} keeps its arena, {readable_bytes(kept)}, until the next suspend uses it")


def give_up_arenas(session: Session, quiet: Sequence[Rank]) -> None:
    """Give back the arenas of ranks that are quiet.

    Failing to do so costs memory until the next suspend, which uses them, not the group; `verify` tells who has one.
    """
    # Those that are page-locked apart are unlocked by their shims when the group runs.
    _unlock_pages(session, quiet, "was not given back", bytes=0)


def unlock_arenas(session: Session) -> None:
    """Unlock the arenas, which keep what is in them, for the driver's checkpoint: the load locks them as it copies.

    The driver takes longer to carry what is locked along than to lock it again.  One that stays locked costs that time.
    """
    _unlock_pages(session, session.group.ranks, "stays page-locked", unlock=1)


def _unlock_pages(session: Session, ranks: Sequence[Rank], otherwise: str, **fields: Any) -> None:
    """Ask all for it; what is refused is a warning.  Raises DeadlinePassed on the way down.

    There a shim that is still at it can do nothing else of what has to follow.  On the way back only `open` does, which
    it answers meanwhile.
    """
    if not ranks:
        return
    deadline = Deadline(session.limits.unlock_pages_s)
    with session.timed("unlock-pages", len(ranks)) as phase:
        slots = phases.parallel(ranks, lambda rank: rank.ask("arena", deadline, **fields), session.waiting)
        phase.took(slots)
        for slot in slots:
            if isinstance(slot.error, errors.DeadlinePassed) and session.record.stage is Stage.SUSPENDING:
                raise errors.DeadlinePassed(**{**slot.error.facts, "step": "unlock-pages", "pid": slot.rank.pid})
    for slot in slots:
        if slot.error is not None:
            session.context.warn(f"the arena of pid {slot.rank.pid} {otherwise}: {slot.error}")


def not_running(session: Session) -> dict[int, str]:
    """Return what every member that does not run is in, asked afresh; what does not answer does not run."""
    keepers = [one.pid for one in session.keepers]
    held = {pid: processes.tracer(pid) for pid in session.members}
    found = {pid: f"held by process {keeper}" for pid, keeper in held.items() if keeper in keepers}
    unknown: list[int] = []
    if session.driver_used:
        try:
            for pid, state in session.states().items():
                if state != DriverState.RUNNING:
                    found[pid] = state_name(state)
        except (errors.GpushareError, OSError) as error:
            session.context.warn(str(error))
            unknown = session.group.cuda_pids
    deadline = Deadline(session.limits.request_s)
    for slot in phases.parallel(session.group.ranks, lambda rank: rank.ask("status", deadline).text("phase")):
        phase = slot.values[0] if slot.values else "no answer"
        if phase != "running":
            found.setdefault(slot.rank.pid, phase)
    # A shim opens its gates after the driver has let its process go.
    shimmed = [rank.pid for rank in session.group.ranks]
    return found | {pid: "state unknown" for pid in unknown if pid not in found and pid not in shimmed}


def outcome(session: Session, cause: errors.GpushareError) -> errors.GpushareError | None:
    """Return what a failure on the way back means for the group, nothing if all who live run all the same.

    Then those who do not are in the losses of the session.
    """
    if isinstance(cause, CallsPending):
        return unknown(session, cause)
    if (death := session.death(session.record.step)) is not None:
        session.lose(death)
    stuck = not_running(session)
    if not stuck:
        session.context.warn(f"{cause}; everything that lives runs all the same")
        return None
    failed = [pid for pid, state in stuck.items() if state == DriverState.FAILED.name]
    lost = sorted({*failed, *(pid for loss in session.losses for pid in loss.pids)})
    if lost:
        first = session.losses[0] if session.losses else cause
        also = "" if first is cause else f"; the way back failed too: {cause}"
        return errors.Lost(
            cause=first, lost=lost, count_lost=len(lost), count=len(session.record.members), states=stuck,
            detail=f". {len(stuck)} that live do not run{also}",
        )  # fmt: skip
    kind = errors.StoreDamaged if isinstance(cause, errors.StoreProblem) else errors.StillSuspended
    return kind(
        cause=cause, left=left(session.record, len(stuck)), states=stuck,
        count_suspended=len(stuck), count=len(session.record.members),
    )  # fmt: skip


def left(record: Record, count: int) -> str:
    """Return what a way back that failed leaves of a group, of which so many do not run, by the name `status` has."""
    of_all = f"{count} of {len(record.members)} processes"
    if record.stage is Stage.SUSPENDED:  # it was not begun
        return f"Still suspended: {of_all}"
    return f"Left in phase {record.stage.value}: {of_all} do not run"


def unknown(session: Session, cause: CallsPending) -> errors.StateUnknown:
    """Return the outcome of a driver call that did not come back."""
    return errors.StateUnknown(
        cause=cause, call=cause.facts["step"], pid=cause.pids[0], pids=cause.pids, driver_pid=cause.facts["driver_pid"],
        fate="cut off by the end of" if cause.facts["driver_ended"] else "left in",
    )  # fmt: skip
