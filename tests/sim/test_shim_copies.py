"""Copies between devices in two and three dimensions, without peer access: native memory is reached, so is ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs.setting import ROOT, Setting

pytestmark = pytest.mark.machine(driver="sim", devices=2)

SCRIPT = """
import ctypes, sys
from cuda.bindings import driver as cu

symbol, source, kind, names_contexts = sys.argv[1], int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4

def ck(answer):
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]

ck(cu.cuInit(0))
contexts = [ck(cu.cuDevicePrimaryCtxRetain(ck(cu.cuDeviceGet(device)))) for device in (0, 1)]
memory = []
for context in contexts:
    ck(cu.cuCtxSetCurrent(context))
    memory.append(ck(cu.cuMemAlloc(4 << 20)))
    ck(cu.cuMemsetD8(memory[-1], len(memory), 4 << 20))
    ck(cu.cuCtxSynchronize())
ck(cu.cuCtxSetCurrent(contexts[0]))

shape = "3D_PEER" if "Peer" in symbol else "3D" if "3D" in symbol else "2D"
copy = getattr(cu, "CUDA_MEMCPY" + shape)()
copy.srcMemoryType = copy.dstMemoryType = getattr(cu.CUmemorytype, "CU_MEMORYTYPE_" + kind)
copy.srcDevice, copy.dstDevice = memory[source], memory[1 - source]
copy.srcPitch = copy.dstPitch = 4096
copy.WidthInBytes, copy.Height = 1024, 16
if shape != "2D":
    copy.srcHeight = copy.dstHeight = 16
    copy.Depth = 4
if names_contexts:
    # The wrong way round: the context that is named decides who needs access.
    copy.srcContext, copy.dstContext = contexts[1 - source], contexts[source]
function = getattr(ctypes.CDLL(None), symbol)
arguments = [ctypes.c_void_p(copy.getPtr())] + ([ctypes.c_void_p(0)] if "Async" in symbol else [])
code = function(*arguments)
assert code == 0, code
for context in contexts:
    ck(cu.cuCtxSetCurrent(context))
    ck(cu.cuCtxSynchronize())
got = (ctypes.c_ubyte * 1024)()
ck(cu.cuMemcpyDtoH(ctypes.addressof(got), int(memory[1 - source]) + 15 * 4096, 1024))
assert set(got) == {source + 1}, set(got)
"""

FORMS = ["cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2", "cuMemcpy2DAsync_v2", "cuMemcpy3D_v2", "cuMemcpy3DAsync_v2",
         "cuMemcpy3DPeer", "cuMemcpy3DPeerAsync"]
SYMBOLS = [form + suffix for form in FORMS for suffix in ("", "_ptsz" if "Async" in form else "_ptds")]


def copied(machine: Setting, *arguments: str) -> None:
    """Run the script in a process of its own under the shim; it asserts."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, env=machine.environ(with_shim=True),
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_without_peer_access(machine: Setting, symbol: str) -> None:
    """From the current device's memory to another one's, sync and async, legacy and per-thread."""
    copied(machine, symbol, "0", "DEVICE")


@pytest.mark.parametrize("symbol", ["cuMemcpy2D_v2", "cuMemcpy3D_v2", "cuMemcpy3DPeer"])
def test_from_the_other_device(machine: Setting, symbol: str) -> None:
    """The other way, with addresses whose kind the driver finds out."""
    copied(machine, symbol, "1", "UNIFIED")


@pytest.mark.parametrize("symbol", ["cuMemcpy3DPeer", "cuMemcpy3DPeerAsync_ptsz"])
def test_named_contexts(machine: Setting, symbol: str) -> None:
    """A context that is named is the one that needs access."""
    copied(machine, symbol, "0", "DEVICE", "names")
