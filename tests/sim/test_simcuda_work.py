"""What the simulated GPU does with work beyond the conformance suite: explicit graphs, 3D copies, batches."""

from __future__ import annotations

import pytest

from tests.programs.setting import Setting
from tests.sim.test_simcuda_machine import run_script

pytestmark = pytest.mark.machine(driver="sim")

PRELUDE = """
from cuda.bindings import driver as cu
from gpususpend import demo
from pathlib import Path
import threading, time

def ck(answer):
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]

ck(cu.cuInit(0))
contexts = [ck(cu.cuDevicePrimaryCtxRetain(ck(cu.cuDeviceGet(d)))) for d in (1, 0)]
for c in contexts:
    ck(cu.cuCtxSetCurrent(c))
module = ck(cu.cuModuleLoadData((Path(demo.__file__).parent / "kernels.ptx").read_bytes() + bytes(1)))
u64, u32 = ctypes.c_uint64, ctypes.c_uint32

def kernel(name):
    return ck(cu.cuModuleGetFunction(module, name.encode()))

def read(address, count):
    words = (u32 * count)()
    ck(cu.cuMemcpyDtoH(ctypes.addressof(words), address, 4 * count))
    return list(words)
"""


def check(machine: Setting, script: str, **extra: str) -> None:
    """Run a script in a process of its own; it asserts."""
    done = run_script(machine, PRELUDE + script, **extra)
    assert done.returncode == 0, done.stderr


def test_explicit_graph(machine: Setting) -> None:
    check(machine, """
a, b = ck(cu.cuMemAlloc(4096)), ck(cu.cuMemAlloc(4096))
graph = ck(cu.cuGraphCreate(0))
fill = cu.CUDA_MEMSET_NODE_PARAMS()
fill.dst, fill.value, fill.elementSize, fill.width, fill.height, fill.pitch = a, 5, 4, 1024, 1, 4096
first = ck(cu.cuGraphAddMemsetNode(graph, [], 0, fill, contexts[1]))
copy = cu.CUDA_MEMCPY3D()
copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
copy.srcDevice, copy.dstDevice, copy.WidthInBytes, copy.Height, copy.Depth = a, b, 4096, 1, 1
second = ck(cu.cuGraphAddMemcpyNode(graph, [first], 1, copy, contexts[1]))
launch = cu.CUDA_KERNEL_NODE_PARAMS()
launch.func = kernel("gs_add")
for name in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
    setattr(launch, name, 1)
launch.kernelParams = ((int(b), int(a), 1024), (u64, u64, u64))
third = ck(cu.cuGraphAddKernelNode(graph, [second], 1, launch))
executable = ck(cu.cuGraphInstantiate(graph, 0))
ck(cu.cuGraphDestroy(graph))
for _ in range(2):
    ck(cu.cuGraphLaunch(executable, 0))
ck(cu.cuGraphExecDestroy(executable))
assert read(b, 1024) == [10] * 1024
""")


def test_capture_joins_streams(machine: Setting) -> None:
    check(machine, """
a = ck(cu.cuMemAlloc(4096))
s, t = ck(cu.cuStreamCreate(1)), ck(cu.cuStreamCreate(1))
fork, join = ck(cu.cuEventCreate(2)), ck(cu.cuEventCreate(2))
ck(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ck(cu.cuMemsetD32Async(a, 1, 1024, s))
ck(cu.cuEventRecord(fork, s))
ck(cu.cuStreamWaitEvent(t, fork, 0))
ck(cu.cuMemsetD32Async(int(a) + 2048, 2, 512, t))
assert int(cu.cuStreamSynchronize(t)[0]) == 900  # and the capture is broken
assert int(cu.cuStreamEndCapture(s)[0]) == 901
ck(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ck(cu.cuMemsetD32Async(a, 1, 1024, s))
ck(cu.cuEventRecord(fork, s))
ck(cu.cuStreamWaitEvent(t, fork, 0))
ck(cu.cuMemsetD32Async(int(a) + 2048, 2, 512, t))
ck(cu.cuEventRecord(join, t))
ck(cu.cuStreamWaitEvent(s, join, 0))
graph = ck(cu.cuStreamEndCapture(s))
assert ck(cu.cuGraphGetNodes(graph, 9))[1] == 2
ck(cu.cuGraphLaunch(ck(cu.cuGraphInstantiate(graph, 0)), s))
ck(cu.cuStreamSynchronize(s))
assert read(a, 1024) == [1] * 512 + [2] * 512
ck(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ck(cu.cuEventRecord(fork, s))
ck(cu.cuStreamWaitEvent(t, fork, 0))
ck(cu.cuMemsetD32Async(a, 2, 512, t))
assert int(cu.cuStreamEndCapture(s)[0]) == 904
""")


def test_copies_in_three_dimensions(machine: Setting) -> None:
    check(machine, """
a, b = ck(cu.cuMemAlloc(1 << 16)), ck(cu.cuMemAlloc(1 << 16))
words = (u32 * 16384)(*range(16384))
ck(cu.cuMemcpyHtoD(a, ctypes.addressof(words), 1 << 16))
copy = cu.CUDA_MEMCPY3D_PEER()
copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
copy.srcDevice, copy.dstDevice, copy.srcContext, copy.dstContext = a, b, contexts[1], contexts[1]
copy.srcPitch, copy.srcHeight, copy.dstPitch, copy.dstHeight = 256, 8, 128, 4
copy.srcXInBytes, copy.srcY, copy.srcZ = 16, 2, 1
copy.WidthInBytes, copy.Height, copy.Depth = 64, 3, 2
ck(cu.cuMemcpy3DPeer(copy))
got = read(b, 16384)
for z in range(2):
    for y in range(3):
        for x in range(16):
            assert got[z * 128 + y * 32 + x] == (z + 1) * 512 + (y + 2) * 64 + x + 4
""")


def test_memory_operations(machine: Setting) -> None:
    check(machine, """
flags = ck(cu.cuMemAlloc(4096))
ck(cu.cuMemsetD8(flags, 0, 4096))
s, t = ck(cu.cuStreamCreate(1)), ck(cu.cuStreamCreate(1))
ck(cu.cuStreamWaitValue32(s, flags, 3, cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ))
ck(cu.cuStreamWriteValue64(s, int(flags) + 8, 1 << 40, 0))
time.sleep(0.1)
assert int(cu.cuStreamQuery(s)[0]) == 600
write, wait = cu.CUstreamBatchMemOpParams(), cu.CUstreamBatchMemOpParams()
write.writeValue.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
write.writeValue.address, write.writeValue.value = flags, 3
wait.waitValue.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64
wait.waitValue.address, wait.waitValue.value64 = int(flags) + 8, 1 << 40
ck(cu.cuStreamBatchMemOp(t, 2, [write, wait], 0))
ck(cu.cuCtxSynchronize())
assert read(flags, 4) == [3, 0, 0, 256]
""")


def test_waiting_for_a_context_ends_beside_work_that_is_given_to_it_all_the_time(machine: Setting) -> None:
    """Only what was submitted before the call counts; the stream never falls idle here."""
    check(machine, """
flag = ck(cu.cuMemAlloc(4096))
ck(cu.cuMemsetD32(flag, 0, 1024))
s, t = ck(cu.cuStreamCreate(1)), ck(cu.cuStreamCreate(1))
ck(cu.cuStreamWaitValue32(s, flag, 1, 0))
def wait():
    ck(cu.cuCtxSetCurrent(contexts[1]))
    ck(cu.cuCtxSynchronize())
waiter = threading.Thread(target=wait, daemon=True)
waiter.start()
def look():
    lines = Path(f"/proc/self/task/{waiter.native_id}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("State", "voluntary", "nonvoluntary"))]
seen = []
while (now := look()) != seen or "S (" not in now[0]:  # it sleeps in the call; for the interpreter it would wake often
    seen = now
    time.sleep(0.1)
ck(cu.cuStreamWaitValue32(s, flag, 2, 0))
ck(cu.cuStreamWriteValue32(t, flag, 1, 0))
waiter.join(60)
assert not waiter.is_alive(), "it waits for what came later"
ck(cu.cuStreamWriteValue32(t, flag, 2, 0))
ck(cu.cuCtxSynchronize())
""")


def test_threads_own_default_streams(machine: Setting) -> None:
    check(machine, """
flag = ck(cu.cuMemAlloc(4096))
ck(cu.cuMemsetD8(flag, 0, 4096))
s = ck(cu.cuStreamCreate(1))
def other():
    ck(cu.cuCtxSetCurrent(contexts[1]))
    ck(cu.cuStreamWaitValue32(0, flag, 1, 0))
    ck(cu.cuStreamSynchronize(0))
thread = threading.Thread(target=other)
thread.start()
time.sleep(0.1)
ck(cu.cuMemsetD32Async(int(flag) + 64, 1, 1, 0))  # its own default stream waits for nobody
ck(cu.cuStreamSynchronize(0))
ck(cu.cuStreamWriteValue32(s, flag, 1, 0))
thread.join(60)
assert not thread.is_alive()
""", CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1")


def test_fault_poisons_the_context(machine: Setting) -> None:
    check(machine, """
a = ck(cu.cuMemAlloc(4096))
bad = ((0x1000, 64, 1), (u64, u64, u32))
ck(cu.cuLaunchKernel(kernel("gs_fill"), 1, 1, 1, 1, 1, 1, 0, 0, bad, 0))
assert int(cu.cuCtxSynchronize()[0]) == 700
assert int(cu.cuMemFree(a)[0]) == 700
ck(cu.cuCtxSetCurrent(contexts[0]))
ck(cu.cuCtxSynchronize())
""")


def test_images_for_real_gpus_are_refused(machine: Setting) -> None:
    check(machine, """
assert int(cu.cuModuleLoadData(b"\\x7fELF" + bytes(64))[0]) == 209
assert int(cu.cuModuleLoadData(b"no ptx" + bytes(1))[0]) == 218
assert int(cu.cuModuleGetFunction(module, b"gs_none")[0]) == 500
""")
