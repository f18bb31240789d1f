/* cuMemAlloc and its kin: one physical allocation for each, at an address that the driver chooses. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

/* Allocate device memory of a context, mapped for its device; from a pool if one is named. */
CUresult alloc_device(CUcontext context, size_t size, enum mapping_kind kind, CUmemoryPool pool, CUdeviceptr *out) {
    struct machine_object object = {
        .size = round_up(size, PAGE),
        .charged = round_up(size, size < GRANULE ? PAGE : GRANULE),
        .device = device_physical[context->device],
        .ipc_capable = kind == MAP_ALLOC,
    };
    if (size > machine_device_memory())
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = machine_object_create(&object);
    if (result != CUDA_SUCCESS)
        return result;
    struct memory *memory = memory_new(&object, kind == MAP_POOL ? MEM_POOL : MEM_ALLOC, false);
    CUdeviceptr va = reserve_range(object.size, size < GRANULE ? PAGE : GRANULE, 0);
    struct mapping mapping = {
        .va = va, .size = size, .span = object.size, .memory = memory, .kind = kind, .context = context,
        .device = context->device, .pool = pool, .buffer_id = mapping_new_buffer_id(),
    };
    memory_lock();
    bool inserted = va && mapping_insert(&mapping);
    memory_unlock();
    if (!inserted) {
        memory_put(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = va;
    return CUDA_SUCCESS;
}

/* Free what alloc_device made; the address must be the one it gave. */
CUresult alloc_free(CUdeviceptr va, enum mapping_kind kind) {
    struct mapping m;
    if (!mapping_find(va, &m))
        return CUDA_ERROR_INVALID_VALUE;
    mapping_done(&m);
    if (m.va != va || m.kind != kind)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    bool removed = mapping_remove(va, &m);
    memory_unlock();
    if (!removed)
        return CUDA_ERROR_INVALID_VALUE;
    release_range(m.va, m.span);
    mapping_done(&m);
    if (kind == MAP_MANAGED)
        managed_memory_freed();
    return CUDA_SUCCESS;
}

/* Free everything that was allocated in a context that ends, host memory too. */
void alloc_free_context(CUcontext context) {
    for (;;) {
        struct mapping found = {0};
        int count;
        memory_lock();
        const struct mapping *rows = mapping_table(&count);
        for (int i = 0; i < count; i++)
            if (rows[i].context == context && rows[i].kind != MAP_VMM)
                found = rows[i];
        bool removed = found.va && mapping_remove(found.va, &found);
        memory_unlock();
        if (!removed)
            return;
        if (found.kind != MAP_REGISTERED) /* whose pages are the application's own */
            release_range(found.va, found.span);
        if (found.kind == MAP_MANAGED)
            managed_memory_freed();
        mapping_done(&found);
    }
}

API(CALL_CONTEXT | CALL_UNSAFE, cuMemAlloc_v2, (CUdeviceptr * out, size_t size), (out, size)) {
    if (!out || !size)
        return CUDA_ERROR_INVALID_VALUE;
    return alloc_device(context_current(), size, MAP_ALLOC, NULL, out);
}

API(CALL_CONTEXT | CALL_UNSAFE, cuMemAllocPitch_v2, (CUdeviceptr * out, size_t *pitch, size_t width, size_t height, unsigned element),
    (out, pitch, width, height, element)) {
    if (!out || !pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = round_up(width, 512);
    return alloc_device(context_current(), *pitch * height, MAP_ALLOC, NULL, out);
}

static enum mapping_kind kind_at(CUdeviceptr va) {
    struct mapping m;
    if (!mapping_find(va, &m))
        return MAP_ALLOC;
    mapping_done(&m);
    return m.kind;
}

static void wait_for(CUcontext context, void *data) {
    CUresult *result = data;
    CUresult here = context_wait(context);
    if (*result == CUDA_SUCCESS)
        *result = here;
}

/* Free waits for all work, as the real one does in effect, and needs no context; memory of a managed or pool allocation
 * is freed here, too. */
API(CALL_INIT | CALL_UNSAFE, cuMemFree_v2, (CUdeviceptr va), (va)) {
    if (!va)
        return CUDA_SUCCESS;
    enum mapping_kind kind = kind_at(va);
    if (kind != MAP_ALLOC && kind != MAP_MANAGED && kind != MAP_POOL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    context_each(wait_for, &result);
    return result == CUDA_SUCCESS ? alloc_free(va, kind) : result;
}

static bool anyone_has_access(const struct mapping *m) {
    bool any = m->host_access != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    for (int d = 0; d < MAX_DEVICES; d++)
        any = any || m->access[d] != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return any;
}

API(CALL_CONTEXT, cuMemGetInfo_v2, (size_t *available, size_t *total), (available, total)) {
    if (available)
        *available = machine_device_free(device_physical[context_current()->device]);
    if (total)
        *total = machine_device_memory();
    return CUDA_SUCCESS;
}

/* Measured: cuMem memory has no range until somebody was given access; of host memory the base reads 0. */
API(CALL_CONTEXT, cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *size, CUdeviceptr address), (base, size, address)) {
    struct mapping m;
    if (!mapping_find(address, &m))
        return CUDA_ERROR_NOT_FOUND;
    bool on_host = m.memory && is_host_memory(m.memory);
    mapping_done(&m);
    if (m.kind == MAP_VMM && !anyone_has_access(&m))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = on_host ? 0 : m.va;
    if (size)
        *size = m.size;
    return CUDA_SUCCESS;
}
