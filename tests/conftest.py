"""Fixtures for every test: a simulated machine (or the real one) of its own, workers on it, the command line tool.

`GPUSHARE_DRIVER=sim|real` picks the driver, `GPUSHARE_SHIM` another shim than the one in the tree, and
`GPUSHARE_GPU_TESTS=1` turns a missing GPU into a failure (`=2`: a missing second one too).
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.programs import setting as where
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool

HANG_S = 300
"""A test that runs this long prints the stacks of all threads and ends the run: something waits without a deadline."""


def lacking(reason: str, devices: int = 1) -> NoReturn:
    """Skip for want of hardware, or fail where tests that need `devices` GPUs have to run."""
    if where.gpus_required() >= devices:
        pytest.fail(f"GPUSHARE_GPU_TESTS={where.gpus_required()}, but {reason}")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_endless_wait() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def shim_path() -> Path:
    """The built shim."""
    path = Path(os.environ.get("GPUSHARE_SHIM", where.SHIM)).resolve()
    if not path.exists():
        pytest.fail(f"{path} is missing: run `python setup.py build_native`")
    return path


@pytest.fixture(scope="session")
def libcuda_path() -> Path:
    """The built simulated driver."""
    if not where.SIMCUDA.exists():
        pytest.fail(f"{where.SIMCUDA} is missing: run `python setup.py build_native`")
    return where.SIMCUDA


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """The machine of this test, with the shim where it is built.

    `@pytest.mark.machine(devices=2, driver="real")` says what the test needs.
    """
    mark = request.node.get_closest_marker("machine")
    options = dict(mark.kwargs) if mark else {}
    driver = where.wanted_driver()
    only = options.pop("driver", driver)
    if only != driver:
        if only == "real":
            lacking("this test needs an NVIDIA GPU (GPUSHARE_DRIVER=real)", options.get("devices", 1))
        pytest.skip("this test is about the simulated driver")
    devices = options.pop("devices", 2)
    shim = Path(os.environ.get("GPUSHARE_SHIM", where.SHIM)).resolve()
    if driver == "real":
        found = where.real_devices()
        if found < 1 or (found < devices and mark and "devices" in mark.kwargs):
            wanted = devices if mark and "devices" in mark.kwargs else 1
            lacking(f"this test needs {wanted} GPUs and finds {found}", wanted)
        yield Setting("real", shim, devices=min(found, devices))
        return
    state = where.fresh_state()
    try:
        yield Setting("sim", shim, devices=devices, state=state, **options)
    finally:
        where.drop_state(state)


@pytest.fixture
def start_worker(machine: Setting, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """A function that starts a worker on a device (`device=None`: CUDA stays untouched); all are killed at the end."""
    started: list[Worker] = []

    def start(device: int | None = 0, *, shim: bool = True, per_thread: bool = False,
              env: dict[str, str] | None = None) -> Worker:
        stderr = tmp_path / f"worker-{len(started)}.stderr"
        worker = Worker(machine, shim=shim, per_thread=per_thread, stderr=stderr, env=env)
        started.append(worker)
        if device is not None:
            worker.start(device % machine.devices)
        return worker

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def tool(machine: Setting) -> Iterator[Tool]:
    """The command line tool on this test's machine."""
    with Tool(machine) as one:
        yield one


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers of this file."""
    config.addinivalue_line("markers", "machine(devices, driver, memory_bytes, extra): what the test's machine must be")
