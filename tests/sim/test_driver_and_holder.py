"""Driver process, holder and GPU usage together on processes that use CUDA; also runs on a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpususpend import driver, gpus, processes
from gpususpend.deadline import Deadline
from gpususpend.defaults import limits_with
from gpususpend.driver import DriverProcess, DriverState
from gpususpend.holder import Holder, HoldTarget
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.unit.threads_program import wait_for

SIZE = 8 << 20
KEEP = (processes.CONTROL_THREAD, processes.SIMULATED_GPU_THREAD)
Start = Callable[..., Worker]


def soon() -> Deadline:
    return Deadline(60)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def process(machine: Setting, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverProcess]:
    """A driver process on this test's machine."""
    for name, value in machine.environ().items():
        monkeypatch.setenv(name, value)
    with DriverProcess.start(state_dir, machine.simulated) as started:
        yield started


def busy_worker(start_worker: Start, device: int) -> tuple[Worker, int]:
    worker = start_worker(device, shim=False)
    address = worker.alloc(SIZE)
    worker.fill(address, SIZE, 7 + device)
    worker.expect(address, SIZE, [7 + device])
    return worker, address


def states(process: DriverProcess, pids: list[int]) -> set[int]:
    results = process.states(pids, soon())
    assert all(result.ok for result in results.values()), results
    return {result.value for result in results.values()}


def test_a_cycle_with_stopped_threads(
    process: DriverProcess, machine: Setting, start_worker: Start, state_dir: Path
) -> None:
    """The order of calls and stops that the supervisor uses, on two processes."""
    workers = [busy_worker(start_worker, device)[0] for device in (0, machine.devices - 1)]
    pids = [worker.pid for worker in workers]
    assert states(process, pids) == {DriverState.RUNNING}
    restore = {pid: result.value for pid, result in process.restore_threads(pids, soon()).items()}
    assert all(Path(f"/proc/{pid}/task/{tid}").exists() for pid, tid in restore.items())
    targets = [HoldTarget(pid, frozenset({tid})) for pid, tid in restore.items()]
    listing = gpus.gpus_of(process)
    before = listing.usage()
    pairs = [(gpu.uuid, gpu.uuid) for gpu in listing.list()]
    with Holder.start(state_dir, KEEP) as holder:
        for round_number in range(3):
            assert all(result.ok for result in process.lock(pids, 30).values())
            assert states(process, pids) == {DriverState.LOCKED}
            assert all(result.ok for result in process.checkpoint(pids, soon()).values())
            assert set(holder.stop(targets, soon()).threads) == set(pids)
            assert states(process, pids) == {DriverState.CHECKPOINTED}
            assert all(not set(pids) & set(usage.pids) for usage in listing.usage().values())
            restored = process.restore(pids, pairs if round_number else [], soon())
            assert all(result.ok for result in restored.values()), restored
            holder.go(soon())
            assert all(result.ok for result in process.unlock(pids, soon()).values())
            assert states(process, pids) == {DriverState.RUNNING}
            for worker in workers:
                assert worker.verify() == []
    assert set(listing.usage()) == set(before)


def test_the_list_of_gpus(process: DriverProcess, machine: Setting, start_worker: Start) -> None:
    worker, _ = busy_worker(start_worker, 0)
    found = gpus.gpus_of(process)
    listed = found.list()
    assert len(listed) >= machine.devices
    assert all(gpu.uuid.startswith("GPU-") and gpu.total_bytes > SIZE for gpu in listed)
    if machine.simulated:
        assert found.usage()[listed[0].uuid].by_pid[worker.pid] >= SIZE


def test_a_process_without_cuda_is_an_error_and_no_hang(process: DriverProcess) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        for results in (
            process.states([sleeper.pid], soon()),
            process.restore_threads([sleeper.pid], soon()),
            process.lock([sleeper.pid], 30),
        ):
            assert results[sleeper.pid].finished
            assert results[sleeper.pid].code > 0
    finally:
        sleeper.kill()
        sleeper.wait()


def test_wrong_states_are_named(process: DriverProcess, start_worker: Start) -> None:
    worker, _ = busy_worker(start_worker, 0)
    for results in (
        process.checkpoint([worker.pid], soon()),
        process.restore([worker.pid], [], soon()),
        process.unlock([worker.pid], soon()),
    ):
        assert (results[worker.pid].code, results[worker.pid].name) == (401, "CUDA_ERROR_ILLEGAL_STATE")
    assert worker.verify() == []


@pytest.mark.machine(driver="sim")
@pytest.mark.parametrize("call", ["cuCheckpointProcessLock", "cuCheckpointProcessGetState"])
def test_an_injected_hang_is_left_behind(
    process: DriverProcess,
    machine: Setting,
    start_worker: Start,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """One of two calls hangs: the other's result counts, and the process outlives the command."""
    monkeypatch.setattr(driver, "LIMITS", limits_with(helper_grace_s=1.0))
    pids = [busy_worker(start_worker, device)[0].pid for device in (0, 1)]
    machine.inject(f"{call} 1 hang", process.pid)
    if call.endswith("Lock"):
        verb, results = "lock", process.lock(pids, 1)
    else:
        verb, results = "state", process.states(pids, Deadline(2))
    assert sorted(result.finished for result in results.values()) == [False, True]
    (hanging,) = (pid for pid, result in results.items() if not result.finished)
    process.close()
    (left,) = driver.leftovers(state_dir)
    try:
        assert left.alive()
        assert list(left.results) == [(verb, hanging)]
        assert not left.results[verb, hanging].finished
    finally:
        os.kill(left.pid, signal.SIGKILL)
        wait_for(lambda: not left.alive())


@pytest.mark.machine(driver="sim")
def test_an_injected_failure_keeps_its_number(process: DriverProcess, machine: Setting, start_worker: Start) -> None:
    worker, _ = busy_worker(start_worker, 0)
    machine.inject("cuCheckpointProcessLock 1 4242", process.pid)
    assert process.lock([worker.pid], 30)[worker.pid].code == 4242
    assert process.lock([worker.pid], 30)[worker.pid].ok
