"""Whether a record of an interprocess event reaches another process, asked of two workers."""

from __future__ import annotations

from tests.programs.client import Worker

INTERPROCESS = 6
"""Flags of an event that others may open: CU_EVENT_INTERPROCESS, which wants CU_EVENT_DISABLE_TIMING with it."""

CROSSED = [0, 600, 0, 0, 0]
"""What `crossing` returns where the record crosses."""


def crossing(by: Worker, event: int, other: Worker, opened: int) -> list[int]:
    """Record on one side, look on the other: codes of record, early query, wait, late query, stream behind the wait.

    The event is recorded behind a kernel that waits for a flag, and the flag is set after the wait.
    """
    flag, stream = by.alloc_host(4096, 2), by.stream_create()
    by.host_write(flag, 0)
    by.kernel("gs_wait_flag", [flag, 1], stream)
    waiting = other.stream_create()
    codes = [by.code("event_record", event, stream), other.code("event_query", opened),
             other.code("stream_wait_event", waiting, opened)]
    by.host_write(flag, 1)
    by.stream_sync(stream)
    codes += [other.code("event_query", opened), other.code("stream_sync", waiting)]
    by.stream_destroy(stream)
    other.stream_destroy(waiting)
    by.free_host(flag)
    return codes
