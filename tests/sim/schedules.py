"""Seeded schedules of ranks that work in step, each cut somewhere: `python -m tests.sim.schedules --count 5000`.

A schedule draws how many ranks take part, what each of their threads does, and at which moments the gates close; every
cut has to be found by the command's own deadline, and after the last one everybody has to finish.  The processes, shims
and gates are real; the GPUs are simulated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpususpend import phases, processes, quiesce
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.group import Rank
from gpususpend.journal import Kind, Member
from tests.programs import setting
from tests.programs.client import Worker
from tests.programs.setting import Setting

RANKS = 4
CHAINS = 2  # threads of a rank that work in step with those of other ranks
FLAGS_BYTES = 4096
FINISH_S = 60.0


def rank_of(worker: Worker) -> Rank:
    """Return the supervisor's side of a worker."""
    found = processes.read_process(worker.pid)
    return Rank(Member(found.pid, found.start_time, found.inner_pid, found.uid, found.comm, Kind.SHIMMED))


@dataclass
class Crew:
    """Workers that can reach each other's flags, for one schedule after another."""

    workers: Sequence[Worker]
    ranks: list[Rank] = field(default_factory=list)
    flags: list[list[list[int]]] = field(default_factory=list)  # [chain][who uses it][whose]: an address
    turns: int = 1  # above those of all schedules before

    def __post_init__(self) -> None:
        """Share the flags."""
        for _ in range(CHAINS):
            own = [worker.alloc(FLAGS_BYTES) for worker in self.workers]
            for worker, address in zip(self.workers, own, strict=True):
                worker.memset_d32(address, 0, FLAGS_BYTES // 4)
                worker.ctx_sync()
            handles = [worker.ipc_get(address) for worker, address in zip(self.workers, own, strict=True)]
            self.flags.append([
                [own[at] if at == user else worker.ipc_open(handles[at]) for at in range(len(self.workers))]
                for user, worker in enumerate(self.workers)
            ])
        self.ranks = [rank_of(worker) for worker in self.workers]

    def run(self, seed: int) -> int:
        """Run one schedule; return the number of launches that were let through.  Raises what went wrong."""
        pick = random.Random(seed)
        count = pick.randint(2, len(self.workers))
        turns = pick.randint(4, 20)
        loops = [
            (worker, worker.loop_start(
                "steps", mine=self.flags[chain][at][at], theirs=self.flags[chain][at][:count], rank=at,
                seed=seed * CHAINS + chain, first=self.turns, turns=turns))
            for chain in range(pick.randint(1, CHAINS)) for at, worker in enumerate(self.workers[:count])
        ]
        self.turns += turns
        admitted = 0
        for _ in range(pick.randint(1, 3)):
            time.sleep(pick.uniform(0, 0.02))
            admitted += cut(self.ranks[:count])
        finish(loops)
        return admitted


def cut(ranks: Sequence[Rank]) -> int:
    """Close both gates of all, as a suspend does, and open them again; return the launches that were let through."""
    deadline = Deadline(LIMITS.timeout_s)

    def all_of(verb: str, **fields: int) -> None:
        phases.results(verb, phases.parallel(ranks, lambda rank: rank.ask(verb, deadline, **fields)))

    try:
        all_of("close-launch")
        admitted = quiesce.drain_all(ranks, deadline, lambda pids: None)
        all_of("close-memory", timeout_ms=phases.timeout_ms(deadline))
    finally:
        phases.parallel(ranks, lambda rank: rank.ask("open", Deadline(LIMITS.open_s)))
    return admitted


def finish(loops: Sequence[tuple[Worker, int]]) -> None:
    """Wait until all loops have ended by themselves; what one found wrong is raised."""
    until = time.monotonic() + FINISH_S
    for worker, number in loops:
        while (state := worker.loop_state(number))["alive"]:
            assert time.monotonic() < until, f"pid {worker.pid} does not go on after the gates have opened: {state}"
            time.sleep(0.002)
        assert not state["errors"], f"pid {worker.pid}: {state['errors']}"


def main(arguments: Sequence[str]) -> int:
    """Run schedules and print how many there were, what they needed and which failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args(arguments)
    machine = Setting("sim", setting.SHIM, state=setting.fresh_state())
    workers = [Worker(machine) for _ in range(RANKS)]
    seed, admitted, longest, begun = options.seed, 0, 0.0, time.monotonic()
    try:
        for at, worker in enumerate(workers):
            worker.start(at % machine.devices)
        crew = Crew(workers)
        for seed in range(options.seed, options.seed + options.count):
            before = time.monotonic()
            admitted += crew.run(seed)
            longest = max(longest, time.monotonic() - before)
            if (seed - options.seed) % 250 == 249:
                print(f"{seed - options.seed + 1} of {options.count}", file=sys.stderr, flush=True)
    except Exception as error:
        print(f"schedule {seed} failed: {error}")
        return 1
    finally:
        for worker in workers:
            worker.kill()
        if machine.state is not None:
            setting.drop_state(Path(machine.state))
    print(f"schedules {options.seed} to {seed}: 0 failed, {admitted} launches let through, "
          f"the longest took {longest:.1f} s, all {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
