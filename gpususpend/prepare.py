"""Host memory for what leaves the GPUs: made and filled here, handed to the shims while the workload still serves.

Owns which shim needs how much, an arena for everything or a ring to pass it through, and handing it over.  Must not
know how it is filled with pages, or what the shims do with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpususpend import phases
from gpususpend.control import Reply
from gpususpend.deadline import Deadline
from gpususpend.defaults import APART_BYTES
from gpususpend.group import Rank
from gpususpend.journal import Depth
from gpususpend.phases import PhaseTime
from gpususpend.preflight import Plan, arena_to_hand_over, read_plan
from gpususpend.progress import readable_bytes
from gpususpend.session import Session

if TYPE_CHECKING:
    from gpususpend.arena import Arena

# What to do where the kernel gives an arena no huge pages.
PLAIN_ADVICE = (
    "For huge pages: --in-place as root if no dump is to follow, or echo advise "
    ">/sys/kernel/mm/transparent_hugepage/shmem_enabled, or set vm.nr_hugepages aside"
)


def prepare(session: Session, quiet: bool = False) -> None:
    """Give every shim that will save something what it needs for that; what is large enough already stays.

    What an earlier command left and does not serve is replaced when the group is `quiet`, not before.
    """
    plans = {pid: read_plan(reply) for pid, reply in session.quick("plan").items()}
    have = {pid: reply.number("arena_bytes") for pid, reply in session.quick("status").items()}
    session.learn(plans)
    free = [pid for pid in plans if quiet or have[pid] == 0]
    if to_be_dumpable(session):
        have |= {pid: 0 for pid in free if have[pid] and not session.context.tools.is_dumpable(pid)}
    if session.stored is not None:
        hand_over(session, session.stored.rings({pid: plans[pid].arena_bytes for pid in free}))
    else:
        hand_over(session, _arenas(plans, have, free))


def _arenas(plans: Mapping[int, Plan], have: Mapping[int, int], free: Sequence[int]) -> dict[int, int]:
    return {pid: arena_to_hand_over(plans[pid]) for pid in free if plans[pid].arena_bytes > have[pid]}


def hand_over(session: Session, wanted: Mapping[int, int]) -> None:
    """Make the memory that shims shall get, by pid in bytes, and hand it over."""
    ranks = [rank for rank in session.group if rank.pid in wanted]
    if not ranks:
        return
    session.context.tools.check_memory([(os.getpid(), sum(wanted.values()))])
    deadline = Deadline(session.limits.prepare_s)
    with (
        session.timed("prepare", len(ranks), sum(wanted.values())) as phase,
        filled(session, phase, ranks, wanted) as made,
    ):
        # Only now does a shim get one: what fails before, or is interrupted, leaves nothing to take back.
        slots = phases.parallel(
            ranks, lambda rank: give(session, rank, made[rank.pid], deadline),
            lambda pids: session.waiting(pids, sum(wanted.values())),
        )  # fmt: skip
        phase.took(slots, "page-lock")
        replies = phases.results("prepare", slots)
        phase.bytes = sum(reply.number("bytes") for reply in replies.values())
        if session.stored is not None:
            session.stored.take_rings({pid: arena.fd for pid, arena in made.items()})
    for pid, reply in replies.items():
        locked, whole = reply.number("locked_bytes"), reply.number("bytes")
        if locked < whole:
            session.context.progress.say(
                f"the driver page-locks {readable_bytes(locked)} of the {_word(session)} of pid {pid}, "
                f"{readable_bytes(whole)}: the rest is copied more slowly"
            )


def give(session: Session, rank: Rank, arena: Arena, deadline: Deadline) -> Reply:
    """Have a shim map and page-lock its arena or ring; return its answer.

    Unlocking waits for all work of a context and runs at 60 GB/s, so it would double the time of a load.  In a context
    of the shim's own it can wait until the group runs; that takes 0.25 GiB of the GPU, which a checkpoint would carry.
    """
    apart = session.record.depth is Depth.PAGES and session.stored is None and arena.bytes >= APART_BYTES
    return rank.ask("arena", deadline, fd=arena.fd, bytes=arena.bytes, apart=int(apart))


def to_be_dumpable(session: Session) -> bool:
    """Tell whether arenas have to be of a kind that can be dumped; a ring is gone before a dump is taken."""
    record = session.record
    return record.depth is Depth.PROCESS and not record.in_place and session.stored is None


def _word(session: Session) -> str:
    return "arena" if session.stored is None else "ring"


@contextmanager
def filled(
    session: Session, phase: PhaseTime, ranks: Sequence[Rank], wanted: Mapping[int, int]
) -> Iterator[dict[int, Arena]]:
    """Yield by pid populated memory; the descriptors are closed at the end.

    A signal turns back in the middle of it: this may take minutes.
    """
    context = session.context
    dumpable = to_be_dumpable(session)
    pieces: list[int] = []  # appended to by many threads, which is atomic; only its sum is read

    def count(piece: int) -> None:
        pieces.append(piece)
        if session.interruptible:
            context.interrupts.check("prepare")

    slots = phases.parallel(
        ranks, lambda rank: context.tools.prepare_arena(wanted[rank.pid], count, dumpable),
        lambda pids: session.waiting(pids, sum(pieces)),
    )  # fmt: skip
    phase.took(slots, "populate")
    try:
        made = phases.results("prepare", slots)
        for pid, arena in made.items():
            if not arena.kind.huge:
                context.progress.say(
                    f"the {_word(session)} of pid {pid} has plain pages: locking and copying are slower. {PLAIN_ADVICE}"
                )
        yield made
    finally:
        for slot in slots:
            for arena in slot.values:
                os.close(arena.fd)
