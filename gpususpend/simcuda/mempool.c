/* Stream-ordered allocation: pools, without the reuse that real ones do. An allocation is there at once; a free happens
 * when the stream comes to it. Only a pool's export is of interest beyond that: the shim has to count it. */
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

struct CUmemPoolHandle_st {
    uint32_t magic;
    struct CUmemPoolHandle_st *next_free;
    int device;
    bool is_default;
    CUmemAllocationHandleType handles;
    cuuint64_t attributes[16];
    uint64_t exported;
};
static struct pool pools = POOL(struct CUmemPoolHandle_st, 0x504f4f4c);
static CUmemoryPool default_pool[MAX_DEVICES], current_pool[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static CUmemoryPool pool_of(int device) {
    pthread_mutex_lock(&lock);
    if (!default_pool[device]) {
        default_pool[device] = pool_new(&pools);
        default_pool[device]->device = device;
        default_pool[device]->is_default = true;
        current_pool[device] = default_pool[device];
    }
    CUmemoryPool pool = default_pool[device];
    pthread_mutex_unlock(&lock);
    return pool;
}

static CUresult give_pool(CUmemoryPool *out, CUdevice device, bool current) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = pool_of(device);
    if (current)
        *out = current_pool[device];
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuDeviceGetDefaultMemPool, (CUmemoryPool * out, CUdevice device), (out, device)) { return give_pool(out, device, false); }
API(CALL_INIT, cuDeviceGetMemPool, (CUmemoryPool * out, CUdevice device), (out, device)) { return give_pool(out, device, true); }
API(CALL_INIT, cuMemGetDefaultMemPool, (CUmemoryPool * out, CUmemLocation *location, CUmemAllocationType type), (out, location, type)) {
    bool ok = location && location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED;
    return ok ? give_pool(out, location->id, false) : CUDA_ERROR_INVALID_VALUE;
}
API(CALL_INIT, cuMemGetMemPool, (CUmemoryPool * out, CUmemLocation *location, CUmemAllocationType type), (out, location, type)) {
    bool ok = location && location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED;
    return ok ? give_pool(out, location->id, true) : CUDA_ERROR_INVALID_VALUE;
}
API(CALL_INIT, cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool), (device, pool)) {
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!pool_holds(&pools, pool) || pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    pool_of(device);
    current_pool[device] = pool;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMemPoolCreate, (CUmemoryPool * out, const CUmemPoolProps *props), (out, props)) {
    if (!out || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED || props->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(props->location.id))
        return CUDA_ERROR_INVALID_DEVICE;
    CUmemoryPool pool = pool_new(&pools);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->device = props->location.id;
    pool->handles = props->handleTypes;
    *out = pool;
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuMemPoolDestroy, (CUmemoryPool pool), (pool)) {
    if (!pool_holds(&pools, pool) || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (current_pool[pool->device] == pool)
        current_pool[pool->device] = default_pool[pool->device];
    pthread_mutex_unlock(&lock);
    if (pool->exported)
        machine_object_drop(pool->exported);
    pool_delete(&pools, pool);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep)) {
    (void)keep;
    return pool_holds(&pools, pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
/* Attributes 1 to 3 are ints, the others 64 bits wide. */
API(CALL_INIT, cuMemPoolSetAttribute, (CUmemoryPool pool, int name, void *value), (pool, name, value)) {
    if (!pool_holds(&pools, pool) || name < 1 || name > 8 || !value)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&pool->attributes[name], value, name < 4 ? 4 : 8);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuMemPoolGetAttribute, (CUmemoryPool pool, int name, void *value), (pool, name, value)) {
    if (!pool_holds(&pools, pool) || name < 1 || name > 8 || !value)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(value, &pool->attributes[name], name < 4 ? 4 : 8);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *list, size_t count), (pool, list, count)) {
    return pool_holds(&pools, pool) && list && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API(CALL_INIT, cuMemPoolGetAccess, (CUmemAccess_flags * flags, CUmemoryPool pool, CUmemLocation *location), (flags, pool, location)) {
    if (!flags || !pool_holds(&pools, pool) || !location)
        return CUDA_ERROR_INVALID_VALUE;
    bool own = location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == pool->device;
    *flags = own ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

/* ---- allocation ---- */

static CUresult allocate(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream handle) {
    CUstream stream;
    if (!out || !size)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream_is_capturing(stream))
        return CUDA_ERROR_NOT_SUPPORTED; /* memory nodes come with a later stage */
    if (result != CUDA_SUCCESS)
        return result;
    if (!pool) {
        pool_of(stream->context->device);
        pool = current_pool[stream->context->device];
    }
    return alloc_device(stream->context, size, MAP_POOL, pool, out);
}
API_STREAM(CALL_CONTEXT, cuMemAllocAsync, _ptsz, (CUdeviceptr * out, size_t size, CUstream stream), (out, size, stream)) { return allocate(out, size, NULL, stream); }
API_STREAM(CALL_CONTEXT, cuMemAllocFromPoolAsync, _ptsz, (CUdeviceptr * out, size_t size, CUmemoryPool pool, CUstream stream), (out, size, pool, stream)) {
    return pool_holds(&pools, pool) ? allocate(out, size, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}
API_STREAM(CALL_CONTEXT, cuMemFreeAsync, _ptsz, (CUdeviceptr va, CUstream handle), (va, handle)) {
    struct mapping m;
    CUstream stream;
    if (!mapping_find(va, &m))
        return CUDA_ERROR_INVALID_VALUE;
    mapping_done(&m);
    if (m.va != va || (m.kind != MAP_POOL && m.kind != MAP_ALLOC))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream_is_capturing(stream))
        return CUDA_ERROR_NOT_SUPPORTED;
    return work_submit(handle, &(struct work){.kind = WORK_FREE, .free = va});
}

/* ---- sharing pools: a later stage; exporting succeeds, so that the shim's refusal can be tested ---- */

API(CALL_INIT, cuMemPoolExportToShareableHandle, (void *out, CUmemoryPool pool, CUmemAllocationHandleType type, unsigned long long flags),
    (out, pool, type, flags)) {
    if (!out || !pool_holds(&pools, pool) || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(pool->handles & type))
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool->exported) {
        struct machine_object object = {.size = GRANULE, .device = device_physical[pool->device]};
        CUresult result = machine_object_create(&object);
        if (result != CUDA_SUCCESS)
            return result;
        pool->exported = object.id;
    }
    return machine_export(pool->exported, out);
}
API(CALL_INIT, cuMemPoolImportFromShareableHandle, (CUmemoryPool * out, void *handle, CUmemAllocationHandleType type, unsigned long long flags),
    (out, handle, type, flags)) {
    (void)handle, (void)flags;
    return out && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}
API(CALL_INIT, cuMemPoolExportPointer, (CUmemPoolPtrExportData * out, CUdeviceptr va), (out, va)) {
    if (!out || !address_is_device(va))
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    memcpy(out->reserved, &va, sizeof va);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuMemPoolImportPointer, (CUdeviceptr * out, CUmemoryPool pool, CUmemPoolPtrExportData *data), (out, pool, data)) {
    return out && data && pool_holds(&pools, pool) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}
