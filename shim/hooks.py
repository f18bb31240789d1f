"""The one table of driver entry points that the shim knows.

It owns what each exported driver symbol is called, from which CUDA version on its ABI is current, which default stream
it means, its signature, its class and whether its wrapper is generated or written by hand. Exports, look-ups, real
pointers and wrappers all come from here (`shim.generate`), so a hook cannot be half added. It must not know how a hook
does its work. `tests/unit/test_hooks.py` compares every row with NVIDIA's header.
"""
# ruff: noqa: E501 - one row a line, however long

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

NEWEST_CUDA = 13050
"""The newest CUDA version whose names and ABIs this table was compared with."""

LOADER_EXPORTS = ("dlsym", "dlvsym")
"""Exported beside the table: the loader's own look-ups, in assembler (platform.h)."""

# A row: since, the per-thread twin (the version it exists from, and its suffix) or -, the prototype without CUresult.
# The stream is the parameter of type CUstream, or what stream= says. The bracket above says class and kind.
TABLE = """
# Kernel and graph launches.
[launch gated]
4000  7000sz  cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
11060 11060sz cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) stream=config.hStream
9000  9000sz  cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)
9000  -       cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags)
2000  -       cuLaunch(CUfunction f)
2000  -       cuLaunchGrid(CUfunction f, int grid_width, int grid_height)
2000  -       cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream)
10000 10000sz cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
11010 11010sz cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)

# Recording of graphs: it begins as a launch does, and the drain has to know how many live (captures.pxi).
[launch custom]
10000 10000sz cuStreamBeginCapture(CUstream hStream)
10010 10010sz cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
12030 12030sz cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode)
13030 13030sz cuStreamBeginRecaptureToGraph(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph, CUgraphRecaptureCallback callbackFunc, void *userData)
[query custom]
10000 10000sz cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
2000  -       cuStreamDestroy(CUstream hStream)
4000  -       cuStreamDestroy_v2(CUstream hStream)

# Copies.
[memory gated]
4000  7000ds  cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)
4000  7000sz  cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
4000  7000ds  cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount)
4000  7000sz  cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount, CUstream hStream)
3020  7000ds  cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)
3020  7000sz  cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)
3020  7000ds  cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
3020  7000sz  cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
3020  7000ds  cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount)
3020  7000sz  cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
3020  7000ds  cuMemcpyDtoA_v2(CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount)
3020  7000ds  cuMemcpyAtoD_v2(CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount)
3020  7000ds  cuMemcpyHtoA_v2(CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount)
3020  7000sz  cuMemcpyHtoAAsync_v2(CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream)
3020  7000ds  cuMemcpyAtoH_v2(void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount)
3020  7000sz  cuMemcpyAtoHAsync_v2(void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream)
3020  7000ds  cuMemcpyAtoA_v2(CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount)
3020  7000ds  cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy)
3020  7000ds  cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy)
3020  7000sz  cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream)
3020  7000ds  cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy)
3020  7000sz  cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream)
4000  7000ds  cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *pCopy)
4000  7000sz  cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream)
12080 12080sz cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream)
13000 13000sz cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrIdxs, size_t numAttrs, CUstream hStream)
12080 12080sz cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx, unsigned long long flags, CUstream hStream)
13000 13000sz cuMemcpy3DBatchAsync_v2(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream)
13020 13020sz cuMemcpyWithAttributesAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, CUstream hStream)
13020 13020sz cuMemcpy3DWithAttributesAsync(CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags, CUstream hStream)
13050 13050sz cuFabricCpyBatchAsync(size_t numOps, CUDA_FABRIC_COPY_BATCH_OP *opList, unsigned long long flags, CUstream hStream)
12060 12060sz cuMemBatchDecompressAsync(CUmemDecompressParams *paramsArray, size_t count, unsigned int flags, size_t *errorIndex, CUstream stream)

# Memsets.
[memory gated]
3020  7000ds  cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N)
3020  7000ds  cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N)
3020  7000ds  cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N)
3020  7000ds  cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height)
3020  7000ds  cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height)
3020  7000ds  cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height)
3020  7000sz  cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
3020  7000sz  cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream)
3020  7000sz  cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)
3020  7000sz  cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height, CUstream hStream)
3020  7000sz  cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height, CUstream hStream)
3020  7000sz  cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, CUstream hStream)

# The 32-bit ABI of CUDA 2 and 3.0: libcuda still exports it. Gated, and otherwise left alone.
[memory gated]
2000  -       cuMemcpyHtoD(unsigned int dstDevice, const void *srcHost, unsigned int ByteCount)
2000  -       cuMemcpyHtoDAsync(unsigned int dstDevice, const void *srcHost, unsigned int ByteCount, CUstream hStream)
2000  -       cuMemcpyDtoH(void *dstHost, unsigned int srcDevice, unsigned int ByteCount)
2000  -       cuMemcpyDtoHAsync(void *dstHost, unsigned int srcDevice, unsigned int ByteCount, CUstream hStream)
2000  -       cuMemcpyDtoD(unsigned int dstDevice, unsigned int srcDevice, unsigned int ByteCount)
3000  -       cuMemcpyDtoDAsync(unsigned int dstDevice, unsigned int srcDevice, unsigned int ByteCount, CUstream hStream)
2000  -       cuMemcpyDtoA(CUarray dstArray, unsigned int dstOffset, unsigned int srcDevice, unsigned int ByteCount)
2000  -       cuMemcpyAtoD(unsigned int dstDevice, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount)
2000  -       cuMemcpyHtoA(CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount)
2000  -       cuMemcpyHtoAAsync(CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount, CUstream hStream)
2000  -       cuMemcpyAtoH(void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount)
2000  -       cuMemcpyAtoHAsync(void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount, CUstream hStream)
2000  -       cuMemcpyAtoA(CUarray dstArray, unsigned int dstOffset, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount)
2000  -       cuMemcpy2D(const CUDA_MEMCPY2D_v1 *pCopy)
2000  -       cuMemcpy2DUnaligned(const CUDA_MEMCPY2D_v1 *pCopy)
2000  -       cuMemcpy2DAsync(const CUDA_MEMCPY2D_v1 *pCopy, CUstream hStream)
2000  -       cuMemcpy3D(const CUDA_MEMCPY3D_v1 *pCopy)
2000  -       cuMemcpy3DAsync(const CUDA_MEMCPY3D_v1 *pCopy, CUstream hStream)
2000  -       cuMemsetD8(unsigned int dstDevice, unsigned char uc, unsigned int N)
2000  -       cuMemsetD16(unsigned int dstDevice, unsigned short us, unsigned int N)
2000  -       cuMemsetD32(unsigned int dstDevice, unsigned int ui, unsigned int N)
2000  -       cuMemsetD2D8(unsigned int dstDevice, unsigned int dstPitch, unsigned char uc, unsigned int Width, unsigned int Height)
2000  -       cuMemsetD2D16(unsigned int dstDevice, unsigned int dstPitch, unsigned short us, unsigned int Width, unsigned int Height)
2000  -       cuMemsetD2D32(unsigned int dstDevice, unsigned int dstPitch, unsigned int ui, unsigned int Width, unsigned int Height)
2000  -       cuMemAlloc(unsigned int *dptr, unsigned int bytesize)
2000  -       cuMemAllocPitch(unsigned int *dptr, unsigned int *pPitch, unsigned int WidthInBytes, unsigned int Height, unsigned int ElementSizeBytes)
2000  -       cuMemFree(unsigned int dptr)
2000  -       cuMemAllocHost(void **pp, unsigned int bytesize)

# Stream memory operations (two ABIs under one name: 11.7 changed what they promise, not how they are called), pools, prefetch.
[memory gated]
8000  8000sz  cuStreamWaitValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
9000  9000sz  cuStreamWaitValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
8000  8000sz  cuStreamWriteValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
9000  9000sz  cuStreamWriteValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
8000  8000sz  cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags)
11070 11070sz cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
11070 11070sz cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
11070 11070sz cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
11070 11070sz cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
11070 11070sz cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags)
11020 11020sz cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
11020 11020sz cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
11020 11020sz cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
8000  8000sz  cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
12020 12020sz cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream)

# Their functions run on threads of the driver and must pass the gates: hostfuncs.pxi.
[memory custom]
10000 10000sz cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
13010 13010sz cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode)
5000  7000sz  cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)

# The same functions as nodes of graphs.
[query custom]
10000 -       cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)
10000 -       cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
10000 -       cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
10020 -       cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
12020 -       cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUgraphNodeParams *nodeParams)
12030 -       cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams)
13040 -       cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams)
12020 -       cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
13040 -       cuGraphNodeSetParams_v2(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
12020 -       cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
13020 -       cuGraphNodeGetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)

# Allocations, addresses, host memory.
[object custom]
3020  -       cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
3020  -       cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes)
3020  -       cuMemFree_v2(CUdeviceptr dptr)
6000  -       cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
3020  -       cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
4000  -       cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
7000  -       cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)
[memory gated]
6000  -       cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
3020  -       cuMemGetInfo_v2(size_t *free, size_t *total)
3020  -       cuMemAllocHost_v2(void **pp, size_t bytesize)
2020  -       cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
2000  -       cuMemFreeHost(void *p)
3020  -       cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
2030  -       cuMemHostGetFlags(unsigned int *pFlags, void *p)
[object custom]
4000  -       cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
6050  -       cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
4000  -       cuMemHostUnregister(void *p)

# cuMem.
[object custom]
10020 -       cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags)
10020 -       cuMemRelease(CUmemGenericAllocationHandle handle)
11000 -       cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
10020 -       cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
10020 -       cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)
10020 -       cuMemAddressFree(CUdeviceptr ptr, size_t size)
10020 -       cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
10020 -       cuMemUnmap(CUdeviceptr ptr, size_t size)
10020 -       cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
10020 -       cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
10020 -       cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType, unsigned long long flags)
10020 -       cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType)
11010 11010sz cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream)

# Sharing: legacy IPC, peer access.
[object custom]
4010  -       cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
4010  -       cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
11000 -       cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
4010  -       cuIpcCloseMemHandle(CUdeviceptr dptr)
4000  -       cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
4000  -       cuCtxDisablePeerAccess(CUcontext peerContext)

# Counted, not carried yet; what takes a handle also translates it.
[object custom]
12010 -       cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop)
12010 -       cuMulticastAddDevice(CUmemGenericAllocationHandle mcHandle, CUdevice dev)
12010 -       cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, unsigned long long flags)
13010 -       cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, unsigned long long flags)
12010 -       cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags)
13010 -       cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags)
12010 -       cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size)
13030 -       cuLogicalEndpointBindMem(cuuint32_t leId, CUdevice dev, cuuint64_t offset, CUmemGenericAllocationHandle memHandle, cuuint64_t memOffset, cuuint64_t size, unsigned long long flags)
11020 -       cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags)
11020 -       cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags)
11020 -       cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr)
11020 -       cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData)
11020 -       cuMemPoolDestroy(CUmemoryPool pool)
4010  -       cuIpcGetEventHandle(CUipcEventHandle *pHandle, CUevent event)
4010  -       cuIpcOpenEventHandle(CUevent *phEvent, CUipcEventHandle handle)
2000  -       cuEventDestroy(CUevent hEvent)
4000  -       cuEventDestroy_v2(CUevent hEvent)
10000 -       cuImportExternalMemory(CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc)
10000 -       cuDestroyExternalMemory(CUexternalMemory extMem)
10000 -       cuImportExternalSemaphore(CUexternalSemaphore *extSem_out, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *semHandleDesc)
10000 -       cuDestroyExternalSemaphore(CUexternalSemaphore extSem)

# Contexts: memory goes with them.
[object custom]
2000  -       cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
3020  -       cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
11040 -       cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev)
12050 -       cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
2000  -       cuCtxDestroy(CUcontext ctx)
4000  -       cuCtxDestroy_v2(CUcontext ctx)
7000  -       cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
7000  -       cuDevicePrimaryCtxRelease(CUdevice dev)
11000 -       cuDevicePrimaryCtxRelease_v2(CUdevice dev)
7000  -       cuDevicePrimaryCtxReset(CUdevice dev)
11000 -       cuDevicePrimaryCtxReset_v2(CUdevice dev)

# Loading code allocates and copies: it waits with the memory gate.
[memory gated]
2000  -       cuModuleLoad(CUmodule *module, const char *fname)
2000  -       cuModuleLoadData(CUmodule *module, const void *image)
2010  -       cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues)
2000  -       cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
2000  -       cuModuleUnload(CUmodule hmod)
12000 -       cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)
12000 -       cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)
12000 -       cuLibraryUnload(CUlibrary library)

# Start and look-up.
[query custom]
2000  -       cuInit(unsigned int Flags)
11030 -       cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
12000 -       cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)

# Called by the shim, not hooked.
[query real]
2020  -       cuDriverGetVersion(int *driverVersion)
6000  -       cuGetErrorName(CUresult error, const char **pStr)
2000  -       cuDeviceGet(CUdevice *device, int ordinal)
2000  -       cuDeviceGetCount(int *count)
2000  -       cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
9020  -       cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
11040 -       cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
4000  -       cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
7000  -       cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
4000  -       cuCtxGetCurrent(CUcontext *pctx)
4000  -       cuCtxSetCurrent(CUcontext ctx)
4000  -       cuCtxPushCurrent_v2(CUcontext ctx)
4000  -       cuCtxPopCurrent_v2(CUcontext *pctx)
2000  -       cuCtxGetDevice(CUdevice *device)
2000  -       cuCtxSynchronize()
2000  -       cuStreamCreate(CUstream *phStream, unsigned int Flags)
2000  -       cuStreamSynchronize(CUstream hStream)
2000  -       cuStreamQuery(CUstream hStream)
9020  -       cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
10000 -       cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
10010 -       cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
2000  -       cuEventCreate(CUevent *phEvent, unsigned int Flags)
2000  -       cuEventRecord(CUevent hEvent, CUstream hStream)
2000  -       cuEventQuery(CUevent hEvent)
2000  -       cuEventSynchronize(CUevent hEvent)
10020 -       cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option)
"""


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
    """Where the wrapper comes from.

    Gated: it is generated. Custom: written by hand in a .pxi. Real: there is none, the shim itself calls the function.
    """

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


SIMULATOR_FUNCTIONS = tuple(
    Hook(symbol, symbol, 0, 0, Variant.ANY, "", Class.QUERY, Kind.REAL, "", returns)
    for symbol, returns in (("simcudaVersion", "int"), ("simcudaDriverVersionString", "const char *"))
)
"""Not CUDA's: how a simulated driver makes itself known. Resolved where they exist."""


def base_name(symbol: str) -> str:
    """Return the name under which cuGetProcAddress knows `symbol`."""
    return re.sub(r"(_v\d+)?(_ptds|_ptsz)?$", "", symbol)


def _stream(params: str) -> str:
    """Return the name of the parameter that is a stream, or nothing."""
    match = re.search(r"\bCUstream (\w+)", params)
    return match[1] if match else ""


def _rows(table: str) -> Iterator[Hook]:
    """Yield the hooks of a table, each with its per-thread twin, in the table's order."""
    cls, kind = Class.QUERY, Kind.REAL
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        if bracket := re.fullmatch(r"\[(\w+) (\w+)\]", line):
            cls, kind = Class(bracket[1]), Kind(bracket[2])
            continue
        row = re.fullmatch(r"(\d+) +(?:-|(\d+)(ds|sz)) +(\w+)\((.*)\)(?: stream=(\S+))?", line)
        if row is None:
            raise ValueError(f"not a row of the hook table: {line}")
        since, twin_since, twin, symbol, params, stream = row.groups()
        variant = Variant.LEGACY if twin else Variant.ANY
        hook = Hook(symbol, base_name(symbol), int(since), 0, variant, params, cls, kind, stream or _stream(params))
        yield hook
        if twin:
            yield replace(hook, symbol=f"{symbol}_pt{twin}", since=int(twin_since), variant=Variant.PER_THREAD)


def _with_until(hooks: list[Hook]) -> list[Hook]:
    """Fill in `until`: the version of the next ABI of the same name for the same default stream."""

    def later(hook: Hook) -> list[int]:
        per_thread = hook.variant is Variant.PER_THREAD
        same = [other for other in hooks if (other.variant is Variant.PER_THREAD) == per_thread]
        return [other.since for other in same if other.name == hook.name and other.since > hook.since]

    return [replace(hook, until=min(later(hook), default=0)) for hook in hooks]


HOOKS: tuple[Hook, ...] = tuple(sorted(_with_until(list(_rows(TABLE))), key=lambda hook: hook.symbol))
"""The table, sorted by symbol."""
