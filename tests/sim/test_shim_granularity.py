"""B29: a driver whose answer would make every size a multiple of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preload import stub

PROGRAM = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
found = ctypes.c_ulonglong()
pitch = ctypes.c_size_t()
print(cuda.cuInit(0), cuda.cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(1 << 20)),
      cuda.cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(1 << 24)),
      cuda.cuMemAllocPitch_v2(ctypes.byref(found), ctypes.byref(pitch), ctypes.c_size_t(100), ctypes.c_size_t(9), 4),
      found.value, pitch.value, cuda.stub_calls(b"cuMemCreate"), cuda.stub_calls(b"cuMemGetAllocationGranularity"))
"""


def test_b29_zero_granularity_is_refused(
    tmp_path: Path, shim_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B29: nothing is divided by it, nothing is created, the caller gets an error."""
    monkeypatch.setitem(stub.BODIES, "cuDeviceGetAttribute", "*pi = 1;")
    monkeypatch.setitem(stub.BODIES, "cuCtxGetCurrent", "*pctx = (CUcontext)16;")
    monkeypatch.setitem(stub.BODIES, "cuMemGetAllocationGranularity", "*granularity = 0;")
    folder = stub.build(tmp_path / "driver").parent
    env = os.environ | {"LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(shim_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "801", "801", "801", "0", "0", "0", "1"], done.stderr
