/* Devices: how many, their names, UUIDs and attributes. Modelled on the H200 the facts were measured on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

int device_count;
int device_physical[MAX_DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

bool device_valid(CUdevice device) { return device >= 0 && device < device_count; }

/* Return the ordinal under which this process sees a physical GPU, or -1. */
int device_ordinal(int physical) {
    for (int d = 0; d < device_count; d++)
        if (device_physical[d] == physical)
            return d;
    return -1;
}

/* The UUID of a physical GPU: the same on every simulated machine. */
CUuuid device_uuid(int physical) {
    CUuuid uuid;
    memcpy(uuid.bytes, "simcuda-gpu-\0\0\0", 16);
    uuid.bytes[15] = (char)(physical + 1);
    return uuid;
}

API(CALL_INIT, cuDeviceGetCount, (int *count), (count)) {
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal)) {
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceGetName, (char *name, int length, CUdevice device), (name, length, device)) {
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "Simulated GPU");
    return CUDA_SUCCESS;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice device) {
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *uuid = device_uuid(device_physical[device]);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuDeviceGetUuid, (CUuuid * uuid, CUdevice device), (uuid, device)) { return uuid_of(uuid, device); }
API(CALL_INIT, cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device), (uuid, device)) { return uuid_of(uuid, device); }

API(CALL_INIT, cuDeviceGetLuid, (char *luid, unsigned *mask, CUdevice device), (luid, mask, device)) {
    (void)luid, (void)mask, (void)device;
    return CUDA_ERROR_NOT_SUPPORTED; /* Windows only */
}

API(CALL_INIT, cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device), (bytes, device)) {
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = machine_device_memory();
    return CUDA_SUCCESS;
}

/* Whether the memory of the GPUs is the machine's, as on a GB10. */
static bool integrated(void) {
    const char *set = getenv("SIMCUDA_INTEGRATED");
    return set && set[0] == '1';
}

/* Whether this process has a channel to a fabric (IMEX). */
bool fabric_on(void) {
    const char *set = getenv("SIMCUDA_FABRIC");
    return set && set[0] == '1';
}

struct attribute {
    CUdevice_attribute name;
    int value;
};
static const struct attribute attributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 62914560},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
    {CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
};

static int attribute_value(CUdevice_attribute name, CUdevice device) {
    if (name == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)
        return device_physical[device] + 1;
    if (name == CU_DEVICE_ATTRIBUTE_INTEGRATED)
        return integrated();
    /* A fabric is there on request only; the attribute keeps libraries from using it. */
    if (name == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
        return fabric_on();
    if (name == CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)
        return CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | (fabric_on() ? CU_MEM_HANDLE_TYPE_FABRIC : 0);
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++)
        if (attributes[i].name == name)
            return attributes[i].value;
    return 0;
}

API(CALL_INIT, cuDeviceGetAttribute, (int *value, CUdevice_attribute name, CUdevice device), (value, name, device)) {
    if (!value || name <= 0 || name > 1000)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute_value(name, device);
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceGetProperties, (CUdevprop * p, CUdevice device), (p, device)) {
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *p = (CUdevprop){1024, {1024, 1024, 64}, {2147483647, 65535, 65535}, 49152, 65536, 32, 2147483647, 65536, 1980000, 512};
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceComputeCapability, (int *major, int *minor, CUdevice device), (major, minor, device)) {
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *major = 9;
    *minor = 0;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceGetPCIBusId, (char *id, int length, CUdevice device), (id, length, device)) {
    if (!id || length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(id, (size_t)length, "0000:%02X:00.0", device_physical[device] + 1);
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceGetByPCIBusId, (CUdevice * device, const char *id), (device, id)) {
    unsigned domain, bus, slot;
    if (!device || !id || sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return CUDA_ERROR_INVALID_VALUE;
    int found = domain == 0 && slot == 0 ? device_ordinal((int)bus - 1) : -1;
    if (found < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = found;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer), (can, device, peer)) {
    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device) || !device_valid(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceGetP2PAttribute, (int *value, CUdevice_P2PAttribute name, CUdevice from, CUdevice to), (value, name, from, to)) {
    if (!value || name < 1 || name > 4)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(from) || !device_valid(to) || from == to)
        return CUDA_ERROR_INVALID_DEVICE;
    *value = name != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDeviceGetExecAffinitySupport, (int *supported, int type, CUdevice device), (supported, type, device)) {
    (void)type;
    if (!supported)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *supported = 0;
    return CUDA_SUCCESS;
}
