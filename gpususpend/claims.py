"""Which groups a command works on, and that no other command works on them.

Owns looking up records by what the user named, and claiming.  Must not know the steps.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpususpend import control, discover, errors, holder, processes
from gpususpend.deadline import Deadline
from gpususpend.discover import Found, Targets
from gpususpend.group import Group, Rank, group_of, still_there, still_there_without_shim
from gpususpend.journal import Depth, Journal, Kind, Member, Record, Stage, new_id
from gpususpend.session import Context


def overlapping(journal: Journal, pids: Sequence[int]) -> list[Record]:
    """Return the records with a living member among `pids`."""
    wanted = set(pids)
    return [
        record
        for record in journal.records()
        if any(member.pid in wanted and still_there(member) for member in record.members)
    ]


def check_free(journal: Journal, pids: Sequence[int]) -> Record | None:
    """Return the record of the suspended group that holds all of `pids`, None if none of them is in any group.

    Raises MixedStates if only some are suspended, NeedsRecover if a command was cut off half-way.
    """
    records = overlapping(journal, pids)
    if not records:
        return None
    for record in records:
        if record.stage is not Stage.SUSPENDED:
            # Perhaps a command is at work on it this very moment; then that is the better answer.
            with journal.held(record.id):
                raise errors.NeedsRecover(pid=record.members[0].pid, phase=f"{record.stage.value}: {record.step}")
    suspended = {pid for record in records for pid in record.pids}
    outside = [pid for pid in pids if pid not in suspended]
    if outside or len(records) > 1:
        raise errors.MixedStates(suspended=sorted(suspended & set(pids)), running=outside or "of one group")
    return records[0]


@contextlib.contextmanager
def claimed(
    context: Context, members: Sequence[Member], driver: str, depth: Depth = Depth.PROCESS
) -> Iterator[Record]:
    """Write the record of a new group and hold it; raises if one of the processes belongs to another group."""
    journal = context.journal
    record = Record(
        id=new_id(), stage=Stage.SUSPENDING, step="preflight", simulated=context.simulated, driver=driver,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), members=list(members),
        depth=depth,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        with journal.choosing():
            if check_free(journal, record.pids) is not None:
                raise errors.Busy(pid=0, group="", pids=record.pids)
            stack.enter_context(journal.held(record.id))
            journal.write(record)
        yield record


@contextlib.contextmanager
def exclusive(pids: Iterable[int]) -> Iterator[None]:
    """Keep every other command from these processes: also root's, or one with another state directory.

    By a lock on what the kernel shows of the process to those only who may work on it, and frees when this one dies.
    """
    with contextlib.ExitStack() as stack:
        for pid in sorted(set(pids)):
            try:
                fd = os.open(f"{processes.PROC}/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # it has ended, or is refused for that reason
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise errors.Busy(pid=processes.lock_holder(os.fstat(fd).st_ino), group="", pids=[pid]) from None
        yield


@contextlib.contextmanager
def taken(context: Context, record: Record) -> Iterator[Record]:
    """Hold an existing group; yields the record as it is now.  Raises FileNotFoundError if it is done meanwhile."""
    with context.journal.held(record.id, record.pids):
        yield context.journal.read(record.id)


def named_records(context: Context, targets: Targets) -> tuple[list[Record], list[int]]:
    """Return the records of the groups that the targets touch, and the named pids that are in none.

    Raises NoSuchProcess or ThreadId for a pid that was named and is neither in a group nor a process.
    """
    records = context.journal.records()
    if targets.everything:
        return records, []
    wanted = named_pids(targets)
    chosen = [record for record in records if wanted & set(record.pids)]
    inside = {pid for record in chosen for pid in record.pids}
    for pid in {*targets.pids, *targets.trees} - inside:
        processes.read_process(pid)
    return chosen, sorted(wanted - inside)


def named_pids(targets: Targets) -> set[int]:
    """Return the pids that were named, with trees; a tree's root need not live any more."""
    if not targets:
        raise errors.NoTarget()
    below = processes.descendants(targets.trees, processes.all_processes()) if targets.trees else []
    return {*targets.pids, *targets.trees, *(process.pid for process in below)}


def living(record: Record) -> tuple[Record, list[Member]]:
    """Return the record with its members as they live now, and the members that are gone."""
    now = [(member, still_there(member)) for member in record.members]
    if any(found is not None and found.start_time != member.start_time for member, found in now):
        # Restored from a dump: members without a shim have new start times, too.
        now = [(member, found or _without_shim(member)) for member, found in now]
    gone = [member for member, found in now if found is None]
    return replace(record, members=[found for _, found in now if found is not None]), gone


def _without_shim(member: Member) -> Member | None:
    return None if member.kind is Kind.SHIMMED else still_there_without_shim(member)


def unrecorded(context: Context, targets: Targets) -> list[Found]:
    """Return the shims among the targets that stand half-way and are in no record here.

    The state directory was lost, or stayed on another machine: a group that was dumped and restored arrives like this.
    Raises HeldElsewhere for a named process that a holder of another state directory keeps.
    """
    if targets.implied:
        # Another command, with another state directory, may be at work on such a shim right now.
        return []
    known = {member.pid for record in context.journal.records() for member in record.members}
    wanted = None if targets.everything else named_pids(targets)
    # The record may be lost or damaged where the holder's own is not.
    kept = {pid for record in holder.records(context.tools.state_dir) if record.alive() for pid in record.targets}
    found = []
    for inner_pid in control.listeners():
        if inner_pid in known or (wanted is not None and inner_pid not in wanted):
            continue
        try:
            one = discover.examine(processes.read_process(inner_pid))
            if one.hello is None:
                continue
            status = Rank(one.member()).status(Deadline(context.limits.request_s))
        except errors.Refused:
            if inner_pid in targets.pids:
                raise
            continue
        except errors.StepFailed as failure:
            if inner_pid in targets.pids:
                raise errors.NoAnswer(pid=inner_pid, detail=str(failure)) from None
            continue
        if status.text("phase") == "running":
            continue
        if status.text("lease") == "held" and one.pid not in kept:
            if wanted is not None:
                raise errors.HeldElsewhere(pid=one.pid, holder=processes.tracer(one.pid) or "(unknown)")
            continue
        found.append(one)
    return found


def adopted(context: Context, found: Sequence[Found]) -> Record:
    """Write a record for shims that stand half-way and are in none."""
    members = [one.member() for one in found]
    hello = found[0].hello
    assert hello is not None
    record = Record(
        id=new_id(), stage=Stage.SUSPENDED, step="found", simulated=hello.number("simulated") == 1,
        driver=hello.text("driver"), members=members,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    return context.journal.write(record)


def runtime(record: Record) -> Group:
    """Return the group of a record with fresh connections."""
    return group_of(record.members)
