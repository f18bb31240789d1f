"""What state groups and processes are in, from records, /proc and the shims: no driver is asked, nothing is changed.

Owns the look at groups that every command's report ends with.  Must stay light: `status` is called by probes.
"""

from __future__ import annotations

import contextlib
import os

from gpususpend import claims, control, discover, errors, origin, phases, processes, system
from gpususpend.control import Reply
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS, SAME_PIDS
from gpususpend.discover import Targets
from gpususpend.group import Rank, still_there
from gpususpend.journal import Depth, Kind, Member, Record, Stage
from gpususpend.report import GroupReport, RankReport, Report
from gpususpend.session import Context

ENDED = "ended"
GONE = (ENDED, "dead")
MUTE, DENIED = "no answer", "denied"


def status_targets(context: Context, targets: Targets, report: Report) -> None:
    """Report every group that the targets touch, and the shims that are in none."""
    records, others = claims.named_records(context, targets)
    report.groups += [group_report(context, record) for record in records]
    grouped = {pid for record in records for pid in record.pids}
    loose = []
    for process in _loose(context, targets, grouped, others):
        by = processes.stopped_by(process.pid)
        if by and process.pid not in targets.pids and control.listens(process):
            advice = errors.let_run(process.pid)
            context.warn(f"pid {process.pid} is passed over: it is stopped {by}, and cannot answer; {advice}")
            continue
        try:
            found = discover.examine(process)
        except errors.Refused as refusal:
            if process.pid in targets.pids:
                raise
            context.warn(str(refusal))
            continue
        if found.silent:
            context.warn(str(errors.NoSocket(pid=found.pid, comm=process.comm, names=SAME_PIDS)))
        loose.append(found.member())
    if loose:
        ranks = _look(loose)
        halfway = [rank for rank in ranks if rank.phase not in ("running", "-")]
        told = _strays(context, halfway, targets.implied) if halfway else _kept(ranks)
        note = _joined(told, _mute(ranks))
        report.groups.append(GroupReport("half-way" if halfway else "running", ranks, note=note))
    if not report.groups:
        report.lines.append("no group is suspended, and no process runs under the shim here")


def _strays(context: Context, ranks: list[RankReport], implied: bool) -> str:
    """Return what is to be done about ranks in no record: nothing while a command, of another place, is at work."""
    busy = {rank.pid: claims.at_work_on(rank.pid) for rank in ranks}
    left = {rank.pid: rank.lease == "held" for rank in ranks if not busy[rank.pid]}
    told = [_at_work(errors.Busy.by(pid)) for pid in dict.fromkeys(busy.values()) if pid]
    return ". ".join([*told, *map(str, claims.strays(context, left, implied))])


def _at_work(busy: errors.Busy) -> str:
    return f"a command ({busy.facts['who']}) is at work"


def _loose(context: Context, targets: Targets, grouped: set[int], others: list[int]) -> list[processes.Process]:
    if targets.everything:
        try:
            return [one.process for one in discover.select(targets, context.warn) if one.pid not in grouped]
        except OSError as error:
            if not (grouped and system.denied(error)):
                raise
            context.warn(f"processes in no group are not shown: {error.strerror}")
            return []
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
    state, taken = _state(record, ranks), _taken(context, record)
    if isinstance(taken, errors.Busy):
        state, note = record.stage.value, _at_work(taken)
    else:
        note = _joined(_note(record, state, ranks, held=bool(kept)), str(taken or ""))
    return GroupReport(
        state, ranks, id=record.id, step=record.step, holder=kept[0].pid if kept else None, not_running=_idle(ranks),
        depth=record.depth.value, stored=record.stored, note=_joined(note, _mute(ranks)),
    )  # fmt: skip


def _state(record: Record, ranks: list[RankReport]) -> str:
    """Return what a group is in, where no command is at work on it: its record may not say how far it has come."""
    running = [rank.phase == "running" for rank in ranks if rank.phase != "-"]
    if all(rank.state in GONE for rank in ranks):
        return ENDED
    suspended = record.stage is Stage.SUSPENDED
    if record.stage is Stage.SUSPENDING or not any(running):
        return record.stage.value
    if all(running) and (suspended or not record.error):
        return "running"
    return Stage.RESUMING.value if suspended else record.stage.value  # only a way back opens gates


def _note(record: Record, state: str, ranks: list[RankReport], held: bool) -> str:
    """Return what is to be known of a group, and done: what the command that failed said, if it could."""
    if state == ENDED:
        return f"no process of it lives any more; {errors.run_recover(record.pids[0])}, which drops the record"
    running = [rank.pid for rank in ranks if rank.phase == "running"]
    if running and (state == "running" or record.stage is Stage.SUSPENDED):
        return str(errors.NeedsRecover.of_running(running[0], record.stage.value))
    if record.stage is not Stage.SUSPENDED:
        return str(claims.needs_recover(record))
    said = f"the last command said: {record.error}" if record.error else ""
    again = ""
    if record.frozen and not held:
        again = ("see to that, then " if said else "") + errors.run_recover(record.pids[0])
    return _joined(_suspended(record, held), _dead(ranks), said, again)


def _dead(ranks: list[RankReport]) -> str:
    """Return what is to be known of members with CUDA that have ended while the group was suspended."""
    pids = ", ".join(str(rank.pid) for rank in ranks if rank.state == "dead")
    return f"pid {pids} has ended: a resume brings back the others, and says what is lost with it" if pids else ""


def _suspended(record: Record, held: bool) -> str:
    if record.depth is Depth.PAGES:
        return "the memory is away, contexts stay on the GPUs; threads run until they come to a gate"
    if record.frozen and not held:
        return "the holder is gone: threads run, the gates hold"
    return "" if record.frozen else "stopped: no holder, ready for a dump; resume brings it back"


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


def _taken(context: Context, record: Record) -> errors.Refused | None:
    """Return why another command could not take the group now: one but this is at work on it, or the lock is odd."""
    try:
        with context.journal.held(record.id, patience_s=0):
            return None
    except errors.Busy as busy:
        return None if busy.facts["pid"] == os.getpid() else busy
    except errors.Refused as refusal:
        return refusal


def _mute(ranks: list[RankReport]) -> str:
    """Return why shims have not answered: whether they are suspended is not known.

    And which processes without one somebody keeps stopped besides: the driver would wait for them.
    """
    late = f"did not answer within {LIMITS.status_s:g} s: it may be busy"
    told = []
    for rank in ranks:
        if rank.state == MUTE or (rank.kind == Kind.UNSHIMMED.value and rank.state not in GONE):
            by = processes.stopped_by(rank.pid, each_thread=True)
            if by:
                told.append(f"pid {rank.pid} is stopped {by}; {errors.let_run(rank.pid)}")
            elif rank.state == MUTE:
                told.append(f"pid {rank.pid} {late}")
        if rank.state == DENIED:
            told.append(f"pid {rank.pid} cannot be asked: a seccomp filter or a security module denies that")
    return "; ".join(told)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _kept(ranks: list[RankReport]) -> str:
    pids = ", ".join(str(rank.pid) for rank in ranks if rank.arena_bytes)
    return f"pid {pids}: the arena of a suspend that turned back; the next one uses it" if pids else ""


def _idle(ranks: list[RankReport]) -> int:
    return sum(rank.state != "running" for rank in ranks)


def _look(members: list[Member], stage: Stage | None = None) -> list[RankReport]:
    """Ask all shims at once; each member becomes one row."""
    shimmed = [Rank(member) for member in members if member.kind is Kind.SHIMMED]
    deadline = Deadline(LIMITS.status_s)
    slots = phases.parallel(shimmed, lambda rank: _ask(rank, deadline))
    answers = {slot.rank.pid: slot.values[0] if slot.values else None for slot in slots}
    denied = {slot.rank.pid for slot in slots if isinstance(slot.error, errors.SystemCall)}
    for rank in shimmed:
        rank.client.close()
    silent = {member.pid: DENIED if member.pid in denied else MUTE for member in members}
    return [_row(member, answers.get(member.pid), stage, silent[member.pid]) for member in members]


def _ask(rank: Rank, deadline: Deadline) -> Reply | None:
    """Return a shim's status; None of one that has come after an exec, or with another process of that pid."""
    nonce = rank.member.nonce
    if nonce and int(nonce, 16) and rank.ask("hello", deadline).text("nonce") != nonce:
        return None
    return rank.status(deadline)


def _row(member: Member, reply: Reply | None, stage: Stage | None, silent: str) -> RankReport:
    row = RankReport(
        member.pid, member.inner_pid, member.comm, member.kind.value, "unknown",
        bytes=member.arena_bytes, host_bytes=member.host_bytes,
    )  # fmt: skip
    if reply is not None:
        row.phase, row.busy = reply.text("phase"), reply.text("busy", "-")
        row.bytes = reply.number("carried_bytes", row.bytes)
        row.arena_bytes = reply.number("arena_bytes")
        row.state = "running" if row.phase == "running" else "suspended" if row.phase == "sealed" else row.phase
        # Who kept its threads stopped says nothing of a process that runs.
        row.lease = "-" if row.phase == "running" else reply.text("lease", "-")
    elif _is_gone(member):
        row.state = "ended" if member.kind is Kind.PLAIN else "dead"
    elif member.kind is Kind.SHIMMED:
        row.phase = row.state = silent
    else:
        row.state = "suspended" if stage is Stage.SUSPENDED else "running"
    return row


def _is_gone(member: Member) -> bool:
    try:
        return still_there(member) is None
    except errors.Refused:  # it does not answer
        return False
