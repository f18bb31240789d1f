"""Whose a descriptor is, who may speak, and what a failed call leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.sim.shim_control import GRANULE, PLACEHOLDER, Group, Refused, ask, exchange, rows, talk

Start = Callable[..., Worker]
T = TypeVar("T")
EPERM, EINVAL, F_DUPFD_QUERY = 1, 22, 1027
NUMBERS = {"x86_64": {"fcntl": 72, "kcmp": 312}, "aarch64": {"fcntl": 25, "kcmp": 272}}


def links_of(pid: int) -> set[str]:
    """Return what the descriptors of a process point to; the shim may close some meanwhile."""
    links = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return links


def without_identity_calls(run: Callable[[], T]) -> T:
    """Run `run` in a thread whose children may use neither kcmp nor F_DUPFD_QUERY; a filter holds for one thread."""
    numbers = NUMBERS[platform.machine()]
    load, equal, answer = 0x20, 0x15, 0x06
    program = [
        (load, 0, 0, 0), (equal, 4, 0, numbers["kcmp"]), (equal, 0, 4, numbers["fcntl"]),
        (load, 0, 0, 24), (equal, 0, 2, F_DUPFD_QUERY), (answer, 0, 0, 0x50000 | EINVAL),
        (answer, 0, 0, 0x50000 | EPERM), (answer, 0, 0, 0x7FFF0000),
    ]
    found: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        packed = b"".join(struct.pack("HBBI", *line) for line in program)
        filters = ctypes.create_string_buffer(packed, len(packed))
        fprog = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
        try:
            assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
            assert libc.prctl(22, 2, ctypes.create_string_buffer(fprog, len(fprog))) == 0, ctypes.get_errno()
            found.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def test_identity_without_kcmp_and_dupfd_query(start_worker: Start) -> None:
    """Imports are resolved and descriptors are found where a container's seccomp profile denies both calls."""
    owner = without_identity_calls(start_worker)
    other = without_identity_calls(start_worker)
    for worker in (owner, other):
        assert "Seccomp:\t2" in Path(f"/proc/{worker.pid}/status").read_text()
    blocks = [owner.block(GRANULE) for _ in range(3)]
    exported = [owner.mem_export(block["handle"]) for block in blocks]
    copy = owner.dup_fd(exported[1])
    views = []
    for seed, (block, fd) in enumerate(zip(blocks, exported, strict=True)):
        owner.fill(block["address"], GRANULE, seed)
        kept = owner.hand(fd, other)
        views.append((kept, other.import_block(kept, GRANULE)))
        other.expect(views[-1][1]["address"], GRANULE, [seed])
    keys = [row["key"] for row in rows(other.pid, "imports")]
    assert len(set(keys)) == 3 and all(row["state"] == "resolved" for row in rows(other.pid, "imports"))
    with Group([owner, other]) as group:
        group.suspend()
        assert all(PLACEHOLDER in owner.readlink(fd) for fd in [*exported, copy])
        assert all(PLACEHOLDER in other.readlink(kept) for kept, _ in views)
        group.resume()
    owner.check()
    other.check()
    found = {int(row["fd"]): row["object"] for row in rows(owner.pid, "fds")}
    assert found[exported[1]] == found[copy] and len(set(found.values())) == 3


def test_b21_rollback_before_seal_keeps_exported_memory(start_worker: Start) -> None:
    """B21: released and rolled back: descriptors that were never replaced stand for the same memory, wherever they are.

    One of them is on its way to somebody at the time, where nobody can replace it.
    """
    owner, other = start_worker(), start_worker()
    block = owner.block(GRANULE)
    owner.fill(block["address"], GRANULE, 1)
    exported = owner.mem_export(block["handle"])
    travelling = owner.give_fd(exported)
    view = other.import_block(owner.hand(exported, other), GRANULE)
    with Group([owner, other]) as group:
        group.arenas()
        group.quiesce()
        ask(owner.pid, "release")  # the other one has not released: its mapping is of the old incarnation
        assert "nvidia" in owner.readlink(exported)
        group.all("load")
        group.all("remap")
        group.unseal()
        group.all("check")
        group.all("open")
    late = other.import_block(owner.hand(exported, other), GRANULE)
    other.send("take", fd=travelling)
    os.close(travelling)
    arrived = other.import_block(other.receive("take")[0].value, GRANULE)
    owner.check()
    owner.write(block["address"], [4])
    assert [other.read(one["address"]) for one in (view, late, arrived)] == [[4]] * 3


def test_an_import_that_stayed_sees_the_new_incarnation(start_worker: Start) -> None:
    """A rollback from the middle: the exporter made its memory again, the importer never let go of the old."""
    owner, other = start_worker(), start_worker()
    memory = owner.alloc(3 << 20)
    owner.fill(memory, 3 << 20, 1)
    opened = other.ipc_open(owner.ipc_get(memory))
    other.expect(opened, 3 << 20, [1])
    with Group([owner, other]) as group:
        group.arenas()
        group.quiesce()
        ask(owner.pid, "release")
        group.all("load")
        group.all("remap")
        group.all("check")
        group.all("open")
    other.check()
    owner.write(memory, [6])
    assert other.read(opened) == [6]


def test_exporter_answers_while_it_loads(machine: Setting, start_worker: Start) -> None:
    """Pitfall 5: a peer's request for an export is answered while a copy of the exporter's own load hangs."""
    owner, other = start_worker(), start_worker()
    memory = owner.alloc(3 << 20)
    opened = other.ipc_open(owner.ipc_get(memory))
    with Group([owner, other]) as group:
        group.suspend()
        machine.inject("cuMemcpyHtoDAsync_v2 1 hold", owner.pid)
        loading = threading.Thread(target=ask, args=(owner.pid, "load"))
        loading.start()
        machine.wait_until_held()
        assert ask(owner.pid, "status")["busy"] == "load"
        ask(other.pid, "remap")
        assert loading.is_alive()
        machine.inject("", owner.pid)
        loading.join()
        group.resume()
    owner.write(memory, [3])
    assert other.read(opened) == [3]


def test_arena_too_small_changes_nothing(start_worker: Start) -> None:
    """The refusal names what is needed, and everything is still there."""
    worker = start_worker()
    memory = worker.alloc(5 << 20)
    worker.fill(memory, 5 << 20, 1)
    with Group([worker]) as group:
        group.arena(worker.pid, GRANULE)
        group.quiesce()
        with pytest.raises(Refused) as refusal:
            group.release()
        assert refusal.value.code == "arena" and int(refusal.value.fields["need"]) == 3 * GRANULE
        assert ask(worker.pid, "status")["phase"] == "quiesced"
        group.all("open")
        worker.check()


def test_open_is_refused_while_something_is_away(start_worker: Start) -> None:
    """FR-50: the gates open on a whole process only; the lease says whether its holder took leave."""
    worker = start_worker()
    worker.alloc(100)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(f"\0nvsnap-gpushare.{worker.pid}")
    assert exchange(link, "1 lease")[0] == "ok 1"
    assert ask(worker.pid, "status")["lease"] == "held"
    with Group([worker]) as group:
        group.suspend()
        with pytest.raises(Refused) as refusal:
            group.all("open")
        assert refusal.value.code == "phase"
        link.close()
        while ask(worker.pid, "status")["lease"] == "held":
            time.sleep(0.01)
        assert ask(worker.pid, "status")["lease"] == "lost"
        assert ask(worker.pid, "status")["memory"] == "closed"
        group.resume()


def test_what_is_not_the_protocol(start_worker: Start) -> None:
    """Unknown versions and verbs are answered, and a descriptor that nobody expects is closed."""
    worker = start_worker()
    assert talk(worker.pid, "2 hello")[0] == "err 1 code=version supported=1"
    assert talk(worker.pid, "1 nonsense")[0] == "err 1 code=verb"
    assert talk(worker.pid, "1 export key=zz.1")[0] == "err 1 code=argument"
    with Path("/dev/zero").open("rb") as sent:
        for verb in ("hello", "whose"):
            talk(worker.pid, f"1 {verb}", sent.fileno())
    # The shim has served both connections once it answers a third.
    ask(worker.pid, "hello")
    assert "/dev/zero" not in links_of(worker.pid)


def test_b05_a_failed_call_leaves_the_context_stack(machine: Setting, start_worker: Start) -> None:
    """B05: allocation, free and peer access keep the caller's context, whatever fails inside."""
    worker = start_worker()
    home = worker.ctx_current()
    there = worker.primary_retain(1)
    worker.use(there)
    memory = worker.alloc(3 << 20)
    worker.use(home)
    for rule in ("cuMemFree_v2 1 700", "cuMemUnmap 1 1", "cuCtxPushCurrent_v2 1 201"):
        machine.inject(rule, worker.pid)
        assert worker.code("free", memory) != 0
        machine.inject("", worker.pid)
        assert worker.ctx_current() == home
    for rule in ("cuMemCreate 1 2", "cuMemAddressReserve 1 2", "cuMemMap 1 1", "cuMemSetAccess 1 1"):
        machine.inject(rule, worker.pid)
        for size in (100, 3 << 20):
            worker.code("alloc", size)
        machine.inject("", worker.pid)
        assert worker.ctx_current() == home
    worker.free(memory)
    assert worker.code("ctx_pop") == 0 and worker.ctx_current() == 0
