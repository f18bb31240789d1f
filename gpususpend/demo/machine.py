"""The GPUs that the demo runs on: NVIDIA's, or those of the simulated driver.

Owns the choice, what a process's environment needs for it, and the measurement of who uses how much GPU memory. Makes
no CUDA call in this process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pynvml

PACKAGE = Path(__file__).resolve().parents[1]
SHIM = PACKAGE / "libnvsnap_gpushare.so"
SIM = PACKAGE / "simcuda" / "libcuda.so.1"
MAX_PIDS = 256
GIB = 1 << 30


class NoDriver(Exception):
    """The driver that was asked for is not there."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as results name it."""

    name: str
    uuid: str
    memory_bytes: int


@dataclass(frozen=True)
class Use:
    """Memory in use on one GPU, and the processes that use it, by the pids that its driver reports."""

    used_bytes: int
    pids: frozenset[int]


class Machine(Protocol):
    """What the demo asks of either driver."""

    simulated: bool
    driver_version: str
    gpus: list[Gpu]

    def environment(self) -> dict[str, str]:
        """Return the variables that ranks and commands need, all of them."""

    def use(self) -> list[Use]:
        """Return the use of each GPU, now."""


class RealMachine:
    """NVIDIA's driver, asked through NVML."""

    simulated = False

    def __init__(self) -> None:
        self.driver_version = str(pynvml.nvmlSystemGetDriverVersion())
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        self.gpus = [self._describe(handle) for handle in self._handles]

    @staticmethod
    def _describe(handle: Any) -> Gpu:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Gpu(str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle)), memory)

    def environment(self) -> dict[str, str]:
        """Return this process's own variables."""
        return dict(os.environ)

    def use(self) -> list[Use]:
        """Return what NVML reports; in a container the pids may be others than ours, or none at all."""
        return [Use(int(pynvml.nvmlDeviceGetMemoryInfo(h).used), self._pids(h)) for h in self._handles]

    @staticmethod
    def _pids(handle: Any) -> frozenset[int]:
        try:
            return frozenset(int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except pynvml.NVMLError:
            return frozenset()


class SimulatedMachine:
    """The simulated driver, with a state folder that this demo alone uses."""

    simulated = True

    def __init__(self, state: Path, devices: int, memory_bytes: int) -> None:
        self._variables = {
            "SIMCUDA_STATE": str(state),
            "SIMCUDA_DEVICES": str(devices),
            "SIMCUDA_MEMORY": str(memory_bytes),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(SIM.parent), os.environ.get("LD_LIBRARY_PATH")])),
        }
        os.environ.update(self._variables)  # read by the library below, in this process
        self._library = ctypes.CDLL(str(SIM))
        self._library.simcudaDriverVersionString.restype = ctypes.c_char_p
        self.driver_version = self._library.simcudaDriverVersionString().decode()
        self.gpus = [Gpu("simulated GPU", f"simulated-{i}", memory_bytes) for i in range(devices)]

    def environment(self) -> dict[str, str]:
        """Return this process's variables, by which a child finds the simulated driver and its state."""
        return {**os.environ, **self._variables}

    def use(self) -> list[Use]:
        """Return the simulated driver's own count."""
        return [self._use(device) for device in range(len(self.gpus))]

    def _use(self, device: int) -> Use:
        pids = (ctypes.c_uint * MAX_PIDS)()
        sizes = (ctypes.c_size_t * MAX_PIDS)()
        count = ctypes.c_int(MAX_PIDS)
        status = self._library.simcudaDeviceUsage(device, pids, sizes, ctypes.byref(count))
        if status:
            raise NoDriver(f"simcudaDeviceUsage: {status}")
        using = range(min(count.value, MAX_PIDS))
        return Use(sum(sizes[i] for i in using), frozenset(pids[i] for i in using))


def _real() -> RealMachine | None:
    try:
        pynvml.nvmlInit()
        return RealMachine() if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError:
        return None


@contextmanager
def find_machine(choice: str, ranks: int, mib: int) -> Iterator[Machine]:
    """Yield the machine for `choice`, one of auto, real and sim. Raises NoDriver.

    Auto takes real GPUs where there are any. The simulated one has as many devices as ranks, up to two.
    """
    if choice != "sim":
        real = _real()
        if real:
            yield real
            return
        if choice == "real":
            raise NoDriver("no NVIDIA GPU that NVML can see; --driver sim uses the simulated driver")
    if not SIM.exists():
        raise NoDriver(f"{SIM} is not built: run `make native`")
    state = Path(tempfile.mkdtemp(prefix="gpushare-demo-", dir="/dev/shm"))
    try:
        yield SimulatedMachine(state, min(ranks, 2), max(2 * GIB, ranks * mib * 2 << 20))
    finally:
        shutil.rmtree(state, ignore_errors=True)


def describe(machine: Machine) -> dict[str, Any]:
    """Return the machine as results record it."""
    kind = "sim" if machine.simulated else "real"
    return {
        "driver": {"kind": kind, "version": machine.driver_version},
        "simulated": machine.simulated,
        "gpus": [asdict(gpu) for gpu in machine.gpus],
    }
