"""What becomes of every function of cuda.h and the headers beside it: ``python -m shim.census cuda.h cudaGL.h`` says
what a header has that is not known.

It owns the list of functions that pass to the driver, each with a reason, and the rule which functions may not; what
is hooked stands in `shim.hooks`. `shim.generate` writes the report. It must not know how a hook does its work.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shim.hooks import HOOKS, Hook, Kind, base_name

PASSED = """
Constants and words of the driver.
    cuDriverGetVersion cuGetErrorName cuGetErrorString

What a device is like: none of it changes during a suspend.
    cuDeviceGet cuDeviceGetCount cuDeviceGetName cuDeviceGetUuid cuDeviceGetLuid cuDeviceTotalMem
    cuDeviceGetProperties cuDeviceComputeCapability cuDeviceGetByPCIBusId cuDeviceGetPCIBusId
    cuDeviceGetTexture1DLinearMaxWidth cuDeviceGetHostAtomicCapabilities cuDeviceGetNvSciSyncAttributes
    cuDeviceGetExecAffinitySupport cuDeviceCanAccessPeer cuDeviceGetP2PAttribute cuDeviceGetP2PAtomicCapabilities
    cuDeviceGetDevResource cuDeviceGetCliqueCount cuDeviceGetCliqueInfo cuDeviceGetFabricClusterUuid

Which devices a graphics API uses; or prepares that API and the profiler.
    cuGLGetDevices cuWGLGetDevice cuVDPAUGetDevice cuGLInit cuProfilerInitialize cuProfilerStart cuProfilerStop

Granularities and limits: they follow from the arguments and the device.
    cuMemGetAllocationGranularity cuMulticastGetGranularity cuLogicalEndpointGetLimits

Which context a thread uses, and what it is like: state of the host.
    cuCtxGetCurrent cuCtxSetCurrent cuCtxPushCurrent cuCtxPopCurrent cuCtxGetDevice cuCtxGetFlags cuCtxSetFlags
    cuCtxGetId cuCtxGetLimit cuCtxGetCacheConfig cuCtxSetCacheConfig cuCtxGetApiVersion cuCtxGetStreamPriorityRange
    cuCtxGetExecAffinity cuCtxGetSharedMemConfig cuCtxSetSharedMemConfig cuCtxGetDevResource
    cuDevicePrimaryCtxGetState cuDevicePrimaryCtxSetFlags cuGreenCtxGetDevResource cuGreenCtxGetId
    cuDevSmResourceSplit cuDevSmResourceSplitByCount cuDevResourceGenerateDesc cuThreadExchangeStreamCaptureMode

Waits for work that was submitted before the gates closed, or asks about it: it puts nothing in.
    cuCtxSynchronize cuEventQuery cuEventSynchronize cuEventElapsedTime

Makes or ends an event, which is no memory: the driver keeps it, also one that processes share.
    cuEventCreate cuEventDestroy

What loaded code is like, and how it will be launched: it reads and sets the host's description.
    cuModuleGetLoadingMode cuModuleGetFunctionCount cuModuleEnumerateFunctions cuLibraryGetKernel
    cuLibraryGetKernelCount cuLibraryEnumerateKernels cuKernelGetLibrary cuKernelGetAttribute cuKernelSetAttribute
    cuKernelSetCacheConfig cuKernelGetName cuKernelGetParamInfo cuKernelGetParamCount cuFuncGetAttribute
    cuFuncSetAttribute cuFuncSetCacheConfig cuFuncGetModule cuFuncGetName cuFuncGetParamInfo cuFuncGetParamCount
    cuFuncIsLoaded cuFuncSetBlockShape cuFuncSetSharedSize cuFuncSetSharedMemConfig cuParamSetSize cuParamSeti
    cuParamSetf cuParamSetv cuParamSetTexRef cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxPotentialBlockSize
    cuOccupancyMaxPotentialBlockSizeWithFlags cuOccupancyAvailableDynamicSMemPerBlock
    cuOccupancyMaxPotentialClusterSize cuOccupancyMaxActiveClusters

Compiles and links on the host; loading the result is held.
    cuLinkCreate cuLinkAddData cuLinkAddFile cuLinkComplete cuLinkDestroy

What an array, texture or surface is like: the object stays where the driver keeps it.
    cuArrayGetDescriptor cuArray3DGetDescriptor cuArrayGetSparseProperties cuArrayGetMemoryRequirements
    cuArrayGetPlane cuMipmappedArrayGetSparseProperties cuMipmappedArrayGetMemoryRequirements
    cuMipmappedArrayGetLevel cuTexObjectGetResourceDesc cuTexObjectGetTextureDesc cuTexObjectGetResourceViewDesc
    cuSurfObjectGetResourceDesc cuSurfRefGetArray cuTexRefCreate cuTexRefDestroy cuTexRefGetArray
    cuTexRefGetMipmappedArray cuTexRefGetAddressMode cuTexRefGetFilterMode cuTexRefGetFormat
    cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp cuTexRefGetMaxAnisotropy
    cuTexRefGetBorderColor cuTexRefGetFlags cuTexRefSetFormat cuTexRefSetAddressMode cuTexRefSetFilterMode
    cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp cuTexRefSetMaxAnisotropy
    cuTexRefSetBorderColor cuTexRefSetFlags

Writes an address into a descriptor of the application's; the address stays the same and nothing is read from it.
    cuTensorMapEncodeTiled cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide cuTensorMapReplaceAddress
    cuTensorMapSetAllocationClass

Which pool is used, and what it is like.
    cuDeviceSetMemPool cuDeviceGetMemPool cuDeviceGetDefaultMemPool cuMemSetMemPool cuMemGetMemPool
    cuMemGetDefaultMemPool cuMemPoolSetAttribute cuMemPoolGetAttribute cuMemPoolGetAccess
    cuDeviceGetGraphMemAttribute cuDeviceSetGraphMemAttribute

Describes a graph on the host: nothing runs before the launch, which is held, and no address is looked up.
    cuGraphCreate cuGraphDestroy cuGraphClone cuGraphAddKernelNode cuGraphKernelNodeGetParams
    cuGraphKernelNodeSetParams cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute
    cuGraphKernelNodeSetAttribute cuGraphMemcpyNodeGetParams cuGraphMemsetNodeGetParams cuGraphMemAllocNodeGetParams
    cuGraphBatchMemOpNodeGetParams cuGraphAddChildGraphNode cuGraphChildGraphNodeGetGraph cuGraphAddEmptyNode
    cuGraphAddEventRecordNode cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent cuGraphAddEventWaitNode
    cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent cuGraphAddExternalSemaphoresSignalNode
    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphAddExternalSemaphoresWaitNode cuGraphExternalSemaphoresWaitNodeGetParams
    cuGraphExternalSemaphoresWaitNodeSetParams cuGraphAddDependencies cuGraphRemoveDependencies cuGraphGetEdges
    cuGraphGetNodes cuGraphGetRootNodes cuGraphNodeGetDependencies cuGraphNodeGetDependentNodes cuGraphNodeFindInClone
    cuGraphNodeGetType cuGraphNodeGetContainingGraph cuGraphNodeGetLocalId cuGraphNodeGetToolsId cuGraphNodeGetEnabled
    cuGraphGetId cuGraphDestroyNode cuGraphDebugDotPrint cuGraphConditionalHandleCreate cuGraphRetainUserObject
    cuGraphReleaseUserObject cuUserObjectRetain cuUserObjectRelease

Changes what the next launch of a graph does; the launch is held.
    cuGraphExecGetFlags cuGraphExecGetId cuGraphExecKernelNodeSetParams cuGraphExecChildGraphNodeSetParams
    cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphNodeSetEnabled

Numbers of logical endpoints, and whether one is ready: no memory.
    cuLogicalEndpointIdReserve cuLogicalEndpointIdRelease cuLogicalEndpointQuery

A flag for the next mapping of a resource, which is held.
    cuGraphicsResourceSetMapFlags cuGLSetBufferObjectMapFlags

Callbacks about events of the driver, core dumps and the log: no work of the GPU waits for them.
    cuDeviceRegisterAsyncNotification cuDeviceUnregisterAsyncNotification cuCoredumpGetAttribute
    cuCoredumpGetAttributeGlobal cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal
    cuCoredumpRegisterStartCallback cuCoredumpRegisterCompleteCallback cuCoredumpDeregisterStartCallback
    cuCoredumpDeregisterCompleteCallback cuLogsRegisterCallback cuLogsUnregisterCallback cuLogsCurrent
    cuLogsDumpToFile cuLogsDumpToMemory

Private tables of NVIDIA's own libraries; what stands in them is not public and is not seen by the shim.
    cuGetExportTable

A supervisor's calls about other processes.
    cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState cuCheckpointProcessLock
    cuCheckpointProcessCheckpoint cuCheckpointProcessRestore cuCheckpointProcessUnlock cuCheckpointOperationComplete
"""
"""The functions that go straight to the driver: a reason, and under it the names that it stands for."""

MAY_NOT_PASS = re.compile(r"\b(CUstream|CUdeviceptr|CUdeviceptr_v\d|CUmemGenericAllocationHandle|CUhostFn)\b")
"""What a function's parameters may not name if it is to pass: it would act on memory or on a stream."""

SHOWS = re.compile(r"cu\w+Get\w+|cuOccupancy\w+|cuCheckpoint\w+")
"""Names of functions that may take a structure with such a member: they fill it in, or look at other members."""

ACTS = re.compile(
    r"Launch|Memcpy|Memset|MemOp|HostFunc|WaitValue|WriteValue|Prefetch|Export|Import|MapResources|MapArray"
)
"""Words in the name of a function that acts on memory; a node of a graph is only described."""

DESCRIBES = re.compile(r"cuGraph\w*Node\w*|cuGetExportTable")
"""Names with such a word that act on nothing."""


class State(Enum):
    """What becomes of a call."""

    HELD = "held"
    TRACKED = "tracked"
    REFUSED = "refused"
    PASSED = "passed"


STATES = {Kind.GATED: State.HELD, Kind.CUSTOM: State.TRACKED, Kind.COUNTED: State.REFUSED}


@dataclass(frozen=True)
class Function:
    """One function of the driver by the name that cuGetProcAddress knows."""

    name: str
    state: State
    reason: str


@dataclass(frozen=True)
class Declaration:
    """One declaration of a header: the symbol that it means, and whether that has a form of the thread's own stream."""

    symbol: str
    params: str
    per_thread: str


def passed() -> Iterator[Function]:
    """Yield the functions that pass, in the order of the list."""
    for group in PASSED.strip().split("\n\n"):
        reason, *lines = group.splitlines()
        for name in " ".join(lines).split():
            yield Function(name, State.PASSED, reason)


def hooked() -> Iterator[Function]:
    """Yield the functions that are hooked, by name; one name's newest form speaks for all."""
    newest: dict[str, Hook] = {}
    for hook in HOOKS:
        if hook.kind is not Kind.REAL and (hook.name not in newest or hook.since >= newest[hook.name].since):
            newest[hook.name] = hook
    for name, hook in newest.items():
        yield Function(name, STATES[hook.kind], hook.reason)


def functions() -> list[Function]:
    """Return every function that is known, by name."""
    return sorted([*passed(), *hooked()], key=lambda function: function.name)


def declarations(header: str) -> list[Declaration]:
    """Return what a cuda.h declares, with the names of its macros resolved to symbols."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.S)
    # The names are macros up to where the header takes them back, to declare the older forms under their own names.
    public, _, older = code.partition("#undef cu")
    macros: dict[str, tuple[str, str]] = {}
    for name, wrapped, twin, plain in re.findall(
        r"^\s*#define +(cu\w+) +(?:__CUDA_API_PT(DS|SZ)\((cu\w+)\)|(cu\w+))\s*$", public, re.M
    ):
        macros.setdefault(name, (twin or plain, f"_pt{wrapped.lower()}" if wrapped else ""))
    result = []
    for text, names in ((public, macros), (older, {})):
        for name, params in re.findall(r"CUDAAPI\s+(cu\w+)\s*\(([^;]*?)\)\s*;", text):
            symbol, twin = names.get(name, (name, ""))
            result.append(Declaration(symbol, params, f"{symbol}{twin}" if twin else ""))
    return result


def structures(code: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a header's structures and unions with what stands in them, and the other names of types."""
    for start in re.finditer(r"typedef\s+(?:struct|union)\s+\w*\s*\{", code):
        depth, end = 1, start.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        if name := re.match(r"\s*(\w+)\s*;", code[end:]):
            yield name[1], code[start.end() : end]
    for meaning, name in re.findall(r"typedef\s+(?:struct\s+|union\s+)?(\w+)\s+(\w+)\s*;", code):
        yield name, meaning


def types_that_name_memory(header: str) -> set[str]:
    """Return the structures of a header with a member, at whatever depth, that is an address or a stream."""
    known = list(structures(re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.S)))
    found: set[str] = set()
    while more := {
        name
        for name, body in known
        if name not in found and (MAY_NOT_PASS.search(body) or found & set(re.findall(r"\w+", body)))
    }:
        found |= more
    return {name for name in found if not MAY_NOT_PASS.fullmatch(name)}


def faults(header: str) -> list[str]:
    """Say what a header declares that is not known here, or that may not pass and does."""
    symbols = {hook.symbol for hook in HOOKS if hook.kind is not Kind.REAL}
    names = {function.name for function in hooked()}
    passing = {function.name for function in passed()}
    indirect = types_that_name_memory(header)
    found = []
    for declared in declarations(header):
        name = base_name(declared.symbol)
        if declared.symbol in symbols:
            if declared.per_thread and declared.per_thread not in symbols:
                found.append(f"{declared.per_thread}: hooked without its form of the thread's own stream")
        elif name in names:
            found.append(f"{declared.symbol}: a form of a hooked name that is not hooked")
        elif name not in passing:
            found.append(f"{declared.symbol}: not classified")
        elif MAY_NOT_PASS.search(declared.params):
            found.append(f"{declared.symbol}: passes, and its parameters name memory or a stream")
        elif indirect & set(re.findall(r"\w+", declared.params)) and not SHOWS.fullmatch(name):
            found.append(f"{declared.symbol}: passes, and a structure among its parameters names memory or a stream")
        elif ACTS.search(name) and not DESCRIBES.fullmatch(name):
            found.append(f"{declared.symbol}: passes, and its name says that it acts on memory")
    return found


def report() -> str:
    """Return docs/reference/driver-functions.md."""
    known = functions()
    count = {state: sum(1 for function in known if function.state is state) for state in State}
    lines = [
        "# Every function of the driver",
        "",
        "<!-- Generated by shim/census.py. Regenerate: python -m shim.generate --docs docs/reference -->",
        "",
        f"What becomes of the {len(known)} functions of cuda.h, cudaGL.h, cudaEGL.h, cudaVDPAU.h and cudaProfiler.h,",
        "by the name that cuGetProcAddress knows. The symbols of each, with versions and default streams, stand in",
        "[hooks.md](hooks.md). `python -m shim.census FILE...` says what other headers have that is not classified.",
        "",
        f"- **held** ({count[State.HELD]}): the call waits while memory is away.",
        f"- **tracked** ({count[State.TRACKED]}): the shim also follows what the call makes, takes or ends.",
        f"- **refused** ({count[State.REFUSED]}): a process that has what the call makes is not suspended;",
        "  the refusal names the object, the process and the way out.",
        f"- **passed** ({count[State.PASSED]}): the call goes to the driver. No function may pass that has a stream or",
        "  an address of device memory among its parameters or in a structure that it is given, takes a handle or a",
        "  host function, or whose name says that it launches, copies, sets, maps, exports or imports.",
        "",
        "| function | | why |",
        "|---|---|---|",
    ]
    lines += [f"| {function.name} | {function.state.value} | {function.reason} |" for function in known]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="shim.census", description="Say what headers have that is not classified.")
    parser.add_argument("headers", type=Path, nargs="+", help="a cuda.h, or one beside it")
    found = [fault for header in parser.parse_args().headers for fault in faults(header.read_text())]
    print("\n".join(found or ["every function is classified"]))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
