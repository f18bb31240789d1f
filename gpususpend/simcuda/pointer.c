/* What the driver says about an address. */
#include <string.h>

#include "simcuda.h"

static bool is_host(const struct mapping *m) { return m->kind == MAP_HOST || m->kind == MAP_REGISTERED || (m->memory && is_host_memory(m->memory)); }

static bool is_vmm(const struct mapping *m) { return m->kind == MAP_VMM; }

/* Measured: memory that was opened in a context of another device shows that device. */
static int ordinal_of(const struct mapping *m) {
    if (m->kind == MAP_IPC)
        return m->context->device;
    return m->device < 0 ? CU_DEVICE_CPU : m->device;
}

#define GIVE(type, value)                 \
    do {                                  \
        *(type *)data = (type)(value);    \
        return CUDA_SUCCESS;              \
    } while (0)

static CUresult tell(void *data, CUpointer_attribute name, CUdeviceptr address, const struct mapping *m) {
    switch (name) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        if (is_vmm(m))
            GIVE(CUcontext, NULL);
        GIVE(CUcontext, m->context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: GIVE(unsigned, is_host(m) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: GIVE(CUdeviceptr, address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!is_host(m) && m->kind != MAP_MANAGED)
            return CUDA_ERROR_INVALID_VALUE;
        GIVE(CUdeviceptr, address);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: GIVE(int, 0);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: GIVE(unsigned long long, m->buffer_id);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: GIVE(int, m->kind == MAP_MANAGED);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: GIVE(int, ordinal_of(m));
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: GIVE(int, m->kind == MAP_ALLOC);
    /* Measured: the range of cuMem memory starts where its reservation starts; that it also ends there is assumed. */
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: GIVE(CUdeviceptr, is_vmm(m) ? m->range : m->va);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: GIVE(size_t, is_vmm(m) ? m->range_size : m->size);
    case CU_POINTER_ATTRIBUTE_MAPPED: GIVE(int, 1);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: GIVE(int, is_vmm(m) ? m->memory->object.prop.requestedHandleTypes : 0);
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        GIVE(int, is_vmm(m) ? m->memory->object.prop.allocFlags.gpuDirectRDMACapable : m->kind == MAP_ALLOC);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: {
        CUcontext context = context_current();
        GIVE(int, is_vmm(m) && context ? m->access[context->device] : CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: GIVE(CUmemoryPool, m->pool);
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: GIVE(size_t, m->span);
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: GIVE(CUdeviceptr, m->va);
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: GIVE(unsigned long long, m->buffer_id);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

API(CALL_UNLOCKED, cuPointerGetAttribute, (void *data, CUpointer_attribute name, CUdeviceptr address), (data, name, address)) {
    struct mapping m;
    if (!data || name <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!mapping_find(address, &m)) {
        if (name != CU_POINTER_ATTRIBUTE_MAPPED)
            return CUDA_ERROR_INVALID_VALUE;
        *(int *)data = 0;
        return CUDA_SUCCESS;
    }
    CUresult result = tell(data, name, address, &m);
    mapping_done(&m);
    return result;
}

/* What an address that the driver does not know reads in the plural call: zeros, and no error. */
static void tell_unknown(void *data, CUpointer_attribute name) {
    bool wide = name == CU_POINTER_ATTRIBUTE_CONTEXT || name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || name == CU_POINTER_ATTRIBUTE_HOST_POINTER
        || name == CU_POINTER_ATTRIBUTE_BUFFER_ID || name == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || name == CU_POINTER_ATTRIBUTE_RANGE_SIZE
        || name == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE || name == CU_POINTER_ATTRIBUTE_MAPPING_SIZE
        || name == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR || name == CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID;
    memset(data, 0, wide ? 8 : 4);
    if (name == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)data = CU_DEVICE_INVALID;
}

API(CALL_UNLOCKED, cuPointerGetAttributes, (unsigned count, CUpointer_attribute *names, void **data, CUdeviceptr address), (count, names, data, address)) {
    struct mapping m;
    if (!count || !names || !data)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        if (names[i] <= 0 || names[i] > 21 || !data[i])
            return CUDA_ERROR_INVALID_VALUE;
    bool known = mapping_find(address, &m);
    for (unsigned i = 0; i < count; i++)
        if (!known || tell(data[i], names[i], address, &m) != CUDA_SUCCESS)
            tell_unknown(data[i], names[i]);
    if (known)
        mapping_done(&m);
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuPointerSetAttribute, (const void *value, CUpointer_attribute name, CUdeviceptr address), (value, name, address)) {
    if (!value || name != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !address_is_device(address))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
