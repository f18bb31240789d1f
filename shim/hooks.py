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
# The stream is the parameter of type CUstream, or what stream= says. The bracket above says class and kind, the rest of
# its line the reason that the report gives. `= since name symbol`: from then on that name means a symbol called otherwise.
TABLE = """
[launch gated] Starts work on the GPU.
4000  7000sz  cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
11060 11060sz cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) stream=config.hStream
9000  9000sz  cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)
9000  -       cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags)
2000  -       cuLaunch(CUfunction f)
2000  -       cuLaunchGrid(CUfunction f, int grid_width, int grid_height)
2000  -       cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream)
10000 10000sz cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
11010 11010sz cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)

[launch custom] Begins to record a graph, as a launch begins; the drain has to know how many are recorded (captures.pxi).
10000 10000sz cuStreamBeginCapture(CUstream hStream)
10010 10010sz cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
12030 12030sz cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode)
13010 13010sz cuStreamBeginCaptureToCig(CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams)
13030 13030sz cuStreamBeginRecaptureToGraph(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph, CUgraphRecaptureCallback callbackFunc, void *userData)
[query custom] Ends a recording, for which a drain waits.
10000 10000sz cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
13010 13010sz cuStreamEndCaptureToCig(CUstream hStream)
2000  -       cuStreamDestroy(CUstream hStream)
4000  -       cuStreamDestroy_v2(CUstream hStream)

[memory gated] Copies: either end may be away.
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

[memory gated] Sets memory that may be away.
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

# libcuda still exports the 32-bit ABI of CUDA 2 and 3.0.
[memory gated] The 32-bit ABI of CUDA 2: held, and otherwise left alone.
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
2000  -       cuMemGetInfo(unsigned int *free, unsigned int *total)
2000  -       cuMemGetAddressRange(unsigned int *pbase, unsigned int *psize, unsigned int dptr)
2020  -       cuMemHostGetDevicePointer(unsigned int *pdptr, void *p, unsigned int Flags)

# Two ABIs under one name: 11.7 changed what the memory operations promise, not how they are called.
[launch gated] Lets a stream wait for a value, which another process may write: like a kernel that waits.
8000  8000sz  cuStreamWaitValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
9000  9000sz  cuStreamWaitValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
8000  8000sz  cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags)
11070 11070sz cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
11070 11070sz cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
11070 11070sz cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags)
[memory gated] Reads, writes, makes, frees or moves memory in the order of a stream.
8000  8000sz  cuStreamWriteValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
9000  9000sz  cuStreamWriteValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
11070 11070sz cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
11070 11070sz cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
11020 11020sz cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
11020 11020sz cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
8000  8000sz  cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
12020 12020sz cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream)
13000 13000sz cuMemPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream)
13000 13000sz cuMemDiscardBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, unsigned long long flags, CUstream hStream)
13000 13000sz cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream)
6000  7000sz  cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags)
10000 10000sz cuSignalExternalSemaphoresAsync(const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *paramsArray, unsigned int numExtSems, CUstream stream)
10000 10000sz cuWaitExternalSemaphoresAsync(const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray, unsigned int numExtSems, CUstream stream)

[memory gated] Puts work into a stream or waits for it: between the drain and the resume nothing is put in.
2000  7000sz  cuEventRecord(CUevent hEvent, CUstream hStream)
11010 11010sz cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)
3020  7000sz  cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
2000  7000sz  cuStreamSynchronize(CUstream hStream)
2000  7000sz  cuStreamQuery(CUstream hStream)
12050 -       cuCtxRecordEvent(CUcontext hCtx, CUevent hEvent)
12050 -       cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent)
12040 -       cuGreenCtxRecordEvent(CUgreenCtx hCtx, CUevent hEvent)
12040 -       cuGreenCtxWaitEvent(CUgreenCtx hCtx, CUevent hEvent)
11030 -       cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope)
11000 -       cuCtxResetPersistingL2Cache()

# A form of these that is not known changes nothing, and stands in no suspend's way.
[query gated] Asks about a stream or sets what it is like; held, so that no stream is used while memory is away.
5050  7000sz  cuStreamGetPriority(CUstream hStream, int *priority)
5050  7000sz  cuStreamGetFlags(CUstream hStream, unsigned int *flags)
12000 12000sz cuStreamGetId(CUstream hStream, unsigned long long *streamId)
12080 12080sz cuStreamGetDevice(CUstream hStream, CUdevice *device)
9020  9020sz  cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
12050 12050sz cuStreamGetCtx_v2(CUstream hStream, CUcontext *pctx, CUgreenCtx *pGreenCtx)
12040 -       cuStreamGetGreenCtx(CUstream hStream, CUgreenCtx *phCtx)
13010 13010sz cuStreamGetDevResource(CUstream hStream, CUdevResource *result, CUdevResourceType type)
10000 10000sz cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
10010 10010sz cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out)
11030 11030sz cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out, const CUgraphNode **dependencies_out, size_t *numDependencies_out)
12030 12030sz cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out, const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out)
11030 11030sz cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags)
12030 12030sz cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, unsigned int flags)
11000 11000sz cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value)
11000 11000sz cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *param)
11000 11000sz cuStreamCopyAttributes(CUstream dstStream, CUstream srcStream)
[query gated] Asks about addresses, or advises on them; while they are away the driver would answer wrongly.
8000  -       cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device)
12020 -       cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)
8000  -       cuMemRangeGetAttribute(void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr, size_t count)
8000  -       cuMemRangeGetAttributes(void **data, size_t *dataSizes, CUmem_range_attribute *attributes, size_t numAttributes, CUdeviceptr devPtr, size_t count)
13040 -       cuMemGetLocationInfo(CUdeviceptr ptr, size_t size, size_t summaryGranularity, size_t samplingGranularity, CUmemLocation *location_out)

[memory gated] Makes a stream.
2000  -       cuStreamCreate(CUstream *phStream, unsigned int Flags)
5050  -       cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
12050 -       cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority)

[memory gated] Makes what names memory, which the driver looks up at once.
5000  -       cuTexObjectCreate(CUtexObject *pTexObject, const CUDA_RESOURCE_DESC *pResDesc, const CUDA_TEXTURE_DESC *pTexDesc, const CUDA_RESOURCE_VIEW_DESC *pResViewDesc)
5000  -       cuTexObjectDestroy(CUtexObject texObject)
5000  -       cuSurfObjectCreate(CUsurfObject *pSurfObject, const CUDA_RESOURCE_DESC *pResDesc)
5000  -       cuSurfObjectDestroy(CUsurfObject surfObject)
2000  -       cuTexRefSetAddress(unsigned int *ByteOffset, CUtexref hTexRef, unsigned int dptr, unsigned int bytes)
3020  -       cuTexRefSetAddress_v2(size_t *ByteOffset, CUtexref hTexRef, CUdeviceptr dptr, size_t bytes)
2020  -       cuTexRefSetAddress2D(CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, unsigned int dptr, unsigned int Pitch)
3020  -       cuTexRefSetAddress2D_v2(CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, CUdeviceptr dptr, size_t Pitch)
4010  -       cuTexRefSetAddress2D_v3(CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, CUdeviceptr dptr, size_t Pitch)
2000  -       cuTexRefSetArray(CUtexref hTexRef, CUarray hArray, unsigned int Flags)
5000  -       cuTexRefSetMipmappedArray(CUtexref hTexRef, CUmipmappedArray hMipmappedArray, unsigned int Flags)
3000  -       cuSurfRefSetArray(CUsurfref hSurfRef, CUarray hArray, unsigned int Flags)
2000  -       cuTexRefGetAddress(unsigned int *pdptr, CUtexref hTexRef)
3020  -       cuTexRefGetAddress_v2(CUdeviceptr *pdptr, CUtexref hTexRef)
11040 -       cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
11040 -       cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUdeviceptr dptr)
11040 -       cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out)

[memory gated] Makes or frees memory of the driver's own: the driver's checkpoint carries it.
2000  -       cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)
3020  -       cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)
2000  -       cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray)
3020  -       cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray)
5000  -       cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, unsigned int numMipmapLevels)
11020 -       cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
11020 -       cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
11040 -       cuDeviceGraphMemTrim(CUdevice device)
10000 -       cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)
11000 -       cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)
11040 -       cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
12000 12000sz cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
10020 -       cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult *updateResult_out)
12000 -       cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
10000 -       cuGraphExecDestroy(CUgraphExec hGraphExec)
11030 -       cuUserObjectCreate(CUuserObject *object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount, unsigned int flags)
3010  -       cuCtxSetLimit(CUlimit limit, size_t value)
= 12000 cuGraphInstantiate cuGraphInstantiateWithFlags

[memory gated] Maps memory of another API, or says where it is.
10000 -       cuExternalMemoryGetMappedBuffer(CUdeviceptr *devPtr, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *bufferDesc)
10000 -       cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *mipmap, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *mipmapDesc)
3000  7000sz  cuGraphicsMapResources(unsigned int count, CUgraphicsResource *resources, CUstream hStream)
3000  7000sz  cuGraphicsUnmapResources(unsigned int count, CUgraphicsResource *resources, CUstream hStream)
3000  -       cuGraphicsSubResourceGetMappedArray(CUarray *pArray, CUgraphicsResource resource, unsigned int arrayIndex, unsigned int mipLevel)
5000  -       cuGraphicsResourceGetMappedMipmappedArray(CUmipmappedArray *pMipmappedArray, CUgraphicsResource resource)
3000  -       cuGraphicsResourceGetMappedPointer(unsigned int *pDevPtr, unsigned int *pSize, CUgraphicsResource resource)
3020  -       cuGraphicsResourceGetMappedPointer_v2(CUdeviceptr *pDevPtr, size_t *pSize, CUgraphicsResource resource)
2000  -       cuGLMapBufferObject(unsigned int *dptr, unsigned int *size, unsigned int buffer)
3020  7000ds  cuGLMapBufferObject_v2(CUdeviceptr *dptr, size_t *size, unsigned int buffer)
2030  -       cuGLMapBufferObjectAsync(unsigned int *dptr, unsigned int *size, unsigned int buffer, CUstream hStream)
3020  7000sz  cuGLMapBufferObjectAsync_v2(CUdeviceptr *dptr, size_t *size, unsigned int buffer, CUstream hStream)
2000  -       cuGLUnmapBufferObject(unsigned int buffer)
2030  -       cuGLUnmapBufferObjectAsync(unsigned int buffer, CUstream hStream)
7000  -       cuGraphicsResourceGetMappedEglFrame(CUeglFrame *eglFrame, CUgraphicsResource resource, unsigned int index, unsigned int mipLevel)
7000  -       cuEGLStreamConsumerAcquireFrame(CUeglStreamConnection *conn, CUgraphicsResource *pCudaResource, CUstream *pStream, unsigned int timeout)
7000  -       cuEGLStreamConsumerReleaseFrame(CUeglStreamConnection *conn, CUgraphicsResource pCudaResource, CUstream *pStream)
7000  -       cuEGLStreamProducerPresentFrame(CUeglStreamConnection *conn, CUeglFrame eglframe, CUstream *pStream)
7000  -       cuEGLStreamProducerReturnFrame(CUeglStreamConnection *conn, CUeglFrame *eglframe, CUstream *pStream)
9000  -       cuEventCreateFromEGLSync(CUevent *phEvent, void *eglSync, unsigned int flags)

[memory custom] Its function runs on a thread of the driver and has to pass the gates (hostfuncs.pxi).
10000 10000sz cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
13010 13010sz cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode)
5000  7000sz  cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)

[memory gated] A node of a graph that names addresses, which the driver looks up at once.
10000 -       cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
10000 -       cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams)
10020 -       cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
10000 -       cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
10000 -       cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams)
10020 -       cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
11070 -       cuGraphAddBatchMemOpNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
11070 -       cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
11070 -       cuGraphExecBatchMemOpNodeSetParams(CUgraphExec graphExec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)

[query custom] A host function as a node of a graph.
10000 -       cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)
10000 -       cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
10000 -       cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
10020 -       cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
[memory custom] A node of any kind: a host function is wrapped, addresses are looked up at once.
12020 -       cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUgraphNodeParams *nodeParams)
12030 -       cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams)
13040 -       cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams)
12020 -       cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
13040 -       cuGraphNodeSetParams_v2(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
12020 -       cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
[query custom] Shows the application its own host function.
13020 -       cuGraphNodeGetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)

[object custom] Makes or frees memory that is carried.
3020  -       cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
3020  -       cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes)
3020  -       cuMemFree_v2(CUdeviceptr dptr)
[object custom] Answers about carried memory as about native memory.
3020  -       cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
4000  -       cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
7000  -       cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)
[memory gated] Host memory of the driver's own, and questions that it would answer wrongly while memory is away.
6000  -       cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
3020  -       cuMemGetInfo_v2(size_t *free, size_t *total)
3020  -       cuMemAllocHost_v2(void **pp, size_t bytesize)
2020  -       cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
2000  -       cuMemFreeHost(void *p)
3020  -       cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
2030  -       cuMemHostGetFlags(unsigned int *pFlags, void *p)
[object custom] Registered host memory stays so; remap looks that it is, at the same address for the GPU.
4000  -       cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
6050  -       cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
4000  -       cuMemHostUnregister(void *p)

[object custom] Handles, mappings and access of cuMem memory: the application keeps its values.
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

[object custom] Sharing between processes and devices.
4010  -       cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
4010  -       cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
11000 -       cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
4010  -       cuIpcCloseMemHandle(CUdeviceptr dptr)
4000  -       cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
4000  -       cuCtxDisablePeerAccess(CUcontext peerContext)

# Counted: a process is not suspended while it has one of what these make. What takes a handle also translates it.
[object counted] Managed memory: the driver's checkpoint refuses it.
6000  -       cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
[object counted] Maps memory into sparse arrays, whose tiles are not followed.
11010 11010sz cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream)
[object custom] Multicast objects, where they are not hidden: devices and binds are followed, to be made again.
12010 -       cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop)
12010 -       cuMulticastAddDevice(CUmemGenericAllocationHandle mcHandle, CUdevice dev)
12010 -       cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, unsigned long long flags)
13010 -       cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, unsigned long long flags)
12010 -       cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags)
13010 -       cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags)
12010 -       cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size)
[object custom] Takes the handle of memory to bind.
13030 -       cuLogicalEndpointBindMem(cuuint32_t leId, CUdevice dev, cuuint64_t offset, CUmemGenericAllocationHandle memHandle, cuuint64_t memOffset, cuuint64_t size, unsigned long long flags)
[object custom] Makes a pool; for a fabric only where that is not hidden.
11020 -       cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
[object counted] Pools that other processes share.
11020 -       cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags)
11020 -       cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags)
11020 -       cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr)
11020 -       cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData)
[memory gated] Shares an event with other processes: the driver keeps both sides of it and its handle over a checkpoint.
4010  -       cuIpcGetEventHandle(CUipcEventHandle *pHandle, CUevent event)
4010  -       cuIpcOpenEventHandle(CUevent *phEvent, CUipcEventHandle handle)
[object counted] Green contexts: no checkpoint of one has been seen.
12040 -       cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
[object counted] Memory and semaphores of other APIs.
10000 -       cuImportExternalMemory(CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc)
10000 -       cuImportExternalSemaphore(CUexternalSemaphore *extSem_out, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *semHandleDesc)
[object counted] Shares memory with a graphics API, which keeps it where it is.
3000  -       cuGraphicsGLRegisterBuffer(CUgraphicsResource *pCudaResource, unsigned int buffer, unsigned int Flags)
3000  -       cuGraphicsGLRegisterImage(CUgraphicsResource *pCudaResource, unsigned int image, unsigned int target, unsigned int Flags)
7000  -       cuGraphicsEGLRegisterImage(CUgraphicsResource *pCudaResource, void *image, unsigned int flags)
3010  -       cuGraphicsVDPAURegisterVideoSurface(CUgraphicsResource *pCudaResource, cuuint32_t vdpSurface, unsigned int flags)
3010  -       cuGraphicsVDPAURegisterOutputSurface(CUgraphicsResource *pCudaResource, cuuint32_t vdpSurface, unsigned int flags)
2000  -       cuGLRegisterBufferObject(unsigned int buffer)
7000  -       cuEGLStreamConsumerConnect(CUeglStreamConnection *conn, void *stream)
8000  -       cuEGLStreamConsumerConnectWithFlags(CUeglStreamConnection *conn, void *stream, unsigned int flags)
7000  -       cuEGLStreamProducerConnect(CUeglStreamConnection *conn, void *stream, int width, int height)
[object counted] Hands memory to a network card or another API, which nobody sees letting go of it.
11070 -       cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType, unsigned long long flags)
[object counted] Endpoints of a fabric, where it is not hidden.
13030 -       cuLogicalEndpointCreate(cuuint32_t leId, const CUlogicalEndpointProp *prop)
13030 -       cuLogicalEndpointImport(cuuint32_t leId, const void *handle, CUlogicalEndpointIpcHandleType handleType)
[memory gated] Gives memory to an endpoint of a fabric.
13030 -       cuLogicalEndpointAddDevice(cuuint32_t leId, CUdevice dev)
13030 -       cuLogicalEndpointBindAddr(cuuint32_t leId, CUdevice dev, cuuint64_t offset, void *ptr, cuuint64_t size, unsigned long long flags)
13030 -       cuLogicalEndpointUnbind(cuuint32_t leId, CUdevice dev, cuuint64_t offset, cuuint64_t size)
13030 -       cuLogicalEndpointExport(void *handle, cuuint32_t leId, CUlogicalEndpointIpcHandleType handleType)
[object custom] Ends what is counted.
11020 11020sz cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
12040 -       cuGreenCtxDestroy(CUgreenCtx hCtx)
13030 -       cuLogicalEndpointDestroy(cuuint32_t leId)
11020 -       cuMemPoolDestroy(CUmemoryPool pool)
10000 -       cuDestroyExternalMemory(CUexternalMemory extMem)
10000 -       cuDestroyExternalSemaphore(CUexternalSemaphore extSem)
3000  -       cuGraphicsUnregisterResource(CUgraphicsResource resource)
2000  -       cuGLUnregisterBufferObject(unsigned int buffer)
7000  -       cuEGLStreamConsumerDisconnect(CUeglStreamConnection *conn)
7000  -       cuEGLStreamProducerDisconnect(CUeglStreamConnection *conn)
2000  -       cuArrayDestroy(CUarray hArray)
5000  -       cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)

[object custom] Contexts: memory goes with them, and a drain waits for each.
2000  -       cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
3020  -       cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
11040 -       cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev)
12050 -       cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
2000  -       cuGLCtxCreate(CUcontext *pCtx, unsigned int Flags, CUdevice device)
3020  -       cuGLCtxCreate_v2(CUcontext *pCtx, unsigned int Flags, CUdevice device)
3010  -       cuVDPAUCtxCreate(CUcontext *pCtx, unsigned int flags, CUdevice device, cuuint32_t vdpDevice, void *vdpGetProcAddress)
3020  -       cuVDPAUCtxCreate_v2(CUcontext *pCtx, unsigned int flags, CUdevice device, cuuint32_t vdpDevice, void *vdpGetProcAddress)
2000  -       cuCtxDestroy(CUcontext ctx)
4000  -       cuCtxDestroy_v2(CUcontext ctx)
7000  -       cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
7000  -       cuDevicePrimaryCtxRelease(CUdevice dev)
11000 -       cuDevicePrimaryCtxRelease_v2(CUdevice dev)
7000  -       cuDevicePrimaryCtxReset(CUdevice dev)
11000 -       cuDevicePrimaryCtxReset_v2(CUdevice dev)
[memory gated] Contexts whose memory is that of another.
2000  -       cuCtxAttach(CUcontext *pctx, unsigned int flags)
2000  -       cuCtxDetach(CUcontext ctx)
12040 -       cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx)

[object custom] Says where a variable is, and counts managed ones; or ends them with their code.
3020  -       cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
12000 -       cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
12000 -       cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
2000  -       cuModuleUnload(CUmodule hmod)
12000 -       cuLibraryUnload(CUlibrary library)
[memory gated] Loads code, which allocates and copies; lazily loaded code at the first question about it.
2000  -       cuModuleLoad(CUmodule *module, const char *fname)
2000  -       cuModuleLoadData(CUmodule *module, const void *image)
2010  -       cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues)
2000  -       cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
12000 -       cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)
12000 -       cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)
2000  -       cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
2000  -       cuModuleGetGlobal(unsigned int *dptr, unsigned int *bytes, CUmodule hmod, const char *name)
2000  -       cuModuleGetTexRef(CUtexref *pTexRef, CUmodule hmod, const char *name)
3000  -       cuModuleGetSurfRef(CUsurfref *pSurfRef, CUmodule hmod, const char *name)
12000 -       cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
12000 -       cuLibraryGetUnifiedFunction(void **fptr, CUlibrary library, const char *symbol)
12000 -       cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
12040 -       cuFuncLoad(CUfunction hfunc)

[query custom] Answers for a device as the driver does, but for what is hidden (hiding.pxi).
2000  -       cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
[query custom] Starts the shim, or hands out functions.
2000  -       cuInit(unsigned int Flags)
11030 -       cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
12000 -       cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)

# Called by the shim, not hooked; why it lets applications call them stands in census.py.
[query real]
2020  -       cuDriverGetVersion(int *driverVersion)
6000  -       cuGetErrorName(CUresult error, const char **pStr)
2000  -       cuDeviceGet(CUdevice *device, int ordinal)
2000  -       cuDeviceGetCount(int *count)
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
10010 -       cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
2000  -       cuEventCreate(CUevent *phEvent, unsigned int Flags)
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
    """What a call does: launch, memory, object (memory that the shim follows), or query (nothing to it)."""

    LAUNCH = "launch"
    MEMORY = "memory"
    OBJECT = "object"
    QUERY = "query"


class Kind(Enum):
    """Where the wrapper comes from.

    Gated: it is generated. Custom: written by hand in a .pxi. Counted: by hand too, and a process is not suspended while
    it has what the call makes. Real: there is none, the shim itself calls the function.
    """

    GATED = "gated"
    CUSTOM = "custom"
    COUNTED = "counted"
    REAL = "real"


class Gate(Enum):
    """What holds a call during a suspend."""

    LAUNCH = "launch"
    MEMORY = "memory"
    NONE = "none"


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
    reason: str = ""
    returns: str = "CUresult"

    @property
    def arguments(self) -> list[str]:
        """The names of the parameters, in order."""
        return [re.split(r"[\s*]+", part.strip())[-1] for part in self.params.split(",")] if self.params else []

    @property
    def by_hand(self) -> bool:
        """Whether a .pxi defines the wrapper."""
        return self.kind in (Kind.CUSTOM, Kind.COUNTED)

    @property
    def gate(self) -> Gate:
        """The gate that holds the call; a query has one only where its wrapper is generated."""
        if self.kind is Kind.REAL or (self.cls is Class.QUERY and self.by_hand):
            return Gate.NONE
        return Gate.LAUNCH if self.cls is Class.LAUNCH else Gate.MEMORY

    @property
    def may_be_unknown(self) -> bool:
        """Whether a form of it that the table does not know may be called without a wrapper."""
        return self.kind is Kind.REAL or (self.cls is Class.QUERY and self.kind is Kind.GATED)


SIMULATOR_FUNCTIONS = tuple(
    Hook(symbol, symbol, 0, 0, Variant.ANY, "", Class.QUERY, Kind.REAL, "", "", returns)
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
    cls, kind, reason = Class.QUERY, Kind.REAL, ""
    for line in table.splitlines():
        if not line or line.startswith(("#", "=")):
            continue
        if bracket := re.fullmatch(r"\[(\w+) (\w+)\] ?(.*)", line):
            cls, kind, reason = Class(bracket[1]), Kind(bracket[2]), bracket[3]
            continue
        row = re.fullmatch(r"(\d+) +(?:-|(\d+)(ds|sz)) +(\w+)\((.*)\)(?: stream=(\S+))?", line)
        if row is None:
            raise ValueError(f"not a row of the hook table: {line}")
        since, twin_since, twin, symbol, params, stream = row.groups()
        variant = Variant.LEGACY if twin else Variant.ANY
        stream = stream or _stream(params)
        hook = Hook(symbol, base_name(symbol), int(since), 0, variant, params, cls, kind, stream, reason)
        yield hook
        if twin:
            yield replace(hook, symbol=f"{symbol}_pt{twin}", since=int(twin_since), variant=Variant.PER_THREAD)


def _other_names(table: str, hooks: list[Hook]) -> Iterator[Hook]:
    """Yield the rows that say by which other name a symbol is looked up."""
    by_symbol = {hook.symbol: hook for hook in hooks}
    for since, name, symbol in re.findall(r"^= (\d+) (\w+) (\w+)$", table, re.M):
        yield replace(by_symbol[symbol], name=name, since=int(since))


def _with_until(rows: list[Hook]) -> list[Hook]:
    """Fill in `until`: the version of the next ABI of the same name for the same default stream."""

    def later(hook: Hook) -> list[int]:
        per_thread = hook.variant is Variant.PER_THREAD
        same = [other for other in rows if (other.variant is Variant.PER_THREAD) == per_thread]
        return [other.since for other in same if other.name == hook.name and other.since > hook.since]

    return [replace(hook, until=min(later(hook), default=0)) for hook in rows]


_SYMBOLS = list(_rows(TABLE))

LOOKUPS: tuple[Hook, ...] = tuple(
    sorted(_with_until([*_SYMBOLS, *_other_names(TABLE, _SYMBOLS)]), key=lambda hook: (hook.symbol, hook.since))
)
"""What a name means at a version: the table, sorted by symbol, and a symbol once more for each other name of it."""

HOOKS: tuple[Hook, ...] = tuple(hook for hook in LOOKUPS if hook.name == base_name(hook.symbol))
"""The table, sorted by symbol: each symbol once."""
