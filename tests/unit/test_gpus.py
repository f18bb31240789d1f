"""GPUs by NVML (a stand-in), GPU usage, and map files."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpususpend import cgroup, errors, gpus
from gpususpend.gpus import Gpu, GpuUsage, NvmlGpus, SimulatedGpus

A, B, C = (f"GPU-0000000{digit}-1111-2222-3333-444444444444" for digit in "abc")
HERE = [Gpu(A, 0, "NVIDIA H200", 100), Gpu(B, 1, "NVIDIA H200", 100)]


class NVMLError(Exception):
    """NVML's error."""


class NotSupported(NVMLError):
    """Its subclass for what a model does not tell."""


class Nvml:
    """A stand-in for pynvml with two GPUs; refuses every call outside init and shutdown."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.users = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == self.fail or (name != "nvmlInit" and self.users < 1):
                raise NVMLError("Driver Not Loaded")
            if name == "nvmlInit":
                self.users += 1
                return None
            if name == "nvmlShutdown":
                self.users -= 1
                return None
            return self.answer(name, *arguments)

        return call

    def answer(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlDeviceGetMigMode":
            if arguments[0] == 0:
                raise NVMLError("Not Supported")
            return [1, 1]
        if name == "nvmlDeviceGetGraphicsRunningProcesses":
            raise NVMLError("Not Supported")
        return {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: (A.encode(), B)[handle],
            "nvmlDeviceGetName": lambda handle: (b"NVIDIA H200", "NVIDIA H200")[handle],
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100, used=30 + handle),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=7, usedGpuMemory=20),
                SimpleNamespace(pid=5, usedGpuMemory=None),
            ],
            "nvmlDeviceGetMPSComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=25)],
        }[name](*arguments)


def test_nvml_lists_and_tells_usage() -> None:
    nvml = Nvml()
    assert NvmlGpus(nvml).list() == [Gpu(A, 0, "NVIDIA H200", 100), Gpu(B, 1, "NVIDIA H200", 100, mig=True)]
    usage = NvmlGpus(nvml).usage()
    assert usage == {
        A: GpuUsage(30, 100, {7: 25, 5: 0}, frozenset({7})), B: GpuUsage(31, 100, {7: 25, 5: 0}, frozenset({7}))
    }  # fmt: skip
    assert (usage[A].pids, usage[A].free_bytes) == ((5, 7), 70)
    assert nvml.users == 0


def test_nvml_of_a_gpu_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what the machine has."""
    monkeypatch.setattr(cgroup, "machine_limits", lambda: [cgroup.Limit("RAM", 1000, 600)])
    monkeypatch.setattr(Nvml, "NVMLError_NotSupported", NVMLError)
    nvml = Nvml("nvmlDeviceGetMemoryInfo")
    assert [gpu.total_bytes for gpu in NvmlGpus(nvml).list()] == [1000, 1000]
    assert NvmlGpus(nvml).usage()[A].used_bytes == 400


@pytest.mark.parametrize("fail", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_nvml_that_fails_is_a_missing_driver(fail: str) -> None:
    nvml = Nvml(fail)
    with pytest.raises(errors.NoDriver, match="NVML: Driver Not Loaded"):
        NvmlGpus(nvml).usage()
    assert nvml.users == 0


def test_the_simulated_gpus() -> None:
    driver = SimpleNamespace(
        version=lambda: SimpleNamespace(simulated=True),
        devices=lambda deadline: [
            {"uuid": A, "name": "simulated", "bytes": 100, "integrated": False},
            {"uuid": B, "name": "simulated", "bytes": 100, "integrated": False},
        ],
        simulated_usage=lambda index, deadline: {5: 10, 7: 20} if index == 0 else {},
    )
    found = gpus.gpus_of(driver)  # type: ignore[arg-type]
    assert isinstance(found, SimulatedGpus)
    assert found.list() == [Gpu(A, 0, "simulated", 100), Gpu(B, 1, "simulated", 100)]
    assert found.usage() == {A: GpuUsage(30, 100, {5: 10, 7: 20}), B: GpuUsage(0, 100)}


def test_a_written_map_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "map"
    gpus.write_map(path, HERE)
    assert gpus.read_map(path) == [(A, A), (B, B)]
    gpus.check_map(gpus.read_map(path), [A, B], HERE)
    assert [file.name for file in tmp_path.iterdir()] == ["map"]


def test_writing_replaces_no_link_and_not_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "map").symlink_to(target)
    with pytest.raises(errors.BadFile, match="no regular file"):
        gpus.write_map(tmp_path / "map", HERE)
    assert target.read_text() == "precious" and (tmp_path / "map").is_symlink()


def test_order_and_writing_of_a_map_are_free(tmp_path: Path) -> None:
    """Pitfall 23: a pair is two UUIDs, whatever the ordinals and the order of lines."""
    path = tmp_path / "map"
    path.write_text(f"# a comment\n\n{B.upper()}\t{C}   # another\n{A} {B}\n")
    assert gpus.read_map(path) == [(B, C), (A, B)]
    gpus.check_map(gpus.read_map(path), {A, B}, [Gpu(B, 0, "", 1), Gpu(C, 1, "", 1)])


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("", "names no GPU"),
        ("# nothing\n", "names no GPU"),
        (f"{A}\n", "line 1"),
        (f"{A} {B} {C}\n", "line 1"),
        (f"{A} {B}\n0 1\n", "line 2"),
        (f"{A} {B}\n{A} {C}\n", f"names old GPU {A} twice"),
        (f"{A} {C}\n{B} {C}\n", f"names new GPU {C} twice"),
    ],
)
def test_a_bad_map_is_refused(tmp_path: Path, text: str, detail: str) -> None:
    path = tmp_path / "map"
    path.write_text(text)
    with pytest.raises(errors.GpuMapMismatch, match=re.escape(detail)):
        gpus.read_map(path)


def test_a_map_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(errors.GpuMapMismatch, match="No such file"):
        gpus.read_map(tmp_path / "map")
    (tmp_path / "map").write_bytes(b"\xff\xfe")
    with pytest.raises(errors.GpuMapMismatch, match="cannot be read"):
        gpus.read_map(tmp_path / "map")


@pytest.mark.parametrize(
    ("pairs", "detail"),
    [
        ([(A, A)], f"the old GPU {B} is not in the map"),
        ([(A, A), (B, C)], f"the new GPU {B} is not in the map"),
        ([(A, A), (B, B), (C, C)], f"the old GPU {C} was not there at the suspend"),
        ([(A, B), (C, A)], f"the old GPU {B} is not in the map"),
    ],
)
def test_fr11_every_gpu_must_be_in_the_map(pairs: list[tuple[str, str]], detail: str) -> None:
    with pytest.raises(errors.GpuMapMismatch, match=re.escape(detail)):
        gpus.check_map(pairs, [A, B], HERE)
    with pytest.raises(errors.GpuMapMismatch, match=f"new GPU {C} is not on this machine"):
        gpus.check_map([(A, A), (B, B), (C, C)], [A, B, C], HERE)
