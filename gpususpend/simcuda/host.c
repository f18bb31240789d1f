/* Host memory: allocated, registered, managed. It is ordinary memory of the process at its own address. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simcuda.h"

static atomic_int managed_count;

bool managed_memory_exists(void) { return atomic_load(&managed_count) > 0; }

/* Why a range cannot be registered; memory lock held. */
static CUresult refusal(CUdeviceptr va, size_t size) {
    int count;
    const struct mapping *rows = mapping_table(&count);
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < count; i++)
        if (rows[i].va < va + size && va < rows[i].va + rows[i].span)
            result = rows[i].kind == MAP_REGISTERED ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    return result;
}

static CUresult add(CUdeviceptr va, size_t size, size_t span, enum mapping_kind kind, unsigned flags) {
    CUcontext context = context_current();
    struct mapping m = {
        .va = va, .size = size, .span = span, .kind = kind, .context = context, .device = context->device, .flags = flags,
        .buffer_id = mapping_new_buffer_id(),
    };
    memory_lock();
    CUresult result = refusal(va, size);
    if (result == CUDA_SUCCESS && !mapping_insert(&m))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    memory_unlock();
    return result;
}

static CUresult allocate(void **out, size_t size, enum mapping_kind kind, unsigned flags) {
    if (!out || !size)
        return CUDA_ERROR_INVALID_VALUE;
    void *memory = mmap(NULL, round_up(size, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = add((CUdeviceptr)(uintptr_t)memory, size, round_up(size, PAGE), kind, flags);
    if (result == CUDA_SUCCESS)
        *out = memory;
    else
        munmap(memory, round_up(size, PAGE));
    return result;
}

static bool remove_kind(CUdeviceptr va, enum mapping_kind kind, struct mapping *out) {
    struct mapping m;
    if (!mapping_find(va, &m))
        return false;
    mapping_done(&m);
    if (m.va != va || m.kind != kind)
        return false;
    memory_lock();
    bool removed = mapping_remove(va, out);
    memory_unlock();
    return removed;
}

/* Measured: nothing is not refused, and is nowhere. */
static CUresult allocate_host(void **out, size_t size, unsigned flags) {
    if (!out || size || flags > 7)
        return flags > 7 ? CUDA_ERROR_INVALID_VALUE : allocate(out, size, MAP_HOST, flags);
    *out = NULL;
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT | CALL_UNSAFE, cuMemHostAlloc, (void **out, size_t size, unsigned flags), (out, size, flags)) { return allocate_host(out, size, flags); }

API(CALL_CONTEXT | CALL_UNSAFE, cuMemAllocHost_v2, (void **out, size_t size), (out, size)) { return allocate_host(out, size, 0); }

static void wait_for(CUcontext context, void *unused) {
    (void)unused;
    context_wait(context);
}

API(CALL_CONTEXT | CALL_UNSAFE, cuMemFreeHost, (void *memory), (memory)) {
    struct mapping m;
    if (!memory)
        return CUDA_SUCCESS;
    context_each(wait_for, NULL);
    if (!remove_kind((CUdeviceptr)(uintptr_t)memory, MAP_HOST, &m))
        return CUDA_ERROR_INVALID_VALUE;
    munmap(memory, m.span);
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT | CALL_UNSAFE, cuMemHostRegister_v2, (void *memory, size_t size, unsigned flags), (memory, size, flags)) {
    unsigned char probe[1];
    if (!memory || !size || flags > 15)
        return CUDA_ERROR_INVALID_VALUE;
    /* A page that is not there cannot be locked. */
    uintptr_t first = (uintptr_t)memory & ~(PAGE - 1), last = ((uintptr_t)memory + size - 1) & ~(PAGE - 1);
    if (mincore((void *)first, PAGE, probe) || mincore((void *)last, PAGE, probe))
        return CUDA_ERROR_INVALID_VALUE;
    return add((CUdeviceptr)(uintptr_t)memory, size, size, MAP_REGISTERED, flags);
}

API(CALL_CONTEXT | CALL_UNSAFE, cuMemHostUnregister, (void *memory), (memory)) {
    struct mapping m;
    CUdeviceptr va = (CUdeviceptr)(uintptr_t)memory;
    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    /* Measured: of the contexts it only waits for the one that the memory was registered in. */
    context_wait_held(context_current());
    if (mapping_find(va, &m)) {
        mapping_done(&m);
        if (m.kind == MAP_REGISTERED && m.context != context_current() && context_valid(m.context))
            context_wait_held(m.context);
    }
    if (remove_kind(va, MAP_REGISTERED, &m))
        return CUDA_SUCCESS;
    /* What the driver knows otherwise, or elsewhere than at its start, is no matter of registration to it. */
    return address_is_device(va) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

static bool find_host(const void *memory, struct mapping *m) {
    if (!mapping_find((CUdeviceptr)(uintptr_t)memory, m))
        return false;
    mapping_done(m);
    return m->kind == MAP_HOST || m->kind == MAP_REGISTERED;
}

API(CALL_CONTEXT, cuMemHostGetDevicePointer_v2, (CUdeviceptr * out, void *memory, unsigned flags), (out, memory, flags)) {
    struct mapping m;
    if (!out || flags || !find_host(memory, &m))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuMemHostGetFlags, (unsigned *out, void *memory), (out, memory)) {
    struct mapping m;
    if (!out || !find_host(memory, &m))
        return CUDA_ERROR_INVALID_VALUE;
    *out = m.flags | CU_MEMHOSTALLOC_DEVICEMAP; /* with unified addresses every allocation is mapped */
    return CUDA_SUCCESS;
}

/* Return what tells the registration around an address from all others, 0 where there is none. */
uint64_t registration_at(CUdeviceptr address) {
    struct mapping m;
    if (!mapping_find(address, &m))
        return 0;
    mapping_done(&m);
    return m.kind == MAP_REGISTERED ? m.buffer_id : 0;
}

/* Managed memory: host memory here. While any exists the process cannot be checkpointed (measured: 801). */
CUresult managed_alloc(CUdeviceptr *out, size_t size, unsigned flags) {
    void *memory;
    CUresult result = allocate(&memory, size, MAP_MANAGED, flags);
    if (result == CUDA_SUCCESS) {
        *out = (CUdeviceptr)(uintptr_t)memory;
        atomic_fetch_add(&managed_count, 1);
    }
    return result;
}
API(CALL_CONTEXT | CALL_UNSAFE, cuMemAllocManaged, (CUdeviceptr * out, size_t size, unsigned flags), (out, size, flags)) {
    if (!out || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    return managed_alloc(out, size, flags);
}

/* Called by the free of alloc.c. */
void managed_memory_freed(void) { atomic_fetch_sub(&managed_count, 1); }

static CUresult on_managed(CUdeviceptr va, size_t size) {
    struct mapping m;
    if (!size || !mapping_find(va, &m))
        return CUDA_ERROR_INVALID_VALUE;
    mapping_done(&m);
    return m.kind == MAP_MANAGED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API_STREAM(CALL_CONTEXT, cuMemPrefetchAsync_v2, _ptsz, (CUdeviceptr va, size_t size, CUmemLocation location, unsigned flags, CUstream stream),
    (va, size, location, flags, stream)) {
    (void)location, (void)stream;
    return flags ? CUDA_ERROR_INVALID_VALUE : on_managed(va, size);
}
API(CALL_CONTEXT, cuMemAdvise_v2, (CUdeviceptr va, size_t size, CUmem_advise advice, CUmemLocation location), (va, size, advice, location)) {
    (void)advice, (void)location;
    return on_managed(va, size);
}
