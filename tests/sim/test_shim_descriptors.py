"""FR-48: what the shim opens in a process is close-on-exec at every phase; programs that it starts get none of it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

from tests.programs.client import Worker
from tests.sim.shim_control import GRANULE, TIMEOUT_MS, Group, exchange

CLOSE_ON_EXEC = 0o2000000
STEPS = ("close-launch", "drain", "close-memory", "release", "seal", "load", "remap", "unseal", "check", "open")


def descriptors(pid: int) -> dict[int, bool]:
    """Return the descriptors of a process, and whether each is closed by exec."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/fdinfo/{name}") as info:
            words = dict(line.split(":", 1) for line in info.read().splitlines() if ":" in line)
            found[int(name)] = bool(int(words["flags"], 8) & CLOSE_ON_EXEC)
    return found


@contextlib.contextmanager
def connected(worker: Worker) -> Iterator[None]:
    """Connections that the shim keeps open: a lease, and one that only asked."""
    with contextlib.ExitStack() as stack:
        for verb in ("lease", "status"):
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            link.connect(f"\0nvsnap-gpushare.{worker.pid}")
            assert exchange(link, f"1 {verb}")[0].startswith("ok 1")
            if verb == "lease":
                stack.callback(exchange, link, "1 unlease")
        yield


def test_fr48_what_the_shim_opens_is_closed_by_exec(start_worker: Callable[..., Worker]) -> None:
    """Two processes that share by every way: nothing but what they opened themselves is inherited."""
    owner, other = workers = [start_worker(None) for _ in range(2)]
    before = {worker.pid: set(descriptors(worker.pid)) for worker in workers}
    for device, worker in enumerate(workers):
        worker.start(device)
    block = owner.block(GRANULE)
    exported = owner.mem_export(block["handle"])
    received, unused = owner.hand(exported, other), owner.hand(exported, other)
    other.import_block(received, GRANULE)
    host = owner.block(GRANULE, kind="host_numa")
    host_fd = owner.mem_export(host["handle"])
    host_there = owner.hand(host_fd, other)
    other.import_block(host_there, GRANULE, kind="host_numa")
    other.ipc_open(owner.ipc_get(owner.alloc(3 << 20)))
    own = {owner.pid: {exported, host_fd}, other.pid: {received, unused, host_there}}

    def check(step: str) -> None:
        for worker in workers:
            mine = before[worker.pid] | own[worker.pid]
            ours = {number: closed for number, closed in descriptors(worker.pid).items() if number not in mine}
            assert ours and all(ours.values()), (step, ours, [worker.readlink(number) for number in ours])
            assert set(worker.inherited_fds()) <= mine, step

    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.enter_context(connected(worker))
        group = stack.enter_context(Group(workers))
        check("running")
        group.arenas()
        for step in STEPS:
            if step == "drain":
                group.quiesce()
            else:
                group.all(step, **({"timeout_ms": TIMEOUT_MS} if step in ("seal", "unseal") else {}))
            check(step)
