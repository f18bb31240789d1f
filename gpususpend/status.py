"""What state groups and processes are in, from records, /proc and the shims: no driver is asked, nothing is changed.

Owns the look at groups that every command's report ends with.  Must stay light: `status` is called by probes.
"""

from __future__ import annotations

import contextlib

from gpususpend import claims, discover, errors, origin, phases, processes
from gpususpend.control import Reply
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.discover import Targets
from gpususpend.group import Rank, still_there
from gpususpend.journal import Depth, Kind, Member, Record, Stage
from gpususpend.report import GroupReport, RankReport, Report
from gpususpend.session import Context


def status_targets(context: Context, targets: Targets, report: Report) -> None:
    """Report every group that the targets touch, and the shims that are in none."""
    records, others = claims.named_records(context, targets)
    report.groups += [group_report(context, record) for record in records]
    grouped = {pid for record in records for pid in record.pids}
    loose = []
    for process in _loose(context, targets, grouped, others):
        try:
            found = discover.examine(process)
        except errors.Refused as refusal:
            if process.pid in targets.pids:
                raise
            context.warn(str(refusal))
            continue
        loose.append(found.member())
    if loose:
        ranks = _look(loose)
        halfway = [rank.pid for rank in ranks if rank.phase not in ("running", "-")]
        note = _unrecorded(ranks, halfway) if halfway else _kept(ranks)
        report.groups.append(GroupReport("half-way" if halfway else "running", ranks, note=note))
    if not report.groups:
        report.lines.append("no group is suspended, and no process runs under the shim here")


def _unrecorded(ranks: list[RankReport], pids: list[int]) -> str:
    keepers = dict.fromkeys(processes.tracer(rank.pid) for rank in ranks if rank.lease == "held")
    text = "left half-way by a command whose record is gone, or is in another state directory; "
    held = f"threads are held by process {', '.join(str(pid or '(unknown)') for pid in keepers)}; " if keepers else ""
    return f"{text}{held}run recover {' '.join(map(str, pids))}"


def _loose(context: Context, targets: Targets, grouped: set[int], others: list[int]) -> list[processes.Process]:
    if targets.everything:
        return [one.process for one in discover.select(targets, context.warn) if one.pid not in grouped]
    found = []
    for pid in others:
        with contextlib.suppress(errors.NoSuchProcess):  # it has ended since it was found
            found.append(processes.read_process(pid))
    return found


def group_report(context: Context, record: Record) -> GroupReport:
    """Return a recorded group as it is now."""
    try:
        record = context.journal.read(record.id)
    except (FileNotFoundError, ValueError):
        ranks = _look(record.members)  # done: the record is gone
        state = "not running" if _idle(ranks) else "running"
        return GroupReport(state, ranks, id=record.id or None, not_running=_idle(ranks))
    if kind := claims.elsewhere(record):
        return _unseen(context, record, kind)
    ranks = _look(record.members, record.stage)
    kept = [holder for holder in context.tools.holders_of(record) if holder.alive()]
    group = GroupReport(
        record.stage.value, ranks, id=record.id, step=record.step, holder=kept[0].pid if kept else None,
        not_running=_idle(ranks), depth=record.depth.value, stored=record.stored,
    )  # fmt: skip
    if record.calls:
        calls = ", ".join(f"{call.call} on pid {call.pid} in process {call.driver_pid}" for call in record.calls)
        group.note = f"driver calls have not returned: {calls}; run recover"
    elif record.stage is Stage.SUSPENDED and record.frozen and not kept:
        group.note = "the holder is gone: threads run, the gates hold; run recover"
    elif record.stage is Stage.SUSPENDED and record.depth is Depth.PAGES:
        group.note = "the memory is away, contexts stay on the GPUs; threads run until they come to a gate"
    elif record.stage is Stage.SUSPENDED and not record.frozen:
        group.note = "stopped: no holder, ready for a dump; resume brings it back"
    elif record.stage is not Stage.SUSPENDED:
        group.note = _halfway(context, record)
    return group


def _unseen(context: Context, record: Record, kind: str) -> GroupReport:
    """Return what is recorded of a group of another namespace: from here, nobody knows who of it lives.

    But for its holder in another time namespace, which has the same pid here.
    """
    ranks = [
        RankReport(member.pid, member.inner_pid, member.comm, member.kind.value, "unknown", bytes=member.arena_bytes)
        for member in record.members
    ]
    holder = record.holder_pid
    if holder is not None and kind == "time":
        holder = next(origin.living_there(record.origin, kind, [holder]), None)
    return GroupReport(
        record.stage.value, ranks, id=record.id, step=record.step, holder=holder, not_running=len(ranks),
        depth=record.depth.value, stored=record.stored, note=str(claims.of_elsewhere(context.journal, record, kind)),
    )  # fmt: skip


def _halfway(context: Context, record: Record) -> str:
    try:
        with context.journal.held(record.id, patience_s=0):
            pass
    except errors.Busy as busy:
        return f"a command ({busy.facts['who']}) is at work"
    except errors.Refused as refusal:
        return str(refusal)
    text = f"cut off in {record.step}; run recover"
    return f"{text}: {record.error}" if record.error else text


def _kept(ranks: list[RankReport]) -> str:
    pids = ", ".join(str(rank.pid) for rank in ranks if rank.arena_bytes)
    return f"pid {pids}: the arena of a suspend that turned back; the next one uses it" if pids else ""


def _idle(ranks: list[RankReport]) -> int:
    return sum(rank.state != "running" for rank in ranks)


def _look(members: list[Member], stage: Stage | None = None) -> list[RankReport]:
    """Ask all shims at once; each member becomes one row."""
    shimmed = [Rank(member) for member in members if member.kind is Kind.SHIMMED]
    deadline = Deadline(LIMITS.status_s)
    slots = phases.parallel(shimmed, lambda rank: rank.status(deadline))
    answers = {slot.rank.pid: slot.values[0] if slot.values else None for slot in slots}
    for rank in shimmed:
        rank.client.close()
    return [_row(member, answers.get(member.pid), stage) for member in members]


def _row(member: Member, reply: Reply | None, stage: Stage | None) -> RankReport:
    row = RankReport(
        member.pid, member.inner_pid, member.comm, member.kind.value, "unknown",
        bytes=member.arena_bytes, host_bytes=member.host_bytes,
    )  # fmt: skip
    if reply is not None:
        row.phase, row.lease, row.busy = reply.text("phase"), reply.text("lease", "-"), reply.text("busy", "-")
        row.bytes = reply.number("carried_bytes", row.bytes)
        row.arena_bytes = reply.number("arena_bytes")
        row.state = "running" if row.phase == "running" else "suspended" if row.phase == "sealed" else row.phase
    elif _is_gone(member):
        row.state = "ended" if member.kind is Kind.PLAIN else "dead"
    elif member.kind is Kind.SHIMMED:
        row.phase, row.state = "no answer", "no answer"
    else:
        row.state = "suspended" if stage is Stage.SUSPENDED else "running"
    return row


def _is_gone(member: Member) -> bool:
    try:
        return still_there(member) is None
    except errors.Refused:  # it does not answer
        return False
