"""MIG, MPS and tools: by what they are seen, and by what not."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpususpend import modes
from gpususpend.gpus import Gpu, GpuUsage

WHOLE = Gpu("GPU-a", 0, "H200", 1 << 37)
SPLIT = Gpu("GPU-b", 1, "H200", 1 << 37, mig=True)


@pytest.fixture
def pid(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process with the variables of the test's parameter."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"],
        env={"PATH": os.environ["PATH"], **getattr(request, "param", {})}, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def test_a_process_on_a_whole_gpu(pid: int) -> None:
    """Beside a GPU that is split, which somebody else uses."""
    usage = {"GPU-a": GpuUsage(1, 2, {pid: 1}), "GPU-b": GpuUsage(1, 2, {1: 1}, frozenset({1}))}
    assert modes.mig(pid, ["GPU-a"], [WHOLE, SPLIT], usage) == ""
    assert modes.mps(pid, os.geteuid(), usage) == "" and modes.tools(pid) == []


def test_mig_by_nvml_and_by_the_shim(pid: int) -> None:
    """As root NVML lists the process; else the shim's device is one that NVML does not list, or the split one."""
    usage = {"GPU-b": GpuUsage(1, 2, {pid: 1})}
    assert "GPU-b" in modes.mig(pid, [], [WHOLE, SPLIT], usage)
    assert "GPU-b" in modes.mig(pid, ["GPU-b"], [WHOLE, SPLIT], {})
    assert "GPU-c" in modes.mig(pid, ["GPU-c"], [WHOLE, SPLIT], {})
    assert modes.mig(pid, ["GPU-c"], [WHOLE], {}) == ""


@pytest.mark.parametrize("pid", [{"CUDA_VISIBLE_DEVICES": "MIG-1"}, {"NVIDIA_VISIBLE_DEVICES": "MIG-1"}], indirect=True)
def test_mig_by_the_environment(pid: int) -> None:
    """That the process was started with."""
    assert "VISIBLE_DEVICES=MIG-1" in modes.mig(pid, [], [WHOLE], {})


@pytest.mark.parametrize("pid", [{"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7.5"}], indirect=True)
def test_heartbeat_by_the_environment(pid: int) -> None:
    assert modes.heartbeat_s(pid) == 7.5


def test_heartbeat_of_pytorch(pid: int, tmp_path: Path) -> None:
    """Its own default, where its library is loaded, and none elsewhere."""
    assert modes.heartbeat_s(pid) == math.inf
    library = tmp_path / "libtorch_cuda.so"
    library.write_bytes(b"\0" * mmap.PAGESIZE)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert modes.heartbeat_s(os.getpid()) == 480


def test_network_card(pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open, and the kernel's module that lets it at GPU memory is there."""
    module, card = tmp_path / "nvidia_peermem", tmp_path / "uverbs0"
    monkeypatch.setattr(modes, "_PEER_MEMORY", (str(module),))
    monkeypatch.setattr(modes, "_NETWORK_CARD", str(tmp_path / "uverbs"))
    with card.open("w"):
        assert modes.network_card(os.getpid()) == ""
        module.mkdir()
        assert modes.network_card(os.getpid()) == str(card)
        assert modes.network_card(pid) == ""


def test_mps_by_nvml(pid: int) -> None:
    """Whatever the files say."""
    assert "NVML" in modes.mps(pid, 0, {"GPU-a": GpuUsage(1, 2, {pid: 1}, frozenset({pid}))})


def test_mps_at_the_default_place(pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root's daemon or one of the process's own user: anybody could make it."""
    monkeypatch.setattr(modes, "_DEFAULT_PIPE", str(tmp_path))
    assert modes.mps(pid, os.geteuid(), {}) == ""
    os.mkfifo(tmp_path / "control")
    assert f"{tmp_path}/control" in modes.mps(pid, os.geteuid(), {})
    if os.geteuid() == 0:
        os.chown(tmp_path / "control", 12345, 12345)
        assert modes.mps(pid, 0, {}) == ""
