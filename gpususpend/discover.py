"""Which processes a command is about, and what each of them is.

Owns turning pids, --tree and --all into members, and the refusals that concern one process alone.  Must not know the
phases.  Changes nothing anywhere.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpususpend import control, errors, processes, system
from gpususpend.control import ControlClient, Reply, ShimRefused
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.journal import Kind, Member
from gpususpend.processes import Process


@dataclass(frozen=True)
class Targets:
    """What the user named."""

    pids: tuple[int, ...] = ()
    trees: tuple[int, ...] = ()
    everything: bool = False
    implied: bool = False  # everything, because nothing was named

    def __bool__(self) -> bool:
        """Tell whether anything was named."""
        return bool(self.pids or self.trees or self.everything)


def parse_pids(words: Iterable[str]) -> tuple[int, ...]:
    """Turn words into pids, each once; raises NotANumber."""
    pids = []
    for word in words:
        if re.fullmatch(r"[0-9]{1,10}", word) is None or not 0 < int(word) < 1 << 31:
            raise errors.NotANumber(value=word)
        pids.append(int(word))
    return tuple(dict.fromkeys(pids))


@dataclass
class Found:
    """A process, what its shim said of itself (None: no shim), and whether it shows signs of CUDA."""

    process: Process
    hello: Reply | None = None
    cuda: bool = False
    silent: bool = False  # it has the threads of a shim, to which no socket leads
    named: bool = False  # by its own pid, as one process or as the root of a tree
    tree: bool = False  # it belongs to a tree

    @property
    def pid(self) -> int:
        """Return the pid."""
        return self.process.pid

    def member(self, kind: Kind | None = None) -> Member:
        """Return it as a member of a group."""
        found = Kind.SHIMMED if self.hello else Kind.UNSHIMMED if self.cuda else Kind.PLAIN
        nonce = self.hello.text("nonce") if self.hello else ""
        process = self.process
        return Member(
            process.pid, process.start_time, process.inner_pid, process.uid, process.comm, kind or found, nonce,
            tree=self.tree,
        )  # fmt: skip


@dataclass
class Discovery:
    """Everything that was found for one command."""

    found: list[Found] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def select(targets: Targets, warn: Callable[[str], None] = lambda text: None) -> list[Found]:
    """Return the processes that were named, by pid, not looked at yet.

    Raises NoTarget, NoSuchProcess, ThreadId and OwnAncestor; a process found by --tree that ends meanwhile is left out.
    """
    if not targets:
        raise errors.NoTarget()
    chosen = {pid: Found(processes.read_process(pid), named=True) for pid in targets.pids}
    roots = [processes.read_process(pid) for pid in targets.trees]
    own = processes.own_line()
    if roots:
        everything = processes.all_processes()
        below = processes.descendants([root.pid for root in roots], everything)
        # The command itself may stand in the tree, a parent of it may not.
        for process in [*roots, *below]:
            if process.pid != os.getpid():
                named = process.pid in chosen or process.pid in targets.trees
                chosen[process.pid] = Found(process, named=named, tree=True)
    if targets.everything:
        chosen |= {process.pid: Found(process) for process in with_sockets(warn)}
    for pid in chosen:
        if pid in own:
            raise errors.OwnAncestor(pid=pid)
    return [chosen[pid] for pid in sorted(chosen)]


def with_sockets(warn: Callable[[str], None]) -> list[Process]:
    """Return the processes of this user whose shims listen here; what cannot be one is passed over with a warning."""
    found = []
    for inner_pid in control.listeners():
        try:
            for pid, uid in control.who_listens(inner_pid, Deadline(LIMITS.connect_s)):
                # Who cannot be seen from here is of another container with this network.
                if pid and os.geteuid() in (0, uid):
                    found.append(_listener(pid, inner_pid))
        except (errors.Refused, TimeoutError) as refusal:
            warn(f"@{control.socket_name(inner_pid)} passed over: {refusal}")
    return found


def _listener(pid: int, inner_pid: int) -> Process:
    process = processes.read_process(pid)
    processes.check_reachable(process)
    if process.inner_pid != inner_pid:
        raise errors.WrongPeer(pid=inner_pid, inner_pid=inner_pid, peer_pid=pid, peer_uid=process.uid)
    return process


def examine(process: Process, named: bool = False, tree: bool = False) -> Found:
    """Find out what a process is; raises a Refused that names it.

    The socket's owner is checked, so a process cannot pass for another by taking its name.
    """
    processes.check_reachable(process)
    found = Found(process, named=named, tree=tree)
    try:
        with ControlClient(process.pid, process.inner_pid, process.uid) as client:
            found.hello = client.request("hello", Deadline(LIMITS.connect_s))
    except ConnectionRefusedError:
        pass  # nobody listens: no shim, or one that has not seen CUDA yet or has no name or descriptor to listen
    except errors.RankStopped as cause:
        raise errors.LookFailed(cause=cause) from None
    except TimeoutError:
        raise errors.NoAnswer(pid=process.pid, detail=f"no answer within {LIMITS.connect_s:g} s") from None
    except (OSError, ValueError, ShimRefused) as error:
        if not processes.is_same(process):
            raise errors.ProcessGone(pid=process.pid) from None
        if isinstance(error, OSError) and system.denied(error):
            raise system.unasked(process.pid, error) from None
        raise errors.NoAnswer(pid=process.pid, detail=str(error)) from None
    if found.hello is None:
        try:
            found.cuda = processes.uses_cuda(process.pid)
            found.silent = bool(processes.threads_named(process.pid, [processes.CONTROL_THREAD]))
        except PermissionError:
            raise processes.closed(process) from None
    elif found.hello.number("pid", process.inner_pid) != process.inner_pid:
        raise errors.NoAnswer(pid=process.pid, detail="its shim takes itself for another process")
    if not processes.is_same(process):
        raise errors.ProcessGone(pid=process.pid)
    return found


def examine_all(targets: Targets, warn: Callable[[str], None] = lambda text: None) -> list[Found]:
    """Find out what every named process is; one found by --tree or --all that ends meanwhile is left out."""
    result = []
    for one in select(targets, warn):
        try:
            result.append(examine(one.process, one.named, one.tree))
        except (errors.ProcessGone, errors.NoSuchProcess):
            if one.named:
                raise
    return result


def examine_members(members: Sequence[Member]) -> list[Found]:
    """Find out what the members of a group are now; one without CUDA that has ended is left out."""
    result = []
    for member in members:
        try:
            result.append(examine(member.process, named=True, tree=member.tree))
        except errors.ProcessGone:
            if member.kind is not Kind.PLAIN:
                raise
    return result


def newcomers(members: Sequence[Member], among: Sequence[Process] = ()) -> list[Found]:
    """Return what the plain members of a group are by now, what has appeared below its members, and these others."""
    known = {member.pid for member in members}
    everything = processes.all_processes()
    below = processes.descendants(known, everything)
    in_trees = {one.pid for one in processes.descendants([m.pid for m in members if m.tree], everything)}
    plain = [member.process for member in members if member.kind is Kind.PLAIN]
    result = []
    for process in [*plain, *(process for process in [*below, *among] if process.pid not in known)]:
        with contextlib.suppress(errors.ProcessGone):
            result.append(examine(process, tree=process.pid in in_trees))
    return result
