"""The one table of driver entry points that the shim knows.

It owns what each exported driver symbol is called, from which CUDA version on its ABI is current, which default stream
it means, its signature, its class and whether its wrapper is generated or written by hand. Exports, look-ups, real
pointers and wrappers all come from here (`shim.generate`), so a hook cannot be half added. It must not know how a hook
does its work. `tests/unit/test_hooks.py` compares every row with NVIDIA's header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

NEWEST_CUDA = 13050
"""The newest CUDA version whose names and ABIs this table was compared with."""


class Variant(Enum):
    """The default stream that a symbol means; the value is the flag of cuGetProcAddress that asks for it."""

    ANY = 0
    LEGACY = 1
    PER_THREAD = 2


class Class(Enum):
    """What a call does, and with that the gate that holds it: launch, memory (also object), or none (query)."""

    LAUNCH = "launch"
    MEMORY = "memory"
    OBJECT = "object"
    QUERY = "query"


class Kind(Enum):
    """Gated: the wrapper is generated. Custom: written by hand in a .pxi. Real: resolved for our own use, not exported."""

    GATED = "gated"
    CUSTOM = "custom"
    REAL = "real"


@dataclass(frozen=True)
class Hook:
    """One symbol of the driver. `until` is the version at which the next ABI of that name takes over, 0 for none."""

    symbol: str
    name: str
    since: int
    until: int
    variant: Variant
    params: str
    cls: Class
    kind: Kind
    stream: str
    returns: str = "CUresult"

    @property
    def arguments(self) -> list[str]:
        """The names of the parameters, in order."""
        return [re.split(r"[\s*]+", part.strip())[-1] for part in self.params.split(",")] if self.params else []


def base_name(symbol: str) -> str:
    """Return the name under which cuGetProcAddress knows `symbol`."""
    return re.sub(r"(_v\d+)?(_pt[sd][zs])?$", "", symbol)


def _row(
    symbol: str,
    since: int,
    params: str,
    *,
    cls: Class,
    kind: Kind = Kind.GATED,
    twin: str = "",
    twin_since: int = 0,
    stream: str = "",
) -> list[Hook]:
    """Return the hook, and its per-thread twin (`_ptds` or `_ptsz`) if it has one."""
    variant = Variant.LEGACY if twin else Variant.ANY
    hook = Hook(symbol, base_name(symbol), since, 0, variant, params, cls, kind, stream)
    if not twin:
        return [hook]
    return [hook, replace(hook, symbol=symbol + twin, variant=Variant.PER_THREAD, since=twin_since or since)]


def _launch(symbol: str, since: int, params: str, twin_since: int = 0, stream: str = "hStream") -> list[Hook]:
    """A kernel or graph launch; with `twin_since` it has a per-thread form."""
    return _row(symbol, since, params, cls=Class.LAUNCH, twin="_ptsz" if twin_since else "", twin_since=twin_since, stream=stream)


def _sync(symbol: str, since: int, params: str, twin_since: int = 0) -> list[Hook]:
    """A copy or memset that returns when it is done."""
    return _row(symbol, since, params, cls=Class.MEMORY, twin="_ptds" if twin_since else "", twin_since=twin_since)


def _async(symbol: str, since: int, params: str, twin_since: int = 0, stream: str = "hStream") -> list[Hook]:
    """Work on memory that is put into a stream."""
    return _row(symbol, since, params, cls=Class.MEMORY, twin="_ptsz" if twin_since else "", twin_since=twin_since, stream=stream)


def _gated(symbol: str, since: int, params: str) -> list[Hook]:
    """A call without a stream that must not run while memory is away."""
    return _row(symbol, since, params, cls=Class.MEMORY)


def _custom(symbol: str, since: int, params: str, cls: Class = Class.OBJECT) -> list[Hook]:
    """A hook written by hand."""
    return _row(symbol, since, params, cls=cls, kind=Kind.CUSTOM)


def _real(symbol: str, since: int, params: str) -> list[Hook]:
    """A function that the shim calls and does not hook."""
    return _row(symbol, since, params, cls=Class.QUERY, kind=Kind.REAL)


_GRID = (
    "CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, "
    "unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream"
)

_LAUNCHES = [
    _launch("cuLaunchKernel", 4000, f"{_GRID}, void **kernelParams, void **extra", 7000),
    _launch(
        "cuLaunchKernelEx",
        11060,
        "const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra",
        11060,
        stream="config.hStream",
    ),
    _launch("cuLaunchCooperativeKernel", 9000, f"{_GRID}, void **kernelParams", 9000),
    _launch(
        "cuLaunchCooperativeKernelMultiDevice",
        9000,
        "CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags",
        stream="",
    ),
    _launch("cuLaunch", 2000, "CUfunction f", stream=""),
    _launch("cuLaunchGrid", 2000, "CUfunction f, int grid_width, int grid_height", stream=""),
    _launch("cuLaunchGridAsync", 2000, "CUfunction f, int grid_width, int grid_height, CUstream hStream"),
    _launch("cuGraphLaunch", 10000, "CUgraphExec hGraphExec, CUstream hStream", 10000),
    _launch("cuGraphUpload", 11010, "CUgraphExec hGraphExec, CUstream hStream", 11010),
]

_PEER = "CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount"
_H2D = "CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount"
_D2H = "void *dstHost, CUdeviceptr srcDevice, size_t ByteCount"
_D2D = "CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount"
_D2A = "CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount"
_A2D = "CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount"
_H2A = "CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount"
_A2H = "void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount"
_A2A = "CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount"


def _32bit(params: str) -> str:
    """Spell a signature in the ABI of CUDA 2, where addresses and sizes have 32 bits."""
    return params.replace("CUdeviceptr ", "unsigned int ").replace("size_t ", "unsigned int ")


_COPIES = [
    _sync("cuMemcpy", 4000, "CUdeviceptr dst, CUdeviceptr src, size_t ByteCount", 7000),
    _async("cuMemcpyAsync", 4000, "CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream", 7000),
    _sync("cuMemcpyPeer", 4000, _PEER, 7000),
    _async("cuMemcpyPeerAsync", 4000, f"{_PEER}, CUstream hStream", 7000),
    _sync("cuMemcpyHtoD_v2", 3020, _H2D, 7000),
    _async("cuMemcpyHtoDAsync_v2", 3020, f"{_H2D}, CUstream hStream", 7000),
    _sync("cuMemcpyDtoH_v2", 3020, _D2H, 7000),
    _async("cuMemcpyDtoHAsync_v2", 3020, f"{_D2H}, CUstream hStream", 7000),
    _sync("cuMemcpyDtoD_v2", 3020, _D2D, 7000),
    _async("cuMemcpyDtoDAsync_v2", 3020, f"{_D2D}, CUstream hStream", 7000),
    _sync("cuMemcpyDtoA_v2", 3020, _D2A, 7000),
    _sync("cuMemcpyAtoD_v2", 3020, _A2D, 7000),
    _sync("cuMemcpyHtoA_v2", 3020, _H2A, 7000),
    _async("cuMemcpyHtoAAsync_v2", 3020, f"{_H2A}, CUstream hStream", 7000),
    _sync("cuMemcpyAtoH_v2", 3020, _A2H, 7000),
    _async("cuMemcpyAtoHAsync_v2", 3020, f"{_A2H}, CUstream hStream", 7000),
    _sync("cuMemcpyAtoA_v2", 3020, _A2A, 7000),
    _sync("cuMemcpy2D_v2", 3020, "const CUDA_MEMCPY2D *pCopy", 7000),
    _sync("cuMemcpy2DUnaligned_v2", 3020, "const CUDA_MEMCPY2D *pCopy", 7000),
    _async("cuMemcpy2DAsync_v2", 3020, "const CUDA_MEMCPY2D *pCopy, CUstream hStream", 7000),
    _sync("cuMemcpy3D_v2", 3020, "const CUDA_MEMCPY3D *pCopy", 7000),
    _async("cuMemcpy3DAsync_v2", 3020, "const CUDA_MEMCPY3D *pCopy, CUstream hStream", 7000),
    _sync("cuMemcpy3DPeer", 4000, "const CUDA_MEMCPY3D_PEER *pCopy", 7000),
    _async("cuMemcpy3DPeerAsync", 4000, "const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream", 7000),
    _async(
        "cuMemcpyBatchAsync",
        12080,
        "CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, "
        "size_t *attrIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream",
        12080,
    ),
    _async(
        "cuMemcpyBatchAsync_v2",
        13000,
        "CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, "
        "size_t *attrIdxs, size_t numAttrs, CUstream hStream",
        13000,
    ),
    _async(
        "cuMemcpy3DBatchAsync",
        12080,
        "size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx, unsigned long long flags, CUstream hStream",
        12080,
    ),
    _async(
        "cuMemcpy3DBatchAsync_v2",
        13000,
        "size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream",
        13000,
    ),
    _async(
        "cuMemcpyWithAttributesAsync",
        13020,
        "CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, CUstream hStream",
        13020,
    ),
    _async(
        "cuMemcpy3DWithAttributesAsync",
        13020,
        "CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags, CUstream hStream",
        13020,
    ),
    _async(
        "cuFabricCpyBatchAsync",
        13050,
        "size_t numOps, CUDA_FABRIC_COPY_BATCH_OP *opList, unsigned long long flags, CUstream hStream",
        13050,
    ),
    _async(
        "cuMemBatchDecompressAsync",
        12060,
        "CUmemDecompressParams *paramsArray, size_t count, unsigned int flags, size_t *errorIndex, CUstream stream",
        12060,
        stream="stream",
    ),
]

_MEMSETS = [
    _sync("cuMemsetD8_v2", 3020, "CUdeviceptr dstDevice, unsigned char uc, size_t N", 7000),
    _sync("cuMemsetD16_v2", 3020, "CUdeviceptr dstDevice, unsigned short us, size_t N", 7000),
    _sync("cuMemsetD32_v2", 3020, "CUdeviceptr dstDevice, unsigned int ui, size_t N", 7000),
    _sync("cuMemsetD2D8_v2", 3020, "CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height", 7000),
    _sync("cuMemsetD2D16_v2", 3020, "CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height", 7000),
    _sync("cuMemsetD2D32_v2", 3020, "CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height", 7000),
    _async("cuMemsetD8Async", 3020, "CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream", 7000),
    _async("cuMemsetD16Async", 3020, "CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream", 7000),
    _async("cuMemsetD32Async", 3020, "CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream", 7000),
    _async(
        "cuMemsetD2D8Async",
        3020,
        "CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height, CUstream hStream",
        7000,
    ),
    _async(
        "cuMemsetD2D16Async",
        3020,
        "CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height, CUstream hStream",
        7000,
    ),
    _async(
        "cuMemsetD2D32Async",
        3020,
        "CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, CUstream hStream",
        7000,
    ),
]

# The 32-bit ABI of CUDA 2 and 3.0: libcuda still exports it. Gated, and otherwise left alone.
_OLD_COPIES = [
    _sync("cuMemcpyHtoD", 2000, _32bit(_H2D)),
    _async("cuMemcpyHtoDAsync", 2000, _32bit(_H2D) + ", CUstream hStream"),
    _sync("cuMemcpyDtoH", 2000, _32bit(_D2H)),
    _async("cuMemcpyDtoHAsync", 2000, _32bit(_D2H) + ", CUstream hStream"),
    _sync("cuMemcpyDtoD", 2000, _32bit(_D2D)),
    _async("cuMemcpyDtoDAsync", 3000, _32bit(_D2D) + ", CUstream hStream"),
    _sync("cuMemcpyDtoA", 2000, _32bit(_D2A)),
    _sync("cuMemcpyAtoD", 2000, _32bit(_A2D)),
    _sync("cuMemcpyHtoA", 2000, _32bit(_H2A)),
    _async("cuMemcpyHtoAAsync", 2000, _32bit(_H2A) + ", CUstream hStream"),
    _sync("cuMemcpyAtoH", 2000, _32bit(_A2H)),
    _async("cuMemcpyAtoHAsync", 2000, _32bit(_A2H) + ", CUstream hStream"),
    _sync("cuMemcpyAtoA", 2000, _32bit(_A2A)),
    _sync("cuMemcpy2D", 2000, "const CUDA_MEMCPY2D_v1 *pCopy"),
    _sync("cuMemcpy2DUnaligned", 2000, "const CUDA_MEMCPY2D_v1 *pCopy"),
    _async("cuMemcpy2DAsync", 2000, "const CUDA_MEMCPY2D_v1 *pCopy, CUstream hStream"),
    _sync("cuMemcpy3D", 2000, "const CUDA_MEMCPY3D_v1 *pCopy"),
    _async("cuMemcpy3DAsync", 2000, "const CUDA_MEMCPY3D_v1 *pCopy, CUstream hStream"),
    _sync("cuMemsetD8", 2000, "unsigned int dstDevice, unsigned char uc, unsigned int N"),
    _sync("cuMemsetD16", 2000, "unsigned int dstDevice, unsigned short us, unsigned int N"),
    _sync("cuMemsetD32", 2000, "unsigned int dstDevice, unsigned int ui, unsigned int N"),
    _sync("cuMemsetD2D8", 2000, "unsigned int dstDevice, unsigned int dstPitch, unsigned char uc, unsigned int Width, unsigned int Height"),
    _sync("cuMemsetD2D16", 2000, "unsigned int dstDevice, unsigned int dstPitch, unsigned short us, unsigned int Width, unsigned int Height"),
    _sync("cuMemsetD2D32", 2000, "unsigned int dstDevice, unsigned int dstPitch, unsigned int ui, unsigned int Width, unsigned int Height"),
    _gated("cuMemAlloc", 2000, "unsigned int *dptr, unsigned int bytesize"),
    _gated(
        "cuMemAllocPitch",
        2000,
        "unsigned int *dptr, unsigned int *pPitch, unsigned int WidthInBytes, unsigned int Height, unsigned int ElementSizeBytes",
    ),
    _gated("cuMemFree", 2000, "unsigned int dptr"),
    _gated("cuMemAllocHost", 2000, "void **pp, unsigned int bytesize"),
]

_VALUE32 = "CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags"
_VALUE64 = "CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags"
_MEMOPS = "CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags"

_STREAM_WORK = [
    # Two ABIs under one name: 11.7 changed what the calls promise, not how they are called.
    _async("cuStreamWaitValue32", 8000, _VALUE32, 8000, stream="stream"),
    _async("cuStreamWaitValue64", 9000, _VALUE64, 9000, stream="stream"),
    _async("cuStreamWriteValue32", 8000, _VALUE32, 8000, stream="stream"),
    _async("cuStreamWriteValue64", 9000, _VALUE64, 9000, stream="stream"),
    _async("cuStreamBatchMemOp", 8000, _MEMOPS, 8000, stream="stream"),
    _async("cuStreamWaitValue32_v2", 11070, _VALUE32, 11070, stream="stream"),
    _async("cuStreamWaitValue64_v2", 11070, _VALUE64, 11070, stream="stream"),
    _async("cuStreamWriteValue32_v2", 11070, _VALUE32, 11070, stream="stream"),
    _async("cuStreamWriteValue64_v2", 11070, _VALUE64, 11070, stream="stream"),
    _async("cuStreamBatchMemOp_v2", 11070, _MEMOPS, 11070, stream="stream"),
    _async("cuMemAllocAsync", 11020, "CUdeviceptr *dptr, size_t bytesize, CUstream hStream", 11020),
    _async("cuMemAllocFromPoolAsync", 11020, "CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream", 11020),
    _async("cuMemFreeAsync", 11020, "CUdeviceptr dptr, CUstream hStream", 11020),
    _async("cuMemPrefetchAsync", 8000, "CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream", 8000),
    _async(
        "cuMemPrefetchAsync_v2",
        12020,
        "CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream",
        12020,
    ),
]

# Their functions run on threads of the driver and must pass the gates: hostfuncs.pxi.
_HOST_FUNCTIONS = [
    _row(symbol, since, params, cls=Class.MEMORY, kind=Kind.CUSTOM, twin="_ptsz", twin_since=twin_since, stream="hStream")
    for symbol, since, params, twin_since in (
        ("cuLaunchHostFunc", 10000, "CUstream hStream, CUhostFn fn, void *userData", 10000),
        ("cuLaunchHostFunc_v2", 13010, "CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode", 13010),
        ("cuStreamAddCallback", 5000, "CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags", 7000),
    )
]
_DEPENDENCIES = "const CUgraphNode *dependencies, size_t numDependencies"
_EDGES = "const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies"
_HOST_NODES = [
    _custom(
        "cuGraphAddHostNode",
        10000,
        f"CUgraphNode *phGraphNode, CUgraph hGraph, {_DEPENDENCIES}, const CUDA_HOST_NODE_PARAMS *nodeParams",
        Class.QUERY,
    ),
    _custom("cuGraphHostNodeGetParams", 10000, "CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams", Class.QUERY),
    _custom("cuGraphHostNodeSetParams", 10000, "CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams", Class.QUERY),
    _custom(
        "cuGraphExecHostNodeSetParams",
        10020,
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams",
        Class.QUERY,
    ),
    _custom(
        "cuGraphAddNode",
        12020,
        f"CUgraphNode *phGraphNode, CUgraph hGraph, {_DEPENDENCIES}, CUgraphNodeParams *nodeParams",
        Class.QUERY,
    ),
    _custom(
        "cuGraphAddNode_v2",
        12030,
        f"CUgraphNode *phGraphNode, CUgraph hGraph, {_EDGES}, CUgraphNodeParams *nodeParams",
        Class.QUERY,
    ),
    _custom(
        "cuGraphAddNode_v3",
        13040,
        f"CUgraphNode *phGraphNode, CUgraph hGraph, {_EDGES}, CUgraphNodeParams *nodeParams",
        Class.QUERY,
    ),
    _custom("cuGraphNodeSetParams", 12020, "CUgraphNode hNode, CUgraphNodeParams *nodeParams", Class.QUERY),
    _custom("cuGraphNodeSetParams_v2", 13040, "CUgraphNode hNode, CUgraphNodeParams *nodeParams", Class.QUERY),
    _custom("cuGraphExecNodeSetParams", 12020, "CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams", Class.QUERY),
    _custom("cuGraphNodeGetParams", 13020, "CUgraphNode hNode, CUgraphNodeParams *nodeParams", Class.QUERY),
]

_ALLOCATIONS = [
    _custom("cuMemAlloc_v2", 3020, "CUdeviceptr *dptr, size_t bytesize"),
    _custom(
        "cuMemAllocPitch_v2",
        3020,
        "CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes",
    ),
    _custom("cuMemFree_v2", 3020, "CUdeviceptr dptr"),
    _custom("cuMemAllocManaged", 6000, "CUdeviceptr *dptr, size_t bytesize, unsigned int flags"),
    _custom("cuMemGetAddressRange_v2", 3020, "CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr"),
    _custom("cuPointerGetAttribute", 4000, "void *data, CUpointer_attribute attribute, CUdeviceptr ptr"),
    _custom(
        "cuPointerGetAttributes",
        7000,
        "unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr",
    ),
    _gated("cuPointerSetAttribute", 6000, "const void *value, CUpointer_attribute attribute, CUdeviceptr ptr"),
    _gated("cuMemGetInfo_v2", 3020, "size_t *free, size_t *total"),
    _gated("cuMemAllocHost_v2", 3020, "void **pp, size_t bytesize"),
    _gated("cuMemHostAlloc", 2020, "void **pp, size_t bytesize, unsigned int Flags"),
    _gated("cuMemFreeHost", 2000, "void *p"),
    _gated("cuMemHostGetDevicePointer_v2", 3020, "CUdeviceptr *pdptr, void *p, unsigned int Flags"),
    _gated("cuMemHostGetFlags", 2030, "unsigned int *pFlags, void *p"),
    _custom("cuMemHostRegister", 4000, "void *p, size_t bytesize, unsigned int Flags"),
    _custom("cuMemHostRegister_v2", 6050, "void *p, size_t bytesize, unsigned int Flags"),
    _custom("cuMemHostUnregister", 4000, "void *p"),
]

_HANDLE = "CUmemGenericAllocationHandle"
_CUMEM = [
    _custom("cuMemCreate", 10020, f"{_HANDLE} *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags"),
    _custom("cuMemRelease", 10020, f"{_HANDLE} handle"),
    _custom("cuMemRetainAllocationHandle", 11000, f"{_HANDLE} *handle, void *addr"),
    _custom("cuMemGetAllocationPropertiesFromHandle", 10020, f"CUmemAllocationProp *prop, {_HANDLE} handle"),
    _custom("cuMemAddressReserve", 10020, "CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags"),
    _custom("cuMemAddressFree", 10020, "CUdeviceptr ptr, size_t size"),
    _custom("cuMemMap", 10020, f"CUdeviceptr ptr, size_t size, size_t offset, {_HANDLE} handle, unsigned long long flags"),
    _custom("cuMemUnmap", 10020, "CUdeviceptr ptr, size_t size"),
    _custom("cuMemSetAccess", 10020, "CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count"),
    _custom("cuMemGetAccess", 10020, "unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr"),
    _custom(
        "cuMemExportToShareableHandle",
        10020,
        f"void *shareableHandle, {_HANDLE} handle, CUmemAllocationHandleType handleType, unsigned long long flags",
    ),
    _custom("cuMemImportFromShareableHandle", 10020, f"{_HANDLE} *handle, void *osHandle, CUmemAllocationHandleType shHandleType"),
    _row(
        "cuMemMapArrayAsync",
        11010,
        "CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream",
        cls=Class.OBJECT,
        kind=Kind.CUSTOM,
        twin="_ptsz",
        stream="hStream",
    ),
]

_SHARING = [
    _custom("cuIpcGetMemHandle", 4010, "CUipcMemHandle *pHandle, CUdeviceptr dptr"),
    _custom("cuIpcOpenMemHandle", 4010, "CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags"),
    _custom("cuIpcOpenMemHandle_v2", 11000, "CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags"),
    _custom("cuIpcCloseMemHandle", 4010, "CUdeviceptr dptr"),
    _custom("cuCtxEnablePeerAccess", 4000, "CUcontext peerContext, unsigned int Flags"),
    _custom("cuCtxDisablePeerAccess", 4000, "CUcontext peerContext"),
]

# Counted, not carried yet; the functions that take a handle also translate it.
_UNCARRIED = [
    _custom("cuMulticastCreate", 12010, f"{_HANDLE} *mcHandle, const CUmulticastObjectProp *prop"),
    _custom("cuMulticastAddDevice", 12010, f"{_HANDLE} mcHandle, CUdevice dev"),
    _custom(
        "cuMulticastBindMem",
        12010,
        f"{_HANDLE} mcHandle, size_t mcOffset, {_HANDLE} memHandle, size_t memOffset, size_t size, unsigned long long flags",
    ),
    _custom(
        "cuMulticastBindMem_v2",
        13010,
        f"{_HANDLE} mcHandle, CUdevice dev, size_t mcOffset, {_HANDLE} memHandle, size_t memOffset, size_t size, unsigned long long flags",
    ),
    _custom("cuMulticastBindAddr", 12010, f"{_HANDLE} mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags"),
    _custom(
        "cuMulticastBindAddr_v2",
        13010,
        f"{_HANDLE} mcHandle, CUdevice dev, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags",
    ),
    _custom("cuMulticastUnbind", 12010, f"{_HANDLE} mcHandle, CUdevice dev, size_t mcOffset, size_t size"),
    _custom(
        "cuLogicalEndpointBindMem",
        13030,
        f"cuuint32_t leId, CUdevice dev, cuuint64_t offset, {_HANDLE} memHandle, cuuint64_t memOffset, cuuint64_t size, "
        "unsigned long long flags",
    ),
    _custom(
        "cuMemPoolExportToShareableHandle",
        11020,
        "void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags",
    ),
    _custom(
        "cuMemPoolImportFromShareableHandle",
        11020,
        "CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags",
    ),
    _custom("cuMemPoolExportPointer", 11020, "CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr"),
    _custom("cuMemPoolImportPointer", 11020, "CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData"),
    _custom("cuMemPoolDestroy", 11020, "CUmemoryPool pool"),
    _custom("cuIpcGetEventHandle", 4010, "CUipcEventHandle *pHandle, CUevent event"),
    _custom("cuIpcOpenEventHandle", 4010, "CUevent *phEvent, CUipcEventHandle handle"),
    _custom("cuEventDestroy", 2000, "CUevent hEvent"),
    _custom("cuEventDestroy_v2", 4000, "CUevent hEvent"),
    _custom("cuImportExternalMemory", 10000, "CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc"),
    _custom("cuDestroyExternalMemory", 10000, "CUexternalMemory extMem"),
    _custom(
        "cuImportExternalSemaphore",
        10000,
        "CUexternalSemaphore *extSem_out, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *semHandleDesc",
    ),
    _custom("cuDestroyExternalSemaphore", 10000, "CUexternalSemaphore extSem"),
]

_CONTEXTS = [
    _custom("cuCtxCreate", 2000, "CUcontext *pctx, unsigned int flags, CUdevice dev"),
    _custom("cuCtxCreate_v2", 3020, "CUcontext *pctx, unsigned int flags, CUdevice dev"),
    _custom("cuCtxCreate_v3", 11040, "CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev"),
    _custom("cuCtxCreate_v4", 12050, "CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev"),
    _custom("cuCtxDestroy", 2000, "CUcontext ctx"),
    _custom("cuCtxDestroy_v2", 4000, "CUcontext ctx"),
    _custom("cuDevicePrimaryCtxRetain", 7000, "CUcontext *pctx, CUdevice dev"),
    _custom("cuDevicePrimaryCtxRelease", 7000, "CUdevice dev"),
    _custom("cuDevicePrimaryCtxRelease_v2", 11000, "CUdevice dev"),
    _custom("cuDevicePrimaryCtxReset", 7000, "CUdevice dev"),
    _custom("cuDevicePrimaryCtxReset_v2", 11000, "CUdevice dev"),
]

# Loading code allocates and copies: it waits with the memory gate.
_JIT = "CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, "
_LIBRARY = f"{_JIT}CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions"
_CODE = [
    _gated("cuModuleLoad", 2000, "CUmodule *module, const char *fname"),
    _gated("cuModuleLoadData", 2000, "CUmodule *module, const void *image"),
    _gated(
        "cuModuleLoadDataEx",
        2010,
        "CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues",
    ),
    _gated("cuModuleLoadFatBinary", 2000, "CUmodule *module, const void *fatCubin"),
    _gated("cuModuleUnload", 2000, "CUmodule hmod"),
    _gated("cuLibraryLoadData", 12000, f"CUlibrary *library, const void *code, {_LIBRARY}"),
    _gated("cuLibraryLoadFromFile", 12000, f"CUlibrary *library, const char *fileName, {_LIBRARY}"),
    _gated("cuLibraryUnload", 12000, "CUlibrary library"),
]

_LOOKUP = [
    _custom("cuInit", 2000, "unsigned int Flags", Class.QUERY),
    _custom("cuGetProcAddress", 11030, "const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags", Class.QUERY),
    _custom(
        "cuGetProcAddress_v2",
        12000,
        "const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus",
        Class.QUERY,
    ),
]

_OWN_USE = [
    _real("cuDriverGetVersion", 2020, "int *driverVersion"),
    _real("cuGetErrorName", 6000, "CUresult error, const char **pStr"),
    _real("cuDeviceGet", 2000, "CUdevice *device, int ordinal"),
    _real("cuDeviceGetCount", 2000, "int *count"),
    _real("cuDeviceGetAttribute", 2000, "int *pi, CUdevice_attribute attrib, CUdevice dev"),
    _real("cuDeviceGetUuid", 9020, "CUuuid *uuid, CUdevice dev"),
    _real("cuDeviceGetUuid_v2", 11040, "CUuuid *uuid, CUdevice dev"),
    _real("cuDeviceCanAccessPeer", 4000, "int *canAccessPeer, CUdevice dev, CUdevice peerDev"),
    _real("cuDevicePrimaryCtxGetState", 7000, "CUdevice dev, unsigned int *flags, int *active"),
    _real("cuCtxGetCurrent", 4000, "CUcontext *pctx"),
    _real("cuCtxSetCurrent", 4000, "CUcontext ctx"),
    _real("cuCtxPushCurrent_v2", 4000, "CUcontext ctx"),
    _real("cuCtxPopCurrent_v2", 4000, "CUcontext *pctx"),
    _real("cuCtxGetDevice", 2000, "CUdevice *device"),
    _real("cuCtxSynchronize", 2000, ""),
    _real("cuStreamCreate", 2000, "CUstream *phStream, unsigned int Flags"),
    _real("cuStreamDestroy_v2", 4000, "CUstream hStream"),
    _real("cuStreamSynchronize", 2000, "CUstream hStream"),
    _real("cuStreamQuery", 2000, "CUstream hStream"),
    _real("cuStreamGetCtx", 9020, "CUstream hStream, CUcontext *pctx"),
    _real("cuStreamIsCapturing", 10000, "CUstream hStream, CUstreamCaptureStatus *captureStatus"),
    _real("cuThreadExchangeStreamCaptureMode", 10010, "CUstreamCaptureMode *mode"),
    _real("cuEventCreate", 2000, "CUevent *phEvent, unsigned int Flags"),
    _real("cuEventRecord", 2000, "CUevent hEvent, CUstream hStream"),
    _real("cuEventQuery", 2000, "CUevent hEvent"),
    _real("cuEventSynchronize", 2000, "CUevent hEvent"),
    _real(
        "cuMemGetAllocationGranularity",
        10020,
        "size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option",
    ),
]

_GROUPS = (
    _LAUNCHES,
    _COPIES,
    _MEMSETS,
    _OLD_COPIES,
    _STREAM_WORK,
    _HOST_FUNCTIONS,
    _HOST_NODES,
    _ALLOCATIONS,
    _CUMEM,
    _SHARING,
    _UNCARRIED,
    _CONTEXTS,
    _CODE,
    _LOOKUP,
    _OWN_USE,
)

# Exported beside the table: the loader's own look-ups, in assembler (platform.h).
LOADER_EXPORTS = ("dlsym", "dlvsym")

# Not CUDA's: how a simulated driver makes itself known. Resolved where they exist.
SIMULATOR_FUNCTIONS = (
    replace(_real("simcudaVersion", 0, "")[0], returns="int"),
    replace(_real("simcudaDriverVersionString", 0, "")[0], returns="const char *"),
)


def _with_until(hooks: list[Hook]) -> list[Hook]:
    """Fill in `until`: the version of the next ABI of the same name for the same default stream."""

    def next_since(hook: Hook) -> int:
        per_thread = hook.variant is Variant.PER_THREAD
        later = [
            other.since
            for other in hooks
            if other.name == hook.name and other.since > hook.since and (other.variant is Variant.PER_THREAD) == per_thread
        ]
        return min(later, default=0)

    return [replace(hook, until=next_since(hook)) for hook in hooks]


HOOKS: tuple[Hook, ...] = tuple(
    sorted(_with_until([hook for group in _GROUPS for family in group for hook in family]), key=lambda hook: hook.symbol)
)
