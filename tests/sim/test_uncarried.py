"""Kinds of object that are not carried: each is refused by name before anything changes, and only while it lives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gpususpend.preflight import NAMED_OBJECTS, WAYS_OUT
from tests.programs.client import Worker
from tests.programs.setting import ROOT
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, Pair, Start, running

pytestmark = pytest.mark.usefixtures("own_network")

UNKNOWN_ABI = {"SIMCUDA_LATER_ABI": "cuMemAlloc"}


@dataclass
class Kind:
    """How a worker comes to own an object of a kind, and how it gives it up (None: it cannot)."""

    make: Callable[[Worker, Worker], Any]
    drop: Callable[[Worker, Any], Any] | None
    env: dict[str, str] | None = None


def pool(worker: Worker, bare: Worker) -> int:
    """Export a pool."""
    del bare
    one = worker.pool_create(0)
    worker.close_fd(worker.pool_export(one))
    return int(one)


def dma_buf(worker: Worker, bare: Worker) -> int:
    """Give memory to another device, as a network card's driver does; the descriptor is closed at once."""
    del bare
    memory = worker.alloc(3 * MIB)
    worker.dma_buf(memory + MIB, MIB)
    return int(memory)


def managed_variable(worker: Worker, bare: Worker) -> int:
    """Load a module with a __managed__ variable and ask for it, as libcudart does."""
    del bare
    module = worker.module_load_managed()
    assert worker.pointer_attribute("IS_MANAGED", worker.module_global(module, "counter")[0]) == 1
    return int(module)


def managed_in_own_context(worker: Worker, bare: Worker) -> int:
    """Allocate managed memory in a context made for it."""
    del bare
    before = worker.ctx_current()
    own = worker.ctx_create(0)
    worker.alloc_managed(MIB)
    worker.ctx_set(before)
    return int(own)


def foreign(worker: Worker, bare: Worker) -> dict[str, int]:
    """Import memory of a process without the shim, which then closes everything but the memory itself."""
    number = bare.mem_export(bare.block(2 * MIB)["handle"])
    there = bare.hand(number, worker)
    block = worker.import_block(there, 2 * MIB)
    worker.close_fd(there)
    bare.close_fd(number)
    return dict(block)


def sparse_array(worker: Worker, bare: Worker) -> int:
    """Map memory into a sparse array."""
    del bare
    one = worker.array_create()
    worker.array_map(one, worker.mem_create(2 * MIB))
    return int(one)


KINDS = {
    "multicast": Kind(lambda one, bare: one.multicast_create(2 * MIB, 2), lambda one, made: one.mem_release(made),
                      {"GPUSHARE_MULTICAST": "keep"}),
    "fabric": Kind(lambda one, bare: one.fabric_import(bare.fabric_export(bare.mem_create(2 * MIB, "device", 0, 8))),
                   lambda one, made: one.mem_release(made),
                   {"SIMCUDA_FABRIC": "1", "GPUSHARE_FABRIC": "keep"}),
    "exported-pool": Kind(pool, lambda one, made: one.pool_destroy(made)),
    "external-memory": Kind(lambda one, bare: one.external_memory_import(MIB),
                            lambda one, made: one.external_memory_destroy(made)),
    "external-semaphore": Kind(lambda one, bare: one.external_semaphore_import(),
                               lambda one, made: one.external_semaphore_destroy(made)),
    "graphics": Kind(lambda one, bare: one.graphics_register(), lambda one, made: one.graphics_unregister(made)),
    "green-context": Kind(lambda one, bare: one.green_create(0), lambda one, made: one.green_destroy(made)),
    "dma-buf": Kind(dma_buf, lambda one, made: one.free(made)),
    "managed": Kind(lambda one, bare: one.alloc_managed(MIB), lambda one, made: one.free(made)),
    "native-ipc": Kind(lambda one, bare: one.ipc_open(bare.ipc_get(bare.alloc(2 * MIB))),
                       lambda one, made: one.ipc_close(made)),
    "foreign-import": Kind(foreign, lambda one, made: one.drop_block(made)),
    "mapped-array": Kind(sparse_array, lambda one, made: one.array_destroy(made)),
    "unknown-abi": Kind(lambda one, bare: one.proc_address("cuMemAlloc", 14000), None, UNKNOWN_ABI),
}


def test_every_kind_with_a_way_out_is_here() -> None:
    """One test for each kind: a kind that is added needs one, too."""
    words = re.findall(r'return b"([a-z-]+)"', (ROOT / "shim" / "uncarried.pxi").read_text())
    assert set(KINDS) == set(WAYS_OUT) == set(words)


@pytest.mark.parametrize("name", KINDS)
def test_uncarried_kind_is_refused(start_worker: Start, tool: Tool, name: str) -> None:
    """FR-24 (memory that network cards write to), FR-42 (exported pools): named, and gone when the object is."""
    refused_while_it_lives(start_worker, tool, name, KINDS[name])


def test_managed_variable_is_refused(start_worker: Start, tool: Tool) -> None:
    variable = Kind(managed_variable, lambda one, made: one.module_unload(made))
    refused_while_it_lives(start_worker, tool, "managed", variable)


def test_each_object_is_counted_and_named(start_worker: Start, tool: Tool) -> None:
    """Of every kind: allocations by address, variables and functions by name, and how many more there are."""
    worker = start_worker(0, env=UNKNOWN_ABI)
    worker.proc_address("cuMemAlloc", 14000)
    addresses = [worker.alloc_managed(MIB) for _ in range(NAMED_OBJECTS)]
    variable = worker.module_global(worker.module_load_managed(), "counter")[0]
    worker.green_create(0)
    error = tool.suspend(worker.pid).expect(3).json["error"]
    assert error["facts"]["kinds"] == {"unknown-abi": 1, "managed": NAMED_OBJECTS + 1, "green-context": 1}
    assert "1 of kind unknown-abi (cuMemAlloc): install" in error["message"]
    assert f"{NAMED_OBJECTS + 1} of kind managed (" in error["message"] and "and 1 more): use" in error["message"]
    worker.free(addresses.pop())
    error = tool.suspend(worker.pid).expect(3).json["error"]
    named = error["facts"]["objects"]["managed"]
    assert sorted(named) == sorted([*map(hex, addresses), f"counter at {variable:#x}"])
    assert f"{NAMED_OBJECTS} of kind managed ({', '.join(named)}): use" in error["message"]


def test_managed_memory_that_went_with_its_context(start_worker: Start, tool: Tool) -> None:
    own = Kind(managed_in_own_context, lambda one, made: one.ctx_destroy(made))
    refused_while_it_lives(start_worker, tool, "managed", own)


@pytest.mark.parametrize("free", ["free", "free_async"])
def test_pool_memory_that_was_handed_out(start_worker: Start, tool: Tool, free: str) -> None:
    """It is the driver's own, and known by its address; gone once it is freed, in whatever way."""

    def make(worker: Worker, bare: Worker) -> int:
        del bare
        memory = worker.alloc_async(2 * MIB)
        worker.dma_buf(memory, MIB)
        return int(memory)

    refused_while_it_lives(start_worker, tool, "dma-buf", Kind(make, lambda one, made: one.do(free, made)))


def refused_while_it_lives(start_worker: Start, tool: Tool, name: str, kind: Kind) -> None:
    """With kind, object, pid and the way out, before anything changed; without the object the suspend works."""
    pair = Pair(start_worker(0, env=kind.env), start_worker(1))
    block = pair.first.alloc(3 * MIB)
    pair.first.fill(block, 3 * MIB, 3)
    pair.second.expect(pair.second.ipc_open(pair.first.ipc_get(block)), 3 * MIB, [3])
    bare = start_worker(0, shim=False, env=kind.env)
    made = kind.make(pair.first, bare)
    answer = tool.suspend(*pair.pids).expect(3)
    error = answer.json["error"]
    assert (answer.json["reason"], error["pid"]) == ("uncarried", pair.first.pid), answer
    assert error["facts"]["kind"] == name and error["facts"]["objects"][name][0] in error["message"]
    assert WAYS_OUT[name] in error["message"]
    pair.check()
    running(tool)
    if kind.drop is None:
        return
    kind.drop(pair.first, made)
    bare.kill()
    tool.suspend(*pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()


def test_known_function_of_a_later_cuda_is_hooked(start_worker: Start, tool: Tool) -> None:
    """A newer version that is the function we know gets our wrapper, and stands in nobody's way."""
    worker = start_worker(0, env=UNKNOWN_ABI)
    assert worker.proc_address("cuMemFree", 14000) == worker.proc_address("cuMemFree", 13000)
    tool.suspend(worker.pid).expect(0)
    tool.resume(worker.pid).expect(0)
