"""Suspend: from a running group to one that holds nothing of the GPUs, and back to running if anything fails.

Owns the order prepare, quiesce, release, seal, lock, checkpoint, freeze, and the rollback.  Must not know how processes
were chosen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpususpend import discover, errors, phases, processes, quiesce
from gpususpend.control import Reply
from gpususpend.deadline import Deadline
from gpususpend.driver import DriverState
from gpususpend.gpus import GpuUsage
from gpususpend.group import Group, Rank
from gpususpend.journal import Depth, Kind, Member, Stage
from gpususpend.preflight import arena_to_hand_over, check_descriptors, read_plan
from gpususpend.progress import readable_bytes
from gpususpend.resume import (
    RESTLESS,
    SEAL_PAUSE_S,
    as_cause,
    bring_back_survivors,
    in_a_stop,
    not_running,
    outcome,
    some_lost,
    unknown,
)
from gpususpend.session import CallsPending, Session
from gpususpend.tools import state_name

if TYPE_CHECKING:
    from gpususpend.arena import Arena

PENDING_GRACE_S = 5.0
# How long a workload that is not to be suspended any more may be held up for the sake of the memory of its arenas.
ARENA_CUT_S = 5.0
ANSWER_S = 1.0
KEPT_BYTES = 32 << 20  # of a GPU at depth pages, by which what others do there is told from memory that stays


def suspend(session: Session) -> None:
    """Suspend the group; its record says `suspended` then.

    Raises Refused if nothing had changed; RolledBack or Interrupted if everything runs again; Lost, StillSuspended or
    StateUnknown if not.
    """
    session.interruptible, session.turning_back = True, False
    try:
        go_down(session)
    except Exception as failure:
        raise roll_back(session, as_cause(session, failure)) from failure


def go_down(session: Session) -> None:
    """Go through all steps; raises what fails first."""
    limits = session.limits
    usage_before = session.context.tools.usage(session.driver)
    # Where the command ends before it can measure, this is what a restore needs again.
    session.note(gpus=list(usage_before), room_bytes=used_by(session.group, usage_before))
    plain_nodes = nodes_of_plain(session)
    prepare(session)
    # Once more: the arenas may have taken minutes, in which descriptors went around.
    check_descriptors(session.group, limits)
    quiesce_all(session)
    settle_orphans(session)
    prepare(session, quiet=True)  # what was allocated since, and what orphans were adopted
    session.verb("release", limits.copy_timeout_s, "saved_bytes", session.arena_total)
    if session.record.depth is Depth.PAGES:
        # CPU threads go on, and with them what they do to memory that is not the GPUs'.
        in_a_stop(session, "seal", host=0)
        leave(session, usage_before)
        return
    if session.group.ranks:
        in_a_stop(session, "seal")
    session.driver_used = True
    pids = session.group.cuda_pids
    session.driver_step(
        "lock", pids, limits.timeout_s, lambda driver, _: driver.lock(pids, limits.timeout_s)
    )
    session.driver_step(
        "checkpoint", pids, limits.checkpoint_timeout_s, lambda driver, until: driver.checkpoint(pids, until)
    )
    freeze(session, plain_nodes, usage_before)


def used_by(group: Group, usage: Mapping[str, GpuUsage]) -> dict[str, int]:
    """Return the bytes that a group uses on each GPU, as far as the driver tells."""
    used = {uuid: sum(gpu.by_pid.get(pid, 0) for pid in group.cuda_pids) for uuid, gpu in usage.items()}
    return {uuid: count for uuid, count in used.items() if count}


def leave(session: Session, usage_before: dict[str, GpuUsage]) -> None:
    """Write down that the memory is away; nothing is stopped, and the gates hold."""
    newcomers(session)
    after = session.context.tools.usage(session.driver)
    session.usage = {
        uuid: (before.used_bytes, after[uuid].used_bytes) for uuid, before in usage_before.items() if uuid in after
    }
    for uuid, carried in session.carried.items():
        used, left = session.usage.get(uuid, (carried, 0))
        if used - left < carried - KEPT_BYTES:
            session.context.warn(
                f"GPU {uuid} gave back {readable_bytes(max(0, used - left))} of {readable_bytes(carried)}: "
                "something keeps memory of the group, or others have allocated meanwhile"
            )
    session.interruptible = False
    session.note(stage=Stage.SUSPENDED, step="suspended", room_bytes=session.carried, error="")


def stop_everything(session: Session) -> None:
    """Stop all threads of the group, and what has appeared below its trees: what stands still makes no children.

    A thread may be stopped with a lock in its hands without which its shim answers nobody: in the middle of a fork, for
    one.  Then all have to run on, and are stopped again a little later.
    """
    deadline = Deadline(session.limits.threads_s)
    while True:
        session.holder.stop(session.targets(everybody=True), deadline)
        answers = phases.parallel(session.group.ranks, lambda rank: rank.status(deadline.within(ANSWER_S)))
        if any(isinstance(slot.error, errors.DeadlinePassed) for slot in answers) and not deadline.passed():
            session.holder.go(deadline)
            deadline.sleep(SEAL_PAUSE_S)
            continue
        phases.results("freeze", answers)
        appeared = newcomers(session)
        if not appeared:
            return
        session.take_in(appeared)


def freeze(session: Session, plain_nodes: dict[int, set[str]], usage_before: dict[str, GpuUsage]) -> None:
    """Stop all threads, prove that nothing of the GPUs is left, and leave the holder behind."""
    with session.timed("freeze", len(session.group.members)):
        stop_everything(session)
        check_quiet(session, plain_nodes)
        room = check_memory(session, usage_before)
    session.interruptible = False
    session.keep_holder()
    session.note(stage=Stage.SUSPENDED, step="suspended", room_bytes=room, error="")


def freeze_again(session: Session) -> None:
    """Stop the threads of a group whose holder is gone; everything else about it is as it should be."""
    known = session.record.room_bytes
    freeze(session, nodes_of_plain(session), session.context.tools.usage(session.driver))
    if known:
        session.note(room_bytes=known)


def prepare(session: Session, quiet: bool = False) -> None:
    """Give every shim an arena that holds what it will save; one that is large enough already stays.

    One that an earlier command left and that is too small is replaced when the group is `quiet`, not before.
    """
    replies = session.quick("plan")
    plans = {pid: read_plan(reply) for pid, reply in replies.items()}
    have = {pid: reply.number("arena_bytes") for pid, reply in session.quick("status").items()}
    short = [
        rank for rank in session.group
        if plans[rank.pid].arena_bytes > have[rank.pid] and (quiet or have[rank.pid] == 0)
    ]  # fmt: skip
    session.learn(plans)
    if not short:
        return
    wanted = {rank.pid: arena_to_hand_over(plans[rank.pid]) for rank in short}
    session.context.tools.check_memory([(os.getpid(), sum(wanted.values()))])
    deadline = Deadline(session.limits.prepare_s)
    with session.timed("prepare", len(short), sum(wanted.values())) as phase, filled(session, short, wanted) as made:
        # Only now does a shim get one: what fails before, or is interrupted, leaves nothing to take back.
        slots = phases.parallel(
            short, lambda rank: rank.ask("arena", deadline, fd=made[rank.pid][0].fd, bytes=made[rank.pid][0].bytes),
            lambda done: session.context.progress.update(done, sum(wanted.values())),
        )  # fmt: skip
        phase.rank_seconds = {slot.rank.pid: made[slot.rank.pid][1] + slot.seconds for slot in slots}
        replies = phases.results("prepare", slots)
        phase.bytes = sum(reply.number("bytes") for reply in replies.values())
    for pid, reply in replies.items():
        locked, whole = reply.number("locked_bytes"), reply.number("bytes")
        if locked < whole:
            session.context.progress.say(
                f"the driver page-locks {readable_bytes(locked)} of the arena of pid {pid}, {readable_bytes(whole)}: "
                "the rest is copied more slowly"
            )


@contextmanager
def filled(
    session: Session, ranks: Sequence[Rank], wanted: Mapping[int, int]
) -> Iterator[dict[int, tuple[Arena, float]]]:
    """Yield by pid a populated arena and the seconds that it took; the descriptors are closed at the end.

    A signal turns back in the middle of it: this may take minutes.
    """
    context = session.context
    dumpable = session.record.depth is Depth.PROCESS
    pieces: list[int] = []  # appended to by many threads, which is atomic; only its sum is read

    def count(piece: int) -> None:
        pieces.append(piece)
        if session.interruptible:
            context.interrupts.check("prepare")

    slots = phases.parallel(
        ranks, lambda rank: context.tools.prepare_arena(wanted[rank.pid], count, dumpable),
        lambda done: context.progress.update(done, sum(pieces)),
    )  # fmt: skip
    try:
        for pid, arena in phases.results("prepare", slots).items():
            if not arena.kind.huge:
                context.progress.say(f"the arena of pid {pid} has plain pages: locking and copying are slower")
        yield {slot.rank.pid: (slot.values[0], slot.seconds) for slot in slots}
    finally:
        for slot in slots:
            for arena in slot.values:
                os.close(arena.fd)


def quiesce_all(session: Session, seconds: float | None = None) -> None:
    """Close the gates of all ranks around one consistent cut, by default within --timeout."""
    deadline = Deadline(session.limits.timeout_s if seconds is None else seconds)
    ranks = session.group.ranks
    with session.timed("quiesce", len(ranks)) as phase:
        session.changed = True
        ask = phases.parallel(ranks, lambda rank: rank.ask("close-launch", deadline.within(session.limits.request_s)))
        phases.results("close-launch", ask)
        quiesce.drain_all(ranks, deadline, lambda: session.barrier("quiesce"))

        def close(rank: Rank) -> Reply:
            return rank.ask("close-memory", deadline, timeout_ms=phases.timeout_ms(deadline))

        slots = phases.parallel(ranks, close)
        phase.rank_seconds = {slot.rank.pid: slot.seconds for slot in slots}
        phases.results("close-memory", slots)


def settle_orphans(session: Session) -> None:
    """Give every memory whose exporter is gone an owner among those who still map it: the first rank that does."""
    deadline = Deadline(session.limits.request_s)
    slots = phases.parallel(session.group.ranks, lambda rank: rank.listing("orphans", deadline))
    holders: dict[str, list[Rank]] = {}
    for slot in slots:
        for item in phases.results("orphans", [slot])[slot.rank.pid]:
            holders.setdefault(item["key"], []).append(slot.rank)
    for key, ranks in sorted(holders.items()):
        owner, *others = ranks
        owner.ask("adopt", deadline, key=key)
        for rank in others:
            rank.ask("redirect", deadline, key=key, pid=owner.member.inner_pid)


def nodes_of_plain(session: Session) -> dict[int, set[str]]:
    """Return the device nodes that plain members hold before anything changes: NVML, or inherited descriptors."""
    return {
        member.pid: {node.path for node in processes.nvidia_nodes(member.pid)}
        for member in session.group.members
        if member.kind is Kind.PLAIN
    }


def newcomers(session: Session) -> list[Member]:
    """Return what has appeared in the trees of the group since it was looked at.

    Raises NewCudaProcess if it uses CUDA, as a member without CUDA may by now: it was neither gated nor saved.
    """
    appeared = []
    for found in discover.newcomers(session.group.members):
        if found.hello is not None or (found.cuda and session.is_cuda(found.pid)):
            raise errors.NewCudaProcess(step="freeze", pid=found.pid, comm=found.process.comm)
        if found.tree and found.pid not in session.members:
            appeared.append(found.member(Kind.PLAIN))
    return appeared


def check_quiet(session: Session, plain_nodes: dict[int, set[str]]) -> None:
    """Raise unless every process is CHECKPOINTED and nothing of the driver is open or mapped in the whole tree."""
    for pid, state in session.states().items():
        if state != DriverState.CHECKPOINTED:
            raise errors.NotQuiet(step="freeze", pid=pid, left=f"driver state {state_name(state)}")
    deadline = Deadline(session.limits.nodes_gone_s)
    while True:
        left, tolerated = driver_nodes(session, plain_nodes)
        if not left:
            break
        if deadline.passed():
            pid = min(left)
            raise errors.NotQuiet(step="freeze", pid=pid, left=", ".join(left[pid]), nodes=left)
        # The driver closes its descriptors a moment after the checkpoint has returned, on a busy machine.
        deadline.sleep(0.05)
    for pid, nodes in tolerated.items():
        session.context.warn(f"pid {pid} uses no CUDA and keeps {', '.join(nodes)}; a dump of it would fail")


Nodes = dict[int, list[str]]


def driver_nodes(session: Session, plain_nodes: dict[int, set[str]]) -> tuple[Nodes, Nodes]:
    """Return by pid what the tree has open or mapped of the driver: what it should not, and what is tolerated.

    Tolerated is what processes without CUDA had before the suspend.
    """
    members = {member.pid: member for member in session.group.members}
    below = processes.descendants(members, processes.all_processes())
    left: Nodes = {}
    tolerated: Nodes = {}
    for pid in dict.fromkeys([*members, *(process.pid for process in below)]):
        for node in processes.nvidia_nodes(pid):
            uses_cuda = pid in members and members[pid].kind is not Kind.PLAIN
            known = not uses_cuda and node.path in plain_nodes.get(pid, {node.path})
            (tolerated if known else left).setdefault(pid, []).append(str(node))
    return left, tolerated


def check_memory(session: Session, before: dict[str, GpuUsage]) -> dict[str, int]:
    """Wait until no GPU lists a member any more; return the bytes that came free, by GPU.

    These are what a restore needs again: what the shims carry and what the driver keeps for itself.
    """
    deadline = Deadline(session.limits.memory_back_s)
    pids = set(session.group.cuda_pids)
    while True:
        after = session.context.tools.usage(session.driver)
        listed = {uuid: sorted(pids & set(usage.pids)) for uuid, usage in after.items() if pids & set(usage.pids)}
        if not listed:
            break
        if deadline.passed():
            uuid, who = next(iter(listed.items()))
            raise errors.NotQuiet(step="freeze", pid=who[0], left=f"memory on GPU {uuid}", listed=listed)
        deadline.sleep(0.05)
    carried = session.carried
    room = {
        uuid: max(carried.get(uuid, 0), before[uuid].used_bytes - usage.used_bytes)
        for uuid, usage in after.items()
        if uuid in before
    }
    session.usage = {
        uuid: (before[uuid].used_bytes, usage.used_bytes) for uuid, usage in after.items() if uuid in before
    }
    return {uuid: count for uuid, count in room.items() if count > 0}


def roll_back(session: Session, cause: errors.GpushareError) -> errors.GpushareError:
    """Bring everything back after `cause`; return the outcome, which says whether that worked."""
    session.interruptible, session.turning_back = False, True
    untouched = not session.changed
    refused = untouched and isinstance(cause, errors.Refused)
    if not refused:
        session.context.progress.say(f"rolling back: {cause}")
        session.note(stage=Stage.ROLLING_BACK, error=str(cause))
    lost: list[errors.StepFailed] = [cause] if isinstance(cause, errors.RankDied) else []
    try:
        if isinstance(cause, CallsPending):
            release_pending(session, cause)
        if lost:
            session.bury([process.pid for process in session.dead()])
        if untouched:
            quiet_for_arenas(session)
        lost += bring_back_survivors(session)
    except Exception as failure:
        problem = as_cause(session, failure)
        session.note(error=f"{cause}; then {problem}")
        if isinstance(problem, CallsPending):
            return unknown(session, problem)
        if lost:
            stuck = not_running(session)
            return errors.Lost(
                cause=cause, lost=sorted(stuck), count_lost=len(stuck), count=len(session.record.members),
                states=stuck, detail=f"Rolling back failed too: {problem}",
            )  # fmt: skip
        problem.facts["first"] = str(cause)
        session.context.warn(f"suspend had failed: {cause}")
        return outcome(session, problem)
    if lost:
        return some_lost(session, lost)
    if refused:
        return cause
    kind = errors.Interrupted if isinstance(cause, errors.Interrupt) else errors.RolledBack
    return kind(cause=cause, count=len(session.group.members), count_not_running=0)


def quiet_for_arenas(session: Session) -> None:
    """Close the gates of ranks that work and have got arenas: these can be taken back only while all are quiet.

    Briefly, since nothing else calls for a stop: where the work on the GPUs takes longer, the arenas stay.  The way
    back takes them and opens the gates.
    """
    if session.record.stage is Stage.SUSPENDED:
        return
    try:
        replies = session.quick("status").values()
        held = any(reply.number("arena_bytes") for reply in replies)
        if held and all(reply.text("phase") in RESTLESS for reply in replies):
            quiesce_all(session, min(ARENA_CUT_S, session.limits.timeout_s))
    except errors.GpushareError as problem:
        session.context.warn(f"the arenas were not taken back: {problem}")


def release_pending(session: Session, cause: CallsPending) -> None:
    """Give a driver call that is past its deadline a chance to come back; raise `cause` again if it does not.

    A lock waits for work of its process, which may wait for a process that is locked already: these are unlocked.
    """
    others = [pid for pid in session.group.cuda_pids if pid not in cause.pids]
    states = session.states(others)
    locked = [pid for pid, state in states.items() if state == DriverState.LOCKED]
    if locked:
        answers = session.driver.unlock(locked, Deadline(session.limits.driver_quick_s))
        session.require("unlock", answers, session.limits.driver_quick_s)
    if not session.context.tools.await_calls(session.record.calls, Deadline(PENDING_GRACE_S)):
        raise cause
    session.note(calls=[])
