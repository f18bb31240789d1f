"""Which groups a command works on, and that no other command works on them.

Owns looking up records by what the user named, and claiming.  Must not know the steps.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpususpend import control, discover, errors, holder, openfiles, origin, preflight, processes
from gpususpend.deadline import Deadline
from gpususpend.defaults import COMMAND
from gpususpend.discover import Found, Targets
from gpususpend.group import Group, Rank, group_of, still_there, still_there_without_shim
from gpususpend.journal import Journal, Kind, Manner, Member, Record, Stage, new_id
from gpususpend.session import Context

_restored: dict[tuple[str, tuple[str, ...]], bool] = {}


def overlapping(journal: Journal, pids: Sequence[int]) -> list[Record]:
    """Return the records with a living member among `pids`."""
    wanted = set(pids)
    return [
        record
        for record in journal.records()
        if any(member.pid in wanted and still_there(member) for member in record.members)
    ]


def check_unneeded(journal: Journal, directory: str, id: str | None) -> None:
    """Refuse to let a checkpoint go that holds the memory of a living group, found by its directory or by its id.

    Raises CheckpointNeeded.
    """
    for record in journal.records():
        stored = record.stored
        if stored is not None and (stored.directory == directory or (id is not None and stored.checkpoint == id)):
            members = living(record)[0].members or (record.members if elsewhere(record) else [])
            if members:
                raise errors.CheckpointNeeded(
                    directory=directory, pid=members[0].pid, group=record.id, stage=record.stage.value
                )


def elsewhere(record: Record) -> str:
    """Return the namespace, `pid` or `time`, in which a record was written whose group cannot be judged from here.

    "" for a group of here: also one that was restored from a dump in another container than it was recorded in.
    """
    kind = origin.other(record.origin)
    if kind != "pid":
        return kind
    # Asked once in a command: who has one of these pids here may not answer, and is waited for.
    key = (record.id, tuple(member.nonce for member in record.members))
    if key not in _restored:
        _restored[key] = any(_restored_here(member) for member in record.members)
    return "" if _restored[key] else kind


def _restored_here(member: Member) -> bool:
    """Tell whether the shim under a member's pid has its nonce; no start time says anything in another namespace."""
    if member.kind is not Kind.SHIMMED or not member.nonce or int(member.nonce, 16) == 0:
        return False
    try:
        return still_there(replace(member, start_time=-1)) is not None
    except errors.Refused:  # whoever has that pid here does not answer
        return False


def check_here(journal: Journal, record: Record) -> None:
    """Refuse a group whose members cannot be told living from dead.  Raises OtherPidNamespace, OtherTimeNamespace."""
    if kind := elsewhere(record):
        raise of_elsewhere(journal, record, kind)


def of_elsewhere(journal: Journal, record: Record, kind: str) -> errors.Refused:
    """Return the refusal of a group of another namespace of this kind: where it can be worked on, or what is left."""
    pid, path, holder_pid = record.pids[0], journal.path(record.id), record.holder_pid
    first = [*([] if holder_pid is None else [holder_pid]), *record.pids]  # these stay, others may be gone in a moment
    others = (process.pid for process in processes.all_processes())
    there = next(origin.living_there(record.origin, kind, itertools.chain(first, others)), 0)
    if kind == "pid":
        return errors.OtherPidNamespace.of_group(pid, record.id, path, there)
    kept = record.stored
    places = ["--store", kept.store, "--ckpt-dir", kept.directory] if kept is not None else []
    resume = shlex.join([COMMAND, "resume", *map(str, record.pids), *places])
    return errors.OtherTimeNamespace.of_group(pid, record.id, path, there, resume)


def check_free(journal: Journal, pids: Sequence[int]) -> Record | None:
    """Return the record of the suspended group that holds all of `pids`, None if none of them is in any group.

    Raises MixedStates if only some are suspended, NeedsRecover if a command was cut off half-way.
    """
    records = overlapping(journal, pids)
    if not records:
        return None
    for record in records:
        check_here(journal, record)
        if record.stage is not Stage.SUSPENDED:
            # Perhaps a command is at work on it this very moment; then that is the better answer.
            with journal.held(record.id):
                raise needs_recover(record)
    suspended = {pid for record in records for pid in record.pids}
    outside = [pid for pid in pids if pid not in suspended]
    if outside or len(records) > 1:
        raise errors.MixedStates(suspended=sorted(suspended & set(pids)), running=outside or "of one group")
    return records[0]


def needs_recover(record: Record) -> errors.NeedsRecover:
    """Return the refusal of a group that an earlier command left half-way."""
    return errors.NeedsRecover.of_group(record.pids[0], record.stage.value, record.step, record.error)


@contextlib.contextmanager
def claimed(
    context: Context, members: Sequence[Member], driver: str, manner: Manner
) -> Iterator[Record]:
    """Write the record of a new group and hold it; raises if one of the processes belongs to another group."""
    journal = context.journal
    record = Record(
        id=new_id(), stage=Stage.SUSPENDING, step="preflight", simulated=context.simulated, driver=driver,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), members=list(members),
        depth=manner.depth, in_place=manner.in_place, origin=origin.here(),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        with journal.choosing():
            other = check_free(journal, record.pids)
            if other is not None:
                who = f"which has just suspended them as group {other.id}"
                raise errors.Busy(pid=None, who=who, group=other.id, pids=record.pids)
            stack.enter_context(journal.held(record.id))
            journal.write(record)
        yield record


@contextlib.contextmanager
def exclusive(pids: Iterable[int]) -> Iterator[None]:
    """Keep every other command from these processes: also root's, or one with another state directory.

    By a lock on what the kernel shows of the process to those only who may work on it, and frees when this one dies.
    """
    each = sorted(set(pids))
    openfiles.reserve(len(each))
    with contextlib.ExitStack() as stack:
        for pid in each:
            try:
                fd = os.open(f"{processes.PROC}/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # it has ended, or is refused for that reason
            stack.callback(os.close, fd)
            if (holder_pid := processes.lock(fd)) is not None:
                raise errors.Busy.by(holder_pid, group="", pids=[pid])
        yield


def at_work_on(pid: int) -> int:
    """Return the command that has a process by `exclusive`, 0 if none is seen; takes nothing."""
    with contextlib.suppress(OSError):
        return processes.lock_holder(os.stat(f"{processes.PROC}/{pid}/environ").st_ino)
    return 0


class GroupDone(Exception):
    """Another command has finished with the group: its record is gone."""


@contextlib.contextmanager
def taken(context: Context, record: Record) -> Iterator[Record]:
    """Hold an existing group; yields the record as it is now.

    Raises GroupDone if there is none any more, and what `check_here` raises.
    """
    with context.journal.held(record.id, record.pids):
        try:
            now = context.journal.read(record.id)
        except FileNotFoundError:
            raise GroupDone(record.id) from None
        check_here(context.journal, now)
        yield now


def named_records(context: Context, targets: Targets) -> tuple[list[Record], list[int]]:
    """Return the records of the groups that the targets touch, and the named pids that are in none.

    Raises NoSuchProcess or ThreadId for a pid that was named and is neither in a group nor a process, and what
    `processes.check_reachable` raises.
    """
    records = context.journal.records()
    if targets.everything:
        return records, []
    wanted = named_pids(targets)
    spelled = {*targets.pids, *targets.trees}
    # The numbers of another pid namespace mean its processes only where they were given as such.
    chosen = [record for record in records if _meant(record) & (spelled if elsewhere(record) == "pid" else wanted)]
    inside = {pid for record in chosen for pid in _meant(record)}
    for pid in spelled - inside:
        process = processes.read_process(pid)
        if pid in targets.pids:
            processes.check_reachable(process)
    return chosen, sorted(wanted - inside)


def _meant(record: Record) -> set[int]:
    """Return the pids of a record, but for those that it has from another pid namespace and that are ranks of here."""
    return set(record.pids) if elsewhere(record) != "pid" else {pid for pid in record.pids if not _is_rank(pid)}


def _is_rank(pid: int) -> bool:
    """Tell whether a process of here has this pid and a shim."""
    try:
        return discover.examine(processes.read_process(pid)).hello is not None
    except errors.Refused:
        return False


def check_tree(pids: Iterable[int]) -> None:
    """Refuse what --tree found where nothing is to be done, but a process that cannot be looked into may be a rank.

    Raises OtherPidNamespace, OtherNetNamespace.
    """
    for pid in pids:
        try:
            processes.check_reachable(processes.read_process(pid))
        except (errors.OtherPidNamespace, errors.OtherNetNamespace):
            raise
        except errors.Refused:  # of another user, or ended
            continue


def check_heard(record: Record) -> None:
    """Refuse a group whose shims listen in another network namespace.  Raises OtherNetNamespace."""
    for member in record.members:
        if member.kind is Kind.SHIMMED:
            with contextlib.suppress(errors.OtherUser, errors.ProcessGone, errors.CannotTrace):
                processes.check_reachable(member.process)


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
    return replace(record, members=[found for _, found in now if found is not None], origin=origin.here()), gone


def _without_shim(member: Member) -> Member | None:
    return None if member.kind is Kind.SHIMMED else still_there_without_shim(member)


def unrecorded(context: Context, targets: Targets) -> tuple[Record | None, list[errors.GpushareError]]:
    """Write a record for the shims among the targets that stand half-way and are in none; return it.

    The state directory was lost, or stayed on another machine: a group that was dumped and restored arrives like this.
    Beside it stands why others are left as they are: a holder of another state directory keeps them, another command
    is at work on them or, where nothing was named, they may be the group of another state directory.
    Raises the reason, before anything is written, where it is one of a process that was named.
    """
    left: list[errors.GpushareError] = []
    with contextlib.ExitStack() as stack:
        free, seen = set(), _halfway(context, targets)
        openfiles.reserve(len(seen))
        for one, _ in seen:
            try:
                stack.enter_context(exclusive([one.pid]))
                free.add(one.pid)
            except errors.Busy as busy:
                # What another command is at work on, nobody has to be told who named nothing.
                left += [] if targets.implied else [busy]
        # Looked at again: another command may have been at work on them a moment ago.
        seen = [(one, held) for one, held in _halfway(context, targets) if one.pid in free] if free else []
        ours, others = _sorted_out(context, {one.pid: held for one, held in seen}, targets.implied)
        left += others
        if left and not targets.everything:
            raise left[0]
        if ours and not (targets.implied or targets.everything):
            preflight.check_whole([one.member() for one, _ in seen if one.pid in ours], context.limits)
        return adopted(context, [one for one, _ in seen if one.pid in ours]) if ours else None, left


def strays(context: Context, seen: Mapping[int, bool], implied: bool = False) -> list[errors.GpushareError]:
    """Return what is to be done about shims that stand half-way and are in no record; see `_sorted_out`."""
    ours, left = _sorted_out(context, seen, implied)
    return [*([errors.NeedsRecover.of_strays(ours)] if ours else []), *left]


def _sorted_out(
    context: Context, seen: Mapping[int, bool], implied: bool
) -> tuple[list[int], list[errors.GpushareError]]:
    """Return who of shims that are in no record can be brought back by their pids, and why others cannot.

    `seen` tells by pid whether a holder keeps it, `implied` that nobody has named them.
    """
    # The record may be lost or damaged where the holder's own is not.
    kept = {pid for record in holder.records(context.tools.state_dir) if record.alive() for pid in record.targets}
    ours = [pid for pid, held in seen.items() if pid in kept or not (held or implied)]
    others: dict[int, list[int]] = {}
    for pid in seen.keys() - ours:
        others.setdefault(processes.tracer(pid) if seen[pid] else -1, []).append(pid)
    return ours, [_of_another(keeper, sorted(pids)) for keeper, pids in sorted(others.items())]


def _of_another(keeper: int, pids: list[int]) -> errors.Refused:
    if keeper < 0:
        return errors.Unrecorded(pid=pids, words=" ".join(map(str, pids)))
    return errors.HeldElsewhere(pid=pids, holder=keeper or "(unknown)")


def _halfway(context: Context, targets: Targets) -> list[tuple[Found, bool]]:
    """Return the shims among the targets that do not run and are in no record, with whether a holder keeps each."""
    known = {pid for record in context.journal.records() for pid in _meant(record)}
    wanted = None if targets.everything else named_pids(targets)
    found = []
    for inner_pid in control.listeners():
        if inner_pid in known or (wanted is not None and inner_pid not in wanted):
            continue
        try:
            one = discover.examine(processes.read_process(inner_pid))
            if one.hello is None:
                continue
            status = Rank(one.member()).status(Deadline(context.limits.request_s))
        except errors.Refused as refusal:
            if inner_pid in targets.pids:
                raise
            if isinstance(refusal, errors.SystemCall):  # nobody knows whether it is to be brought back
                context.warn(str(refusal))
            continue
        except errors.StepFailed as failure:
            if inner_pid in targets.pids:
                raise errors.NoAnswer(pid=inner_pid, detail=str(failure)) from None
            continue
        if status.text("phase") != "running":
            found.append((one, status.text("lease") == "held"))
    return found


def adopted(context: Context, found: Sequence[Found]) -> Record:
    """Write a record for shims that stand half-way and are in none."""
    members = [one.member() for one in found]
    hello = found[0].hello
    assert hello is not None
    record = Record(
        id=new_id(), stage=Stage.SUSPENDED, step="found", simulated=hello.number("simulated") == 1,
        driver=hello.text("driver"), members=members, origin=origin.here(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    return context.journal.write(record)


def runtime(record: Record) -> Group:
    """Return the group of a record with fresh connections."""
    return group_of(record.members)
