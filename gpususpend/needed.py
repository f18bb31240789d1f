"""Whether living processes need a checkpoint, as their shims tell: also where the record of their group is lost.

Owns the question to all shims that listen here.  Must not know records, or how a checkpoint is kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence

from gpususpend import control, errors, openfiles, phases, processes
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.group import Rank
from gpususpend.journal import Kind, Member


def check_unneeded(
    directory: str, ids: Sequence[str], inner_pids: Collection[int] | None, of_here: bool, warn: Callable[[str], None]
) -> None:
    """Refuse to let the checkpoints of these ids go while the shim of a process in this network namespace needs one.

    Only a process with one of `inner_pids` can; None: any can.  Where the checkpoint was made `of_here`, in this PID
    namespace, none of another one can, which would not answer.  All are asked at once and by one deadline.  A shim that
    does not answer may need it: that is a refusal as well.  Other users' shims answer nobody but root; whom they do not
    answer cannot have suspended them.  `warn` is told.

    Raises CheckpointNeeded, NoAnswer.
    """
    deadline = Deadline(LIMITS.connect_s)
    strangers: list[int] = []
    listening = [pid for pid in control.listeners() if inner_pids is None or pid in inner_pids]
    ranks = list(_ranks(listening, deadline, strangers))
    if of_here:
        ranks = [rank for rank in ranks if rank.pid == rank.member.inner_pid]

    def ask(rank: Rank) -> str:
        with contextlib.closing(rank.client):
            return rank.status(deadline).text("stored")

    answers = []
    for some in openfiles.portions([rank for rank in ranks if rank.pid]):
        deadline = Deadline(LIMITS.connect_s)
        answers += phases.parallel(some, ask)
    for rank in ranks:
        if not rank.pid:  # a pid that several may have
            answers += phases.parallel([rank], ask)
    for slot in answers:
        if slot.values and slot.values[0] in ids:
            raise errors.CheckpointNeeded(
                directory=directory, pid=slot.rank.pid or slot.rank.member.inner_pid,
                group="(of another state directory, or of one that is lost)", stage="suspended",
            )  # fmt: skip
    for slot in answers:
        if slot.values or not _lives(slot.rank):
            continue
        if isinstance(slot.error, errors.ConnectionLost) and slot.rank.member.uid != os.geteuid():
            strangers.append(slot.rank.pid)
            continue
        raise _mute(slot.rank.pid or slot.rank.member.inner_pid, str(phases.as_error("status", slot)))
    if strangers:
        pids = ", ".join(map(str, strangers))
        warn(f"processes of other users were not asked whether they need the checkpoint: pids {pids}")


def _ranks(inner_pids: Sequence[int], deadline: Deadline, strangers: list[int]) -> Iterator[Rank]:
    """Yield who of these listens and is to be asked; the pids of others go to `strangers`."""
    for inner_pid in inner_pids:
        try:
            listening = control.who_listens(inner_pid, deadline)
        except TimeoutError as late:
            raise _mute(inner_pid, str(late)) from None
        for pid, uid in listening:
            if os.geteuid() not in (0, uid):
                strangers.append(pid or inner_pid)
                continue
            with contextlib.suppress(errors.NoSuchProcess):  # it has ended
                process = processes.read_process(pid) if pid else None
                start_time, comm = (process.start_time, process.comm) if process is not None else (0, "")
                yield Rank(Member(pid, start_time, inner_pid, uid, comm, Kind.SHIMMED))


def _lives(rank: Rank) -> bool:
    """Tell whether a shim that has not answered may still have something to say."""
    if rank.member.inner_pid not in control.listeners():
        return False
    return not rank.pid or processes.is_same(rank.member.process)


def _mute(pid: int, detail: str) -> errors.NoAnswer:
    way_out = "let it run and try again, in its PID namespace, or in the one where the checkpoint was made"
    return errors.NoAnswer(pid=pid, detail=f"{detail}; it may need the checkpoint that is to go: {way_out}")
