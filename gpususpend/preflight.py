"""What is refused before anything changes, over the whole group.

Owns the refusals that need more than one process: halves of sharing groups, uncarried kinds, unshimmed processes, the
driver's version, memory.  Must not know the phases.  Only asks; every refusal leaves the workload untouched.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpususpend import control, descriptors, errors, modes, openfiles, phases, processes
from gpususpend.control import Reply, number
from gpususpend.deadline import Deadline
from gpususpend.defaults import ARENA_ROOM_BYTES, HANGS_AT_KILL, LIMITS, OLDEST_DRIVER, OWN_BYTES, SAME_PIDS, Limits
from gpususpend.descriptors import CannotTake, Copy
from gpususpend.discover import Found
from gpususpend.driver import DriverResult, DriverState, failure
from gpususpend.gpus import Gpu, GpuUsage
from gpususpend.group import Group, Rank, group_of
from gpususpend.journal import Depth, Kind, Member
from gpususpend.processes import Process
from gpususpend.progress import readable_bytes
from gpususpend.tools import Tools, state_name

# What to do about each kind that is not carried, as the shims name them.
WAYS_OUT = {
    "multicast": "start it with GPUSHARE_MULTICAST=hide, or with NCCL_NVLS_ENABLE=0",
    "fabric": "it is of another node, or of a process without the shim: start it without GPUSHARE_FABRIC, or with "
    "NCCL_MNNVL_ENABLE=0, so that it shares by file descriptor on this node",
    "exported-pool": "share memory made by cuMemCreate instead of a memory pool",
    "external-memory": "close the imported graphics memory first",
    "external-semaphore": "close the imported semaphores first",
    "graphics": "unregister what it shares with OpenGL, EGL or VDPAU first",
    "green-context": "start it without green contexts: no checkpoint of one has been seen",
    "dma-buf": "start it with NCCL_NET_GDR_LEVEL=LOC, so that no network card maps GPU memory",
    "managed": "use device memory, since the driver cannot checkpoint managed memory",
    "native-ipc": "start the process that made the memory under the shim too",
    "foreign-import": "start the process that made the memory under the shim too",
    "mapped-array": "destroy the sparse arrays first",
    "unknown-abi": "install a newer gpushare, which knows this CUDA version",
}
EXEC_PAUSE_S = 0.02
NAMED_OBJECTS = 8  # of each kind, in a refusal


@dataclass(frozen=True)
class Plan:
    """What one rank's suspend moves: bytes into the arena, bytes of host memory, and bytes by GPU to find at load."""

    arena_bytes: int
    host_bytes: int
    device_bytes: dict[str, int] = field(default_factory=dict)


def arena_to_hand_over(plan: Plan) -> int:
    """Return the bytes of a rank's arena: with room for what it allocates between the plan and its quiet.

    An arena that has become too small is replaced while everything stands still, which takes seconds.
    """
    return plan.arena_bytes and plan.arena_bytes + max(ARENA_ROOM_BYTES, plan.arena_bytes // 128)


def read_plan(reply: Reply) -> Plan:
    """Return a shim's answer to `plan`."""
    device_bytes: dict[str, int] = {}
    for group in reply.groups:
        device_bytes[group["device"]] = device_bytes.get(group["device"], 0) + number(group, "bytes")
    return Plan(reply.number("arena_bytes"), reply.number("host_bytes"), device_bytes)


def check_driver_kind(found: Sequence[Found], simulated: bool) -> None:
    """Refuse a process that runs on the other driver: the calls would go to a machine where it does not exist."""
    names = {False: "real", True: "simulated"}
    for one in found:
        if one.hello is not None and (one.hello.number("simulated") == 1) != simulated:
            theirs = not simulated
            way_out = "add --driver sim" if theirs else "leave out --driver sim"
            raise errors.DriverMismatch(pid=one.pid, theirs=names[theirs], ours=names[simulated], way_out=way_out)


def check_driver_version(version: str, simulated: bool, needed: int = OLDEST_DRIVER, feature: str = "suspend") -> None:
    """Refuse a driver that lacks what the command needs; an unreadable version is not guessed about."""
    if simulated:
        return
    match = re.match(r"(\d+)", version)
    if match is None or int(match[1]) < needed:
        raise errors.DriverTooOld(version=version or "of unknown version", feature=feature, needed=needed)


def check_bypass(group: Group, usage: Mapping[str, GpuUsage]) -> None:
    """Refuse a process that passes for one without CUDA, since its shim has seen none, and has memory on a GPU."""
    plain = [member for member in group.members if member.kind is Kind.PLAIN]
    for uuid, gpu in usage.items():
        for member in plain:
            if member.pid in gpu.by_pid:
                raise errors.PastTheShim(pid=member.pid, comm=member.comm, uuid=uuid)


def check_driver_states(group: Group, answers: Mapping[int, DriverResult]) -> None:
    """Refuse what the driver does not know, or what another tool has locked or checkpointed."""
    for member in group.members:
        answer = answers.get(member.pid)
        if answer is None:
            continue
        if not answer.finished:
            raise errors.DeadlinePassed(
                step="state", pid=member.pid, seconds=LIMITS.driver_quick_s, detail="the driver does not answer"
            )
        if answer.code:
            raise failure("state", member.pid, answer)
        if answer.value != DriverState.RUNNING:
            raise errors.DriverHasIt(pid=member.pid, comm=member.comm, state=state_name(answer.value))


def check_modes(
    group: Group, plans: Mapping[int, Plan], gpus: Sequence[Gpu], usage: Mapping[str, GpuUsage],
    warn: Callable[[str], None],
) -> None:
    """Refuse processes on parts of a GPU and clients of MPS; warn of tools inside the driver, and of network cards."""
    cards = {}
    for member in group.members:
        if member.kind is Kind.PLAIN:
            continue
        devices = plans[member.pid].device_bytes if member.pid in plans else {}
        sign = modes.mig(member.pid, devices, gpus, usage)
        if sign:
            raise errors.Mig(pid=member.pid, comm=member.comm, sign=sign)
        sign = modes.mps(member.pid, member.uid, usage)
        if sign:
            raise errors.Mps(pid=member.pid, comm=member.comm, sign=sign)
        for tool in modes.tools(member.pid):
            warn(f"pid {member.pid} was started with {tool}: a tool inside the driver can disturb a checkpoint")
        if card := modes.network_card(member.pid):
            cards[member.pid] = card
    if cards:
        warn(
            f"pid {', '.join(map(str, cards))}: {next(iter(cards.values()))} is open, and the kernel's module "
            "nvidia-peermem lets a network card use GPU memory unseen. If it does, its transfers fail after this: "
            "start with NCCL_IB_DISABLE=1, or NCCL_NET_GDR_LEVEL=LOC"
        )


def check_integrated(
    group: Group, plans: Mapping[int, Plan], usage: Mapping[str, GpuUsage], integrated: Collection[str], stored: bool
) -> None:
    """Refuse to keep in RAM the memory of a GPU that has none but the machine's: both together freeze it (FR-55).

    `integrated` are the UUIDs of such GPUs.  What goes to a store leaves RAM, but of shimmed processes only.
    """
    for member in group.members:
        if member.kind is Kind.PLAIN or (stored and member.kind is Kind.SHIMMED):
            continue
        used = {uuid for uuid, gpu in usage.items() if member.pid in gpu.by_pid}
        used.update(plans[member.pid].device_bytes if member.pid in plans else ())
        for uuid in used.intersection(integrated):
            raise errors.Integrated(pid=member.pid, comm=member.comm, uuid=uuid)


def warn_of_driver(version: str, compute: Iterable[int], warn: Callable[[str], None]) -> None:
    """Warn of a driver under which a restored process is better not killed (FR-3, a public report).

    `compute` are the first numbers of the GPUs' compute capabilities.
    """
    if max(compute, default=0) >= HANGS_AT_KILL.get(version, sys.maxsize):
        warn(
            f"driver {version} has hung machines where a process was killed after a restore: "
            "suspend such a process again before you end it, or install another driver"
        )


def warn_of_shared_gpus(
    pids: Collection[int], users: Mapping[str, Collection[int]], warn: Callable[[str], None]
) -> None:
    """Warn where one of these processes, once restored, runs beside another on a GPU.  `users` are the pids by GPU.

    Measured (driver-facts.md): the GPU no longer leaves a running kernel of a restored process for another process.
    """
    for uuid, listed in users.items():
        there = set(listed) - {0}  # memory that nobody is named for
        if len(there) > 1 and not set(pids).isdisjoint(there):
            named = ", ".join(map(str, sorted(there)))
            warn(
                f"GPU {uuid} is shared by pids {named}: after a resume the driver no longer interrupts a kernel for "
                "another process, and kernels that wait for each other (NCCL) can end in CUDA error 719. Let one of "
                "them use the GPU at a time, or suspend with --depth pages"
            )  # fmt: skip


def warn_of_long_stop(pids: Iterable[int], seconds: float, warn: Callable[[str], None]) -> None:
    """Warn where processes were away for longer than PyTorch's watchdog waits for a sign of life (FR-57)."""
    late = {pid: limit for pid in pids if (limit := modes.heartbeat_s(pid)) < seconds}
    if late:
        warn(
            f"pid {', '.join(map(str, late))}: suspended for {seconds:.0f} s, longer than the heartbeat of PyTorch's "
            f"NCCL watchdog ({min(late.values()):g} s), which may end them. Start them with "
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC above the longest suspension"
        )


def check_threads(group: Group) -> None:
    """Refuse a process without its first thread: what it keeps open and mapped could not be looked at."""
    for member in group.members:
        if processes.is_headless(member.pid):
            raise errors.Headless(pid=member.pid, comm=member.comm)


def check_uncarried(group: Group, limits: Limits) -> None:
    """Refuse objects of kinds that are not carried, naming those of the first process that has any."""

    def ask(rank: Rank) -> list[dict[str, str]]:
        return rank.listing("uncarried", Deadline(limits.request_s))

    for pid, rows in phases.results("preflight", phases.parallel(group.ranks, ask)).items():
        if rows:
            objects: dict[str, list[str]] = {}
            for row in rows:
                objects.setdefault(row.get("kind", "unknown"), []).append(_object_name(row))
            raise errors.Uncarried(
                pid=pid, kind=next(iter(objects)), kinds={kind: len(names) for kind, names in objects.items()},
                objects={kind: names[:NAMED_OBJECTS] for kind, names in objects.items()},
                owned="; ".join(_owned(kind, names) for kind, names in objects.items()),
            )  # fmt: skip


def _object_name(row: Mapping[str, str]) -> str:
    """Return what an object is called: its address or number, a variable's name too, of a function the name alone."""
    return " at ".join(word for word in (row.get("name"), row.get("object")) if word and word != "0x0") or "?"


def _owned(kind: str, names: Sequence[str]) -> str:
    """Say what a process has of one kind, and what to do about it."""
    named = list(names[:NAMED_OBJECTS])
    if len(names) > NAMED_OBJECTS:
        named.append(f"and {len(names) - NAMED_OBJECTS} more")
    return f"{len(names)} of kind {kind} ({', '.join(named)}): {WAYS_OUT.get(kind, 'close these objects first')}"


def check_sharing(group: Group, limits: Limits) -> None:
    """Refuse half of a sharing group, and imports whose exporter cannot be found.

    Asked in both directions: the members where their imports come from, and all other shims whether they import from a
    member.
    """
    inner = {rank.member.inner_pid for rank in group}

    def ask(rank: Rank) -> list[dict[str, str]]:
        return rank.listing("imports", Deadline(limits.request_s))

    exporters: set[int] = set()
    for pid, imports in phases.results("preflight", phases.parallel(group.ranks, ask)).items():
        for item in imports:
            exporter = number(item, "pid")
            if item.get("state") == "unresolved":
                raise errors.UnresolvedImport(pid=pid, object=item.get("object", "?"), exporter=exporter or "unknown")
            if item.get("state") == "resolved":
                exporters.add(exporter)
    _refuse_half(inner, exporters, limits)


def check_whole(members: Sequence[Member], limits: Limits) -> None:
    """Refuse half of a sharing group that is suspended, as far as the others live: who died is told by the way back."""
    with contextlib.ExitStack() as stack:
        group = group_of(members)
        for rank in group:
            stack.callback(rank.client.close)
        inner = {rank.member.inner_pid for rank in group}
        answers = phases.parallel(group.ranks, lambda rank: rank.listing("imports", Deadline(limits.request_s)))
    rows = [row for slot in answers for found in slot.values for row in found if row.get("state") == "resolved"]
    _refuse_half(inner, {number(row, "pid") for row in rows}, limits)


def _refuse_half(inner_pids: set[int], exporters: set[int], limits: Limits) -> None:
    """Refuse processes that import from others than themselves, or that others import from."""
    missing = exporters.union(importers_from(inner_pids, limits)) - inner_pids
    if missing:
        raise errors.HalfGroup(missing=sorted(missing))


def importers_from(inner_pids: set[int], limits: Limits) -> list[int]:
    """Return the pids of other processes that import memory from one of these; the mute are passed over.

    Another user's shim hangs up: its process can only share with processes of its own user, or of root.  All are asked
    at once and by one deadline, since this is asked again while the gates are closed; where that takes more descriptors
    than there are, some at a time.
    """
    strangers = [rank for pid in control.listeners() if pid not in inner_pids for rank in _stranger(pid)]
    found = []
    for some in openfiles.portions(strangers, len(inner_pids)):
        found += _importers(some, inner_pids, Deadline(limits.connect_s))
    return found


def _importers(strangers: Sequence[Rank], inner_pids: set[int], deadline: Deadline) -> list[int]:
    """Return the pids of those that import memory from one of these processes."""

    def shares(stranger: Rank) -> bool:
        # One that is busy for longer is at work for another command, which named all that it shares with.
        with contextlib.suppress(errors.GpushareError, OSError), contextlib.closing(stranger.client):
            rows = stranger.listing("imports", deadline)
            return any(row.get("state") == "resolved" and number(row, "pid") in inner_pids for row in rows)
        return False

    answers = phases.results("preflight", phases.parallel(strangers, shares))
    return [pid for pid, found in answers.items() if found]


def _stranger(inner_pid: int) -> list[Rank]:
    """Return a process outside the group, or nothing if it has ended."""
    try:
        process = processes.read_process(inner_pid)
    except (errors.GpushareError, OSError):
        return []
    member = Member(process.pid, process.start_time, process.inner_pid, process.uid, process.comm, Kind.SHIMMED)
    return [Rank(member)]


def check_descriptors(group: Group, limits: Limits) -> None:
    """Refuse while a process whose shim takes no part keeps a descriptor of the group's memory.

    A shim replaces those of its own process.  One in any other process keeps the memory of before the suspend, and
    stands for something else than what the group uses afterwards.  Such a process may run without the shim, with one
    that is not of the group, or be a member without CUDA.  A child has what its parent had open until it starts its
    own program: one look alone says nothing.
    """
    if not any(_shares(rank, limits) for rank in group):
        return
    heirs = [rank for rank in group.ranks if _has_orphans(rank, limits)]
    everything = processes.all_processes()
    # A descriptor that a rank made leads to a file that the rank has open itself.
    wanted = {file for rank in group for file in descriptors.files(rank.pid)}
    ours = {rank.pid for rank in group} | {os.getpid()}
    ours |= {helper.pid for helper in processes.descendants([os.getpid()], everything)}
    # Counted in looks, not by the clock: a machine that stands still for a moment holds the child up as well.
    looks = round(limits.exec_s / EXEC_PAUSE_S)
    for process in everything:
        if process.pid in ours:
            continue
        for left in reversed(range(looks)):
            try:
                _check_copies(process, wanted, group, heirs, limits)
                break
            except (errors.KeptDescriptor, errors.HiddenDescriptor):
                if not left:
                    raise
            time.sleep(EXEC_PAUSE_S)


def _shares(rank: Rank, limits: Limits) -> bool:
    status = rank.status(Deadline(limits.request_s))
    return bool(status.number("exports") or status.number("imports"))


def _has_orphans(rank: Rank, limits: Limits) -> bool:
    rows = rank.listing("imports", Deadline(limits.request_s))
    return any(row.get("state") == "orphan" for row in rows)


def _check_copies(
    process: Process, wanted: Collection[tuple[int, ...]], group: Group, heirs: Sequence[Rank], limits: Limits
) -> None:
    try:
        for copy in descriptors.copies(process, wanted):
            # Only who made a descriptor is shown it, or who shares a user with its holder: it gives access to memory.
            asked = [rank for rank in group if rank.pid == copy.owner_pid]
            asked += [rank for rank in heirs if rank.member.uid == process.uid and rank not in asked]
            for rank in asked:
                if _knows(rank, copy, limits):
                    listens = control.listens(process)
                    way_out = "name that process too" if listens else "close it, or end that process"
                    raise errors.KeptDescriptor(
                        pid=process.pid, comm=process.comm, fd=copy.node.fd, owner=rank.pid, way_out=way_out
                    )
    except CannotTake as denied:
        raise errors.HiddenDescriptor(
            pid=process.pid, comm=process.comm, fd=denied.node.fd, path=denied.node.path, detail=denied.detail
        ) from None


def _knows(rank: Rank, copy: Copy, limits: Limits) -> bool:
    """Ask a shim whether a descriptor stands for memory that it knows."""
    try:
        rank.ask("whose", Deadline(limits.request_s), fd=copy.fd)
        return True
    except errors.ShimError as refusal:
        if refusal.facts["word"] != "unknown":
            raise
        return False


def check_depth(group: Group, depth: Depth) -> None:
    """Refuse what cannot be suspended at this depth."""
    bare = [member for member in group.others if member.kind is Kind.UNSHIMMED]
    if depth is Depth.PAGES and bare:
        raise errors.NoShimForPages(pid=bare[0].pid, comm=bare[0].comm)


def check_unshimmed(
    found: Sequence[Found], allowed: bool, group: Group, limits: Limits, is_cuda: Callable[[int], bool]
) -> list[Found]:
    """Refuse processes that use CUDA without the shim, or whose shim has no socket.

    Returns the processes, each with `cuda` as it truly is.

    Device nodes alone may be inherited or belong to NVML, so the driver is asked.  An allowed one must have nobody to
    share with: no other process of its user without a shim that uses CUDA, and no shimmed one that has exported memory.
    """
    settled = [
        one if one.hello is not None or not one.cuda else replace(one, cuda=is_cuda(one.pid)) for one in found
    ]
    bare = [one for one in settled if one.hello is None and one.cuda]
    for one in bare:
        if one.silent:
            raise errors.NoSocket(pid=one.pid, comm=one.process.comm, names=SAME_PIDS)
    if bare and not allowed:
        raise errors.NoShim(pid=bare[0].pid, comm=bare[0].process.comm, pids=[one.pid for one in bare])
    for one in bare:
        others, stopped = _possible_partners(one, group, limits, is_cuda)
        if others:
            told = [f". pid {pid} is stopped {by} and cannot be asked: {errors.let_run(pid)}" for pid, by in stopped]
            raise errors.MayShare(pid=one.pid, comm=one.process.comm, others=others, stopped="".join(told))
    return settled


def _possible_partners(
    one: Found, group: Group, limits: Limits, is_cuda: Callable[[int], bool]
) -> tuple[list[int], list[tuple[int, object]]]:
    """Return who may share memory with a process without a shim, and of these who is stopped, with what does it.

    The driver knows who uses CUDA, and cannot be asked of one that is stopped: that counts as one that does.
    """
    shimmed, stopped = {rank.pid for rank in group}, []
    partners = [
        rank.pid
        for rank in group
        if rank.member.uid == one.process.uid and rank.status(Deadline(limits.request_s)).number("exports")
    ]
    everything = processes.all_processes()
    # This command's own driver process has initialised CUDA too.
    passed_over = {one.pid, *shimmed, *(helper.pid for helper in processes.descendants([os.getpid()], everything))}
    for process in everything:
        if process.pid in passed_over or process.uid != one.process.uid:
            continue
        try:
            suspect = processes.uses_cuda(process.pid) and not control.listens(process)
        except PermissionError:
            suspect = False
        try:
            if suspect and is_cuda(process.pid):
                partners.append(process.pid)
        except errors.RankStopped as stop:
            partners.append(process.pid)
            stopped.append((process.pid, stop.facts["by"]))
    return sorted(partners), stopped


def total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums by GPU."""
    result: dict[str, int] = {}
    for part in parts:
        for uuid, count in part.items():
            result[uuid] = result.get(uuid, 0) + count
    return result


def check_room(need: Mapping[str, int], usage: Mapping[str, GpuUsage], moved: Mapping[str, str]) -> None:
    """Refuse a resume for which a GPU lacks room: after a restore that failed for memory no other ever succeeds.

    `moved` maps a GPU's UUID at the suspend to the one that takes its place.
    """
    for uuid, count in need.items():
        place = moved.get(uuid, uuid)
        if place not in usage:
            raise errors.GpuMapMismatch(detail=f"GPU {place} is not in this machine; give a map with --gpu-map")
        free = usage[place].total_bytes - usage[place].used_bytes
        if free < count:
            users = list(usage[place].pids) or "(not known)"
            raise errors.NoGpuRoom(uuid=place, free=free, need=count, users=users)


def plans_of(group: Group, limits: Limits) -> dict[int, Plan]:
    """Return what every rank would save, by pid."""

    def ask(rank: Rank) -> Plan:
        return read_plan(rank.ask("plan", Deadline(limits.request_s)))

    return phases.results("preflight", phases.parallel(group.ranks, ask))


def own_bytes(pid: int, plan: Plan, usage: Mapping[str, GpuUsage]) -> int:
    """Return what a process has on the GPUs and its shim does not carry: contexts, code, pools, arrays."""
    used = sum(gpu.by_pid.get(pid, 0) for gpu in usage.values())
    return max(0, used - sum(plan.device_bytes.values()))


def warn_of_own_memory(
    plans: Mapping[int, Plan], usage: Mapping[str, GpuUsage], depth: Depth, warn: Callable[[str], None]
) -> None:
    """Tell how much memory is left to the driver, where it is more than contexts and code take (FR-42)."""
    for pid, plan in plans.items():
        own = own_bytes(pid, plan, usage)
        if own > OWN_BYTES:
            what = "stays on the GPUs at this depth" if depth is Depth.PAGES else "the driver moves, which is slow"
            warn(
                f"pid {pid}: {readable_bytes(own)} of its GPU memory are not carried by its shim, as stream-ordered "
                f"pools (cudaMallocAsync) and arrays are not: that {what}"
            )


def check_memory(
    group: Group, tools: Tools, plans: Mapping[int, Plan], usage: Mapping[str, GpuUsage], depth: Depth, limits: Limits,
    ring_bytes: int | None = None,
) -> None:  # fmt: skip
    """Refuse a suspend for which host memory or a cgroup lacks room; going over a cgroup's limit would kill.

    The arenas, or rings of `ring_bytes` in their place, are charged to this command, which fills them, but for what is
    there already; the copy that the driver keeps of its own part, and the copy of host-class memory, to each process,
    where these leave their places at all.
    """
    def missing(rank: Rank) -> int:
        plan, there = plans[rank.pid], rank.status(Deadline(limits.request_s)).number("arena_bytes")
        return max(0, arena_to_hand_over(plan) - there) if plan.arena_bytes > there else 0

    charges = [(os.getpid(), sum(map(missing, group.ranks)) if ring_bytes is None else ring_bytes)]
    for pid in group.cuda_pids if depth is Depth.PROCESS else []:
        plan = plans.get(pid, Plan(0, 0))
        charges.append((pid, own_bytes(pid, plan, usage) + plan.host_bytes))
    tools.check_memory(charges)
