"""Suspend: from a running group to one that holds nothing of the GPUs, and back to running if anything fails.

Owns the order prepare, quiesce, release, seal, lock, checkpoint, freeze, and the rollback.  Must not know how processes
were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from gpususpend import discover, errors, phases, processes, quiesce
from gpususpend.control import Reply
from gpususpend.deadline import Deadline
from gpususpend.defaults import KEPT_BYTES, LIMITS
from gpususpend.driver import DriverState
from gpususpend.gpus import GpuUsage
from gpususpend.group import Rank
from gpususpend.journal import Depth, Kind, Member, Stage
from gpususpend.phases import PhaseTime
from gpususpend.preflight import check_descriptors, check_sharing
from gpususpend.prepare import prepare
from gpususpend.processes import Process
from gpususpend.progress import readable_bytes
from gpususpend.resume import (
    RESTLESS,
    as_cause,
    bring_back_survivors,
    dismiss,
    give_up_arenas,
    in_a_stop,
    outcome,
    some_lost,
    unlock_arenas,
)
from gpususpend.session import CallsPending, Session
from gpususpend.tools import state_name


def suspend(session: Session) -> None:
    """Suspend the group; its record says `suspended` then.

    Raises Refused if nothing had changed; RolledBack or Interrupted if everything runs again; Lost, StillSuspended or
    StateUnknown if not.
    """
    session.interruptible, session.turning_back = True, False
    try:
        with session.explained():
            go_down(session)
    except Exception as failure:
        raise roll_back(session, as_cause(session, failure)) from failure


def go_down(session: Session) -> None:
    """Go through all steps; raises what fails first."""
    limits = session.limits
    # Where the command ends before it can measure, this is what a restore needs again.
    session.measured(session.context.tools.usage(session.driver))
    plain_nodes = nodes_of_plain(session)
    if session.stored is not None:
        session.stored.begin()
    prepare(session)
    usage_before = session.context.tools.usage(session.driver)  # with what the shims have taken for the suspend
    session.measured(usage_before)
    # Once more: the arenas may have taken minutes, in which descriptors went around.
    check_descriptors(session.group, limits)
    with quiesced(session) as phase, phase.part("sharing"):
        # From here on nobody opens memory of the group: who did since the first look would keep what is left behind.
        check_sharing(session.group, limits)
        settle_orphans(session)
    prepare(session, quiet=True)  # what was allocated since, and what orphans were adopted
    release(session)
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


def release(session: Session) -> None:
    """Take the memory off the GPUs; where it goes to a store, not before the checkpoint exists."""
    seconds, stored = session.limits.copy_timeout_s, session.stored
    if stored is None:
        session.verb("release", seconds, "saved_bytes", session.arena_total)
        if session.record.depth is Depth.PROCESS:
            unlock_arenas(session)
        return
    stored.save()
    session.verb("release", seconds, stored=stored.places.checkpoint)
    give_up_arenas(session, session.group.ranks)
    stored.drop_rings()


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
    """Stop all threads of the group, and what has appeared below its trees: what stands still makes no children."""
    while True:
        session.stop_threads("freeze", everybody=True)
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


@contextmanager
def quiesced(session: Session, seconds: float | None = None) -> Iterator[PhaseTime]:
    """Close the gates of all ranks around one consistent cut, by default within --timeout; they stay closed.

    What is done inside counts as a part of the phase.
    """
    deadline = Deadline(session.limits.timeout_s if seconds is None else seconds)
    ranks = session.group.ranks

    def look(pids: list[int]) -> None:
        session.barrier("quiesce")
        session.waiting(pids)

    with session.timed("quiesce", len(ranks)) as phase:
        session.changed = True
        ask = phases.parallel(ranks, lambda rank: rank.ask("close-launch", deadline.within(session.limits.request_s)))
        phase.took(ask, "close-launch")
        phases.results("close-launch", ask)
        with phase.part("drain"):
            quiesce.drain_all(ranks, deadline, look)

        def close(rank: Rank) -> Reply:
            return rank.ask("close-memory", deadline, timeout_ms=phases.timeout_ms(deadline))

        slots = phases.parallel(ranks, close, session.waiting)
        phase.took(slots, "close-memory")
        phases.results("close-memory", slots)
        yield phase


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

    Raises NewCudaProcess if it uses CUDA, as a member without CUDA may by now, and with --all anybody: it was neither
    gated nor saved.
    """
    appeared = []
    for found in discover.newcomers(session.group.members, strangers(session)):
        if found.hello is not None or (found.cuda and session.is_cuda(found.pid)):
            raise errors.NewCudaProcess(step="freeze", pid=found.pid, comm=found.process.comm)
        if found.tree and found.pid not in session.members:
            appeared.append(found.member(Kind.PLAIN))
    return appeared


def strangers(session: Session) -> list[Process]:
    """Return what has got a shim that listens since --all was looked up; nobody where the group was named."""
    if session.expected is None:
        return []
    listening = discover.with_sockets(lambda text: None)
    return [process for process in listening if (process.pid, process.start_time) not in session.expected]


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
    # What was too short for the way down must not end the way back as well.
    longest = max(session.limits.copy_timeout_s, LIMITS.copy_timeout_s)
    session.limits = replace(session.limits, copy_timeout_s=longest)
    untouched = not session.changed
    refused = untouched and isinstance(cause, (errors.Refused, errors.StoreRefused))
    if not refused:
        session.context.progress.say(f"rolling back: {cause}")
        cut_off = f"{cause}. The rollback was cut off; {errors.run_recover(session.record.pids[0])}"
        session.note(stage=Stage.ROLLING_BACK, error=cut_off)
    if isinstance(cause, errors.RankDied):
        session.lose(cause)
    try:
        if isinstance(cause, CallsPending):
            release_pending(session, cause)
        if session.times or not refused:  # else no step has begun, and there is nothing to bring back
            turn_back(session, untouched)
    except Exception as failure:
        problem = as_cause(session, failure)
        if problem is not cause and not session.losses:
            problem.facts["first"] = str(cause)
            session.context.warn(f"suspend had failed: {cause}")
        if (end := outcome(session, problem)) is not None:
            first = "" if str(cause) in str(end) else f". The suspend had failed: {cause}"
            session.note(error=f"{end}{first}")
            return end
    dismiss(session)
    if session.losses:
        return some_lost(session)
    if session.stored is not None:
        session.stored.abandon(cause)
    if refused:
        return cause
    kind = errors.Interrupted if isinstance(cause, errors.Interrupt) else errors.RolledBack
    return kind(cause=cause, count=len(session.group.members), count_not_running=0)


def turn_back(session: Session, untouched: bool) -> None:
    """Bring back what lives; while nothing was changed, nothing waits for a stopped process."""
    if not untouched:
        await_continued(session)
    elif session.halt("rollback") is not None:
        session.context.warn("arenas that processes have got by now stay until the next suspend uses them")
        return
    else:
        quiet_for_arenas(session)
    bring_back_survivors(session)


def await_continued(session: Session) -> None:
    """Give whoever keeps a process stopped the time of --timeout to let it run: without it nothing can come back."""
    deadline = Deadline(session.limits.timeout_s)
    session.context.progress.begin("rollback", len(session.group.members))
    while (stop := session.halt("rollback")) is not None and not deadline.passed():
        session.waiting([int(str(stop.facts["pid"]))])
        deadline.sleep(0.1)
    session.context.progress.end()


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
            with quiesced(session, min(session.limits.arena_cut_s, session.limits.timeout_s)):
                pass
    except errors.GpushareError as problem:
        session.context.warn(f"the arenas were not taken back: {problem}")


def release_pending(session: Session, cause: CallsPending) -> None:
    """Give a driver call that is past its deadline a chance to come back; raise `cause` again if it does not.

    A lock waits for work of its process, which may wait for a process that is locked already: these are unlocked.
    """
    busy_or_dead = {*cause.pids, *(process.pid for process in session.dead())}
    try:
        states = session.states([pid for pid in session.group.cuda_pids if pid not in busy_or_dead])
        locked = [pid for pid, state in states.items() if state == DriverState.LOCKED]
        if locked:
            answers = session.driver.unlock(locked, Deadline(session.limits.driver_quick_s))
            session.require("unlock", answers, session.limits.driver_quick_s)
    except errors.StepFailed as problem:
        raise cause from problem
    if not session.context.tools.await_calls(session.record.calls, Deadline(session.limits.pending_grace_s)):
        raise cause
    session.note(calls=[])
