"""Ranks with traffic: NCCL's transports on GPUs, ranks that wait for each other on simcuda (B16)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import lacking, need_package
from tests.gpu.conftest import Group
from tests.programs import setting as where
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping

MIB = 1 << 20

# Multicast can take the host's GPUs out of service, and drivers below 610 cannot make it again.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def free_port() -> str:
    """Return a TCP port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


TRANSPORTS = {
    "default": ({}, "P2P/CUMEM"),
    "legacy IPC": ({"NCCL_CUMEM_ENABLE": "0"}, "P2P/IPC"),
    "host memory of cuMem": ({"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "1"}, "via SHM"),
    "registered files of /dev/shm": ({"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}, "via SHM"),
}


@pytest.mark.machine(devices=2, driver="real")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nccl(machine: Setting, group: Group, tmp_path: Path, transport: str) -> None:
    """FR-5, FR-25, pitfall 7: two ranks with two communicators, three cycles in place; every sum is as the CPU's."""
    chosen, named = TRANSPORTS[transport]
    need_package("torch", "PyTorch")
    env = NO_MULTICAST | chosen | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                          "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p")}
    ranks = Stepping(machine, "tests.programs.nccl_rank", 2, tmp_path, env)
    try:
        ranks.wait_for_more(5, 120)
        said = "".join(path.read_text(errors="replace") for path in tmp_path.glob("nccl.*"))
        assert named in said, f"NCCL does not use {named}; this test is about that transport"
        group.cycle_at_work(ranks, 5)
        ranks.finish()
    finally:
        ranks.kill()


def nccl_ranks(machine: Setting, folder: Path) -> Stepping:
    """Start two ranks at NCCL's default transport."""
    folder.mkdir()
    env = NO_MULTICAST | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return Stepping(machine, "tests.programs.nccl_rank", 2, folder, env)


@contextmanager
def two_groups(machine: Setting, folder: Path) -> Iterator[tuple[Stepping, Stepping]]:
    """Two pairs of ranks on the same two GPUs, both at work."""
    need_package("torch", "PyTorch")
    first, second = nccl_ranks(machine, folder / "first"), nccl_ranks(machine, folder / "second")
    try:
        for one in (first, second):
            one.wait_for_more(5, 120)
        yield first, second
    finally:
        first.kill()
        second.kill()


@pytest.mark.machine(devices=2, driver="real")
@pytest.mark.timeout(400)
def test_two_groups_take_turns(machine: Setting, group: Group, tmp_path: Path) -> None:
    """One is away while the other works, as when models are swapped: see driver-facts.md for both at once."""
    with two_groups(machine, tmp_path) as (there, away):
        group.tool.suspend(*away.pids).expect(0)
        for _ in range(4):
            there.wait_for_more(5, 60)
            group.tool.suspend(*there.pids).expect(0)
            there, away = away, there
            group.tool.resume(*there.pids).expect(0)
        there.finish()
        group.tool.resume(*away.pids).expect(0)
        away.finish()


@pytest.mark.machine(devices=2, driver="real")
@pytest.mark.timeout(400)
def test_two_groups_side_by_side(machine: Setting, group: Group, tmp_path: Path) -> None:
    """At depth pages there is no restore, after which the driver would not let kernels of both take turns."""
    with two_groups(machine, tmp_path) as both, ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for answer in pool.map(lambda one: group.tool.suspend(*one.pids, options=("--depth", "pages")), both):
                answer.expect(0)
            for answer in pool.map(lambda one: group.tool.resume(*one.pids), both):
                answer.expect(0)
            for one in both:
                one.wait_for_more(5, 60)
        for one in both:
            one.finish()


# Four ranks that copy all the time are more than a small machine without a GPU has processors for.
# After a restore, ranks that wait for each other need a GPU each.
@pytest.mark.machine(**({"devices": 4} if where.wanted_driver() == "sim" else {}))
@pytest.mark.parametrize("turn", range(4 if where.wanted_driver() == "real" else 1))
@pytest.mark.parametrize("depth", ["process", "pages"])
def test_b16_ranks_in_lockstep(
    start_worker: Callable[..., Worker], group: Group, machine: Setting, depth: str, turn: int
) -> None:
    """Kernels of every rank wait for the next rank's: the cut has to be consistent, while others copy all the time."""
    del turn
    count = 4 if machine.simulated else 2
    if depth == "process" and not machine.simulated and machine.devices < count:
        lacking("ranks that wait for each other need a GPU each after a restore: driver-facts.md", 2)
    ranks = [start_worker(at) for at in range(count)]
    flags = [rank.alloc(4096) for rank in ranks]
    for rank, flag in zip(ranks, flags, strict=True):
        rank.write(flag, [0])
    loops = []
    for at, rank in enumerate(ranks):
        behind = (at + 1) % count
        theirs = rank.ipc_open(ranks[behind].ipc_get(flags[behind]))
        loops.append((rank, rank.loop_start("lockstep", mine=flags[at], theirs=theirs)))
        loops.append((rank, rank.loop_start("copies", pause_s=0.002 if machine.simulated else 0)))
        loops.append((rank, rank.loop_start("fed_kernels")))
    time.sleep(0.3)
    if depth == "process":
        group.suspend(*ranks)
    else:
        group.tool.suspend(*(rank.pid for rank in ranks), options=("--depth", depth)).expect(0)
    group.resume(*ranks)
    seen = [rank.loop_state(number)["count"] for rank, number in loops]
    until = time.monotonic() + 60
    while time.monotonic() < until:
        states = [rank.loop_state(number) for rank, number in loops]
        assert all(not state["errors"] for state in states), states
        if all(state["count"] > was for state, was in zip(states, seen, strict=True)):
            return
        time.sleep(0.02)
    pytest.fail(f"some loops stand still after the resume: {states}")
