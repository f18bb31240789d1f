"""Who owns memory, who may use it: exporters that free or exit, peers, self-imports."""

from __future__ import annotations

from collections.abc import Callable

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.usage import memory_by_pid
from tests.sim.shim_control import GRANULE, Group, Refused, ask, rows

Start = Callable[..., Worker]


def shared(owner: Worker, *others: Worker) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Share one block; return the owner's and the others' view."""
    block = owner.block(GRANULE)
    owner.fill(block["address"], GRANULE, 1)
    exported = owner.mem_export(block["handle"])
    views = []
    for other in others:
        number = owner.hand(exported, other)
        views.append(other.import_block(number, GRANULE))
        other.close_fd(number)
        other.expect(views[-1]["address"], GRANULE, [1])
    owner.close_fd(exported)
    return block, views


def elect(adopter: Worker, *others: Worker) -> None:
    """Give every orphan of the adopter to it."""
    for row in rows(adopter.pid, "orphans"):
        ask(adopter.pid, "adopt", key=row["key"])
        for other in others:
            ask(other.pid, "redirect", key=row["key"], pid=adopter.pid)


def test_b22_memory_whose_exporter_has_freed_it(start_worker: Start) -> None:
    """B22: two importers of memory that its exporter freed keep sharing it through two cycles."""
    owner, first, second = start_worker(), start_worker(), start_worker(1)
    block, (one, two) = shared(owner, first, second)
    owner.drop_block(block)
    with Group([owner, first, second]) as group:
        for round in range(2):
            group.quiesce()
            if round == 0:
                assert rows(first.pid, "orphans") and rows(second.pid, "orphans")
                elect(first, second)
            assert not rows(second.pid, "orphans")
            group.arenas()
            group.release()
            group.seal()
            group.resume()
            first.check()
            second.check()
            first.write(one["address"], [round + 9])
            assert second.read(two["address"]) == [round + 9]
            first.fill(one["address"], GRANULE, 1)


def test_orphan_without_an_owner_is_not_released(start_worker: Start) -> None:
    """Nothing is dropped while nobody would save it."""
    owner, other = start_worker(), start_worker()
    _, (view,) = shared(owner, other)
    owner.kill()
    with Group([other]) as group:
        group.arenas()
        group.quiesce()
        try:
            group.release()
        except Refused as refusal:
            assert refusal.code == "orphan"
        else:
            raise AssertionError("released memory that nobody owns")
        elect(other)
        group.arenas()
        group.release()
        group.seal()
        group.resume()
    other.check()
    assert other.read(view["address"]) != [0]


def test_self_import(start_worker: Start) -> None:
    """A process that imports its own export sees one memory through both addresses, before and after."""
    worker = start_worker()
    block = worker.block(GRANULE)
    exported = worker.mem_export(block["handle"])
    again = worker.import_block(exported, GRANULE)
    assert again["handle"] != block["handle"]
    worker.fill(block["address"], GRANULE, 6)
    worker.expect(again["address"], GRANULE, [6])
    before = worker.snapshot()
    with Group([worker]) as group:
        for _ in range(2):
            group.cycle()
            assert worker.snapshot() == before
    worker.write(again["address"], [1])
    assert worker.read(block["address"]) == [1]


def test_descriptor_passed_on(start_worker: Start) -> None:
    """Memory whose descriptor reaches a third process through the second is found again at its owner."""
    owner, second, third = start_worker(), start_worker(), start_worker(1)
    block = owner.block(GRANULE)
    owner.fill(block["address"], GRANULE, 2)
    number = owner.hand(owner.mem_export(block["handle"]), second)
    middle = second.import_block(number, GRANULE)
    last = third.import_block(second.hand(number, third), GRANULE)
    third.expect(last["address"], GRANULE, [2])
    row = rows(third.pid, "imports")[0]
    assert (row["state"], int(row["pid"])) == ("resolved", owner.pid)
    with Group([owner, second, third]) as group:
        group.cycle()
    third.check()
    again = third.import_block(second.hand(number, third), GRANULE)
    assert [(row["state"], int(row["pid"])) for row in rows(third.pid, "imports")] == 2 * [("resolved", owner.pid)]
    third.drop_block(again)
    owner.write(block["address"], [3])
    assert third.read(last["address"]) == second.read(middle["address"]) == [3]


def test_b22_rollback_with_memory_whose_exporter_has_freed_it(start_worker: Start) -> None:
    """B22: adopted memory is shared again after a rollback before, within and after the release."""
    owner, first, second = start_worker(), start_worker(), start_worker(1)
    _, (one, two) = shared(owner, first, second)
    memory = owner.alloc(5 << 20)
    owner.fill(memory, 5 << 20, 3)
    handle = owner.ipc_get(memory)
    opened = [first.ipc_open(handle), second.ipc_open(handle)]
    for worker, address in zip((first, second), opened, strict=True):
        worker.expect(address, 5 << 20, [3])
    owner.kill()
    with Group([first, second]) as group:
        for released in ((), (first,), (second,), (first, second)):
            group.quiesce()
            elect(first, second)
            group.arenas()
            for worker in released:
                ask(worker.pid, "release")
            group.resume()
            first.check()
            second.check()
            for mine, theirs in ((one["address"], two["address"]), tuple(opened)):
                first.write(mine, [len(released) + 40])
                assert second.read(theirs) == [len(released) + 40]
            first.fill(one["address"], GRANULE, 1)
            first.fill(opened[0], 5 << 20, 3)


def test_b04_peer_access_before_and_after(start_worker: Start) -> None:
    """B04: peer access holds for memory made before it, after it and after a cycle, and ends when disabled."""
    worker = start_worker()
    home = worker.ctx_current()
    early, early_large = worker.alloc(1000), worker.alloc(3 << 20)
    there = worker.primary_retain(1)
    worker.use(there)
    worker.peer_enable(home)
    worker.use(home)
    late = worker.alloc(500)
    late_large = worker.alloc(2 << 20)
    with Group([worker]) as group:
        for _ in range(2):
            worker.use(there)
            mine = worker.alloc(4096)
            for seed, address in enumerate((early, early_large, late, late_large)):
                worker.memset_d32(address, seed + 1, 100)
                worker.ctx_sync()
                worker.kernel("gs_add", [mine, address, 4])
                worker.ctx_sync()
                assert worker.read(address) == [seed + 1]
            worker.free(mine)
            worker.use(home)
            group.cycle()
    worker.use(there)
    worker.peer_disable(home)
    worker.peer_enable(home)


def test_context_takes_its_memory_along(start_worker: Start) -> None:
    """Memory of a destroyed context is freed, as native memory is."""
    worker = start_worker()
    home = worker.ctx_current()
    context = worker.ctx_create(0)
    worker.use(context)
    held = [worker.alloc(size) for size in (100, 3 << 20)]
    assert ask(worker.pid, "status")["allocations"] == "2"
    worker.ctx_destroy(context)
    worker.use(home)
    assert ask(worker.pid, "status")["allocations"] == "0"
    assert ask(worker.pid, "status")["objects"] == "0"
    assert worker.code("free", held[0]) != 0


def test_release_gives_memory_back_that_others_have_opened(start_worker: Start, machine: Setting) -> None:
    """Memory opened by handle has no descriptor of the application: nothing keeps it until the seal."""
    owner, other = start_worker(), start_worker(1)
    large = owner.alloc(8 << 20)
    owner.fill(large, 8 << 20, 1)
    other.expect(other.ipc_open(owner.ipc_get(large)), 8 << 20, [1])
    before = sum(memory_by_pid(machine).values())
    with Group([owner, other]) as group:
        group.arenas()
        group.quiesce()
        group.release()
        assert before - sum(memory_by_pid(machine).values()) == 8 << 20
        group.resume()
    other.check()
    assert sum(memory_by_pid(machine).values()) == before
