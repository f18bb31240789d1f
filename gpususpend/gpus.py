"""The GPUs of this machine, who uses their memory, and maps from the GPUs of a suspend to those of a resume.

Owns NVML (which makes no context and takes no GPU memory), its stand-in for the simulated driver, and the file format
of maps (docs/reference/gpu-map.md).  Must not know groups or phases.  A GPU is its UUID; its number is for people.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from gpususpend import cgroup, errors
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.driver import DriverProcess
from gpususpend.newfile import NewFile

_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HEADER = """\
# GPU map: one line for each GPU, `old-uuid new-uuid`.
# Replace the second column by the GPUs to resume on; every GPU must be there once.
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU: its UUID as NVML writes it, its number on this machine, its model and its bytes of memory."""

    uuid: str
    index: int
    name: str
    total_bytes: int
    mig: bool = False  # split into instances, which cannot be carried


@dataclass(frozen=True)
class GpuUsage:
    """Memory of one GPU: bytes in use, bytes in all, and bytes by pid (0 where NVML does not tell how many)."""

    used_bytes: int
    total_bytes: int
    by_pid: dict[int, int] = field(default_factory=dict)
    mps_pids: frozenset[int] = frozenset()  # of these, the clients of the MPS daemon

    @property
    def free_bytes(self) -> int:
        """Return the bytes that are free."""
        return self.total_bytes - self.used_bytes

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the processes that use this GPU."""
        return tuple(sorted(self.by_pid))


class Gpus(Protocol):
    """What NVML and its stand-in both tell."""

    def list(self) -> Sequence[Gpu]:
        """Return every GPU, in order."""

    def usage(self) -> dict[str, GpuUsage]:
        """Return the memory of every GPU, by UUID."""


class NvmlGpus:
    """The GPUs of the NVIDIA driver.  `nvml` is the module pynvml, or a test's stand-in."""

    def __init__(self, nvml: ModuleType | Any | None = None) -> None:
        if nvml is None:
            # Imported late: a machine without the driver must be able to use every other command.
            import pynvml

            nvml = pynvml
        self._nvml: Any = nvml

    def list(self) -> Sequence[Gpu]:
        """Return every GPU, in the order of the bus.  Raises NoDriver."""
        with self._open() as handles:
            return [self._gpu(index, handle) for index, handle in enumerate(handles)]

    def usage(self) -> dict[str, GpuUsage]:
        """Return the memory of every GPU, by UUID.  Raises NoDriver."""
        with self._open() as handles:
            return {_text(self._nvml.nvmlDeviceGetUUID(handle)): self._usage(handle) for handle in handles}

    @contextmanager
    def _open(self) -> Iterator[Sequence[Any]]:
        try:
            self._nvml.nvmlInit()
            try:
                count = self._nvml.nvmlDeviceGetCount()
                yield [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            finally:
                self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            raise errors.NoDriver(detail=f"NVML: {error}") from None

    def _gpu(self, index: int, handle: Any) -> Gpu:
        mig = False
        # Most models know no instances and say so by an error.
        with contextlib.suppress(self._nvml.NVMLError):
            mig = self._nvml.nvmlDeviceGetMigMode(handle)[0] == self._nvml.NVML_DEVICE_MIG_ENABLE
        return Gpu(
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            name=_text(self._nvml.nvmlDeviceGetName(handle)),
            total_bytes=self._memory(handle)[1],
            mig=mig,
        )

    def _memory(self, handle: Any) -> tuple[int, int]:
        """Return the bytes in use and in all; the machine's where the GPU has no memory of its own."""
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError_NotSupported:
            machine = cgroup.machine_limits()[0]
            return machine.limit_bytes - machine.available_bytes, machine.limit_bytes
        return int(memory.used), int(memory.total)

    def _usage(self, handle: Any) -> GpuUsage:
        used, total = self._memory(handle)
        by_pid: dict[int, int] = {}
        mps_pids: set[int] = set()
        mps_query = self._nvml.nvmlDeviceGetMPSComputeRunningProcesses
        for query in (
            self._nvml.nvmlDeviceGetComputeRunningProcesses,
            self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
            mps_query,
        ):
            with contextlib.suppress(self._nvml.NVMLError):
                for process in query(handle):
                    by_pid[int(process.pid)] = max(by_pid.get(int(process.pid), 0), int(process.usedGpuMemory or 0))
                    if query == mps_query:
                        mps_pids.add(int(process.pid))
        return GpuUsage(used, total, by_pid, frozenset(mps_pids))


class SimulatedGpus:
    """The GPUs of the simulated driver, asked through the driver process."""

    def __init__(self, driver: DriverProcess) -> None:
        self._driver = driver

    def list(self) -> Sequence[Gpu]:
        """Return every simulated GPU."""
        devices = self._driver.devices(Deadline(LIMITS.driver_quick_s))
        return [Gpu(device["uuid"], index, device["name"], device["bytes"]) for index, device in enumerate(devices)]

    def usage(self) -> dict[str, GpuUsage]:
        """Return the memory of every simulated GPU, by UUID."""
        found = {}
        for gpu in self.list():
            by_pid = self._driver.simulated_usage(gpu.index, Deadline(LIMITS.driver_quick_s))
            found[gpu.uuid] = GpuUsage(sum(by_pid.values()), gpu.total_bytes, by_pid)
        return found


def gpus_of(driver: DriverProcess) -> Gpus:
    """Return the GPUs of the driver that the driver process uses."""
    return SimulatedGpus(driver) if driver.version().simulated else NvmlGpus()


def write_map(path: Path, gpus: Iterable[Gpu], apart: Mapping[str, str] | None = None) -> None:
    """Write a map of every GPU onto itself, to be edited; `apart` as for NewFile.  Raises BadFile, OSError."""
    lines = [f"{gpu.uuid} {gpu.uuid}  # {gpu.index}: {gpu.name}\n" for gpu in gpus]
    NewFile(os.fspath(path), apart).finish(_HEADER + "".join(lines))


def read_map(path: Path) -> list[tuple[str, str]]:
    """Return the pairs (old UUID, new UUID) of a map file.

    Raises GpuMapMismatch for a line that is none, for a UUID that is there twice, and for a file without a pair.
    """
    pairs: list[tuple[str, str]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.GpuMapMismatch(detail=f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].lower().replace("gpu-", "GPU-").split()
        if not words:
            continue
        if len(words) != 2 or not all(_UUID.fullmatch(word) for word in words):
            raise errors.GpuMapMismatch(detail=f"line {number} of {path} is not `old-uuid new-uuid`: {line.strip()!r}")
        pairs.append((words[0], words[1]))
    if not pairs:
        raise errors.GpuMapMismatch(detail=f"{path} names no GPU")
    for column, what in enumerate(("old", "new")):
        names = [pair[column] for pair in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise errors.GpuMapMismatch(detail=f"{path} names {what} GPU {', '.join(twice)} twice")
    return pairs


def check_map(pairs: Sequence[tuple[str, str]], old: Collection[str], new: Sequence[Gpu]) -> None:
    """Check a map against the GPUs of the suspend (`old`, UUIDs) and of this machine (`new`): the sets must be equal.

    The driver wants every GPU that a process saw, not only those that it used; one that is left out, or paired by
    position, fails the restore and may lose the processes.  Raises GpuMapMismatch, naming the difference.
    """
    for what, named, there in (
        ("old", {pair[0] for pair in pairs}, set(old)),
        ("new", {pair[1] for pair in pairs}, {gpu.uuid for gpu in new}),
    ):
        if there - named:
            raise errors.GpuMapMismatch(detail=f"the {what} GPU {', '.join(sorted(there - named))} is not in the map")
        if named - there:
            where = "was not there at the suspend" if what == "old" else "is not on this machine"
            raise errors.GpuMapMismatch(detail=f"the {what} GPU {', '.join(sorted(named - there))} {where}")


def _text(value: str | bytes) -> str:
    # Older versions of the bindings return bytes.
    return value.decode() if isinstance(value, bytes) else value
