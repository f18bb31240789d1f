"""The processes that one command works on, and how it talks to each.

Owns `Rank` (a process with its shim) and `Group`.  Every failure of a request becomes an error that names step and pid.
Must not know the order of the steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gpususpend import errors, processes, system
from gpususpend.control import ControlClient, Reply, ShimRefused, describe
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.journal import Kind, Member
from gpususpend.processes import Process

BUSY_POLL_S = 0.05
SYSTEM_NOT_READY = 802
# What a result code that says little usually comes from.
HINTS = {SYSTEM_NOT_READY: " (is nvidia-fabricmanager running? It may need a moment)"}
T = TypeVar("T")


class Rank:
    """A process under the shim.  Its connection is used by one thread at a time."""

    def __init__(self, member: Member, client: ControlClient | None = None) -> None:
        self.member = member
        self.client = client or ControlClient(member.pid, member.inner_pid, member.uid)

    @property
    def pid(self) -> int:
        """Return the pid as the caller sees it."""
        return self.member.pid

    def hang_up(self) -> None:
        """Leave the connection to whoever still uses it; the next request makes another one."""
        self.client = ControlClient(self.member.pid, self.member.inner_pid, self.member.uid)

    def ask(self, verb: str, deadline: Deadline, step: str = "", fd: int | None = None, **values: Any) -> Reply:
        """Send a request and return its reply; while another long verb runs in the shim, wait for it.

        Raises a StepFailed that names the pid (RankDied, DeadlinePassed, ShimError or ConnectionLost), and SystemCall.
        """
        step = step or verb
        return self._guard(
            step, deadline, lambda: self._patiently(lambda: self.client.request(verb, deadline, fd, **values), deadline)
        )

    def listing(self, verb: str, deadline: Deadline, step: str = "", **values: Any) -> list[dict[str, str]]:
        """Return all groups of a paged list; raises as `ask`."""
        return self._guard(
            step or verb, deadline,
            lambda: self._patiently(lambda: self.client.listing(verb, deadline, **values), deadline),
        )  # fmt: skip

    def _patiently(self, call: Callable[[], T], deadline: Deadline) -> T:
        """Make a request again while the shim is busy with one of another command."""
        while True:
            try:
                return call()
            except ShimRefused as refusal:
                # A lock that a stopped thread holds is not given back by waiting: its owner has to run first.
                held = refusal.reply.text("step") == "lock"
                if refusal.code != "busy" or held or deadline.passed():
                    raise
                deadline.sleep(BUSY_POLL_S)

    def _guard(self, step: str, deadline: Deadline, call: Callable[[], T]) -> T:
        try:
            return call()
        except ShimRefused as refusal:
            reply = refusal.reply
            if refusal.code in ("deadline", "busy") and reply.text("step") != "lock":
                raise errors.DeadlinePassed(
                    step=step, pid=self.pid, seconds=round(deadline.seconds, 1), detail=describe(reply)
                ) from None
            facts: dict[str, object] = {"word": refusal.code}
            if "cuda" in reply.fields:
                facts |= {"cuda": reply.number("cuda"), "cuda_name": cuda_name(reply.number("cuda"))}
                detail = f"{describe(reply)}, {facts['cuda_name']}{HINTS.get(reply.number('cuda'), '')}"
            else:
                detail = describe(reply)
            if "need" in reply.fields:
                facts["need"] = reply.number("need")
            raise errors.ShimError(step=step, pid=self.pid, detail=detail, **facts) from None
        except TimeoutError:
            raise errors.DeadlinePassed(
                step=step, pid=self.pid, seconds=round(deadline.seconds, 1), detail=self._silence()
            ) from None
        except (OSError, ValueError) as error:
            if not processes.is_same(self.member.process):
                raise errors.RankDied(step=step, pid=self.pid, comm=self.member.comm) from None
            if other_program(self.member):
                raise errors.RankReplaced(step=step, pid=self.pid, comm=self.member.comm) from None
            if isinstance(error, OSError) and system.denied(error):
                raise system.refusal(error) from None
            raise errors.ConnectionLost(step=step, pid=self.pid, detail=str(error)) from None

    def _silence(self) -> str:
        """Say why a long request has not been answered: a drain that an earlier command began comes first."""
        with contextlib.suppress(errors.GpushareError, ShimRefused, OSError, ValueError):
            client = ControlClient(self.member.pid, self.member.inner_pid, self.member.uid)
            with contextlib.closing(client):
                if client.request("status", Deadline(LIMITS.answer_s)).text("busy") == "drain":
                    return "its shim still waits for work that runs on the GPU"
        return "its shim has not answered"

    def status(self, deadline: Deadline) -> Reply:
        """Return the shim's status."""
        return self.ask("status", deadline)


def cuda_name(code: int) -> str:
    """Return the driver's name for a result code.  The import is slow, so it waits for the first error."""
    try:
        from cuda.bindings.driver import CUresult

        return str(CUresult(code).name)
    except Exception:  # the bindings raise several kinds for a code they do not know
        return f"CUresult {code}"


@dataclass
class Group:
    """The members of one command, in rank order (by pid)."""

    ranks: list[Rank]
    others: list[Member] = field(default_factory=list)  # unshimmed and plain

    @property
    def members(self) -> list[Member]:
        """Return all members, by pid."""
        return sorted([*(rank.member for rank in self.ranks), *self.others], key=lambda member: member.pid)

    @property
    def cuda_pids(self) -> list[int]:
        """Return the pids on which driver calls are made."""
        return [member.pid for member in self.members if member.kind is not Kind.PLAIN]

    @property
    def processes(self) -> list[Process]:
        """Return the identities of all members."""
        return [member.process for member in self.members]

    def without(self, dead: Sequence[int]) -> Group:
        """Return the group without some pids; connections are shared."""
        return Group(
            [rank for rank in self.ranks if rank.pid not in dead],
            [member for member in self.others if member.pid not in dead],
        )

    def __iter__(self) -> Iterator[Rank]:
        """Go through the ranks."""
        return iter(self.ranks)

    def close(self) -> None:
        """Hang up everywhere."""
        for rank in self.ranks:
            rank.client.close()


def group_of(members: Sequence[Member]) -> Group:
    """Return a group with fresh connections for recorded members."""
    return Group(
        [Rank(member) for member in members if member.kind is Kind.SHIMMED],
        [member for member in members if member.kind is not Kind.SHIMMED],
    )


def other_program(member: Member) -> bool:
    """Tell whether a member that lives has become another program: an exec keeps pid and start time, and no shim."""
    if not member.nonce or processes.stopped_by(member.pid):  # who is stopped can tell nobody, nor become another
        return False
    try:
        processes.check_reachable(member.process)
        with ControlClient(member.pid, member.inner_pid, member.uid) as client:
            nonce = client.request("hello", Deadline(LIMITS.connect_s)).text("nonce")
        # A shim that has made no object yet has no nonce, and nothing to lose.
        return int(member.nonce, 16) != 0 and nonce != member.nonce
    except ConnectionRefusedError:
        # The threads of a shim live as long as its program, whatever becomes of the socket.
        return not processes.threads_named(member.pid, [processes.CONTROL_THREAD])
    except (errors.GpushareError, OSError, ValueError, ShimRefused):
        return False


def still_there(member: Member) -> Member | None:
    """Return a recorded member as it lives now, or None.

    A process restored from a dump keeps pid and nonce and gets a new start time; then the shim's answer decides.
    One without a shim has nothing to tell it by but its place in the group: see `still_there_without_shim`.

    Raises LookFailed or NoAnswer where something listens that does not answer, and SystemCall where the system denies
    asking: that is no death.
    """
    if processes.is_same(member.process):
        return None if other_program(member) else member
    if member.kind is not Kind.SHIMMED:
        return None
    try:
        now = processes.read_process(member.pid)
        if now.inner_pid != member.inner_pid:
            return None
        with ControlClient(now.pid, now.inner_pid, now.uid) as client:
            nonce = client.request("hello", Deadline(LIMITS.connect_s)).text("nonce")
    except errors.RankStopped as cause:
        raise errors.LookFailed(cause=cause) from None
    except TimeoutError:
        raise errors.NoAnswer(pid=member.pid, detail=f"no answer within {LIMITS.connect_s:g} s") from None
    except (errors.GpushareError, OSError, ValueError, ShimRefused) as error:
        if isinstance(error, OSError) and system.denied(error):
            raise system.unasked(member.pid, error) from None
        return None
    return replace(member, start_time=now.start_time, uid=now.uid) if nonce == member.nonce else None


def still_there_without_shim(member: Member) -> Member | None:
    """Return a member without a shim of a group restored from a dump, or None: pids and name are all it has."""
    try:
        now = processes.read_process(member.pid)
    except (errors.GpushareError, OSError, ValueError):
        return None
    same = (now.inner_pid, now.comm) == (member.inner_pid, member.comm)
    return replace(member, start_time=now.start_time, uid=now.uid) if same else None
