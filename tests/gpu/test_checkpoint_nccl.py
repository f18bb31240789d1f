"""Ranks with traffic: NCCL's transports on GPUs, ranks that wait for each other on simcuda (B16)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import lacking
from tests.gpu.conftest import Group
from tests.programs import setting as where
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping
from tests.programs.usage import memory_by_pid

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
    """FR-5: two torch.distributed ranks with two communicators, three cycles in place; every sum is as the CPU's."""
    chosen, named = TRANSPORTS[transport]
    try:
        import torch  # noqa: F401
    except ImportError:
        lacking("this test needs PyTorch")
    env = NO_MULTICAST | chosen | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                          "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p")}
    ranks = Stepping(machine, "tests.programs.nccl_rank", 2, tmp_path, env)
    try:
        ranks.wait_for_more(5, 120)
        said = "".join(path.read_text(errors="replace") for path in tmp_path.glob("nccl.*"))
        assert named in said, f"NCCL does not use {named}; this test is about that transport"
        for _ in range(3):
            group.tool.suspend(*ranks.pids).expect(0)
            assert not memory_by_pid(machine).keys() & set(ranks.pids)
            stopped = ranks.steps()
            time.sleep(0.5)
            assert ranks.steps() == stopped, "ranks run while suspended"
            group.tool.resume(*ranks.pids).expect(0)
            ranks.wait_for_more(5, 60)
        ranks.finish()
    finally:
        ranks.kill()


def nccl_ranks(machine: Setting, folder: Path) -> Stepping:
    """Start two ranks at NCCL's default transport."""
    folder.mkdir()
    env = NO_MULTICAST | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return Stepping(machine, "tests.programs.nccl_rank", 2, folder, env)


@pytest.mark.machine(devices=2, driver="real")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("depth", ["process", "pages"])
@pytest.mark.parametrize("both", [False, True], ids=["one is cycled", "both are cycled"])
def test_two_groups_on_the_same_gpus(machine: Setting, group: Group, tmp_path: Path, depth: str, both: bool) -> None:
    """What one group goes through is nothing to another one, as when models are swapped."""
    pytest.importorskip("torch")
    first, second = nccl_ranks(machine, tmp_path / "first"), nccl_ranks(machine, tmp_path / "second")
    try:
        for one in (first, second):
            one.wait_for_more(5, 120)
        cycled = [first, second] if both else [first]
        with ThreadPoolExecutor(len(cycled)) as pool:
            for _ in range(3):
                for answer in pool.map(lambda one: group.tool.suspend(*one.pids, options=("--depth", depth)), cycled):
                    answer.expect(0)
                if not both:
                    second.wait_for_more(5, 60)
                for answer in pool.map(lambda one: group.tool.resume(*one.pids), cycled):
                    answer.expect(0)
                for one in (first, second):
                    one.wait_for_more(5, 60)
        for one in (first, second):
            one.finish()
    finally:
        first.kill()
        second.kill()


# Four ranks that copy all the time are more than a small machine without a GPU has processors for.
@pytest.mark.parametrize("turn", range(8 if where.wanted_driver() == "real" else 2))
def test_b16_ranks_in_lockstep(start_worker: Callable[..., Worker], group: Group, machine: Setting, turn: int) -> None:
    """Kernels of every rank wait for the next rank's: the cut has to be consistent, while others copy all the time."""
    del turn
    count = 4 if machine.simulated else 2
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
    group.suspend(*ranks)
    group.resume(*ranks)
    seen = [rank.loop_state(number)["count"] for rank, number in loops]
    until = time.monotonic() + 20
    while time.monotonic() < until:
        states = [rank.loop_state(number) for rank, number in loops]
        assert all(not state["errors"] for state in states), states
        if all(state["count"] > was for state, was in zip(states, seen, strict=True)):
            return
        time.sleep(0.02)
    pytest.fail(f"some loops stand still after the resume: {states}")
