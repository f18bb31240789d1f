"""How a process uses the driver, where that rules a checkpoint out or may disturb it: MIG, MPS, tools, network cards.

Owns the signs of it: NVML, the environment that a process was started with, what it has open and mapped, the files of
the MPS daemon.  Must not know phases.  Only looks.  A process that overwrites its environment (setproctitle) shows
nothing there.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping, Sequence

from gpususpend import processes
from gpususpend.defaults import TORCH_HEARTBEAT_S
from gpususpend.gpus import Gpu, GpuUsage
from gpususpend.helpers import INJECTION_VARIABLES

_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_PIPE_VARIABLE, _DEFAULT_PIPE = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
_PEER_MEMORY = ("/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem")
_NETWORK_CARD = "/dev/infiniband/uverbs"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def mig(pid: int, devices: Collection[str], gpus: Sequence[Gpu], usage: Mapping[str, GpuUsage]) -> str:
    """Return what shows that a process runs on an instance of a GPU (MIG), or nothing.

    `devices` are the UUIDs of the GPUs that its shim knows: NVML tells only root whose processes run on an instance.
    """
    for name, value in _named(pid, _DEVICE_VARIABLES):
        if "MIG-" in value:
            return f"{name}={value}"
    split = [gpu for gpu in gpus if gpu.mig]
    for gpu in split:
        if gpu.uuid in devices or (gpu.uuid in usage and pid in usage[gpu.uuid].by_pid):
            return f"GPU {gpu.uuid}"
    whole = {gpu.uuid for gpu in gpus}
    unknown = [uuid for uuid in devices if uuid not in whole]
    return f"device {unknown[0]}" if split and unknown else ""


def mps(pid: int, uid: int, usage: Mapping[str, GpuUsage]) -> str:
    """Return what shows that a process shares its GPU through the MPS daemon, or nothing."""
    if any(pid in gpu.mps_pids for gpu in usage.values()):
        return "NVML lists it as a client"
    named = dict(_named(pid, (_PIPE_VARIABLE,)))
    path = named.get(_PIPE_VARIABLE, _DEFAULT_PIPE)
    with contextlib.suppress(OSError):
        owner = os.stat(f"{processes.PROC}/{pid}/root{path}/control").st_uid
        # Anybody can make the default one; the client believes its own user and root.
        if named or owner in (0, uid):
            return f"the daemon's {path}/control is there"
    return ""


def tools(pid: int) -> list[str]:
    """Return the variables that make the driver load a tool into a process, as NAME=VALUE."""
    return [f"{name}={value}" for name, value in _named(pid, INJECTION_VARIABLES)]


def network_card(pid: int) -> str:
    """Return the network card that a process may have given GPU memory by a way that no call of the driver shows."""
    if not any(map(os.path.exists, _PEER_MEMORY)):
        return ""
    return next((path for path in processes.open_files(pid) if path.startswith(_NETWORK_CARD)), "")


def heartbeat_s(pid: int) -> float:
    """Return after how many seconds PyTorch's watchdog may take a process for stuck; infinite if it has none."""
    named = dict(_named(pid, (_HEARTBEAT,)))
    with contextlib.suppress(ValueError, KeyError):
        return float(named[_HEARTBEAT])
    return TORCH_HEARTBEAT_S if processes.has_library(pid, "libtorch_cuda.so") else math.inf


def _named(pid: int, names: Collection[str]) -> list[tuple[str, str]]:
    """Return those variables that a process was started with, the empty ones left out."""
    environment = processes.environment(pid)
    return [(name, environment[name]) for name in names if environment.get(name)]
