"""B20: every driver call of a suspend and of a resume fails in turn; rollback and retry work from wherever that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.sim.shim_control import GRANULE, HARMLESS, Faults, Group, used_bytes

Start = Callable[..., Worker]
VERBS = ("release", "seal", "load", "remap", "unseal", "check")


class Scene:
    """Two processes with one object of every kind, and the steps of a cycle."""

    def __init__(self, machine: Setting, start: Start, tmp_path: Path) -> None:
        self.machine = machine
        self.trace = tmp_path / "trace"
        env = {"SIMCUDA_TRACE": str(self.trace)}
        self.owner, self.other = start(env=env), start(1, env=env)
        owner, other = self.owner, self.other
        large, small = owner.alloc(3 << 20), owner.alloc(1000)
        owner.fill(large, 3 << 20, 1)
        owner.fill(small, 1000, 2)
        block = owner.block(GRANULE)
        owner.fill(block["address"], GRANULE, 3)
        seen = other.import_block(owner.hand(owner.mem_export(block["handle"]), other), GRANULE)
        other.expect(seen["address"], GRANULE, [3])
        host = owner.block(GRANULE, kind="host_numa")
        owner.host_fill(host["address"], GRANULE, 4)
        other.import_block(owner.hand(owner.mem_export(host["handle"]), other), GRANULE, kind="host_numa")
        opened = other.ipc_open(owner.ipc_get(small))
        other.expect(opened, 1000, [2])
        mine = other.alloc(2 << 20)
        other.fill(mine, 2 << 20, 5)
        unmapped = owner.mem_create(GRANULE)
        owner.mem_export(unmapped)
        for worker in (owner, other):
            worker.host_register(worker.buffer(1 << 20), 1 << 20, 3)
        self.block, self.seen, self.host = block, seen, host
        self.group = Group([owner, other])
        self.before = owner.snapshot(), other.snapshot()
        self.used = used_bytes(owner), used_bytes(other)

    def verify(self) -> None:
        """Everything is as it was, and still shared; nothing that the driver made is forgotten."""
        assert (self.owner.snapshot(), self.other.snapshot()) == self.before
        assert (used_bytes(self.owner), used_bytes(self.other)) == self.used
        self.owner.write(self.block["address"], [99])
        assert self.other.read(self.seen["address"]) == [99]
        self.owner.fill(self.block["address"], GRANULE, 3)


@pytest.fixture
def scene(machine: Setting, start_worker: Start, tmp_path: Path) -> Iterator[Scene]:
    """The two processes."""
    yield Scene(machine, start_worker, tmp_path)


def test_the_scene_survives_cycles(scene: Scene) -> None:
    """Without failures."""
    for _ in range(2):
        scene.group.cycle()
        scene.verify()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("who", ["owner", "other"])
def test_b20_every_call_fails_once(scene: Scene, verb: str, who: str) -> None:
    """Fail each call of one verb in one process, roll back or retry, and compare everything."""
    faults = Faults(scene.group, scene.machine, scene.trace, getattr(scene, who), VERBS[: VERBS.index(verb) + 1])
    faults.count()
    scene.verify()
    faults.fail_each(lambda number: None, lambda number: scene.verify(), HARMLESS)
