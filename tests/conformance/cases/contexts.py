"""Contexts: the stack, what a destroyed context takes with it."""

from __future__ import annotations

import threading

from tests.conformance.case import MIB, Seen, Start, case, here, mapped
from tests.programs import calls, content
from tests.programs.calls import need


@case()
def stack(seen: Seen, start: Start) -> None:
    """Push, pop, set, create, destroy."""
    primary = here()
    own = calls.ctx_create(0)
    seen("create", own)
    seen("the new one is current", calls.ctx_current().value == own.value)
    seen("push", calls.ctx_push(primary))
    seen("device", calls.ctx_device())
    seen("pop returns the pushed one", calls.ctx_pop().value == primary)
    seen("current after pop", calls.ctx_current().value == own.value)
    seen("destroy", calls.ctx_destroy(own.value))
    seen("current after destroy is the primary", calls.ctx_current().value == primary)
    seen("destroy twice is refused", calls.ctx_destroy(own.value).code != 0)  # 201 or 709, by chance
    seen("set none", calls.ctx_set(0))
    seen("current is none", calls.ctx_current().value == 0)
    seen("pop from an empty stack", calls.ctx_pop())
    seen("destroy the primary context", calls.ctx_destroy(primary))


@case()
def destroy_frees(seen: Seen, start: Start) -> None:
    """Memory goes with its context; cuMem memory does not."""
    primary = here()
    own = need(calls.ctx_create(0), "context")
    allocated = [need(calls.alloc(size), "alloc") for size in (4096, 4 * MIB)]
    pinned = need(calls.alloc_host(4096), "host")
    handle, address = mapped(2 * MIB)
    content.write(address, content.pattern([3], 1024))
    need(calls.ctx_destroy(own), "destroy")
    need(calls.ctx_set(primary), "set")
    seen("range of small memory", calls.address_range(allocated[0]))
    seen("range of big memory", calls.address_range(allocated[1]))
    seen("free small memory", calls.free(allocated[0]))
    seen("free big memory", calls.free(allocated[1]))
    seen("free host memory", calls.free_host(pinned))
    seen("range of cuMem memory", calls.address_range(address))
    seen("cuMem content", bool((content.read(address, 1024) == content.pattern([3], 1024)).all()))
    seen("unmap", calls.mem_unmap(address, 2 * MIB))
    seen("release", calls.mem_release(handle))


@case()
def primary_reset(seen: Seen, start: Start) -> None:
    """Reset of the primary context."""
    context = here()
    small, big = need(calls.alloc(4096), "alloc"), need(calls.alloc(4 * MIB), "alloc")
    seen.value("state", calls.primary_state(0))
    seen("reset", calls.primary_reset(0))
    seen.value("state after reset", calls.primary_state(0))
    seen("current stays the old one", calls.ctx_current().value == context)
    again = calls.primary_retain(0)
    seen("retain again", again)
    seen("set again", calls.ctx_set(again.value))
    seen("range of old small memory", calls.address_range(small))
    seen("range of old big memory", calls.address_range(big))
    seen("free old memory", calls.free(big))
    seen("alloc works", calls.alloc(4096))


@case()
def alloc_after_reset(seen: Seen, start: Start) -> None:
    """Allocation in a primary context that was reset."""
    here()
    need(calls.primary_reset(0), "reset")
    seen("alloc in the reset context", calls.alloc(4096))


@case()
def primary_release(seen: Seen, start: Start) -> None:
    """The last release of the primary context destroys what is in it."""
    here()
    address = need(calls.alloc(4 * MIB), "alloc")
    need(calls.primary_retain(0), "retain")
    seen("release", calls.primary_release(0))
    seen("memory still there", calls.address_range(address))
    seen("last release", calls.primary_release(0))
    seen.value("state", calls.primary_state(0))
    seen("one release more", calls.primary_release(0))
    context = need(calls.primary_retain(0), "retain")
    need(calls.ctx_set(context), "set")
    seen("memory after the last release", calls.address_range(address))


@case()
def freed_from_another(seen: Seen, start: Start) -> None:
    """Memory of one context used and freed while another is current, and in a thread without any."""
    here()
    address = need(calls.alloc(4 * MIB), "alloc")
    words = content.pattern([1], 16)
    own = need(calls.ctx_create(0), "context")
    seen("copy in another context", calls.copy_htod(address, content.address_of(words), 64))
    seen("free in another context", calls.free(address))
    need(calls.ctx_destroy(own), "destroy")
    address = need(calls.alloc(4096), "alloc")

    def bare() -> None:
        seen("range in a thread without a context", calls.address_range(address))
        seen("MEMORY_TYPE in a thread without a context", calls.pointer_attribute("MEMORY_TYPE", address))
        seen("copy in a thread without a context", calls.copy_htod(address, content.address_of(words), 64))
        seen("free in a thread without a context", calls.free(address))

    thread = threading.Thread(target=bare)
    thread.start()
    thread.join()
