/* Objects of later stages: external memory and semaphores, sparse arrays. They can be made and destroyed, so that what
 * the shim says about a process that has some can be tested; what they are for is not simulated. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simcuda.h"

/* ---- memory for other devices ---- */

/* A descriptor as a network card would get it. That it keeps the memory is not simulated. */
API(CALL_INIT, cuMemGetHandleForAddressRange, (void *out, CUdeviceptr va, size_t size, CUmemRangeHandleType type, unsigned long long flags),
    (out, va, size, type, flags)) {
    struct mapping m;
    if (!out || !size || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags || !mapping_find(va, &m))
        return CUDA_ERROR_INVALID_VALUE;
    bool inside = m.device >= 0 && va + size <= m.va + m.span;
    mapping_done(&m);
    if (!inside)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)out = memfd_create("simcuda-dmabuf", MFD_CLOEXEC);
    return *(int *)out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

/* ---- green contexts ---- */

struct CUgreenCtx_st {
    uint32_t magic;
    struct CUgreenCtx_st *next_free;
};
static struct pool green_contexts = POOL(struct CUgreenCtx_st, 0x4752454e);

API(CALL_INIT, cuGreenCtxCreate, (CUgreenCtx * out, CUdevResourceDesc desc, CUdevice device, unsigned flags), (out, desc, device, flags)) {
    if (!out || !desc || flags != 1) /* CU_GREEN_CTX_DEFAULT_STREAM has to be asked for */
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = pool_new(&green_contexts);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API(CALL_INIT, cuGreenCtxDestroy, (CUgreenCtx context), (context)) {
    if (!pool_holds(&green_contexts, context))
        return CUDA_ERROR_INVALID_HANDLE;
    pool_delete(&green_contexts, context);
    return CUDA_SUCCESS;
}

/* ---- external memory and semaphores ---- */

struct CUextMemory_st {
    uint32_t magic;
    struct CUextMemory_st *next_free;
};
struct CUextSemaphore_st {
    uint32_t magic;
    struct CUextSemaphore_st *next_free;
};
static struct pool memories = POOL(struct CUextMemory_st, 0x584d454d), semaphores = POOL(struct CUextSemaphore_st, 0x5853454d);

/* On success the driver owns the descriptor. */
static void take_descriptor(int type, int fd) {
    if (type == 1)
        close(fd);
}

API(CALL_CONTEXT, cuImportExternalMemory, (CUexternalMemory * out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc), (out, desc)) {
    if (!out || !desc || !desc->size)
        return CUDA_ERROR_INVALID_VALUE;
    *out = pool_new(&memories);
    take_descriptor(desc->type, desc->handle.fd);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API(CALL_CONTEXT, cuExternalMemoryGetMappedBuffer, (CUdeviceptr * out, CUexternalMemory memory, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc),
    (out, memory, desc)) {
    if (!out || !desc || !desc->size || !pool_holds(&memories, memory))
        return CUDA_ERROR_INVALID_VALUE;
    return alloc_device(context_current(), desc->size, MAP_ALLOC, NULL, out);
}
API(CALL_CONTEXT, cuDestroyExternalMemory, (CUexternalMemory memory), (memory)) {
    if (!pool_holds(&memories, memory))
        return CUDA_ERROR_INVALID_HANDLE;
    pool_delete(&memories, memory);
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuImportExternalSemaphore, (CUexternalSemaphore * out, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc), (out, desc)) {
    if (!out || !desc)
        return CUDA_ERROR_INVALID_VALUE;
    *out = pool_new(&semaphores);
    take_descriptor(desc->type, desc->handle.fd);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API(CALL_CONTEXT, cuDestroyExternalSemaphore, (CUexternalSemaphore semaphore), (semaphore)) {
    if (!pool_holds(&semaphores, semaphore))
        return CUDA_ERROR_INVALID_HANDLE;
    pool_delete(&semaphores, semaphore);
    return CUDA_SUCCESS;
}

/* ---- memory of a graphics API ---- */

struct CUgraphicsResource_st {
    uint32_t magic;
    struct CUgraphicsResource_st *next_free;
};
static struct pool resources = POOL(struct CUgraphicsResource_st, 0x47524150);

API(CALL_CONTEXT, cuGraphicsGLRegisterBuffer, (CUgraphicsResource * out, unsigned buffer, unsigned flags), (out, buffer, flags)) {
    if (!out || !buffer || flags & ~0xfu)
        return CUDA_ERROR_INVALID_VALUE;
    *out = pool_new(&resources);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API(CALL_CONTEXT, cuGraphicsUnregisterResource, (CUgraphicsResource resource), (resource)) {
    if (!pool_holds(&resources, resource))
        return CUDA_ERROR_INVALID_HANDLE;
    pool_delete(&resources, resource);
    return CUDA_SUCCESS;
}

/* ---- sparse arrays ---- */

struct CUarray_st {
    uint32_t magic;
    struct CUarray_st *next_free;
};
static struct pool arrays = POOL(struct CUarray_st, 0x41525259);
enum { ARRAY3D_SPARSE = 0x40, OPERATION_MAP = 1, OPERATION_UNMAP = 2 };
struct array_map { /* what CUarrayMapInfo begins with */
    int type;
    CUarray array;
    int subresource_type;
    uint64_t subresource[4];
    int operation, handle_type;
    CUmemGenericAllocationHandle handle;
};
_Static_assert(offsetof(struct array_map, handle) == 64, "CUarrayMapInfo has its handle there");

API(CALL_CONTEXT, cuArray3DCreate_v2, (CUarray * out, const CUDA_ARRAY3D_DESCRIPTOR *wanted), (out, wanted)) {
    if (!out || !wanted || !wanted->Width)
        return CUDA_ERROR_INVALID_VALUE;
    if (!(wanted->Flags & ARRAY3D_SPARSE))
        return CUDA_ERROR_NOT_SUPPORTED;
    *out = pool_new(&arrays);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API(CALL_CONTEXT, cuArrayDestroy, (CUarray array), (array)) {
    if (!pool_holds(&arrays, array))
        return CUDA_ERROR_INVALID_HANDLE;
    pool_delete(&arrays, array);
    return CUDA_SUCCESS;
}

static CUresult map_tiles(const struct array_map *map) {
    if (!pool_holds(&arrays, map->array))
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    bool known = map->operation == OPERATION_UNMAP || (map->operation == OPERATION_MAP && memory_by_handle(map->handle));
    memory_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API_STREAM(CALL_CONTEXT, cuMemMapArrayAsync, _ptsz, (CUarrayMapInfo * list, unsigned count, CUstream handle), (list, count, handle)) {
    CUstream stream;
    CUresult result = list && count ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; result == CUDA_SUCCESS && i < count; i++)
        result = map_tiles((const struct array_map *)&list[i]);
    return result;
}
