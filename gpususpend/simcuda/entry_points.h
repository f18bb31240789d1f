/* Which function cuGetProcAddress gives for which name, from which CUDA version on.
 *
 * PLAIN(name, since, symbol); STREAM(name, since, symbol, since, symbol whose default stream is the thread's own).
 * One name may have several: the newest that the caller's version reaches is given. */
#define ENTRY_POINTS(PLAIN, STREAM) \
    PLAIN(cuArray3DCreate, 3020, cuArray3DCreate_v2) \
    PLAIN(cuArrayDestroy, 2000, cuArrayDestroy) \
    PLAIN(cuCheckpointProcessCheckpoint, 12080, cuCheckpointProcessCheckpoint) \
    PLAIN(cuCheckpointProcessGetRestoreThreadId, 12080, cuCheckpointProcessGetRestoreThreadId) \
    PLAIN(cuCheckpointProcessGetState, 12080, cuCheckpointProcessGetState) \
    PLAIN(cuCheckpointProcessLock, 12080, cuCheckpointProcessLock) \
    PLAIN(cuCheckpointProcessRestore, 12080, cuCheckpointProcessRestore) \
    PLAIN(cuCheckpointProcessUnlock, 12080, cuCheckpointProcessUnlock) \
    PLAIN(cuCtxCreate, 3020, cuCtxCreate_v2) \
    PLAIN(cuCtxCreate, 11040, cuCtxCreate_v3) \
    PLAIN(cuCtxCreate, 12050, cuCtxCreate_v4) \
    PLAIN(cuCtxDestroy, 4000, cuCtxDestroy_v2) \
    PLAIN(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess) \
    PLAIN(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess) \
    PLAIN(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion) \
    PLAIN(cuCtxGetCacheConfig, 3020, cuCtxGetCacheConfig) \
    PLAIN(cuCtxGetCurrent, 4000, cuCtxGetCurrent) \
    PLAIN(cuCtxGetDevice, 2000, cuCtxGetDevice) \
    PLAIN(cuCtxGetDevice, 13000, cuCtxGetDevice_v2) \
    PLAIN(cuCtxGetFlags, 7000, cuCtxGetFlags) \
    PLAIN(cuCtxGetId, 12000, cuCtxGetId) \
    PLAIN(cuCtxGetLimit, 3010, cuCtxGetLimit) \
    PLAIN(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange) \
    PLAIN(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2) \
    PLAIN(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2) \
    PLAIN(cuCtxResetPersistingL2Cache, 11000, cuCtxResetPersistingL2Cache) \
    PLAIN(cuCtxSetCacheConfig, 3020, cuCtxSetCacheConfig) \
    PLAIN(cuCtxSetCurrent, 4000, cuCtxSetCurrent) \
    PLAIN(cuCtxSetFlags, 12010, cuCtxSetFlags) \
    PLAIN(cuCtxSetLimit, 3010, cuCtxSetLimit) \
    PLAIN(cuCtxSynchronize, 2000, cuCtxSynchronize) \
    PLAIN(cuCtxSynchronize, 13000, cuCtxSynchronize_v2) \
    PLAIN(cuDestroyExternalMemory, 10000, cuDestroyExternalMemory) \
    PLAIN(cuDestroyExternalSemaphore, 10000, cuDestroyExternalSemaphore) \
    PLAIN(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer) \
    PLAIN(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability) \
    PLAIN(cuDeviceGet, 2000, cuDeviceGet) \
    PLAIN(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute) \
    PLAIN(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId) \
    PLAIN(cuDeviceGetCount, 2000, cuDeviceGetCount) \
    PLAIN(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool) \
    PLAIN(cuDeviceGetExecAffinitySupport, 11040, cuDeviceGetExecAffinitySupport) \
    PLAIN(cuDeviceGetLuid, 10000, cuDeviceGetLuid) \
    PLAIN(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool) \
    PLAIN(cuDeviceGetName, 2000, cuDeviceGetName) \
    PLAIN(cuDeviceGetP2PAttribute, 8000, cuDeviceGetP2PAttribute) \
    PLAIN(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId) \
    PLAIN(cuDeviceGetProperties, 2000, cuDeviceGetProperties) \
    PLAIN(cuDeviceGetUuid, 9020, cuDeviceGetUuid) \
    PLAIN(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2) \
    PLAIN(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState) \
    PLAIN(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2) \
    PLAIN(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2) \
    PLAIN(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain) \
    PLAIN(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2) \
    PLAIN(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool) \
    PLAIN(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2) \
    PLAIN(cuDriverGetVersion, 2020, cuDriverGetVersion) \
    PLAIN(cuEventCreate, 2000, cuEventCreate) \
    PLAIN(cuEventDestroy, 4000, cuEventDestroy_v2) \
    PLAIN(cuEventElapsedTime, 2000, cuEventElapsedTime) \
    PLAIN(cuEventElapsedTime, 12080, cuEventElapsedTime_v2) \
    PLAIN(cuEventQuery, 2000, cuEventQuery) \
    STREAM(cuEventRecord, 2000, cuEventRecord, 7000, cuEventRecord_ptsz) \
    STREAM(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags, 11010, cuEventRecordWithFlags_ptsz) \
    PLAIN(cuEventSynchronize, 2000, cuEventSynchronize) \
    PLAIN(cuExternalMemoryGetMappedBuffer, 10000, cuExternalMemoryGetMappedBuffer) \
    PLAIN(cuFuncGetAttribute, 2020, cuFuncGetAttribute) \
    PLAIN(cuFuncGetModule, 11000, cuFuncGetModule) \
    PLAIN(cuFuncGetName, 12030, cuFuncGetName) \
    PLAIN(cuFuncGetParamInfo, 12040, cuFuncGetParamInfo) \
    PLAIN(cuFuncIsLoaded, 12040, cuFuncIsLoaded) \
    PLAIN(cuFuncLoad, 12040, cuFuncLoad) \
    PLAIN(cuFuncSetAttribute, 9000, cuFuncSetAttribute) \
    PLAIN(cuFuncSetCacheConfig, 3000, cuFuncSetCacheConfig) \
    PLAIN(cuGetErrorName, 6000, cuGetErrorName) \
    PLAIN(cuGetErrorString, 6000, cuGetErrorString) \
    PLAIN(cuGetExportTable, 3000, cuGetExportTable) \
    PLAIN(cuGetProcAddress, 11030, cuGetProcAddress) \
    PLAIN(cuGetProcAddress, 12000, cuGetProcAddress_v2) \
    PLAIN(cuGraphAddChildGraphNode, 10000, cuGraphAddChildGraphNode) \
    PLAIN(cuGraphAddDependencies, 10000, cuGraphAddDependencies) \
    PLAIN(cuGraphAddDependencies, 12030, cuGraphAddDependencies_v2) \
    PLAIN(cuGraphAddEmptyNode, 10000, cuGraphAddEmptyNode) \
    PLAIN(cuGraphAddHostNode, 10000, cuGraphAddHostNode) \
    PLAIN(cuGraphAddKernelNode, 10000, cuGraphAddKernelNode) \
    PLAIN(cuGraphAddKernelNode, 12000, cuGraphAddKernelNode_v2) \
    PLAIN(cuGraphAddMemcpyNode, 10000, cuGraphAddMemcpyNode) \
    PLAIN(cuGraphAddMemsetNode, 10000, cuGraphAddMemsetNode) \
    PLAIN(cuGraphClone, 10000, cuGraphClone) \
    PLAIN(cuGraphCreate, 10000, cuGraphCreate) \
    PLAIN(cuGraphDestroy, 10000, cuGraphDestroy) \
    PLAIN(cuGraphDestroyNode, 10000, cuGraphDestroyNode) \
    PLAIN(cuGraphExecDestroy, 10000, cuGraphExecDestroy) \
    PLAIN(cuGraphExecGetFlags, 12000, cuGraphExecGetFlags) \
    PLAIN(cuGraphExecUpdate, 12000, cuGraphExecUpdate_v2) \
    PLAIN(cuGraphGetNodes, 10000, cuGraphGetNodes) \
    PLAIN(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags) \
    PLAIN(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags) \
    STREAM(cuGraphInstantiateWithParams, 12000, cuGraphInstantiateWithParams, 12000, cuGraphInstantiateWithParams_ptsz) \
    STREAM(cuGraphLaunch, 10000, cuGraphLaunch, 10000, cuGraphLaunch_ptsz) \
    PLAIN(cuGraphNodeGetDependencies, 12030, cuGraphNodeGetDependencies_v2) \
    PLAIN(cuGraphNodeGetType, 10000, cuGraphNodeGetType) \
    PLAIN(cuGraphNodeSetEnabled, 11060, cuGraphNodeSetEnabled) \
    PLAIN(cuGraphRemoveDependencies, 12030, cuGraphRemoveDependencies_v2) \
    STREAM(cuGraphUpload, 11010, cuGraphUpload, 11010, cuGraphUpload_ptsz) \
    PLAIN(cuGraphicsGLRegisterBuffer, 3000, cuGraphicsGLRegisterBuffer) \
    PLAIN(cuGraphicsUnregisterResource, 3000, cuGraphicsUnregisterResource) \
    PLAIN(cuGreenCtxCreate, 12040, cuGreenCtxCreate) \
    PLAIN(cuGreenCtxDestroy, 12040, cuGreenCtxDestroy) \
    PLAIN(cuImportExternalMemory, 10000, cuImportExternalMemory) \
    PLAIN(cuImportExternalSemaphore, 10000, cuImportExternalSemaphore) \
    PLAIN(cuInit, 2000, cuInit) \
    PLAIN(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle) \
    PLAIN(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle) \
    PLAIN(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle) \
    PLAIN(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle) \
    PLAIN(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle) \
    PLAIN(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2) \
    PLAIN(cuKernelGetAttribute, 12000, cuKernelGetAttribute) \
    PLAIN(cuKernelGetFunction, 12000, cuKernelGetFunction) \
    PLAIN(cuKernelGetLibrary, 12050, cuKernelGetLibrary) \
    PLAIN(cuKernelGetName, 12030, cuKernelGetName) \
    PLAIN(cuKernelGetParamInfo, 12040, cuKernelGetParamInfo) \
    PLAIN(cuKernelSetAttribute, 12000, cuKernelSetAttribute) \
    STREAM(cuLaunchCooperativeKernel, 9000, cuLaunchCooperativeKernel, 9000, cuLaunchCooperativeKernel_ptsz) \
    STREAM(cuLaunchHostFunc, 10000, cuLaunchHostFunc, 10000, cuLaunchHostFunc_ptsz) \
    STREAM(cuLaunchHostFunc, 13010, cuLaunchHostFunc_v2, 13010, cuLaunchHostFunc_v2_ptsz) \
    STREAM(cuLaunchKernel, 4000, cuLaunchKernel, 7000, cuLaunchKernel_ptsz) \
    STREAM(cuLaunchKernelEx, 11060, cuLaunchKernelEx, 11060, cuLaunchKernelEx_ptsz) \
    PLAIN(cuLibraryGetGlobal, 12000, cuLibraryGetGlobal) \
    PLAIN(cuLibraryGetKernel, 12000, cuLibraryGetKernel) \
    PLAIN(cuLibraryGetKernelCount, 12040, cuLibraryGetKernelCount) \
    PLAIN(cuLibraryGetManaged, 12000, cuLibraryGetManaged) \
    PLAIN(cuLibraryGetModule, 12000, cuLibraryGetModule) \
    PLAIN(cuLibraryLoadData, 12000, cuLibraryLoadData) \
    PLAIN(cuLibraryLoadFromFile, 12000, cuLibraryLoadFromFile) \
    PLAIN(cuLibraryUnload, 12000, cuLibraryUnload) \
    PLAIN(cuMemAddressFree, 10020, cuMemAddressFree) \
    PLAIN(cuMemAddressReserve, 10020, cuMemAddressReserve) \
    PLAIN(cuMemAdvise, 12020, cuMemAdvise_v2) \
    PLAIN(cuMemAlloc, 3020, cuMemAlloc_v2) \
    STREAM(cuMemAllocAsync, 11020, cuMemAllocAsync, 11020, cuMemAllocAsync_ptsz) \
    STREAM(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync_ptsz) \
    PLAIN(cuMemAllocHost, 3020, cuMemAllocHost_v2) \
    PLAIN(cuMemAllocManaged, 6000, cuMemAllocManaged) \
    PLAIN(cuMemAllocPitch, 3020, cuMemAllocPitch_v2) \
    PLAIN(cuMemCreate, 10020, cuMemCreate) \
    PLAIN(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle) \
    PLAIN(cuMemFree, 3020, cuMemFree_v2) \
    STREAM(cuMemFreeAsync, 11020, cuMemFreeAsync, 11020, cuMemFreeAsync_ptsz) \
    PLAIN(cuMemFreeHost, 2000, cuMemFreeHost) \
    PLAIN(cuMemGetAccess, 10020, cuMemGetAccess) \
    PLAIN(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2) \
    PLAIN(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity) \
    PLAIN(cuMemGetAllocationPropertiesFromHandle, 10020, cuMemGetAllocationPropertiesFromHandle) \
    PLAIN(cuMemGetDefaultMemPool, 13000, cuMemGetDefaultMemPool) \
    PLAIN(cuMemGetHandleForAddressRange, 11070, cuMemGetHandleForAddressRange) \
    PLAIN(cuMemGetInfo, 3020, cuMemGetInfo_v2) \
    PLAIN(cuMemGetMemPool, 13000, cuMemGetMemPool) \
    PLAIN(cuMemHostAlloc, 2020, cuMemHostAlloc) \
    PLAIN(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2) \
    PLAIN(cuMemHostGetFlags, 2030, cuMemHostGetFlags) \
    PLAIN(cuMemHostRegister, 6050, cuMemHostRegister_v2) \
    PLAIN(cuMemHostUnregister, 4000, cuMemHostUnregister) \
    PLAIN(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle) \
    PLAIN(cuMemMap, 10020, cuMemMap) \
    STREAM(cuMemMapArrayAsync, 11010, cuMemMapArrayAsync, 11010, cuMemMapArrayAsync_ptsz) \
    PLAIN(cuMemPoolCreate, 11020, cuMemPoolCreate) \
    PLAIN(cuMemPoolDestroy, 11020, cuMemPoolDestroy) \
    PLAIN(cuMemPoolExportPointer, 11020, cuMemPoolExportPointer) \
    PLAIN(cuMemPoolExportToShareableHandle, 11020, cuMemPoolExportToShareableHandle) \
    PLAIN(cuMemPoolGetAccess, 11020, cuMemPoolGetAccess) \
    PLAIN(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute) \
    PLAIN(cuMemPoolImportFromShareableHandle, 11020, cuMemPoolImportFromShareableHandle) \
    PLAIN(cuMemPoolImportPointer, 11020, cuMemPoolImportPointer) \
    PLAIN(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess) \
    PLAIN(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute) \
    PLAIN(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo) \
    STREAM(cuMemPrefetchAsync, 12020, cuMemPrefetchAsync_v2, 12020, cuMemPrefetchAsync_v2_ptsz) \
    PLAIN(cuMemRelease, 10020, cuMemRelease) \
    PLAIN(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle) \
    PLAIN(cuMemSetAccess, 10020, cuMemSetAccess) \
    PLAIN(cuMemUnmap, 10020, cuMemUnmap) \
    STREAM(cuMemcpy, 4000, cuMemcpy, 7000, cuMemcpy_ptds) \
    STREAM(cuMemcpy2D, 3020, cuMemcpy2D_v2, 7000, cuMemcpy2D_v2_ptds) \
    STREAM(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2, 7000, cuMemcpy2DAsync_v2_ptsz) \
    STREAM(cuMemcpy2DUnaligned, 3020, cuMemcpy2DUnaligned_v2, 7000, cuMemcpy2DUnaligned_v2_ptds) \
    STREAM(cuMemcpy3D, 3020, cuMemcpy3D_v2, 7000, cuMemcpy3D_v2_ptds) \
    STREAM(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2, 7000, cuMemcpy3DAsync_v2_ptsz) \
    STREAM(cuMemcpy3DPeer, 4000, cuMemcpy3DPeer, 7000, cuMemcpy3DPeer_ptds) \
    STREAM(cuMemcpy3DPeerAsync, 4000, cuMemcpy3DPeerAsync, 7000, cuMemcpy3DPeerAsync_ptsz) \
    STREAM(cuMemcpyAsync, 4000, cuMemcpyAsync, 7000, cuMemcpyAsync_ptsz) \
    STREAM(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2, 7000, cuMemcpyDtoD_v2_ptds) \
    STREAM(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2, 7000, cuMemcpyDtoDAsync_v2_ptsz) \
    STREAM(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2, 7000, cuMemcpyDtoH_v2_ptds) \
    STREAM(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2, 7000, cuMemcpyDtoHAsync_v2_ptsz) \
    STREAM(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2, 7000, cuMemcpyHtoD_v2_ptds) \
    STREAM(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2, 7000, cuMemcpyHtoDAsync_v2_ptsz) \
    STREAM(cuMemcpyPeer, 4000, cuMemcpyPeer, 7000, cuMemcpyPeer_ptds) \
    STREAM(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync, 7000, cuMemcpyPeerAsync_ptsz) \
    STREAM(cuMemsetD16, 3020, cuMemsetD16_v2, 7000, cuMemsetD16_v2_ptds) \
    STREAM(cuMemsetD16Async, 3020, cuMemsetD16Async, 7000, cuMemsetD16Async_ptsz) \
    STREAM(cuMemsetD2D16, 3020, cuMemsetD2D16_v2, 7000, cuMemsetD2D16_v2_ptds) \
    STREAM(cuMemsetD2D16Async, 3020, cuMemsetD2D16Async, 7000, cuMemsetD2D16Async_ptsz) \
    STREAM(cuMemsetD2D32, 3020, cuMemsetD2D32_v2, 7000, cuMemsetD2D32_v2_ptds) \
    STREAM(cuMemsetD2D32Async, 3020, cuMemsetD2D32Async, 7000, cuMemsetD2D32Async_ptsz) \
    STREAM(cuMemsetD2D8, 3020, cuMemsetD2D8_v2, 7000, cuMemsetD2D8_v2_ptds) \
    STREAM(cuMemsetD2D8Async, 3020, cuMemsetD2D8Async, 7000, cuMemsetD2D8Async_ptsz) \
    STREAM(cuMemsetD32, 3020, cuMemsetD32_v2, 7000, cuMemsetD32_v2_ptds) \
    STREAM(cuMemsetD32Async, 3020, cuMemsetD32Async, 7000, cuMemsetD32Async_ptsz) \
    STREAM(cuMemsetD8, 3020, cuMemsetD8_v2, 7000, cuMemsetD8_v2_ptds) \
    STREAM(cuMemsetD8Async, 3020, cuMemsetD8Async, 7000, cuMemsetD8Async_ptsz) \
    PLAIN(cuModuleGetFunction, 2000, cuModuleGetFunction) \
    PLAIN(cuModuleGetFunctionCount, 12040, cuModuleGetFunctionCount) \
    PLAIN(cuModuleGetGlobal, 3020, cuModuleGetGlobal_v2) \
    PLAIN(cuModuleGetLoadingMode, 11070, cuModuleGetLoadingMode) \
    PLAIN(cuModuleLoad, 2000, cuModuleLoad) \
    PLAIN(cuModuleLoadData, 2000, cuModuleLoadData) \
    PLAIN(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx) \
    PLAIN(cuModuleLoadFatBinary, 2000, cuModuleLoadFatBinary) \
    PLAIN(cuModuleUnload, 2000, cuModuleUnload) \
    PLAIN(cuMulticastAddDevice, 12010, cuMulticastAddDevice) \
    PLAIN(cuMulticastBindAddr, 12010, cuMulticastBindAddr) \
    PLAIN(cuMulticastBindAddr, 13010, cuMulticastBindAddr_v2) \
    PLAIN(cuMulticastBindMem, 12010, cuMulticastBindMem) \
    PLAIN(cuMulticastBindMem, 13010, cuMulticastBindMem_v2) \
    PLAIN(cuMulticastCreate, 12010, cuMulticastCreate) \
    PLAIN(cuMulticastGetGranularity, 12010, cuMulticastGetGranularity) \
    PLAIN(cuMulticastUnbind, 12010, cuMulticastUnbind) \
    PLAIN(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, cuOccupancyMaxActiveBlocksPerMultiprocessor) \
    PLAIN(cuPointerGetAttribute, 4000, cuPointerGetAttribute) \
    PLAIN(cuPointerGetAttributes, 7000, cuPointerGetAttributes) \
    PLAIN(cuPointerSetAttribute, 6000, cuPointerSetAttribute) \
    PLAIN(cuProfilerStart, 4000, cuProfilerStart) \
    PLAIN(cuProfilerStop, 4000, cuProfilerStop) \
    STREAM(cuStreamAddCallback, 5000, cuStreamAddCallback, 7000, cuStreamAddCallback_ptsz) \
    STREAM(cuStreamAttachMemAsync, 6000, cuStreamAttachMemAsync, 7000, cuStreamAttachMemAsync_ptsz) \
    STREAM(cuStreamBatchMemOp, 8000, cuStreamBatchMemOp, 8000, cuStreamBatchMemOp_ptsz) \
    STREAM(cuStreamBatchMemOp, 11070, cuStreamBatchMemOp_v2, 11070, cuStreamBatchMemOp_v2_ptsz) \
    STREAM(cuStreamBeginCapture, 10000, cuStreamBeginCapture, 10000, cuStreamBeginCapture_ptsz) \
    STREAM(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, 10010, cuStreamBeginCapture_v2_ptsz) \
    STREAM(cuStreamBeginCaptureToGraph, 12030, cuStreamBeginCaptureToGraph, 12030, cuStreamBeginCaptureToGraph_ptsz) \
    STREAM(cuStreamCopyAttributes, 11000, cuStreamCopyAttributes, 11000, cuStreamCopyAttributes_ptsz) \
    PLAIN(cuStreamCreate, 2000, cuStreamCreate) \
    PLAIN(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority) \
    PLAIN(cuStreamDestroy, 4000, cuStreamDestroy_v2) \
    STREAM(cuStreamEndCapture, 10000, cuStreamEndCapture, 10000, cuStreamEndCapture_ptsz) \
    STREAM(cuStreamGetAttribute, 11000, cuStreamGetAttribute, 11000, cuStreamGetAttribute_ptsz) \
    STREAM(cuStreamGetCaptureInfo, 10010, cuStreamGetCaptureInfo, 10010, cuStreamGetCaptureInfo_ptsz) \
    STREAM(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2, 11030, cuStreamGetCaptureInfo_v2_ptsz) \
    STREAM(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3, 12030, cuStreamGetCaptureInfo_v3_ptsz) \
    STREAM(cuStreamGetCtx, 9020, cuStreamGetCtx, 9020, cuStreamGetCtx_ptsz) \
    STREAM(cuStreamGetCtx, 12050, cuStreamGetCtx_v2, 12050, cuStreamGetCtx_v2_ptsz) \
    STREAM(cuStreamGetDevice, 12080, cuStreamGetDevice, 12080, cuStreamGetDevice_ptsz) \
    STREAM(cuStreamGetFlags, 5050, cuStreamGetFlags, 7000, cuStreamGetFlags_ptsz) \
    STREAM(cuStreamGetId, 12000, cuStreamGetId, 12000, cuStreamGetId_ptsz) \
    STREAM(cuStreamGetPriority, 5050, cuStreamGetPriority, 7000, cuStreamGetPriority_ptsz) \
    STREAM(cuStreamIsCapturing, 10000, cuStreamIsCapturing, 10000, cuStreamIsCapturing_ptsz) \
    STREAM(cuStreamQuery, 2000, cuStreamQuery, 7000, cuStreamQuery_ptsz) \
    STREAM(cuStreamSetAttribute, 11000, cuStreamSetAttribute, 11000, cuStreamSetAttribute_ptsz) \
    STREAM(cuStreamSynchronize, 2000, cuStreamSynchronize, 7000, cuStreamSynchronize_ptsz) \
    STREAM(cuStreamUpdateCaptureDependencies, 11030, cuStreamUpdateCaptureDependencies, 11030, cuStreamUpdateCaptureDependencies_ptsz) \
    STREAM(cuStreamUpdateCaptureDependencies, 12030, cuStreamUpdateCaptureDependencies_v2, 12030, cuStreamUpdateCaptureDependencies_v2_ptsz) \
    STREAM(cuStreamWaitEvent, 3020, cuStreamWaitEvent, 7000, cuStreamWaitEvent_ptsz) \
    STREAM(cuStreamWaitValue32, 8000, cuStreamWaitValue32, 8000, cuStreamWaitValue32_ptsz) \
    STREAM(cuStreamWaitValue32, 11070, cuStreamWaitValue32_v2, 11070, cuStreamWaitValue32_v2_ptsz) \
    STREAM(cuStreamWaitValue64, 9000, cuStreamWaitValue64, 9000, cuStreamWaitValue64_ptsz) \
    STREAM(cuStreamWaitValue64, 11070, cuStreamWaitValue64_v2, 11070, cuStreamWaitValue64_v2_ptsz) \
    STREAM(cuStreamWriteValue32, 8000, cuStreamWriteValue32, 8000, cuStreamWriteValue32_ptsz) \
    STREAM(cuStreamWriteValue32, 11070, cuStreamWriteValue32_v2, 11070, cuStreamWriteValue32_v2_ptsz) \
    STREAM(cuStreamWriteValue64, 9000, cuStreamWriteValue64, 9000, cuStreamWriteValue64_ptsz) \
    STREAM(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2, 11070, cuStreamWriteValue64_v2_ptsz) \
    PLAIN(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode)
