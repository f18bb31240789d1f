"""Recover: finish what a killed command, a killed holder or a call past its deadline left.

Owns the decision where a group shall go, from its record and from what the shims and the driver say now.  Must not know
the steps themselves: it uses the paths of suspend and resume.
"""

from __future__ import annotations

from enum import Enum

from gpususpend import driver, errors
from gpususpend.control import Silence
from gpususpend.deadline import Deadline
from gpususpend.driver import DriverState
from gpususpend.journal import Depth, PendingCall, Record, Stage
from gpususpend.resume import attach_store, check_threads, resume, told
from gpususpend.session import Context, Session
from gpususpend.suspend import freeze_again, leave, quiet_for_arenas


class Goal(str, Enum):
    """Where recover shall bring a group."""

    RECORDED = "recorded"  # suspended where it was suspended, else running
    RUNNING = "running"
    SUSPENDED = "suspended"


def settle_calls(session: Session) -> None:
    """Wait for driver calls that an earlier command left behind, as long as for one of our own.

    Raises StateUnknown if one still runs, StillSuspended where somebody keeps a process stopped that has to run for it,
    NotBegun at a signal.
    """
    context, calls = session.context, calls_left(session.context, session.record)
    if not calls:
        return
    limits = context.limits
    is_short = all(call.call in ("lock", "unlock") for call in calls)
    deadline = Deadline(limits.timeout_s if is_short else limits.checkpoint_timeout_s)
    context.progress.say(f"waiting for {len(calls)} driver call(s) that an earlier command left")
    waits = [Silence(call.pid, call.call) for call in calls]

    def look() -> None:
        context.interrupts.check_begin()
        with told(session):
            for wait in waits:
                wait.look()

    returned = context.tools.await_calls(calls, deadline, look)
    if not returned:
        call = calls[0]
        raise errors.StateUnknown(
            cause=errors.DeadlinePassed(step=call.call, pid=call.pid, seconds=deadline.seconds, detail="still running"),
            call=call.call, pid=call.pid, driver_pid=call.driver_pid, fate="left in",
        )  # fmt: skip
    for leftover in driver.leftovers(context.tools.state_dir):
        over = all(result.finished for result in leftover.results.values()) or not leftover.alive()
        if over and any(leftover.pid == call.driver_pid for call in calls):
            driver.forget(context.tools.state_dir, leftover)
    session.note(calls=[])


def calls_left(context: Context, record: Record) -> list[PendingCall]:
    """Return the calls of the record, and those of a command that was killed in one: its driver process tells."""
    calls = list(record.calls)
    for leftover in driver.leftovers(context.tools.state_dir):
        calls += [
            PendingCall(pid, call, leftover.pid, leftover.start_time)
            for call, pid in leftover.results
            if pid in record.pids
        ]
    return list(dict.fromkeys(calls))


def recover(session: Session, goal: Goal) -> bool:
    """Bring a group to a whole state; False if it now runs though it was to be suspended.

    That happens where a suspend was cut off before the checkpoint: then the way back comes first, and the caller
    suspends anew.  Raises outcomes as suspend and resume do.
    """
    with told(session):
        session.surviving(lambda: attach_store(session))
        if goal is Goal.RECORDED:
            goal = session.surviving(lambda: recorded(session))
        if goal is Goal.SUSPENDED and session.surviving(lambda: is_down(session)):
            session.surviving(lambda: complete(session))
            if session.record.error:
                session.note(error="")
            return True
        session.surviving(lambda: check_threads(session))
    quiet_for_arenas(session)
    resume(session)
    return goal is not Goal.SUSPENDED


def recorded(session: Session) -> Goal:
    """Return where a group was: suspended, unless a gate has been opened since, which only a resume does.

    Also one that could not write it down.
    """
    resumed = any(reply.text("phase") == "running" for reply in session.quick("status").values())
    return Goal.SUSPENDED if session.record.stage is Stage.SUSPENDED and not resumed else Goal.RUNNING


def complete(session: Session) -> None:
    """Do what a suspend has left to do for a group whose memory is away."""
    record = session.record
    for member in session.gone:
        session.context.warn(f"pid {member.pid} ({member.comm}) has ended; the resume will say what is lost with it")
    unfinished = record.stage is not Stage.SUSPENDED
    if record.depth is Depth.PAGES:
        if unfinished:
            leave(session, {})
        return
    holders = session.context.tools.holders_of(record)
    if unfinished or (record.frozen and not any(kept.alive() for kept in holders)):
        session.check_threads(everybody=True)
        session.changed = True
        session.thaw()
        freeze_again(session)


def is_down(session: Session) -> bool:
    """Tell whether everything is away from the GPUs: all that may be missing is the freeze."""
    states = session.states() if session.driver_used else {}
    phases = [reply.text("phase") for reply in session.quick("status").values()]
    down = all(state == DriverState.CHECKPOINTED for state in states.values())
    return down and all(phase == "sealed" for phase in phases)
