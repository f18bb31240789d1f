/* Multicast objects: one address whose stores reach the memory that is bound for each of several GPUs.
 *
 * Stricter than the driver's documentation: a GPU is added once, binds of one GPU do not overlap, an unbind repeats a
 * bind of the same process, memory at an address is bound inside one mapping, a store needs memory of every GPU, and an
 * ordinary load is refused. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simcuda.h"

enum { FIRST_TO_MAKE_AGAIN = 610 }; /* reported: older branches cannot add a GPU in a process that was restored */

static bool multiple(unsigned long long value) { return value % GRANULE == 0; }

static CUresult check_prop(const CUmulticastObjectProp *prop) {
    if (!prop || prop->numDevices < 1 || prop->numDevices > (unsigned)device_count || !prop->size || !multiple(prop->size) || prop->flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->handleTypes & ~(unsigned long long)(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->handleTypes & CU_MEM_HANDLE_TYPE_FABRIC && !fabric_on())
        return CUDA_ERROR_NOT_PERMITTED;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMulticastGetGranularity, (size_t *out, const CUmulticastObjectProp *prop, CUmulticastGranularity_flags option), (out, prop, option)) {
    if (!out || !prop || option < 0 || option > 1)
        return CUDA_ERROR_INVALID_VALUE;
    *out = GRANULE;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMulticastCreate, (CUmemGenericAllocationHandle * out, const CUmulticastObjectProp *prop), (out, prop)) {
    CUresult result = out ? check_prop(prop) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    struct machine_object object = {.size = prop->size, .device = -1, .team = prop->numDevices};
    object.prop.requestedHandleTypes = (int)prop->handleTypes;
    result = machine_object_create(&object);
    if (result != CUDA_SUCCESS)
        return result;
    struct memory *memory = memory_new(&object, MEM_MULTICAST, false);
    memory->handle_refs = 1;
    *out = memory->handle;
    return CUDA_SUCCESS;
}

/* Return what a handle stands for, if it is of that kind, with a reference. */
static struct memory *hold(CUmemGenericAllocationHandle handle, enum memory_kind kind) {
    memory_lock();
    struct memory *memory = memory_by_handle(handle);
    if (memory && memory->kind != kind)
        memory = NULL;
    if (memory)
        memory_get(memory);
    memory_unlock();
    return memory;
}

API(CALL_INIT, cuMulticastAddDevice, (CUmemGenericAllocationHandle handle, CUdevice device), (handle, device)) {
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (checkpoint_restored() && driver_branch() < FIRST_TO_MAKE_AGAIN)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct memory *team = hold(handle, MEM_MULTICAST);
    if (!team)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = team_join(team->object.id, device_physical[device]);
    memory_put(team);
    return result;
}

/* Wait until all GPUs of a multicast object were added, for ever as the driver does; nothing to do for other memory. */
bool multicast_await(CUmemGenericAllocationHandle handle) {
    struct memory *team = hold(handle, MEM_MULTICAST);
    if (!team)
        return false;
    while (!team_complete(team->object.id))
        nap_us(500);
    memory_put(team);
    return true;
}

/* ---- binding ---- */

struct bind {
    CUmemGenericAllocationHandle team;
    size_t offset, size;
    int device; /* ordinal, -1: that of the memory */
};

static bool range_fits(const struct bind *bind, size_t memory_offset, size_t memory_size, size_t team_size) {
    return bind->size && multiple(bind->size) && multiple(bind->offset) && multiple(memory_offset)
        && bind->offset <= team_size && bind->size <= team_size - bind->offset
        && memory_offset <= memory_size && bind->size <= memory_size - memory_offset;
}

/* Bind a part of memory that the caller holds. */
static CUresult bind_held(const struct bind *bind, const struct memory *memory, size_t memory_offset) {
    struct memory *team = hold(bind->team, MEM_MULTICAST);
    if (!team)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    bool shared = team->foreign || team->object.prop.requestedHandleTypes;
    if (!range_fits(bind, memory_offset, memory->object.size, team->object.size) || memory->device < 0)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (shared && !memory->object.prop.requestedHandleTypes)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (!team_has(team->object.id, memory->object.device) || (bind->device >= 0 && bind->device != memory->device))
        result = CUDA_ERROR_INVALID_DEVICE;
    else
        result = team_bind(team->object.id, memory->object.device, bind->offset, bind->size, memory->object.id, memory_offset);
    memory_put(team);
    return result;
}

static CUresult bind_mem(const struct bind *bind, CUmemGenericAllocationHandle handle, size_t memory_offset, unsigned long long flags) {
    if (flags || !multicast_await(bind->team))
        return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory = hold(handle, MEM_VMM);
    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = bind_held(bind, memory, memory_offset);
    memory_put(memory);
    return result;
}

static CUresult bind_addr(const struct bind *bind, CUdeviceptr va, unsigned long long flags) {
    struct mapping m;
    if (flags || !multicast_await(bind->team) || !mapping_find(va, &m))
        return CUDA_ERROR_INVALID_VALUE;
    bool bindable = (m.kind == MAP_VMM && m.memory->kind == MEM_VMM) || m.kind == MAP_POOL;
    CUresult result = bindable ? bind_held(bind, m.memory, (size_t)(va - m.va)) : CUDA_ERROR_INVALID_VALUE;
    mapping_done(&m);
    return result;
}

API(CALL_INIT, cuMulticastBindMem, (CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory, size_t memory_offset, size_t size,
    unsigned long long flags), (handle, offset, memory, memory_offset, size, flags)) {
    return bind_mem(&(struct bind){handle, offset, size, -1}, memory, memory_offset, flags);
}
API(CALL_INIT, cuMulticastBindMem_v2, (CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, CUmemGenericAllocationHandle memory,
    size_t memory_offset, size_t size, unsigned long long flags), (handle, device, offset, memory, memory_offset, size, flags)) {
    return device_valid(device) ? bind_mem(&(struct bind){handle, offset, size, device}, memory, memory_offset, flags) : CUDA_ERROR_INVALID_DEVICE;
}
API(CALL_INIT, cuMulticastBindAddr, (CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr va, size_t size, unsigned long long flags),
    (handle, offset, va, size, flags)) {
    return bind_addr(&(struct bind){handle, offset, size, -1}, va, flags);
}
API(CALL_INIT, cuMulticastBindAddr_v2, (CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, CUdeviceptr va, size_t size,
    unsigned long long flags), (handle, device, offset, va, size, flags)) {
    return device_valid(device) ? bind_addr(&(struct bind){handle, offset, size, device}, va, flags) : CUDA_ERROR_INVALID_DEVICE;
}

API(CALL_INIT, cuMulticastUnbind, (CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size), (handle, device, offset, size)) {
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    struct memory *team = hold(handle, MEM_MULTICAST);
    if (!team)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = team_unbind(team->object.id, device_physical[device], offset, size);
    memory_put(team);
    return result;
}

/* ---- stores ---- */

static bool map_replica(struct replica *replica, const struct team_place *place, size_t length) {
    size_t from = place->offset / PAGE * PAGE;
    int fd = machine_object_open(place->memory);
    if (fd < 0)
        return false;
    replica->mapped_size = place->offset - from + length;
    replica->mapped = mmap(NULL, replica->mapped_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)from);
    close(fd);
    replica->bytes = (char *)replica->mapped + (place->offset - from);
    return replica->mapped != MAP_FAILED;
}

/* Give the bytes behind an offset of an object, of every GPU, as far as they lie together on all of them. */
CUresult multicast_view(struct view *view, uint64_t team, size_t offset, size_t size) {
    struct team_place places[MAX_DEVICES];
    view->length = size;
    unsigned count = team_places(team, offset, places, &view->length);
    if (!count)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (unsigned i = 0; i < count; i++, view->replica_count++)
        if (!map_replica(&view->replicas[i], &places[i], view->length))
            return CUDA_ERROR_UNKNOWN;
    view->bytes = view->replicas[0].bytes;
    return CUDA_SUCCESS;
}
