"""`python -m tests.gpu.probes.ipc_events`: does an interprocess event still reach the other process after a restore?

Two processes on one GPU, without the shim. Each is asked in turn: it records the event behind a kernel that waits for a
flag; the other queries it (600 wanted) and lets a stream wait for it; the flag is set, and both must see the event
happen (0). Before a checkpoint of both, after it, and after a second one; in the end the handle is opened anew. Prints
one line for each round; exits with 1 if they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.programs.client import Worker
from tests.programs.setting import Setting

INTERPROCESS = 6


@contextmanager
def workers() -> Iterator[list[Worker]]:
    """Two processes on device 0, and one that only drives checkpoints."""
    machine = Setting("real")
    found = [Worker(machine, shim=False) for _ in range(3)]
    try:
        for one in found[:2]:
            one.start(0)
        found[2].init()
        yield found
    finally:
        for one in found:
            one.kill()


def crossing(by: Worker, event: int, other: Worker, opened: int) -> list[int]:
    """Record on one side, look on the other: codes of record, early query, wait, late query, stream behind the wait."""
    flag, stream = by.alloc_host(4096, 2), by.stream_create()
    by.host_write(flag, 0)
    by.kernel("gs_wait_flag", [flag, 1], stream)
    waiting = other.stream_create()
    codes = [by.code("event_record", event, stream), other.code("event_query", opened),
             other.code("stream_wait_event", waiting, opened)]
    by.host_write(flag, 1)
    by.stream_sync(stream)
    codes += [other.code("event_query", opened), other.code("stream_sync", waiting)]
    by.free_host(flag)
    return codes


def main() -> int:
    """Ask everything; 0 if all rounds gave the same."""
    with workers() as (owner, opener, driver):
        event = owner.event_create(INTERPROCESS)
        handle = owner.event_ipc_get(event)
        opened = opener.event_ipc_open(handle)
        rounds = []
        for number in range(3):
            if number:
                codes = [[driver.code(f"cp_{step}", one.pid) for one in (owner, opener)]
                         for step in ("lock", "checkpoint", "restore", "unlock")]
                print(f"checkpoint {number}: {codes}", flush=True)
            rounds.append((crossing(owner, event, opener, opened), crossing(opener, opened, owner, event)))
            print(f"round {number}: owner records {rounds[-1][0]}, opener records {rounds[-1][1]}", flush=True)
        print(f"same handle: {owner.event_ipc_get(event) == handle}")
        again = opener.try_("event_ipc_open", handle)
        print(f"opened anew: {again.code}", flush=True)
        if again.code == 0:
            print(f"through that: {crossing(owner, event, opener, again.value)}")
    return 0 if rounds[0] == rounds[1] == rounds[2] else 1


if __name__ == "__main__":
    sys.exit(main())
