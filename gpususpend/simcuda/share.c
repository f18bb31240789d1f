/* Sharing with other processes: exported descriptors and legacy IPC handles. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simcuda.h"

/* ---- VMM handles ---- */

enum { LARGE = 512 << 20 };

static CUresult exportable(CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, uint64_t *id) {
    memory_lock();
    struct memory *memory = memory_by_handle(handle);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (memory && type && (memory->object.prop.requestedHandleTypes & type) == type) {
        *id = memory->object.id;
        /* Measured of 512 MiB and not of 64: after a restore the larger ones can no longer be exported. */
        result = memory->object.restored && memory->object.size >= LARGE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    }
    memory_unlock();
    return result;
}

/* The 64 bytes of a fabric handle: they name memory and, unlike a descriptor, do not keep it. */
struct fabric_bytes {
    char magic[16];
    uint64_t object;
    char unused[40];
};
_Static_assert(sizeof(struct fabric_bytes) == sizeof(CUmemFabricHandle), "64 bytes");
static const char fabric_magic[16] = "simfabric";

static CUresult import_fabric(const void *handle, struct machine_object *object) {
    struct fabric_bytes bytes;
    if (!fabric_on())
        return CUDA_ERROR_NOT_PERMITTED;
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&bytes, handle, sizeof bytes);
    bool known = !memcmp(bytes.magic, fabric_magic, sizeof fabric_magic) && machine_object_hold(bytes.object, object) == CUDA_SUCCESS;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(CALL_INIT, cuMemExportToShareableHandle, (void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags),
    (out, handle, type, flags)) {
    uint64_t id;
    if (!out || flags || (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && type != CU_MEM_HANDLE_TYPE_FABRIC))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = exportable(handle, type, &id);
    if (result != CUDA_SUCCESS)
        return result;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return machine_export(id, out);
    struct fabric_bytes bytes = {.object = id};
    memcpy(bytes.magic, fabric_magic, sizeof fabric_magic);
    memcpy(out, &bytes, sizeof bytes);
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle * out, void *handle, CUmemAllocationHandleType type), (out, handle, type)) {
    struct machine_object object;
    if (!out || (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && type != CU_MEM_HANDLE_TYPE_FABRIC))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = type == CU_MEM_HANDLE_TYPE_FABRIC ? import_fabric(handle, &object) : machine_import((int)(intptr_t)handle, &object);
    if (result != CUDA_SUCCESS)
        return result;
    if (object.device >= 0 && device_ordinal(object.device) < 0) {
        machine_object_drop(object.id);
        return CUDA_ERROR_INVALID_DEVICE;
    }
    object.prop.requestedHandleTypes = 0; /* an import cannot be exported */
    struct memory *memory = memory_new(&object, object.team ? MEM_MULTICAST : MEM_VMM, object.creator != machine_nonce());
    memory->handle_refs = 1;
    *out = memory->handle;
    return CUDA_SUCCESS;
}

/* ---- legacy IPC of cuMemAlloc memory ---- */

struct ipc_bytes {
    char magic[8];
    uint64_t object, creator, size, serial;
    char padding[24];
};
_Static_assert(sizeof(struct ipc_bytes) == sizeof(CUipcMemHandle), "an IPC handle is 64 bytes");

API(CALL_CONTEXT, cuIpcGetMemHandle, (CUipcMemHandle * out, CUdeviceptr va), (out, va)) {
    struct mapping m;
    if (!out || !mapping_find(va, &m))
        return CUDA_ERROR_INVALID_VALUE;
    bool capable = m.kind == MAP_ALLOC;
    struct ipc_bytes bytes = {"simIPC", 0, machine_nonce(), m.size, m.buffer_id, ""};
    if (capable)
        bytes.object = m.memory->object.id;
    mapping_done(&m);
    if (!capable)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(out, &bytes, sizeof bytes);
    return CUDA_SUCCESS;
}

/* Count one more open of a handle that is open already; measured, in one context of the process only. */
static CUresult open_again(uint64_t object, CUcontext context, CUdeviceptr *out, bool *found) {
    int count;
    CUresult result = CUDA_SUCCESS;
    *found = false;
    memory_lock();
    struct mapping *rows = mapping_edit(&count);
    for (int i = 0; i < count && !*found; i++) {
        if (rows[i].kind != MAP_IPC || rows[i].memory->object.id != object)
            continue;
        *found = true;
        if (rows[i].context == context) {
            rows[i].opens++;
            *out = rows[i].va;
        } else {
            result = CUDA_ERROR_INVALID_HANDLE;
        }
    }
    mapping_publish();
    memory_unlock();
    return result;
}

static CUresult ipc_open(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    struct ipc_bytes bytes;
    struct machine_object object;
    CUcontext context = context_current();
    memcpy(&bytes, &handle, sizeof bytes);
    if (!out || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || memcmp(bytes.magic, "simIPC", 6))
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes.creator == machine_nonce())
        return CUDA_ERROR_INVALID_CONTEXT; /* a process cannot open its own */
    bool open_already;
    CUresult result = open_again(bytes.object, context, out, &open_already);
    if (open_already)
        return result;
    result = machine_object_hold(bytes.object, &object);
    if (result != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE; /* freed meanwhile */
    if (object.restored || !object.ipc_capable || device_ordinal(object.device) < 0) {
        /* Measured: after its owner's restore, memory can no longer be opened. */
        result = object.restored ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_INVALID_VALUE;
        machine_object_drop(object.id);
        return result;
    }
    struct memory *memory = memory_new(&object, MEM_IPC, true);
    struct mapping m = {
        .va = reserve_range(object.size, GRANULE, 0), .size = bytes.size, .span = object.size, .memory = memory, .kind = MAP_IPC,
        .context = context, .device = memory->device, .opens = 1, .buffer_id = mapping_new_buffer_id(),
    };
    m.access[context->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    memory_lock();
    bool inserted = m.va && mapping_insert(&m);
    memory_unlock();
    if (!inserted) {
        memory_put(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = m.va;
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuIpcOpenMemHandle, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags), (out, handle, flags)) { return ipc_open(out, handle, flags); }
API(CALL_CONTEXT, cuIpcOpenMemHandle_v2, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags), (out, handle, flags)) {
    return ipc_open(out, handle, flags);
}

static void wait_for(CUcontext context, void *unused) {
    (void)unused;
    context_wait(context);
}

API(CALL_CONTEXT, cuIpcCloseMemHandle, (CUdeviceptr va), (va)) {
    int count, left = -1;
    struct mapping closed = {0};
    context_each(wait_for, NULL);
    memory_lock();
    struct mapping *rows = mapping_edit(&count);
    for (int i = 0; i < count; i++)
        if (rows[i].kind == MAP_IPC && rows[i].va == va)
            left = --rows[i].opens;
    mapping_publish();
    if (left == 0)
        mapping_remove(va, &closed);
    memory_unlock();
    if (left < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (left == 0) {
        release_range(closed.va, closed.span);
        mapping_done(&closed);
    }
    return CUDA_SUCCESS;
}
