"""Memory that leaves piece by piece through a ring: what the shim hands out, gives up only then, and takes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.sim.keeper import PLACES, STEP, Keeper
from tests.sim.shim_control import HARMLESS, Faults, Group, Refused, ask, rows
from tests.sim.test_shim_faults import Scene

Start = Callable[..., Worker]


STEPS = ("save", "release", "give up", "seal", "load")


class StoredFaults(Faults):
    """The same with a keeper for the memory, whose steps are verbs as well."""

    def __init__(self, keeper: Keeper, scene: Scene, victim: Worker, verb: str) -> None:
        super().__init__(scene.group, scene.machine, scene.trace, victim, STEPS[: STEPS.index(verb) + 1])
        self.keeper = keeper

    def run(self, verb: str) -> None:
        """Run one step on both."""
        if verb == "save":
            self.keeper.save()
        elif verb == "release":
            self.group.all("release", stored="checkpoint-1")
        elif verb == "give up":
            self.keeper.give_up()
        elif verb == "load":
            self.group.all("load")
            self.keeper.load()
            self.group.all("load")
        else:
            super().run(verb)

    def lead(self) -> None:
        """Take both to where the step is due."""
        self.keeper.hand_over()
        self.group.quiesce()
        for verb in self.before:
            self.run(verb)
        if self.verb == "load":
            self.keeper.hand_over()

    def back(self) -> None:
        """Do what a rollback, a retry and a resume do."""
        self.keeper.resume()


@pytest.fixture
def scene(machine: Setting, start_worker: Start, tmp_path: Path) -> Iterator[Scene]:
    """The two processes of the tests of all faults."""
    yield Scene(machine, start_worker, tmp_path)


def test_cycles(scene: Scene) -> None:
    """All memory goes and comes back, and no page of the ring stays in a process meanwhile."""
    keeper = Keeper(scene.group)
    for _ in range(2):
        keeper.suspend()
        for worker in (scene.owner, scene.other):
            assert ask(worker.pid, "status")["stored"] == "checkpoint-1"
            assert "test-ring" not in Path(f"/proc/{worker.pid}/maps").read_text()
        keeper.resume()
        scene.verify()
        assert ask(scene.owner.pid, "status")["stored"] == "-"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", STEPS)
@pytest.mark.parametrize("who", ["owner", "other"])
def test_b20_every_call_fails_once(scene: Scene, verb: str, who: str) -> None:
    """Fail each call of one step in one process, roll back or retry, and compare everything."""
    faults = StoredFaults(Keeper(scene.group), scene, getattr(scene, who), verb)
    faults.count()
    scene.verify()
    faults.fail_each(lambda number: None, lambda number: scene.verify(), HARMLESS)


@pytest.fixture
def one(start_worker: Start) -> Worker:
    """A process with an allocation of several pieces, the last one short."""
    worker = start_worker(0)
    worker.fill(worker.alloc(3 * STEP + 4096), 3 * STEP + 4096, 1)
    return worker


def refused(pid: int, verb: str, **fields: object) -> str:
    """Return the word with which a request is refused."""
    with pytest.raises(Refused) as refusal:
        ask(pid, verb, **fields)
    return refusal.value.code


def test_nothing_is_dropped_that_was_not_copied_out(one: Worker) -> None:
    """Neither without a list, nor with one piece of it missing, nor with one of before the gates opened."""
    with Group([one]) as group:
        keeper = Keeper(group)
        keeper.hand_over()
        group.quiesce()
        assert refused(one.pid, "release", stored="x") == "phase"
        pieces = rows(one.pid, "pieces", bytes=STEP)
        assert sum(int(row["bytes"]) for row in pieces) >= 3 * STEP + 4096
        for row in pieces[1:]:
            ask(one.pid, "copy-out", piece=row["piece"], at=0)
        assert refused(one.pid, "release", stored="x") == "phase"
        ask(one.pid, "copy-out", piece=pieces[0]["piece"], at=0)
        group.all("open")
        group.quiesce()
        assert refused(one.pid, "release", stored="x") == "phase"
        assert refused(one.pid, "release", stored="") == "argument"
        keeper.save()
        group.all("release", stored="x")
        assert refused(one.pid, "release") == "phase"
        keeper.resume()
    one.check()


def test_gates_stay_closed_while_a_piece_is_missing(one: Worker) -> None:
    """A load that stops half-way goes on where it was; nothing passes for whole before the last piece."""
    with Group([one]) as group:
        keeper = Keeper(group)
        keeper.suspend()
        keeper.hand_over()
        whole = int(ask(one.pid, "load")["missing_bytes"])
        first, *rest = rows(one.pid, "pieces", bytes=STEP)
        key = (one.pid, first["object"], first["offset"])
        keeper.seen[one.pid][: int(first["bytes"])] = keeper.kept[key]
        ask(one.pid, "copy-in", piece=first["piece"], at=0)
        assert refused(one.pid, "copy-in", piece=first["piece"], at=0) == "phase"
        assert int(ask(one.pid, "load")["missing_bytes"]) == whole - int(first["bytes"])
        assert ask(one.pid, "status")["phase"] == "loading"
        ask(one.pid, "remap")
        assert refused(one.pid, "open") == "phase"
        assert rest
        keeper.resume()
    one.check()


def test_places_and_pieces_that_are_none(one: Worker) -> None:
    """A piece that does not fit at its place, one that does not exist, a ring that is gone: refused."""
    with Group([one]) as group:
        keeper = Keeper(group)
        keeper.hand_over()
        assert refused(one.pid, "pieces", bytes=STEP) == "phase"
        group.quiesce()
        assert refused(one.pid, "pieces") == "argument"
        pieces = rows(one.pid, "pieces", bytes=STEP)
        for at in (PLACES * STEP - 1, PLACES * STEP, 1 << 63, -1):
            assert refused(one.pid, "copy-out", piece=pieces[0]["piece"], at=at) == "argument"
        for number in (len(pieces) + 7, 1 << 40, "x"):
            assert refused(one.pid, "copy-out", piece=number, at=0) == "argument"
        assert refused(one.pid, "copy-in", piece=pieces[0]["piece"], at=0) == "phase"
        keeper.give_up()
        assert refused(one.pid, "copy-out", piece=pieces[0]["piece"], at=0) == "argument"
        group.all("open")
    one.check()


def test_pieces_of_zeros_are_set_on_the_device(one: Worker) -> None:
    """Several at once, without a ring; only what is missing, and only where there are so many."""
    with Group([one]) as group:
        zeros = one.alloc(2 * STEP + 512)
        one.memset_d32(zeros, 0, (2 * STEP + 512) // 4)
        one.expect(zeros, 2 * STEP + 512, [])
        keeper = Keeper(group)
        keeper.suspend()
        assert refused(one.pid, "clear", piece=0) == "phase"
        ask(one.pid, "load")
        pieces = rows(one.pid, "pieces", bytes=STEP)
        blank = [
            int(row["piece"])
            for row in pieces
            if not any(keeper.kept[one.pid, row["object"], row["offset"]])
        ]  # fmt: skip
        first = blank[0]
        count = next(n for n in range(1, len(blank) + 1) if first + n not in blank)
        assert count >= 3
        for wrong in ({"piece": first, "count": 0}, {"piece": first, "count": 1 << 40}, {"piece": len(pieces) + 7}):
            assert refused(one.pid, "clear", **wrong) == "argument", wrong
        size = sum(int(row["bytes"]) for row in pieces if first <= int(row["piece"]) < first + count)
        missing = int(ask(one.pid, "load")["missing_bytes"])
        assert int(ask(one.pid, "clear", piece=first, count=count)["bytes"]) == size
        assert refused(one.pid, "clear", piece=first, count=count) == "phase"
        assert int(ask(one.pid, "load")["missing_bytes"]) == missing - size
        keeper.resume()
    one.check()
