"""Fixtures for every test: a simulated machine (or the real one) of its own, workers on it, the command line tool.

`GPUSHARE_DRIVER=sim|real` picks the driver, `GPUSHARE_SHIM` another shim than the one in the tree, and
`GPUSHARE_GPU_TESTS=1` turns a missing GPU into a failure (`=2`: a missing second one too).
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.programs import setting as where
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
HANG_S = 300
"""A test that runs this long, and longer than its own limit, prints the stacks of all threads and ends the run.

Something waits without a deadline then.
"""


_OUTSIDE = pytest.StashKey[int]()


def lacking(reason: str, devices: int = 1) -> NoReturn:
    """Skip for want of hardware, or fail where tests that need `devices` GPUs have to run."""
    if where.gpus_required() >= devices:
        pytest.fail(f"GPUSHARE_GPU_TESTS={where.gpus_required()}, but {reason}")
    pytest.skip(reason)


def need_package(module: str, name: str) -> None:
    """Skip, or fail where GPUs have to be tested, without a package that a machine with GPUs has."""
    try:
        importlib.import_module(module)
    except ImportError:
        lacking(f"this test needs {name}")


@pytest.fixture(autouse=True)
def _no_endless_wait(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("timeout")
    faulthandler.dump_traceback_later(max(HANG_S, 30 + mark.args[0] if mark else 0), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def _new_network() -> str:
    """Give this thread a network namespace with a loopback and nothing else; return what hinders that, else nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        return os.strerror(ctypes.get_errno())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the tests of each worker in a network namespace: commands ask every shim there, and wait for the mute.

    The process that only hands the tests to its workers stays where it is, and so do tests on GPUs.
    """
    shared = not hasattr(session.config, "workerinput") and getattr(session.config.option, "dist", "no") != "no"
    if os.geteuid() == 0 and where.wanted_driver() == "sim" and not shared:
        session.config.stash[_OUTSIDE] = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _new_network()


@pytest.fixture(scope="session")
def outside(pytestconfig: pytest.Config) -> list[str]:
    """The words before a command that needs the network which these tests began in."""
    fd = pytestconfig.stash.get(_OUTSIDE, None)
    return [] if fd is None else ["nsenter", f"--net=/proc/{os.getpid()}/fd/{fd}"]


@pytest.fixture
def own_network() -> Iterator[None]:
    """A network namespace of the test's own, so that `--all` finds the shims of this test and of no other."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if hindrance := _new_network():
            pytest.skip(f"no network namespace to be had: {hindrance}")
        yield
    finally:
        ctypes.CDLL(None).setns(before, _CLONE_NEWNET)
        os.close(before)


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
