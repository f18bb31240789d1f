"""Who uses the memory of the GPUs: NVML's word on real ones, the simulated driver's own count otherwise."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from tests.programs.setting import ROOT, Setting

SIMULATED = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
found = {}
for device in range(int(sys.argv[1])):
    pids, sizes, count = (ctypes.c_uint * 64)(), (ctypes.c_size_t * 64)(), ctypes.c_int(64)
    if cuda.simcudaDeviceUsage(device, pids, sizes, ctypes.byref(count)) != 0:
        sys.exit("simcudaDeviceUsage failed")
    for at in range(count.value):
        found[pids[at]] = found.get(pids[at], 0) + sizes[at]
found.pop(__import__("os").getpid(), None)
print(json.dumps(found))
"""


def memory_by_pid(setting: Setting) -> dict[int, int]:
    """Return the bytes of GPU memory that each process uses. Asked in a process of its own, which needs no context."""
    if setting.simulated:
        done = subprocess.run([sys.executable, "-c", SIMULATED, str(setting.devices)], env=setting.environ(), cwd=ROOT,
                              capture_output=True, text=True, timeout=60, check=True)
        return {int(pid): size for pid, size in json.loads(done.stdout).items()}
    import pynvml

    pynvml.nvmlInit()
    try:
        found: dict[int, int] = {}
        for device in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(device)
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                found[one.pid] = found.get(one.pid, 0) + (one.usedGpuMemory or 0)
        return found
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
