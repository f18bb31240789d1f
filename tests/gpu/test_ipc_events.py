"""Events that processes share by CUDA IPC, as torch.multiprocessing does for every tensor it hands over."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import need_package
from tests.gpu.conftest import Group
from tests.programs.client import Worker
from tests.programs.crossing import CROSSED, INTERPROCESS, crossing
from tests.programs.relay import Relay
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping

MIB = 1 << 20
SIZE = 4 * MIB
WORDS = SIZE // 4


class Tensor:
    """A block of a producer and the event that says when it is written, both opened by a consumer."""

    def __init__(self, producer: Worker, consumer: Worker) -> None:
        self.producer, self.consumer = producer, consumer
        self.block, self.event = producer.alloc(SIZE), producer.event_create(INTERPROCESS)
        self.handle = producer.event_ipc_get(self.event)
        self.opened = consumer.ipc_open(producer.ipc_get(self.block))
        self.ready = consumer.event_ipc_open(self.handle)
        self.out = consumer.alloc(SIZE)
        self.streams = producer.stream_create(), consumer.stream_create()
        self.flag = producer.alloc_host(4096, 2)

    def pass_on(self, value: int) -> None:
        """Write the block behind a kernel that takes its time; the consumer's stream waits for the event and copies."""
        ours, theirs = self.streams
        self.producer.host_write(self.flag, 0)
        self.producer.kernel("gs_wait_flag", [self.flag, 1], ours)
        self.producer.kernel("gs_fill", [self.block, WORDS, value], ours)
        self.producer.event_record(self.event, ours)
        self.consumer.stream_wait_event(theirs, self.ready)
        self.consumer.copy_dtod(self.out, self.opened, SIZE, theirs)
        assert self.consumer.code("stream_query", theirs) == 600, "the consumer does not wait"
        self.producer.host_write(self.flag, 1)
        self.consumer.stream_sync(theirs)
        assert self.consumer.checksum(self.out, SIZE) == value * WORDS, "the consumer copied before the event"


def test_tensors_with_an_event_each(start_worker: Callable[..., Worker], group: Group) -> None:
    """Three cycles: those shared before are passed on after each, handles keep their bytes, new ones are shared."""
    producer, consumer = start_worker(0), start_worker(0)
    tensors = [Tensor(producer, consumer) for _ in range(2)]
    for turn in range(4):
        if turn:
            group.cycle(producer, consumer)
            tensors.append(Tensor(producer, consumer))
        for at, one in enumerate(tensors):
            one.pass_on(100 * turn + at + 1)
            assert producer.event_ipc_get(one.event) == one.handle, "handle bytes changed"
    again = consumer.event_ipc_open(tensors[0].handle)
    assert crossing(producer, tensors[0].event, consumer, again) == CROSSED
    for one in tensors:
        consumer.event_destroy(one.ready)
        producer.event_destroy(one.event)
    group.cycle(producer, consumer)


def test_recorded_before_and_asked_after(start_worker: Callable[..., Worker], group: Group) -> None:
    """A record of before the suspend has happened for everybody; one that nobody made is nothing to wait for."""
    owner, opener = start_worker(0), start_worker(1)
    events = [owner.event_create(INTERPROCESS) for _ in range(2)]
    opened = [opener.event_ipc_open(owner.event_ipc_get(event)) for event in events]
    owner.event_record(events[0])
    owner.ctx_sync()
    group.cycle(owner, opener, times=2)
    for event in opened:
        assert opener.code("event_query", event) == 0
        opener.event_sync(event)
    assert crossing(opener, opened[1], owner, events[1]) == CROSSED


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_work_handed_to_and_fro(
    start_worker: Callable[..., Worker], group: Group, machine: Setting, depth: str
) -> None:
    """Suspended three times while two processes hand a block to each other, each waiting for the other's event."""
    relay = Relay(start_worker(0), start_worker(1))
    pids = [worker.pid for worker in relay.workers]
    # Once restored, a kernel that waits for another process on the same GPU never ends (driver facts).
    relay.start(seed=1, turns=100_000, entangled=machine.simulated or machine.devices > 1)
    for _ in range(3):
        goes_on(relay)
        group.tool.suspend(*pids, options=("--depth", depth)).expect(0)
        group.tool.resume(*pids).expect(0)
    goes_on(relay)


def goes_on(relay: Relay) -> None:
    """Wait until both have done some turns more."""
    goal, until = relay.turns_done() + 20, time.monotonic() + 60
    while relay.turns_done() < goal:
        assert time.monotonic() < until, "the two stand still"
        time.sleep(0.01)


@pytest.mark.machine(driver="real")
@pytest.mark.timeout(300)
def test_torch_multiprocessing(machine: Setting, group: Group, tmp_path: Path) -> None:
    """Real tensors, sent through a connection each step and kept from the first."""
    need_package("torch", "PyTorch")
    ranks = Stepping(machine, "tests.programs.torch_tensors", 2, tmp_path, {})
    try:
        ranks.wait_for_more(3, 120)
        group.cycle_at_work(ranks, 3)
        ranks.finish()
    finally:
        ranks.kill()
