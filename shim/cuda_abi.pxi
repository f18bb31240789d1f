# The types of cuda_abi.h as Cython sees them: names for the compiler, fields only where the shim reads them.
# Types that appear in the table and not here are declared opaque by shim/generate.py.

cdef extern from "cuda_abi.h" nogil:
    ctypedef int CUresult
    ctypedef unsigned int cuuint32_t
    ctypedef unsigned long long cuuint64_t
    ctypedef unsigned long long CUdeviceptr
    ctypedef int CUdevice
    ctypedef void *CUcontext
    ctypedef void *CUmodule
    ctypedef void *CUfunction
    ctypedef void *CUlibrary
    ctypedef void *CUkernel
    ctypedef void *CUarray
    ctypedef void *CUmipmappedArray
    ctypedef void *CUgreenCtx
    ctypedef void *CUgraphicsResource
    ctypedef void *CUeglStreamConnection
    ctypedef struct CUeglFrame:
        pass
    ctypedef void *CUtexref
    ctypedef void *CUsurfref
    ctypedef unsigned long long CUtexObject
    ctypedef unsigned long long CUsurfObject
    ctypedef void *CUstream
    ctypedef void *CUevent
    ctypedef void *CUgraph
    ctypedef void *CUgraphNode
    ctypedef void *CUgraphRecaptureCallback
    ctypedef void *CUgraphExec
    ctypedef void *CUmemoryPool
    ctypedef void *CUexternalMemory
    ctypedef void *CUexternalSemaphore
    ctypedef unsigned long long CUmemGenericAllocationHandle
    ctypedef int CUdevice_attribute
    ctypedef int CUpointer_attribute
    ctypedef int CUlimit
    ctypedef int CUmem_advise
    ctypedef int CUmem_range_attribute
    ctypedef int CUstreamAttrID
    ctypedef void *CUdevResourceDesc
    ctypedef int CUdevResourceType
    ctypedef int CUlogicalEndpointIpcHandleType
    ctypedef int CUmemRangeHandleType
    ctypedef int CUflushGPUDirectRDMAWritesTarget
    ctypedef int CUflushGPUDirectRDMAWritesScope
    ctypedef int CUjit_option
    ctypedef int CUlibraryOption
    ctypedef int CUstreamCaptureMode
    ctypedef int CUstreamCaptureStatus
    ctypedef int CUmemAllocationType
    ctypedef int CUmemAllocationHandleType
    ctypedef int CUmemLocationType
    ctypedef int CUmemAccess_flags
    ctypedef int CUmemAllocationGranularity_flags
    ctypedef int CUdriverProcAddressQueryResult
    ctypedef void (*CUhostFn)(void *userData) noexcept nogil
    ctypedef void (*CUstreamCallback)(CUstream hStream, CUresult status, void *userData) noexcept nogil

    ctypedef struct CUuuid:
        char bytes[16]

    ctypedef struct CUlaunchConfig:
        CUstream hStream

    ctypedef struct CUDA_HOST_NODE_PARAMS:
        CUhostFn fn
        void *userData

    ctypedef struct CUmemLocation:
        CUmemLocationType type
        int id

    ctypedef struct CUmemAccessDesc:
        CUmemLocation location
        CUmemAccess_flags flags

    ctypedef struct gs_alloc_flags "struct { unsigned char compressionType; }":
        unsigned char compressionType
        unsigned char gpuDirectRDMACapable
        unsigned short usage

    ctypedef struct CUmemAllocationProp:
        CUmemAllocationType type
        CUmemAllocationHandleType requestedHandleTypes
        CUmemLocation location
        void *win32HandleMetaData
        gs_alloc_flags allocFlags

    ctypedef int CUmemorytype

    ctypedef struct CUDA_MEMCPY2D:
        CUmemorytype srcMemoryType
        CUdeviceptr srcDevice
        CUmemorytype dstMemoryType
        CUdeviceptr dstDevice

    ctypedef struct CUDA_MEMCPY3D:
        CUmemorytype srcMemoryType
        CUdeviceptr srcDevice
        CUmemorytype dstMemoryType
        CUdeviceptr dstDevice

    ctypedef struct CUDA_MEMCPY3D_PEER:
        CUmemorytype srcMemoryType
        CUdeviceptr srcDevice
        CUcontext srcContext
        CUmemorytype dstMemoryType
        CUdeviceptr dstDevice
        CUcontext dstContext

    ctypedef struct CUmulticastObjectProp:
        unsigned int numDevices
        size_t size
        unsigned long long handleTypes
        unsigned long long flags

    ctypedef struct CUctxCreateParams:
        pass

    ctypedef struct CUarrayMapInfo:
        unsigned char opaque[96]

    ctypedef struct CUipcMemHandle:
        char reserved[64]

    ctypedef struct CUipcEventHandle:
        char reserved[64]

    ctypedef struct CUmemPoolProps:
        CUmemAllocationHandleType handleTypes

    ctypedef struct CUmemPoolPtrExportData:
        unsigned char reserved[64]

    ctypedef struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC:
        int type
        unsigned long long size
        unsigned int flags

    ctypedef struct CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC:
        int type
        unsigned int flags

    enum:
        CUDA_SUCCESS
        CUDA_ERROR_INVALID_VALUE
        CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_NOT_INITIALIZED
        CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_DEVICE
        CUDA_ERROR_INVALID_CONTEXT
        CUDA_ERROR_MAP_FAILED
        CUDA_ERROR_OPERATING_SYSTEM
        CUDA_ERROR_INVALID_HANDLE
        CUDA_ERROR_ILLEGAL_STATE
        CUDA_ERROR_NOT_FOUND
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_ILLEGAL_ADDRESS
        CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
        CUDA_ERROR_CONTEXT_IS_DESTROYED
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        CUDA_ERROR_NOT_PERMITTED
        CUDA_ERROR_NOT_SUPPORTED
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        CUDA_ERROR_UNKNOWN

    enum:
        CU_DEVICE_CPU
        CU_GET_PROC_ADDRESS_LEGACY_STREAM
        CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
        CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID
        CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT
        CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        CU_STREAM_NON_BLOCKING
        CU_EVENT_DISABLE_TIMING
        CU_EVENT_INTERPROCESS
        CU_STREAM_CAPTURE_MODE_RELAXED
        CU_STREAM_CAPTURE_STATUS_NONE
        CU_STREAM_CAPTURE_STATUS_ACTIVE
        CU_GRAPH_NODE_TYPE_HOST

    enum:
        CU_MEMORYTYPE_HOST
        CU_MEMORYTYPE_DEVICE
        CU_MEMORYTYPE_UNIFIED
        CU_MEM_ALLOCATION_TYPE_PINNED
        CU_MEM_ALLOCATION_TYPE_MANAGED
        CU_MEM_HANDLE_TYPE_NONE
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        CU_MEM_HANDLE_TYPE_FABRIC
        CU_MEM_LOCATION_TYPE_DEVICE
        CU_MEM_LOCATION_TYPE_HOST
        CU_MEM_LOCATION_TYPE_HOST_NUMA
        CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
        CU_MEM_ACCESS_FLAGS_PROT_NONE
        CU_MEM_ACCESS_FLAGS_PROT_READ
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        CU_MEM_ALLOC_GRANULARITY_MINIMUM
        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        CU_POINTER_ATTRIBUTE_CONTEXT
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        CU_POINTER_ATTRIBUTE_HOST_POINTER
        CU_POINTER_ATTRIBUTE_P2P_TOKENS
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        CU_POINTER_ATTRIBUTE_BUFFER_ID
        CU_POINTER_ATTRIBUTE_IS_MANAGED
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        CU_POINTER_ATTRIBUTE_RANGE_SIZE
        CU_POINTER_ATTRIBUTE_MAPPED
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR
        CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID
        CU_MEMHOSTREGISTER_PORTABLE
        CU_LIMIT_STACK_SIZE
        CU_MEMHOSTREGISTER_DEVICEMAP
        CU_MEMHOSTREGISTER_IOMEMORY
        CU_MEMHOSTREGISTER_READ_ONLY
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

cdef extern from "platform.h" nogil:
    const CUstream GS_STREAM_PER_THREAD
