"""Ranks that run programs of kernels in a time of their own, asked as shims are: what the cut is tried on by seeds.

A rank has threads; each runs its program over and over: it launches kernels into a stream of its own and waits for them
now and then.  A kernel may take some time, meet the kernels of other ranks (a collective), or wait for another rank's
(a flag).  Once the launch gate has closed, a launch waits until it is let through.

`world(seed)` draws ranks and what each of their threads does: tensor-parallel steps, pipelines, rings of flags, kernels
that another thread feeds, work of a rank's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpususpend.control import Reply
from gpususpend.deadline import Deadline


@dataclass(frozen=True)
class Launch:
    """One launch of a program: a kernel that takes `seconds` once what it waits for has happened.

    `meets`: (communicator, ranks): it ends after all of these have begun their kernel with the same turn of it.
    `signals`/`awaits`: it writes, or waits for, the flag of that name with the turn of the thread's loop.
    `sync`: the thread waits afterwards for all that it launched.
    """

    seconds: float
    meets: tuple[str, tuple[int, ...]] | None = None
    signals: str = ""
    awaits: str = ""
    sync: bool = False


@dataclass
class Kernel:
    """A launch that was made; `free` says since when nothing but its own seconds is in its way."""

    launch: Launch
    turn: int
    free: float = -1.0


@dataclass(eq=False)
class Thread:
    """A thread of a rank with its program, and the stream it launches into."""

    program: Sequence[Launch]
    pauses: random.Random
    slowness_s: float
    turn: int = 1
    at: int = 0
    ready: float = 0.0  # when it makes its next launch
    queue: list[Kernel] = field(default_factory=list)
    syncing: bool = False
    gated: bool = False


class World:
    """All ranks and their time in seconds; `now` only moves in `sleep`."""

    step_s = 0.001

    def __init__(self, programs: Sequence[Sequence[Sequence[Launch]]], seed: int, look_s: float = 0.0005) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.look_s = look_s
        self.flags: dict[str, int] = {}
        self.begun: dict[tuple[str, int], set[int]] = {}
        self.ranks = [ModelRank(self, index, threads) for index, threads in enumerate(programs)]

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + max(seconds, 1e-6)
        while self.now < until:
            self.now += min(self.step_s, until - self.now)
            for rank in self.ranks:
                rank.run()

    def deadline(self, seconds: float) -> Deadline:
        """Return a deadline in this time."""
        return Deadline(seconds, self.clock, self.sleep)

    def close(self) -> None:
        """Close the launch gates, one after the other, as the command does."""
        for rank in self.ranks:
            rank.closed = True
            self.sleep(self.random.uniform(0.0, 0.003))


class ModelRank:
    """One rank: its threads, its gate, and the answers of its shim."""

    def __init__(self, world: World, index: int, programs: Sequence[Sequence[Launch]]) -> None:
        self.world = world
        self.index = index
        self.pid = 100 + index
        self.closed = False
        self.let_through: list[Thread] = []
        self.admitted = 0
        self.gate: list[Thread] = []
        pick = world.random
        self.threads = [
            Thread(program, random.Random(pick.random()), pick.choice((0.0, 0.0005, 0.004))) for program in programs
        ]

    def ask(self, verb: str, deadline: Deadline, thread: int = 0) -> Reply:
        """Answer `drain` and `admit`; a look at all ranks takes time."""
        del deadline
        if verb == "admit":
            self.let_through += [one for one in self.gate if self.threads.index(one) + 1 == thread]
            return Reply(True, {})
        if self.index == 0:
            self.world.sleep(self.world.look_s)
        drained = not self.let_through and not any(one.queue for one in self.threads)
        groups = [
            {"thread": str(self.threads.index(one) + 1), "idle": str(int(drained or not one.queue))}
            for one in self.gate if one not in self.let_through
        ]
        head = {"drained": drained, "waiting": len(self.gate), "admitted": self.admitted, "in_flight": 0}
        return Reply(True, {name: str(int(value)) for name, value in head.items()}, groups)

    def run(self) -> None:
        """Do what there is to do at this time."""
        for thread in self.threads:
            while thread.queue and self._ends(thread.queue[0]):
                del thread.queue[0]
        for thread in self.let_through:
            self.gate.remove(thread)
            self.admitted += 1
            self._launch(thread)
        self.let_through = []
        for thread in self.threads:
            self._go_on(thread)

    def _go_on(self, thread: Thread) -> None:
        if thread.syncing and not thread.queue:
            thread.syncing = False
            thread.ready = self.world.now + thread.pauses.uniform(0, thread.slowness_s)
        budget = 4  # launches in one step of time
        while not thread.syncing and thread not in self.gate and thread.ready <= self.world.now and budget:
            if self.closed:
                self.gate.append(thread)
                return
            self._launch(thread)
            budget -= 1

    def _launch(self, thread: Thread) -> None:
        launch = thread.program[thread.at]
        thread.queue.append(Kernel(launch, thread.turn))
        thread.syncing = launch.sync or len(thread.queue) > 1000
        thread.at += 1
        if thread.at == len(thread.program):
            thread.at = 0
            thread.turn += 1
        thread.ready = self.world.now + thread.pauses.uniform(0, thread.slowness_s / 4)

    def _ends(self, kernel: Kernel) -> bool:
        world, launch = self.world, kernel.launch
        if kernel.free < 0:
            if launch.meets:
                name, ranks = launch.meets
                begun = world.begun.setdefault((name, kernel.turn), set())
                begun.add(self.index)
                if not begun.issuperset(ranks):
                    return False
            if launch.awaits and world.flags.get(launch.awaits, 0) < kernel.turn:
                return False
            kernel.free = world.now
        if world.now < kernel.free + launch.seconds:
            return False
        if launch.signals:
            world.flags[launch.signals] = kernel.turn
        return True


Program = list[Launch]


def tensor(rank: int, ranks: int, pick: random.Random) -> Program:
    """Return a step with three collectives of all ranks; kernels of the rank's own between them."""
    del rank
    program: Program = []
    for number in range(3):
        program += [Launch(0.0002)] * pick.randrange(0, 6)
        program.append(Launch(0.0003, meets=(f"tensor{number}", tuple(range(ranks))), sync=pick.random() < 0.3))
    return [*program, Launch(0.0001, sync=True)]


def pipeline(rank: int, ranks: int, pick: random.Random) -> Program:
    """Return a stage that meets the one before it, works, and meets the one after it."""
    del pick
    before = [Launch(0.0003, meets=(f"stage{rank}", (rank - 1, rank)))] if rank else []
    after = Launch(0.0003, meets=(f"stage{rank + 1}", (rank, rank + 1)), sync=True)
    return [*before, Launch(0.001), after if rank + 1 < ranks else Launch(0.0001, sync=True)]


def ring(name: str) -> Callable[[int, int, random.Random], Program]:
    """Return programs that write the next rank's flag and wait for their own."""

    def program(rank: int, ranks: int, pick: random.Random) -> Program:
        del pick
        return [Launch(0.0001, signals=f"{name}{(rank + 1) % ranks}"),
                Launch(0.0001, awaits=f"{name}{rank}", sync=True)]

    return program


def deep(name: str) -> Callable[[int, int, random.Random], Program]:
    """Return programs of flags from everybody to everybody that are rarely waited for: ranks get far apart."""

    def program(rank: int, ranks: int, pick: random.Random) -> Program:
        others = [other for other in range(ranks) if other != rank]
        steps: Program = []
        for step in range(6):
            steps += [Launch(0.00005)] * pick.randrange(4)
            steps += [Launch(0.00005, signals=f"{name}{step}.{rank}.{other}") for other in others]
            steps += [Launch(0.00005, awaits=f"{name}{step}.{other}.{rank}") for other in others]
            steps[-1] = replace(steps[-1], sync=pick.random() < 0.4)
        return steps

    return program


def fed(rank: int, ranks: int, pick: random.Random) -> Program:
    """Return a kernel that ends some time later, as another thread's copy lets it; mostly soon, at times very late."""
    del rank, ranks
    return [Launch(pick.choice((0.002, 0.02, 0.05, 0.2, 0.5)), sync=True)]


def alone(rank: int, ranks: int, pick: random.Random) -> Program:
    """Return kernels that wait for nobody."""
    del rank, ranks
    return [Launch(0.0005)] * pick.randrange(1, 4) + [Launch(0.001, sync=True)]


KINDS = {"tensor": tensor, "pipeline": pipeline, "ring": ring("first"), "other ring": ring("second"),
         "deep": deep("third"), "other deep": deep("fourth"), "fed": fed, "alone": alone}


def world(seed: int) -> World:
    """Draw ranks, run them for a while and close their gates."""
    pick = random.Random(seed)
    count = pick.choice((2, 2, 3, 4, 8))
    kinds = pick.sample(sorted(KINDS), pick.randrange(1, 4))
    seeds = {kind: pick.random() for kind in kinds}  # ranks that meet run the same program
    programs = [
        [KINDS[kind](rank, count, pick if kind == "fed" else random.Random(seeds[kind])) for kind in kinds]
        for rank in range(count)
    ]
    made = World(programs, seed, pick.choice((0.0003, 0.0003, 0.002, 0.02)))
    made.sleep(pick.uniform(0.05, 0.3))
    made.close()
    return made
