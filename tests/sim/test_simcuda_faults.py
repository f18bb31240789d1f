"""Failure injection, the trace, and the resolver of the simulated driver."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker, WorkerDied, WorkerTimeout
from tests.programs.setting import SIMCUDA, Setting
from tests.sim.test_simcuda_machine import bare

pytestmark = pytest.mark.machine(driver="sim")
MIB = 1 << 20
Start = Callable[..., Worker]


def test_nth_call_fails(machine: Setting, start_worker: Start) -> None:
    worker = bare(start_worker)
    machine.inject("cuMemAlloc 2 2\ncuMemFree_v2 1 999")
    address = worker.alloc(4096)
    free = worker.mem_info()
    assert worker.code("alloc", 4096) == 2
    assert worker.mem_info() == free  # the call was not performed
    assert worker.code("alloc", 4096) == 0
    assert worker.code("free", address) == 999
    assert worker.code("free", address) == 0


def test_rules_of_one_process(machine: Setting, start_worker: Start) -> None:
    one, other = bare(start_worker), bare(start_worker)
    machine.inject("cuMemAlloc 1 2", one.pid)
    assert other.code("alloc", 4096) == 0
    assert one.code("alloc", 4096) == 2
    machine.inject("cuMemAlloc 2 1", one.pid)  # a new file counts anew
    assert [one.code("alloc", 4096) for _ in range(3)] == [0, 1, 0]
    machine.inject("", one.pid)
    assert one.code("alloc", 4096) == 0


def test_environment(start_worker: Start) -> None:
    worker = bare(start_worker, env={"SIMCUDA_INJECT": "cuMemAlloc 1 2;cuMemAlloc 3 2"})
    assert [worker.code("alloc", 4096) for _ in range(4)] == [2, 0, 2, 0]


def test_hang_delay_kill(machine: Setting, start_worker: Start) -> None:
    hung, slow, killed = bare(start_worker), bare(start_worker), bare(start_worker)
    machine.inject("cuMemAlloc 1 hang", hung.pid)
    machine.inject("cuMemAlloc 1 delay 300", slow.pid)
    machine.inject("cuMemAlloc 1 kill", killed.pid)
    with pytest.raises(WorkerTimeout):
        hung.do("alloc", 4096, deadline_s=1)
    begun = time.monotonic()
    assert slow.code("alloc", 4096) == 0 and time.monotonic() - begun >= 0.3
    with pytest.raises(WorkerDied):
        killed.alloc(4096)


def test_hold(machine: Setting, start_worker: Start) -> None:
    """The call waits, and says so, until the rule is taken back; then it is carried out."""
    one, other = bare(start_worker), bare(start_worker)
    machine.inject("cuMemAlloc 1 hold", one.pid)
    one.send("alloc", 4096)
    machine.wait_until_held()
    assert machine.state is not None and (machine.state / f"held-{one.pid}").exists()
    machine.inject("cuMemAlloc 1 2", other.pid)
    assert other.code("alloc", 4096) == 2
    with pytest.raises(WorkerTimeout):
        one.receive("alloc", 0.1)
    machine.inject("cuMemAlloc 1 2", one.pid)
    assert one.receive("alloc")[0].code == 0
    assert not list(machine.state.glob("held-*"))
    assert one.code("alloc", 4096) == 2


def test_trace(start_worker: Start, tmp_path: Path) -> None:
    worker = bare(start_worker, env={"SIMCUDA_TRACE": str(tmp_path / "trace")})
    worker.code("alloc", 0)
    worker.alloc(MIB)
    lines = (tmp_path / "trace").read_text().splitlines()
    found = [line for line in lines if line.startswith("cuMemAlloc")]
    assert found == [f"cuMemAlloc_v2 {code} {worker.pid}" for code in (1, 0)]


def resolve(cuda: ctypes.CDLL, name: str, version: int, flags: int = 0) -> tuple[int, str | None, int]:
    """Look a name up; return the code, the symbol that was given, and the status."""
    found, status, wide = ctypes.c_void_p(), ctypes.c_int(-1), ctypes.c_uint64(flags)
    code = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), version, wide, ctypes.byref(status))
    symbol = next((s for s in candidates(name) if found.value and address_of(cuda, s) == found.value), None)
    return code, symbol, status.value


def candidates(name: str) -> list[str]:
    """Return every symbol that might stand for a name."""
    return [name + version + stream for version in ("", "_v2", "_v3", "_v4") for stream in ("", "_ptds", "_ptsz")]


def address_of(cuda: ctypes.CDLL, symbol: str) -> int | None:
    """Return the address of an exported symbol, None if there is none."""
    try:
        return ctypes.cast(getattr(cuda, symbol), ctypes.c_void_p).value
    except AttributeError:
        return None


@pytest.mark.parametrize(("name", "version", "flags", "symbol"), [
    ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"), ("cuMemAlloc", 13000, 0, "cuMemAlloc_v2"),
    ("cuIpcOpenMemHandle", 4010, 0, "cuIpcOpenMemHandle"), ("cuIpcOpenMemHandle", 11000, 0, "cuIpcOpenMemHandle_v2"),
    ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"), ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
    ("cuStreamWaitValue32", 8000, 0, "cuStreamWaitValue32"),
    ("cuStreamWaitValue32", 11070, 0, "cuStreamWaitValue32_v2"),
    ("cuStreamWaitValue32", 11070, 2, "cuStreamWaitValue32_v2_ptsz"), ("cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds"),
    ("cuMemcpyHtoD", 4000, 2, "cuMemcpyHtoD_v2"), ("cuLaunchKernel", 7000, 2, "cuLaunchKernel_ptsz"),
    ("cuLaunchKernel", 7000, 1, "cuLaunchKernel"), ("cuCtxSynchronize", 13000, 0, "cuCtxSynchronize_v2"),
])
def test_resolver(name: str, version: int, flags: int, symbol: str) -> None:
    assert resolve(ctypes.CDLL(str(SIMCUDA)), name, version, flags) == (0, symbol, 0)


def test_resolver_refusals() -> None:
    cuda = ctypes.CDLL(str(SIMCUDA))
    assert resolve(cuda, "cuMemAlloc", 2000) == (500, None, 2)
    assert resolve(cuda, "cuNoSuchCall", 13000) == (500, None, 1)
    assert resolve(cuda, "", 0) == (500, None, 1)
    found = ctypes.c_void_p()
    assert cuda.cuGetProcAddress_v2(b"", ctypes.byref(found), 0, ctypes.c_uint64(0), None) == 500
    assert cuda.cuGetProcAddress(b"cuInit", ctypes.byref(found), 11030, ctypes.c_uint64(0)) == 0
