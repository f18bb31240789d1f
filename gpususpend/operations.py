"""The commands as calls: what each does from the user's words to its report.

Owns the sequence look up, refuse, claim, work, report of suspend, resume, stop and recover.  Must not know option
parsing or output; the steps themselves are in suspend.py, resume.py and recover.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from gpususpend import claims, discover, errors, preflight, processes, recover, resume, suspend
from gpususpend.deadline import Deadline
from gpususpend.discover import Found, Targets
from gpususpend.driver import GpuPairs
from gpususpend.group import Group, group_of
from gpususpend.helpers import HelperFailed
from gpususpend.journal import Depth, Kind, Member, Record, Stage
from gpususpend.recover import Goal
from gpususpend.report import GroupReport, Report
from gpususpend.session import Context, Session
from gpususpend.status import group_report


def suspend_targets(
    context: Context, targets: Targets, allow_unshimmed: bool, depth: Depth, report: Report
) -> None:
    """Suspend what the targets name, as one group.  Raises errors; `report` holds what is known either way."""
    found = discover.examine_all(targets, context.warn)
    context.interrupts.check_begin()
    if targets.everything:
        found = _without_suspended(context, found)
        if not found:
            _nothing_left(context, report)
            return
    _suspend_found(context, found, allow_unshimmed, depth, report)


def _suspend_found(
    context: Context, found: list[Found], allow_unshimmed: bool, depth: Depth, report: Report
) -> None:
    """Suspend processes that were looked at."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(claims.exclusive(one.pid for one in found))
        # Children without CUDA that a suspended group has got since say nothing of it: its threads may run.
        deciding = [one for one in found if one.named or one.hello is not None or one.cuda]
        record = claims.check_free(context.journal, [one.pid for one in deciding])
        if record is not None:
            report.groups.append(group_report(context, record))
            _refuse_stale(report.groups[-1])
            if record.depth is not depth:
                raise errors.OtherDepth(pid=record.pids[0], depth=record.depth.value, wanted=depth.value)
            report.already = True
            return
        session = stack.enter_context(_prepared(context, found, allow_unshimmed, depth))
        stack.enter_context(_reporting(context, session, report))
        record = stack.enter_context(
            claims.claimed(context, session.group.members, session.driver.version().driver, depth)
        )
        session.record = record
        suspend.suspend(session)


def _refuse_stale(group: GroupReport) -> None:
    """Refuse to call a group suspended of which a rank runs: its resume could not write that down."""
    for rank in group.ranks:
        if rank.phase == "running":
            raise errors.NeedsRecover(pid=rank.pid, phase="running, though its record says suspended,")


def _without_suspended(context: Context, found: list[Found]) -> list[Found]:
    """Return what --all found, less the groups that are suspended already."""
    down = {
        pid
        for record in claims.overlapping(context.journal, [one.pid for one in found])
        if record.stage is Stage.SUSPENDED
        for pid in record.pids
    }
    return [one for one in found if one.pid not in down]


def _nothing_left(context: Context, report: Report) -> None:
    """Answer where --all finds nothing that runs: groups that are suspended already, or nothing at all."""
    records = [record for record in context.journal.records() if record.stage is Stage.SUSPENDED]
    if not records:
        raise errors.NothingFound(what="no process with the shim runs here")
    report.already = True
    report.groups += [group_report(context, record) for record in records]


@contextlib.contextmanager
def _prepared(context: Context, found: list[Found], allow_unshimmed: bool, depth: Depth) -> Iterator[Session]:
    """Make the session of a suspend after all refusals; nothing has changed when it is yielded."""
    if not any(one.hello is not None or one.cuda for one in found):
        raise errors.NothingFound(what="none of the named processes uses CUDA")
    preflight.check_driver_kind(found, context.simulated)
    group = _group(found)
    blank = Record("", Stage.SUSPENDING, "preflight", "", context.simulated, "", group.members)
    session = Session(context, group, blank)
    try:
        try:
            _check(context, session, found, allow_unshimmed, depth)
        except (errors.StepFailed, HelperFailed) as cause:
            raise errors.LookFailed(cause=cause) from cause
        death = session.death("preflight")
        if death is not None:
            raise errors.ProcessGone(pid=death.facts["pid"])
        context.interrupts.check_begin()
        yield session
    finally:
        session.close()


def _check(context: Context, session: Session, found: list[Found], allow_unshimmed: bool, depth: Depth) -> None:
    limits, tools = context.limits, context.tools
    preflight.check_phases(session.group, limits)
    # Before the imports: one whose exporter has no shim is better named by its kind, with the way out.
    preflight.check_uncarried(session.group, limits)
    preflight.check_sharing(session.group, limits)
    settled = preflight.check_unshimmed(found, allow_unshimmed, session.group, limits, session.is_cuda)
    session.group.others = _group(settled).others
    preflight.check_depth(session.group, depth)
    preflight.check_descriptors(session.group, limits)
    preflight.check_driver_version(session.driver.version().driver, context.simulated)
    plans, usage = preflight.plans_of(session.group, limits), tools.usage(session.driver)
    preflight.check_modes(session.group, plans, tools.gpus(session.driver), usage, context.warn)
    session.holder.check(session.targets(everybody=True), Deadline(limits.threads_s))
    preflight.check_memory(session.group, tools, plans, usage, depth, limits)


def _group(found: list[Found]) -> Group:
    return group_of([one.member() for one in found])


@contextlib.contextmanager
def _reporting(context: Context, session: Session, report: Report) -> Iterator[None]:
    """Put the group as it is at the end into the report, whatever the end is."""
    try:
        yield
    finally:
        report.groups.append(session_report(context, session))


def session_report(context: Context, session: Session) -> GroupReport:
    """Return the report of a group that was worked on."""
    group = group_report(context, session.record)
    group.phases = session.times
    group.usage = session.usage
    group.ended = {member.pid: member.comm for member in session.ended}
    return group


# --- resume


def resume_targets(context: Context, targets: Targets, gpu_map: str | None, report: Report) -> None:
    """Resume every group that the targets touch; one that runs already is left alone."""
    _each_group(context, targets, report, lambda session: _resume(context, session, gpu_map))


def _resume(context: Context, session: Session, gpu_map: str | None) -> None:
    recover.settle_calls(session)
    session.driver_used = session.record.depth is Depth.PROCESS
    pairs: GpuPairs = []
    if gpu_map is not None:
        session.driver.require_map()
        pairs = context.tools.pairs(gpu_map, session.record.gpus, session.driver)
        for old, new in pairs:
            context.progress.say(f"GPU {old} becomes {new}")
    with resume.told(session):
        if recover.is_down(session):
            preflight.check_room(needed(session.record), context.tools.usage(session.driver), dict(pairs))
    suspend.quiet_for_arenas(session)
    resume.resume(session, pairs)


def needed(record: Record) -> dict[str, int]:
    """Return the bytes by GPU that a restore needs: what came free, or at least what the shims carry."""
    need = dict(record.room_bytes)
    for uuid, count in preflight.total(member.device_bytes for member in record.members).items():
        need[uuid] = max(need.get(uuid, 0), count)
    return need


def _each_group(
    context: Context, targets: Targets, report: Report, work: Callable[[Session], None],
    check: Callable[[list[Record], list[int]], None] = lambda records, others: None,
) -> None:
    """Run `work` on every group that the targets touch; the first error is raised after all were tried.

    `check` is asked first, with the records and the named pids that are in none, and may refuse.
    """
    records, others = claims.named_records(context, targets)
    stray = claims.unrecorded(context, targets)
    if stray:
        with claims.exclusive(one.pid for one in stray):
            # Looked at again: another command may have been at work on them a moment ago.
            stray = claims.unrecorded(context, targets)
            if stray:
                records.append(claims.adopted(context, stray))
                others = [pid for pid in others if pid not in records[-1].pids]
    check(records, others)
    if not records:
        report.already = True
        return
    failures = []
    for record in records:
        try:
            _one_group(context, record, report, work)
        except errors.GpushareError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _one_group(context: Context, record: Record, report: Report, work: Callable[[Session], None]) -> None:
    if not report.groups:
        context.interrupts.check_begin()
    try:
        with claims.taken(context, record) as now, contextlib.ExitStack() as stack:
            now, gone = claims.living(now)
            if not now.members:
                context.tools.end_holders(now, Deadline(context.limits.threads_s), context.warn)
                context.forget(now)
                _refuse_reused(gone)
                raise errors.GroupGone(pids=[member.pid for member in gone], pid=gone[0].pid, group=now.id)
            stack.enter_context(claims.exclusive(now.pids))
            session = Session(context, claims.runtime(now), now)
            session.gone = [member for member in gone if member.kind is not Kind.PLAIN]
            # They stay in the record until a way back has told their loss.
            session.record = replace(now, members=[*now.members, *session.gone])
            session.let_go([member for member in gone if member.kind is Kind.PLAIN])
            stack.callback(session.close)
            stack.enter_context(_reporting(context, session, report))
            work(session)
    except FileNotFoundError:
        report.already = True  # another command has finished with the group in between


def _refuse_reused(gone: list[Member]) -> None:
    """Refuse where a recorded pid now belongs to a process that was never part of the group."""
    for member in gone:
        with contextlib.suppress(errors.NoSuchProcess, errors.ThreadId):
            raise errors.PidReused(pid=member.pid, comm=processes.read_process(member.pid).comm)


# --- stop


@contextlib.contextmanager
def _still_there(record: Record) -> Iterator[None]:
    """Refuse where another command has brought the group back meanwhile."""
    try:
        yield
    except FileNotFoundError:
        raise errors.NotSuspended(pid=record.pids[0]) from None


def stop_targets(context: Context, targets: Targets, report: Report) -> None:
    """End the holders of suspended groups: the threads run, the gates hold, a dump can be taken."""
    records, others = claims.named_records(context, targets)
    if not records or (others and not targets.trees):
        raise errors.NotSuspended(pid=others or "(none named)")
    changed = False
    for record in records:
        with _still_there(record), claims.taken(context, record) as now, claims.exclusive(now.pids):
            if now.stage is not Stage.SUSPENDED:
                raise errors.NeedsRecover(pid=now.members[0].pid, phase=f"{now.stage.value}: {now.step}")
            if now.depth is Depth.PAGES:
                raise errors.OtherDepth(pid=now.pids[0], depth=now.depth.value, wanted=Depth.PROCESS.value)
            changed |= context.tools.end_holders(now, Deadline(context.limits.threads_s), context.warn)
            try:
                now = context.journal.update(now, holder=None, frozen=False)
            except errors.StateNotWritten as problem:
                context.warn(f"{problem}. The threads run, and the record does not say so")
            report.groups.append(group_report(context, now))
    report.already = not changed


# --- recover


def recover_targets(context: Context, targets: Targets, goal: Goal, report: Report) -> None:
    """Bring every group that the targets touch to running or to suspended."""
    again: list[Record] = []
    reached: list[bool] = []

    def work(session: Session) -> None:
        recover.settle_calls(session)
        before = session.record
        if not recover.recover(session, goal):
            again.append(session.record)
        reached.append(session.record != before or not session.times)

    def check(records: list[Record], others: list[int]) -> None:
        loose = [pid for pid in others if pid in targets.pids or (not records and pid in targets.trees)]
        if loose and goal is Goal.SUSPENDED:
            raise errors.NothingToRecover(pid=loose)

    _each_group(context, targets, report, work, check)
    for record in again:
        found = discover.examine_members(record.members)
        context.interrupts.check_begin()
        _suspend_found(context, found, allow_unshimmed=True, depth=record.depth, report=report)
