"""Interprocess events."""

from __future__ import annotations

from tests.conformance.case import HANGS, Seen, Start, asked, case, here
from tests.programs import calls
from tests.programs.calls import need
from tests.programs.client import Worker
from tests.programs.crossing import INTERPROCESS, crossing


def shared(owner: Worker, *others: Worker) -> tuple[int, str, list[int]]:
    """Return an event, its handle and what others opened by it."""
    event = owner.event_create(INTERPROCESS)
    handle = owner.event_ipc_get(event)
    return event, handle, [one.event_ipc_open(handle) for one in others]


@case()
def records_cross(seen: Seen, start: Start) -> None:
    """A record on either side is seen and waited for on the other."""
    owner, opener = start(0), start(0)
    event, handle, (opened,) = shared(owner, opener)
    seen("same bytes twice", owner.event_ipc_get(event) == handle)
    seen("another event has others", owner.event_ipc_get(owner.event_create(INTERPROCESS)) != handle)
    seen("query without a record", [owner.code("event_query", event), opener.code("event_query", opened)])
    waiting = opener.stream_create()
    seen("wait without a record", opener.code("stream_wait_event", waiting, opened))
    seen("nothing is waited for", asked(opener, "stream_sync", waiting))
    seen("the owner records", crossing(owner, event, opener, opened))
    seen("the opener records", crossing(opener, opened, owner, event))
    seen("both sides", [owner.code("event_query", event), opener.code("event_query", opened)])


@case()
def between_three(seen: Seen, start: Start) -> None:
    """Those who opened an event see each other's records; the first of several opens may go."""
    owner, first, second = start(0), start(0), start(0)
    event, handle, (one, other) = shared(owner, first, second)
    seen("an opener records for another", crossing(first, one, second, other))
    again = first.try_("event_ipc_open", handle)
    seen("open twice", again)
    seen("destroy the first", first.code("event_destroy", one))
    seen("the second sees the owner", crossing(owner, event, first, again.value))


@case(devices=2)
def between_devices(seen: Seen, start: Start) -> None:
    """An event of device 0 opened on device 1."""
    owner, opener = start(0), start(1)
    event, _, (opened,) = shared(owner, opener)
    seen("the owner records", crossing(owner, event, opener, opened))
    seen("the opener records", crossing(opener, opened, owner, event))


@case()
def wait_takes_the_newest_record(seen: Seen, start: Start) -> None:
    """A wait means the record that was made last before it, in whatever process; a later one is nothing to it."""
    owner, opener = start(0), start(0)
    event, _, (opened,) = shared(owner, opener)
    flags = [owner.alloc_host(4096, 2) for _ in range(2)]
    streams = [owner.stream_create() for _ in flags]
    waits = [opener.stream_create() for _ in flags]
    for flag, stream, waiting in zip(flags, streams, waits, strict=True):
        owner.host_write(flag, 0)
        owner.kernel("gs_wait_flag", [flag, 1], stream)
        owner.event_record(event, stream)
        opener.stream_wait_event(waiting, opened)
    seen("before both", [opener.code("stream_query", one) for one in waits])
    owner.host_write(flags[0], 1)
    seen("the first wait after the first", asked(opener, "stream_sync", waits[0]))
    seen("the second wait after the first", opener.code("stream_query", waits[1]))
    seen("query after the first", opener.code("event_query", opened))
    owner.host_write(flags[1], 1)
    seen("the second wait after the second", asked(opener, "stream_sync", waits[1]))
    seen("query after the second", opener.code("event_query", opened))


@case()
def synchronize(seen: Seen, start: Start) -> None:
    """A thread waits for a record of another process."""
    owner, opener = start(0), start(0)
    event, _, (opened,) = shared(owner, opener)
    flag, stream = owner.alloc_host(4096, 2), owner.stream_create()
    owner.host_write(flag, 0)
    owner.kernel("gs_wait_flag", [flag, 1], stream)
    owner.event_record(event, stream)
    job = opener.job("event_sync", opened)
    seen("waits", opener.job_answer(job, 0.5) is None)
    owner.host_write(flag, 1)
    answer = opener.job_answer(job, 5)
    seen("ends", HANGS if answer is None else answer[0])


@case()
def rules(seen: Seen, start: Start) -> None:
    """Which events have a handle, and what can be opened."""
    here()
    for flags in (0, 2, 4, 5, 6, 7, 8):
        seen(f"create with flags {flags}", calls.event_create(flags))
    seen("handle of an ordinary event", calls.event_ipc_get(need(calls.event_create(2), "event")))
    event = need(calls.event_create(INTERPROCESS), "event")
    handle = need(calls.event_ipc_get(event), "handle")
    seen("open in the same process", calls.event_ipc_open(handle))
    own = need(calls.ctx_create(0), "context")
    seen("open in another context", calls.event_ipc_open(handle))
    need(calls.ctx_destroy(own), "destroy")
    seen("open zeros", calls.event_ipc_open("00" * 64))
    other = start(0)
    opened = other.event_ipc_open(handle)
    seen("handle of an opened event", other.code("event_ipc_get", opened))
    seen("destroy an opened event", other.code("event_destroy", opened))
    seen("open again", other.code("event_ipc_open", handle))


@case(bare=True)
def owner_goes(seen: Seen, start: Start) -> None:
    """The owner destroys the event, or ends, while another has it open: undefined, but this is what happens."""
    for way in ("destroy", "end"):
        owner, opener, late = start(0), start(0), start(0)
        event, handle, (opened,) = shared(owner, opener)
        owner.event_record(event)
        owner.ctx_sync()
        if way == "destroy":
            owner.event_destroy(event)
        else:
            owner.kill()
        for call in ("event_query", "event_record"):
            seen(f"{call} after {way}", asked(opener, call, opened))
        seen(f"open after {way}", asked(late, "event_ipc_open", handle))
        seen(f"destroy after {way}", asked(opener, "event_destroy", opened))


@case()
def destroyed_with_work_behind_it(seen: Seen, start: Start) -> None:
    """Who destroys an opened event does not take back the wait that a stream was given before."""
    owner, opener = start(0), start(0)
    event, _, (opened,) = shared(owner, opener)
    flag, stream, waiting = owner.alloc_host(4096, 2), owner.stream_create(), opener.stream_create()
    owner.host_write(flag, 0)
    owner.kernel("gs_wait_flag", [flag, 1], stream)
    owner.event_record(event, stream)
    opener.stream_wait_event(waiting, opened)
    seen("destroy", opener.code("event_destroy", opened))
    seen("still waits", opener.code("stream_query", waiting))
    owner.host_write(flag, 1)
    seen("ends", asked(opener, "stream_sync", waiting))
