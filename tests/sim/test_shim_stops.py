"""A thread that is stopped with the lock of the tables in its hands: seal and unseal say so, and change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.preload.inside import built_inside
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.sim.shim_control import GRANULE, PLACEHOLDER, Group, Refused


@pytest.fixture
def worker(machine: Setting, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker whose shim has a way in."""
    with Worker(replace(machine, shim=built_inside(tmp_path_factory)), stderr=tmp_path / "stderr") as one:
        one.start(0)
        yield one


def test_a_lock_that_is_held_is_waited_for_by_nobody(worker: Worker) -> None:
    block = worker.block(GRANULE)
    worker.fill(block["address"], GRANULE, 1)
    exported = worker.mem_export(block["handle"])

    def refused_while_held(verb: str) -> None:
        (held, told), (waits, free) = os.pipe(), os.pipe()
        job = worker.job("hold_tables", worker.take_fd(told), worker.take_fd(waits))
        os.read(held, 1)
        with pytest.raises(Refused) as refusal:
            group.all(verb, timeout_ms=20_000)
        assert (refusal.value.code, refusal.value.fields["step"]) == ("busy", "lock")
        os.write(free, b".")
        assert worker.job_answer(job, 60) == [0, None]
        for fd in (held, told, waits, free):
            os.close(fd)

    with Group([worker]) as group:
        group.arenas()
        group.quiesce()
        group.release()
        refused_while_held("seal")
        group.seal()
        group.all("load")
        group.all("remap")
        refused_while_held("unseal")
        assert PLACEHOLDER in worker.readlink(exported)
        group.resume()
    worker.check()
    assert PLACEHOLDER not in worker.readlink(exported)
