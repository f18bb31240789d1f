"""The commands as calls: what each does from the user's words to its report.

Owns the sequence look up, refuse, claim, work, report of suspend, resume, stop and recover.  Must not know option
parsing or output; the steps themselves are in suspend.py, resume.py and recover.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from gpususpend import claims, discover, errors, holder, preflight, processes, recover, resume, suspend
from gpususpend.deadline import Deadline
from gpususpend.discover import Found, Targets
from gpususpend.driver import GpuPairs
from gpususpend.group import Group, group_of
from gpususpend.helpers import HelperFailed
from gpususpend.journal import Depth, Kind, Manner, Member, Record, Stage, StorePlaces
from gpususpend.recover import Goal
from gpususpend.report import GroupReport, Report
from gpususpend.session import Context, Session
from gpususpend.status import ENDED, group_report


def suspend_targets(
    context: Context, targets: Targets, allow_unshimmed: bool, manner: Manner, report: Report
) -> None:
    """Suspend what the targets name, as one group.  Raises errors; `report` holds what is known either way."""
    found = discover.examine_all(targets, context.warn)
    context.interrupts.check_begin()
    expected = None
    if targets.everything:
        expected = {(one.pid, one.process.start_time) for one in found}
        found = _without_suspended(context, found)
        if not found:
            _nothing_left(context, report)
            return
    with _named("the group to be suspended", [one.pid for one in found]):
        _suspend_found(context, found, allow_unshimmed, manner, report, expected)


def _suspend_found(
    context: Context, found: list[Found], allow_unshimmed: bool, manner: Manner, report: Report,
    expected: Collection[tuple[int, int]] | None = None,
) -> None:  # fmt: skip
    """Suspend processes that were looked at; `expected` is everybody whom --all saw."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(claims.exclusive(one.pid for one in found))
        # Children without CUDA that a suspended group has got since say nothing of it: its threads may run.
        deciding = [one for one in found if one.named or one.hello is not None or one.cuda]
        record = claims.check_free(context.journal, [one.pid for one in deciding])
        if record is not None:
            report.groups.append(group_report(context, record))
            _refuse_stale(report.groups[-1])
            if record.depth is not manner.depth:
                raise errors.OtherDepth(pid=record.pids[0], depth=record.depth.value, wanted=manner.depth.value)
            if context.store.named is not None:
                resume.require_same(context.store.named, record)
            report.already = True
            return
        session = stack.enter_context(_prepared(context, found, allow_unshimmed, manner))
        stack.enter_context(_reporting(context, session, report))
        record = stack.enter_context(
            claims.claimed(context, session.group.members, session.driver.version().driver, manner)
        )
        session.record, session.expected = record, expected
        suspend.suspend(session)


def _refuse_stale(group: GroupReport) -> None:
    """Refuse to call a group suspended of which a rank runs: its resume could not write that down."""
    for rank in group.ranks:
        if rank.phase == "running":
            raise errors.NeedsRecover.of_running(rank.pid, Stage.SUSPENDED.value)


def _without_suspended(context: Context, found: list[Found]) -> list[Found]:
    """Return what --all found, less the groups that are suspended already.  Raises NeedsRecover for one that runs."""
    down = {
        pid
        for record in claims.overlapping(context.journal, [one.pid for one in found])
        if record.stage is Stage.SUSPENDED
        for pid in record.pids
    }
    for one in found:
        if one.pid in down and one.hello is not None and one.hello.text("phase") == "running":
            raise errors.NeedsRecover.of_running(one.pid, Stage.SUSPENDED.value)
    return [one for one in found if one.pid not in down]


def _nothing_left(context: Context, report: Report) -> None:
    """Answer where --all finds nothing that runs: groups that are suspended already, or nothing at all."""
    suspended = [record for record in context.journal.records() if record.stage is Stage.SUSPENDED]
    here = [group_report(context, record) for record in suspended if not claims.elsewhere(record)]
    report.groups += [group for group in here if group.state != ENDED]
    if not report.groups:
        raise errors.NothingFound(what="no process with the shim runs here")
    report.already = True


@contextlib.contextmanager
def _prepared(
    context: Context, found: list[Found], allow_unshimmed: bool, manner: Manner
) -> Iterator[Session]:
    """Make the session of a suspend after all refusals; nothing has changed when it is yielded."""
    if not any(one.hello is not None or one.cuda for one in found):
        raise errors.NothingFound(what="none of the named processes uses CUDA")
    preflight.check_driver_kind(found, context.simulated)
    group = _group(found)
    blank = Record("", Stage.SUSPENDING, "preflight", "", context.simulated, "", group.members)
    session = Session(context, group, blank)
    if manner.stored is not None:
        from gpususpend.stored import StoredMemory

        session.stored = StoredMemory(session, manner.stored, context.store)
    try:
        try:
            with session.explained("preflight"):
                _check(context, session, found, allow_unshimmed, manner.depth)
            session.barrier("preflight")
        except errors.RankDied as death:
            raise errors.ProcessGone(pid=death.facts["pid"]) from death
        except errors.SystemCall as denial:
            raise resume.as_cause(session, denial) from denial
        except (errors.StepFailed, HelperFailed) as cause:
            raise errors.LookFailed(cause=cause) from cause
        context.interrupts.check_begin()
        yield session
    finally:
        session.close()


def _check(context: Context, session: Session, found: list[Found], allow_unshimmed: bool, depth: Depth) -> None:
    limits, tools = context.limits, context.tools
    _check_phases(context, session)
    preflight.check_threads(session.group)
    # Before the imports: one whose exporter has no shim is better named by its kind, with the way out.
    preflight.check_uncarried(session.group, limits)
    preflight.check_sharing(session.group, limits)
    settled = preflight.check_unshimmed(found, allow_unshimmed, session.group, limits, session.is_cuda)
    session.group.others = _group(settled).others
    preflight.check_depth(session.group, depth)
    preflight.check_descriptors(session.group, limits)
    preflight.check_driver_version(session.driver.version().driver, context.simulated)
    if depth is Depth.PROCESS:
        session.awake("state", session.group.cuda_pids)
        answers = session.driver.states(session.group.cuda_pids, Deadline(limits.driver_quick_s))
        preflight.check_driver_states(session.group, answers)
    plans, usage = preflight.plans_of(session.group, limits), tools.usage(session.driver)
    preflight.check_bypass(session.group, usage)
    preflight.warn_of_own_memory(plans, usage, depth, context.warn)
    preflight.check_modes(session.group, plans, tools.gpus(session.driver), usage, context.warn)
    devices = session.driver.devices(Deadline(limits.driver_quick_s))
    integrated = [device["uuid"] for device in devices if device["integrated"]]
    preflight.check_integrated(session.group, plans, usage, integrated, session.stored is not None)
    if depth is Depth.PROCESS:
        users = {uuid: gpu.pids for uuid, gpu in usage.items()}
        preflight.warn_of_shared_gpus(session.group.cuda_pids, users, context.warn)
        compute = [device["compute"] for device in devices]
        preflight.warn_of_driver(session.driver.version().driver, compute, context.warn)
    # Not `session.check_threads`: no holder ends on the way down, and one that has these threads is another group's.
    session.holder.check(session.targets(everybody=True), Deadline(limits.threads_s))
    ring_bytes = None
    if session.stored is not None:
        session.stored.check(plans)
        ring_bytes = sum(session.stored.rings({pid: plan.arena_bytes for pid, plan in plans.items()}).values())
    preflight.check_memory(session.group, tools, plans, usage, depth, limits, ring_bytes)


def _check_phases(context: Context, session: Session) -> None:
    """Refuse shims that stand half-way and are in no record here, in the words of the commands that bring back."""
    replies = session.quick("status").items()
    halfway = {pid: reply.text("lease") == "held" for pid, reply in replies if reply.text("phase") != "running"}
    if halfway:
        raise claims.strays(context, halfway)[0]


def _group(found: list[Found]) -> Group:
    return group_of([one.member() for one in found])


@contextlib.contextmanager
def _reporting(context: Context, session: Session, report: Report) -> Iterator[None]:
    """Put the group as it is at the end into the report, whatever the end is."""
    try:
        yield
    finally:
        report.changed |= session.changed
        report.groups.append(session_report(context, session))


def session_report(context: Context, session: Session) -> GroupReport:
    """Return the report of a group that was worked on."""
    group = group_report(context, session.record)
    group.phases = session.times
    group.usage = session.usage
    if session.stored is not None:
        group.stored, group.stored_bytes = session.stored.places, dict(session.stored.bytes)
    group.ended = {member.pid: member.comm for member in session.ended}
    return group


# --- resume


def resume_targets(context: Context, targets: Targets, gpu_map: str | None, report: Report) -> None:
    """Resume every group that the targets touch; one that runs already is left alone."""
    _raise_first(_each_group(context, targets, report, lambda session: _resume(context, session, gpu_map)))


def _resume(context: Context, session: Session, gpu_map: str | None) -> None:
    recover.settle_calls(session)
    pairs: GpuPairs = []
    if gpu_map is not None:
        session.driver.require_map()
        pairs = context.tools.pairs(gpu_map, session.record.gpus, session.driver)
        for old, new in pairs:
            context.progress.say(f"GPU {old} becomes {new}")

    def look() -> None:
        resume.attach_store(session)
        resume.check_threads(session)
        if recover.is_down(session):
            _check_gpus(context, session, dict(pairs))
            preflight.warn_of_long_stop(session.group.cuda_pids, session.record.age_s, context.warn)

    with resume.told(session):
        session.surviving(look)
    suspend.quiet_for_arenas(session)
    resume.resume(session, pairs)


def _check_gpus(context: Context, session: Session, moved: dict[str, str]) -> None:
    usage = context.tools.usage(session.driver)
    preflight.check_room(needed(session.record, session.gone), usage, moved)
    if session.record.depth is Depth.PROCESS:
        # Who shares a GPU within the group was told at the suspend.
        users = {uuid: set(gpu.pids) for uuid, gpu in usage.items() if gpu.pids}
        for member in session.group.members:
            for uuid in {moved.get(old, old) for old in member.device_bytes} & users.keys():
                users[uuid].add(member.pid)
        preflight.warn_of_shared_gpus(session.group.cuda_pids, users, context.warn)


def needed(record: Record, gone: Sequence[Member] = ()) -> dict[str, int]:
    """Return the bytes by GPU that a restore needs: what came free, less what those need no more that are gone.

    At least it is what the others used, as far as the driver told, and what their shims carry: the driver may count
    memory that two of them map for both.
    """
    deep = record.depth is Depth.PROCESS
    less = preflight.total(member.room(deep) for member in gone)
    others = [member for member in record.members if member not in gone]
    least = preflight.total(member.room(deep and len(gone) > 0) for member in others)
    room = {uuid: count - less.get(uuid, 0) for uuid, count in record.room_bytes.items()}
    return {uuid: max(room.get(uuid, 0), least.get(uuid, 0)) for uuid in {*room, *least}}


def _each_group(
    context: Context, targets: Targets, report: Report, work: Callable[[Session], None],
    check: Callable[[list[Record], list[int]], None] = lambda records, others: None,
) -> list[errors.GpushareError]:
    """Run `work` on every group that the targets touch, whatever happens to one of them.

    The first error is raised after all were tried, and the others are told as warnings.

    `check` is asked first, with the records and the named pids that are in none, and may refuse.  Returned is why
    processes were left as they are that nobody named: to be raised when everything else is done.
    """
    records, others = claims.named_records(context, targets)
    stray, left = claims.unrecorded(context, targets)
    if stray is not None:
        records.append(stray)
        others = [pid for pid in others if pid not in stray.pids]
    check(records, others)
    if not records and not left:
        claims.check_tree(others)
        report.already = True
    failures: list[Exception] = []
    for record in records:
        try:
            with _named(f"group {record.id}", record.pids):
                _one_group(context, record, report, work)
        except Exception as error:  # also one that nobody foresaw: the other groups have nothing to do with it
            failures.append(error)
    for other in failures[1:]:
        context.warn(str(other) or type(other).__name__)
    _raise_first(failures)
    return left


class GroupFailed(Exception):
    """What nobody foresaw, with the group that it befell."""


@contextlib.contextmanager
def _named(what: str, pids: Sequence[int]) -> Iterator[None]:
    """Put the group and its processes into an error that nobody foresaw."""
    try:
        yield
    except errors.GpushareError:
        raise
    except Exception as error:
        group = f"{what} (pid {', '.join(map(str, pids))})"
        if isinstance(error, OSError):
            told = OSError(error.errno, f"{group}: {error.strerror or error}", error.filename)
            raise told.with_traceback(error.__traceback__) from error
        raise GroupFailed(f"{group}: {type(error).__name__}: {error}") from error


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]


def _one_group(context: Context, record: Record, report: Report, work: Callable[[Session], None]) -> None:
    if not report.groups:
        context.interrupts.check_begin()
    try:
        with claims.taken(context, record) as now, contextlib.ExitStack() as stack:
            now, gone = claims.living(now)
            if not now.members:
                context.end_holders(now)
                context.forget(now)
                _refuse_reused(gone)
                raise errors.GroupGone(pids=[member.pid for member in gone], pid=gone[0].pid, group=now.id)
            claims.check_heard(now)
            stack.enter_context(claims.exclusive(now.pids))
            session = Session(context, claims.runtime(now), now)
            session.driver_used = now.depth is Depth.PROCESS
            session.gone = [member for member in gone if member.kind is not Kind.PLAIN]
            # They stay in the record until a way back has told their loss.
            session.record = replace(now, members=[*now.members, *session.gone])
            session.let_go([member for member in gone if member.kind is Kind.PLAIN])
            stack.callback(session.close)
            stack.enter_context(_reporting(context, session, report))
            work(session)
    except claims.GroupDone:
        report.already = True


def _refuse_reused(gone: list[Member]) -> None:
    """Refuse where a recorded pid now belongs to a process that was never part of the group."""
    for member in gone:
        if processes.is_same(member.process):  # it became another program
            continue
        with contextlib.suppress(errors.NoSuchProcess, errors.ThreadId):
            raise errors.PidReused(pid=member.pid, comm=processes.read_process(member.pid).comm)


# --- stop


def stop_targets(context: Context, targets: Targets, report: Report) -> None:
    """End the holders of suspended groups: the threads run, the gates hold, a dump can be taken."""
    records, others = claims.named_records(context, targets)
    if not records or (others and not targets.trees):
        raise errors.NotSuspended(pid=others or "(none named)")
    ended = False
    for record in records:
        try:
            with claims.taken(context, record) as now, claims.exclusive(now.pids):
                ended |= _stop(context, now, report)
        except claims.GroupDone:
            raise errors.NotSuspended(pid=record.pids[0]) from None
    report.already = not ended


def _stop(context: Context, record: Record, report: Report) -> bool:
    """End the holders of one group; return whether there was one."""
    if record.stage is not Stage.SUSPENDED:
        raise claims.needs_recover(record)
    if record.depth is Depth.PAGES:
        raise errors.OtherDepth(pid=record.pids[0], depth=record.depth.value, wanted=Depth.PROCESS.value)
    if record.in_place:
        raise errors.NotForADump(pid=record.pids[0])
    for kept in context.tools.holders_of(record):
        holder.check_end(kept)
    report.changed = True  # what fails from here on may leave a holder that was told to end
    ended = context.end_holders(record)
    try:
        record = context.journal.update(record, holder=None, frozen=False)
    except errors.StateNotWritten as problem:
        context.warn(f"{problem}. The threads run, and the record does not say so")
    report.groups.append(group_report(context, record))
    return ended


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

    left = _each_group(context, targets, report, work, check)
    for record in again:
        found = discover.examine_members(record.members)
        context.interrupts.check_begin()
        with _running_if_refused(context):
            manner = Manner(record.depth, record.in_place, _places_anew(context, record))
            _suspend_found(context, found, True, manner, report)
    _raise_first(left)


def _places_anew(context: Context, record: Record) -> StorePlaces | None:
    """Return where the memory of a group goes that was brought up to be suspended anew."""
    if record.stored is None:
        return None
    from gpususpend.stored import beside

    places = beside(record.stored)
    if places.directory != record.stored.directory:
        context.warn(
            f"the checkpoint in {record.stored.directory} is of before the resume that was cut off, and stays; "
            f"the memory as it is now goes to {places.directory}"
        )
    return places


@contextlib.contextmanager
def _running_if_refused(context: Context) -> Iterator[None]:
    """Say what a refusal leaves behind that comes after the way up."""
    try:
        yield
    except (errors.Refused, errors.StoreRefused):
        context.warn("the group runs: it was brought up, and suspending it anew was refused")
        raise
