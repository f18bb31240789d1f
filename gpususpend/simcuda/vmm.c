/* Virtual memory management: reservations, physical memory, mappings, access.
 *
 * As measured: a mapping is the whole of its physical memory, access is set on whole mappings. Stricter than the driver:
 * a mapping lies inside one reservation, unmap takes whole mappings without a gap and nothing else. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simcuda.h"

/* ---- reservations: inaccessible address space ---- */

struct reservation {
    struct reservation *next;
    CUdeviceptr va;
    size_t size;
};
static struct reservation *reservations; /* of cuMemAddressReserve alone; under the memory lock */

static void *reserve_at(size_t size, CUdeviceptr at) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED_NOREPLACE : 0);
    void *p = mmap((void *)(uintptr_t)at, size, PROT_NONE, flags, -1, 0);
    return p == MAP_FAILED || (at && p != (void *)(uintptr_t)at) ? NULL : p;
}

/* Take address space, at the hint if that is free; 0 when there is none. */
CUdeviceptr reserve_range(size_t size, size_t alignment, CUdeviceptr hint) {
    if (hint && hint % alignment == 0) {
        void *there = reserve_at(size, hint);
        if (there)
            return hint;
    }
    char *p = reserve_at(size + alignment, 0);
    if (!p)
        return 0;
    char *start = (char *)round_up((size_t)p, alignment);
    if (start > p)
        munmap(p, (size_t)(start - p));
    munmap(start + size, (size_t)(p + alignment - start));
    return (CUdeviceptr)(uintptr_t)start;
}

void release_range(CUdeviceptr va, size_t size) { munmap((void *)(uintptr_t)va, size); }

static bool multiple(unsigned long long value) { return value % GRANULE == 0; }

API(CALL_INIT, cuMemAddressReserve, (CUdeviceptr * out, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags),
    (out, size, alignment, hint, flags)) {
    if (!out || !size || !multiple(size) || (alignment & (alignment - 1)) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    struct reservation *reservation = pages_alloc(sizeof *reservation);
    CUdeviceptr va = reserve_range(size, alignment < GRANULE ? GRANULE : alignment, hint);
    if (!va || !reservation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory_lock();
    *reservation = (struct reservation){reservations, va, size};
    reservations = reservation;
    memory_unlock();
    *out = va;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMemAddressFree, (CUdeviceptr va, size_t size), (va, size)) {
    memory_lock();
    struct reservation **at = &reservations;
    while (*at && ((*at)->va != va || (*at)->size != size))
        at = &(*at)->next;
    struct reservation *found = *at;
    bool ok = found && !mapping_overlaps(va, size);
    if (ok)
        *at = found->next;
    memory_unlock();
    if (!ok)
        return CUDA_ERROR_INVALID_VALUE;
    pages_free(found, sizeof *found);
    release_range(va, size);
    return CUDA_SUCCESS;
}

static const struct reservation *reservation_around(CUdeviceptr va, size_t size) {
    const struct reservation *r = reservations;
    while (r && !(va >= r->va && va - r->va <= r->size && size <= r->size - (size_t)(va - r->va)))
        r = r->next;
    return r;
}

/* ---- physical memory ---- */

static bool on_host(CUmemLocationType type) {
    return type == CU_MEM_LOCATION_TYPE_HOST || type == CU_MEM_LOCATION_TYPE_HOST_NUMA || type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static CUresult check_prop(const CUmemAllocationProp *prop) {
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        if (!device_valid(prop->location.id))
            return CUDA_ERROR_INVALID_DEVICE;
    } else if (!on_host(prop->location.type)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (prop->requestedHandleTypes & ~(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC && !fabric_on())
        return CUDA_ERROR_NOT_PERMITTED; /* as measured where no IMEX channel exists */
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMemGetAllocationGranularity, (size_t *out, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option), (out, prop, option)) {
    if (!out || option < 0 || option > 1)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_prop(prop);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_PERMITTED)
        *out = GRANULE;
    return result == CUDA_ERROR_NOT_PERMITTED ? CUDA_SUCCESS : result;
}

API(CALL_INIT, cuMemCreate, (CUmemGenericAllocationHandle * out, size_t size, const CUmemAllocationProp *prop, unsigned long long flags),
    (out, size, prop, flags)) {
    CUresult result = out && size && multiple(size) && !flags ? check_prop(prop) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    bool host = on_host(prop->location.type);
    struct machine_object object = {
        .size = size, .charged = host ? 0 : size, .device = host ? -1 : device_physical[prop->location.id], .prop = *prop,
    };
    if (prop->location.type == CU_MEM_LOCATION_TYPE_HOST) /* is answered as memory of a node */
        object.prop.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = 0};
    result = machine_object_create(&object);
    if (result != CUDA_SUCCESS)
        return result;
    struct memory *memory = memory_new(&object, MEM_VMM, false);
    memory->handle_refs = 1;
    *out = memory->handle;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMemRelease, (CUmemGenericAllocationHandle handle), (handle)) {
    memory_lock();
    struct memory *memory = memory_by_handle(handle);
    if (memory)
        memory->handle_refs--;
    memory_unlock();
    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    memory_put(memory);
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * out, void *address), (out, address)) {
    struct mapping m;
    if (!out || !mapping_find((CUdeviceptr)(uintptr_t)address, &m))
        return CUDA_ERROR_INVALID_VALUE;
    if (m.kind != MAP_VMM) {
        mapping_done(&m);
        return CUDA_ERROR_INVALID_VALUE;
    }
    memory_lock();
    m.memory->handle_refs++; /* the look-up's reference becomes the handle's */
    *out = m.memory->handle;
    memory_unlock();
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp * out, CUmemGenericAllocationHandle handle), (out, handle)) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    struct memory *memory = memory_by_handle(handle);
    if (memory && memory->kind == MEM_MULTICAST)
        memory = NULL; /* no allocation, so it has none */
    if (memory) {
        *out = memory->object.prop;
        if (memory->device >= 0)
            out->location.id = memory->device;
    }
    memory_unlock();
    return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- mappings ---- */

API(CALL_INIT, cuMemMap, (CUdeviceptr va, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
    (va, size, offset, handle, flags)) {
    if (!size || !multiple(va) || !multiple(size) || !multiple(offset) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    multicast_await(handle);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    struct memory *memory = memory_by_handle(handle);
    const struct reservation *around = reservation_around(va, size);
    bool known = memory && (memory->kind == MEM_VMM || memory->kind == MEM_MULTICAST);
    if (known && (offset || size != memory->object.size)) {
        result = CUDA_ERROR_NOT_SUPPORTED;
    } else if (known && around && !mapping_overlaps(va, size)) {
        struct mapping m = {
            .va = va, .size = size, .span = size, .memory = memory, .kind = MAP_VMM, .device = memory->device,
            .buffer_id = mapping_new_buffer_id(), .range = around->va, .range_size = around->size,
        };
        memory_get(memory);
        result = mapping_insert(&m) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory_unlock();
    return result;
}

/* Tell whether [va, va+size) is whole mappings of the VMM calls without a gap, and which; memory lock held. */
static bool whole_mappings(CUdeviceptr va, size_t size, int *first, int *last) {
    int count;
    const struct mapping *rows = mapping_table(&count);
    CUdeviceptr at = va;
    *first = -1;
    for (int i = 0; i < count && at < va + size; i++) {
        if (rows[i].va != at || rows[i].kind != MAP_VMM)
            continue;
        *first = *first < 0 ? i : *first;
        *last = i;
        at += rows[i].size;
    }
    return *first >= 0 && at == va + size;
}

/* Put host memory at its address for the CPU. */
void host_mapping_set(const struct mapping *m) {
    int fd = machine_object_open(m->memory->object.id);
    int protection = m->host_access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    if (fd < 0)
        return;
    mmap((void *)(uintptr_t)m->va, m->span, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    close(fd);
}

/* Leave an inaccessible private mapping, whatever lies there: measured, the real unmap does the same. */
void host_mapping_clear(const struct mapping *m) {
    mmap((void *)(uintptr_t)m->va, m->span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

API(CALL_INIT, cuMemUnmap, (CUdeviceptr va, size_t size), (va, size)) {
    int first, last;
    if (!size || !multiple(va) || !multiple(size))
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    bool ok = whole_mappings(va, size, &first, &last);
    memory_unlock();
    if (!ok)
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = va; at < va + size;) {
        struct mapping m;
        memory_lock();
        bool removed = mapping_remove(at, &m);
        memory_unlock();
        if (!removed)
            return CUDA_ERROR_INVALID_VALUE; /* another thread unmaps the same range */
        if (is_host_memory(m.memory))
            host_mapping_clear(&m);
        at += m.size;
        mapping_done(&m);
    }
    return CUDA_SUCCESS;
}

/* A multicast object is for the GPUs that were added to it. */
static CUresult check_team(const CUmemAccessDesc *desc, const struct mapping *rows, int first, int last) {
    for (int i = first; i <= last; i++)
        if (rows[i].memory->kind == MEM_MULTICAST && !team_has(rows[i].memory->object.id, device_physical[desc->location.id]))
            return CUDA_ERROR_INVALID_DEVICE;
    return CUDA_SUCCESS;
}

static CUresult check_access(const CUmemAccessDesc *desc, const struct mapping *rows, int first, int last) {
    bool flags_valid = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ
        || desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!flags_valid)
        return CUDA_ERROR_INVALID_VALUE;
    if (desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return device_valid(desc->location.id) ? check_team(desc, rows, first, last) : CUDA_ERROR_INVALID_VALUE;
    if (!on_host(desc->location.type))
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = first; i <= last; i++) /* the host reaches host memory alone */
        if (!is_host_memory(rows[i].memory))
            return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

static void apply_access(struct mapping *m, const CUmemAccessDesc *desc) {
    if (desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        m->access[desc->location.id] = (unsigned char)desc->flags;
        return;
    }
    m->host_access = (unsigned char)desc->flags;
    if (m->host_access)
        host_mapping_set(m);
    else
        host_mapping_clear(m);
}

API(CALL_INIT, cuMemSetAccess, (CUdeviceptr va, size_t size, const CUmemAccessDesc *list, size_t count), (va, size, list, count)) {
    int first, last, rows_count;
    if (!size || !list || !count)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    CUresult result = whole_mappings(va, size, &first, &last) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = check_access(&list[i], mapping_table(&rows_count), first, last);
    struct mapping *rows = result == CUDA_SUCCESS ? mapping_edit(&rows_count) : NULL;
    if (rows) {
        for (int row = first; row <= last; row++)
            for (size_t i = 0; i < count; i++)
                apply_access(&rows[row], &list[i]);
        mapping_publish();
    }
    memory_unlock();
    return result == CUDA_SUCCESS && !rows ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

API(CALL_INIT, cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr va), (flags, location, va)) {
    struct mapping m;
    if (!flags || !location || !mapping_find(va, &m))
        return CUDA_ERROR_INVALID_VALUE;
    mapping_done(&m);
    if (m.kind != MAP_VMM)
        return CUDA_ERROR_INVALID_VALUE;
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        if (!device_valid(location->id))
            return CUDA_ERROR_INVALID_DEVICE;
        *flags = m.access[location->id];
    } else if (on_host(location->type)) {
        *flags = m.host_access;
    } else {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}
