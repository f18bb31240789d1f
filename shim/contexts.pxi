# Contexts of the application: which there are, on which device, and what goes with them.
#
# A drain synchronises all of them; copies of ours run in one of them.  Nothing here keeps a context alive.

cdef enum:
    MAX_CONTEXTS = 4096
    MAX_DEVICES = 64

ctypedef struct Context:
    uint32_t link
    int device
    CUcontext ctx
    uint8_t primary

# What does not change about a device.
ctypedef struct Device:
    uint32_t known
    uint8_t vmm             # memory can be made by cuMem and exported as a descriptor
    uint8_t rdma            # gpuDirectRDMACapable may be asked for
    size_t granularity
    CUuuid uuid

cdef Table contexts
cdef Device[MAX_DEVICES] devices


cdef bint device_flag(int device, CUdevice_attribute attribute) noexcept nogil:
    """Return an attribute that is a yes or a no."""
    cdef int value = 0
    return gs_real.cuDeviceGetAttribute(&value, attribute, device) == 0 and value != 0


cdef void allocation_props(CUmemAllocationProp *prop, int device, bint rdma) noexcept nogil:
    """Fill in how memory behind cuMemAlloc is made."""
    memset(prop, 0, sizeof(prop[0]))
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    prop.allocFlags.gpuDirectRDMACapable = 1 if rdma else 0


cdef Device *device_info(int device) noexcept nogil:
    """Return what is known about a device, asking the driver the first time; NULL for no such device."""
    cdef Device d
    cdef CUmemAllocationProp prop
    if device < 0 or device >= MAX_DEVICES:
        return NULL
    if gs_load(&devices[device].known) != 0:
        return &devices[device]
    memset(&d, 0, sizeof(d))
    d.vmm = (device_flag(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
             and device_flag(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
    d.rdma = device_flag(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
    if gs_real.cuDeviceGetUuid_v2 == NULL or gs_real.cuDeviceGetUuid_v2(&d.uuid, device) != 0:
        if gs_real.cuDeviceGetUuid(&d.uuid, device) != 0:
            return NULL
    if d.vmm:
        allocation_props(&prop, device, d.rdma)
        if gs_real.cuMemGetAllocationGranularity(&d.granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != 0:
            return NULL
    gs_lock(&tables_mutex)
    if devices[device].known == 0:
        devices[device] = d
        gs_store(&devices[device].known, 1)
    gs_unlock(&tables_mutex)
    return &devices[device]


cdef Context *context_find(CUcontext ctx) noexcept nogil:
    """Return the entry of a context, or NULL; `tables_mutex` is held."""
    cdef uint32_t cursor = 0
    cdef Context *c
    while True:
        c = <Context *>table_next(&contexts, sizeof(Context), &cursor)
        if c == NULL or c.ctx == ctx:
            return c


cdef bint context_note(CUcontext ctx, int device, bint primary) noexcept nogil:
    """Remember a context; False if the table is full."""
    cdef Context *c
    gs_lock(&tables_mutex)
    c = context_find(ctx)
    if c == NULL:
        c = <Context *>table_take(&contexts, sizeof(Context), MAX_CONTEXTS)
    if c != NULL:
        c.ctx = ctx
        c.device = device
        c.primary = c.primary or primary
    gs_unlock(&tables_mutex)
    return c != NULL


cdef CUcontext context_on(int device) noexcept nogil:
    """Return a context of the application on a device, the primary one first, or NULL."""
    cdef uint32_t cursor = 0
    cdef Context *c
    cdef CUcontext found = NULL
    gs_lock(&tables_mutex)
    while True:
        c = <Context *>table_next(&contexts, sizeof(Context), &cursor)
        if c == NULL:
            break
        if c.device == device and (found == NULL or c.primary):
            found = c.ctx
    gs_unlock(&tables_mutex)
    return found


cdef CUcontext context_any(int *device) noexcept nogil:
    """Return some context of the application and its device, or NULL."""
    cdef uint32_t cursor = 0
    cdef Context *c
    cdef CUcontext found = NULL
    gs_lock(&tables_mutex)
    c = <Context *>table_next(&contexts, sizeof(Context), &cursor)
    if c != NULL:
        found = c.ctx
        device[0] = c.device
    gs_unlock(&tables_mutex)
    return found


cdef CUresult current_context(CUcontext *ctx, int *device) noexcept nogil:
    """Return the calling thread's context and device, and remember the context."""
    cdef CUresult rc = gs_real.cuCtxGetCurrent(ctx)
    if rc == 0 and ctx[0] == NULL:
        rc = CUDA_ERROR_INVALID_CONTEXT
    if rc == 0:
        rc = gs_real.cuCtxGetDevice(device)
    if rc == 0 and not context_note(ctx[0], device[0], False):
        rc = CUDA_ERROR_OUT_OF_MEMORY
    return rc


cdef CUresult context_wait(CUcontext ctx, bint captures_may_begin) noexcept nogil:
    """Wait for all work of a context and break no capture; the caller's context stack is left as it was.

    Where one may begin meanwhile it does not help that none is known: it would begin between the look and the wait.
    """
    cdef CUcontext before = NULL
    cdef CUresult rc = gs_real.cuCtxPushCurrent_v2(ctx)
    if rc != 0:
        return rc
    rc = wait_beside_captures() if captures_may_begin or captures_known() else gs_real.cuCtxSynchronize()
    gs_real.cuCtxPopCurrent_v2(&before)
    return rc


cdef void context_gone(CUcontext ctx) noexcept nogil:
    """Free what the driver would have freed with a context, and forget it."""
    cdef Context *c
    if ctx == NULL:
        return
    gs_lock(&tables_mutex)
    c = context_find(ctx)
    if c != NULL:
        table_give(&contexts, sizeof(Context), c)
    gs_unlock(&tables_mutex)
    captures_forget(ctx)
    peers_forget(ctx)
    allocations_of_context_free(ctx)
    registrations_forget(ctx)
    managed_recheck()


cdef CUcontext primary_context(int device) noexcept nogil:
    """Return the primary context of a device if the application was seen to retain it, else NULL."""
    cdef uint32_t cursor = 0
    cdef Context *c
    cdef CUcontext found = NULL
    gs_lock(&tables_mutex)
    while True:
        c = <Context *>table_next(&contexts, sizeof(Context), &cursor)
        if c == NULL:
            break
        if c.primary and c.device == device:
            found = c.ctx
    gs_unlock(&tables_mutex)
    return found


cdef CUresult context_created(CUcontext *out, int device, CUresult rc) noexcept nogil:
    """Remember a context that was just made; one that cannot be remembered is not handed out."""
    if rc == 0 and out != NULL and not context_note(out[0], device, False):
        gs_real.cuCtxDestroy_v2(out[0])
        rc = CUDA_ERROR_OUT_OF_MEMORY
    return rc


cdef public CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev) noexcept nogil:
    """Create a context (ABI of CUDA 2)."""
    cdef CUresult rc
    if gs_real.cuCtxCreate == NULL and not gs_find(<void *>&gs_real.cuCtxCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pctx, dev, gs_real.cuCtxCreate(pctx, flags, dev))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) noexcept nogil:
    """Create a context."""
    cdef CUresult rc
    if gs_real.cuCtxCreate_v2 == NULL and not gs_find(<void *>&gs_real.cuCtxCreate_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pctx, dev, gs_real.cuCtxCreate_v2(pctx, flags, dev))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams,
                                    unsigned int flags, CUdevice dev) noexcept nogil:
    """Create a context with an affinity."""
    cdef CUresult rc
    if gs_real.cuCtxCreate_v3 == NULL and not gs_find(<void *>&gs_real.cuCtxCreate_v3):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pctx, dev, gs_real.cuCtxCreate_v3(pctx, paramsArray, numParams, flags, dev))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags,
                                    CUdevice dev) noexcept nogil:
    """Create a context with parameters."""
    cdef CUresult rc
    if gs_real.cuCtxCreate_v4 == NULL and not gs_find(<void *>&gs_real.cuCtxCreate_v4):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pctx, dev, gs_real.cuCtxCreate_v4(pctx, ctxCreateParams, flags, dev))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuCtxDestroy(CUcontext ctx) noexcept nogil:
    """Destroy a context (ABI of CUDA 2), and with it what was allocated in it."""
    cdef CUresult rc
    if gs_real.cuCtxDestroy == NULL and not gs_find(<void *>&gs_real.cuCtxDestroy):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuCtxDestroy(ctx)
    if rc == 0:
        context_gone(ctx)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuCtxDestroy_v2(CUcontext ctx) noexcept nogil:
    """Destroy a context, and with it what was allocated in it."""
    cdef CUresult rc
    if gs_real.cuCtxDestroy_v2 == NULL and not gs_find(<void *>&gs_real.cuCtxDestroy_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuCtxDestroy_v2(ctx)
    if rc == 0:
        context_gone(ctx)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) noexcept nogil:
    """Retain the primary context."""
    cdef CUresult rc
    if gs_real.cuDevicePrimaryCtxRetain == NULL and not gs_find(<void *>&gs_real.cuDevicePrimaryCtxRetain):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuDevicePrimaryCtxRetain(pctx, dev)
    if rc == 0 and pctx != NULL and not context_note(pctx[0], dev, True):
        gs_real.cuDevicePrimaryCtxRelease_v2(dev)
        rc = CUDA_ERROR_OUT_OF_MEMORY
    gs_leave(GS_MEMORY)
    return rc


cdef void primary_released(int device) noexcept nogil:
    """Free what went with the primary context if its last user has released it."""
    cdef unsigned int flags = 0
    cdef int active = 1
    if gs_real.cuDevicePrimaryCtxGetState(device, &flags, &active) == 0 and active == 0:
        context_gone(primary_context(device))


cdef public CUresult cuDevicePrimaryCtxRelease(CUdevice dev) noexcept nogil:
    """Release the primary context (ABI before 11.0)."""
    cdef CUresult rc
    if gs_real.cuDevicePrimaryCtxRelease == NULL and not gs_find(<void *>&gs_real.cuDevicePrimaryCtxRelease):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuDevicePrimaryCtxRelease(dev)
    if rc == 0:
        primary_released(dev)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) noexcept nogil:
    """Release the primary context."""
    cdef CUresult rc
    if gs_real.cuDevicePrimaryCtxRelease_v2 == NULL and not gs_find(<void *>&gs_real.cuDevicePrimaryCtxRelease_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuDevicePrimaryCtxRelease_v2(dev)
    if rc == 0:
        primary_released(dev)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuDevicePrimaryCtxReset(CUdevice dev) noexcept nogil:
    """Reset the primary context (ABI before 11.0)."""
    cdef CUresult rc
    if gs_real.cuDevicePrimaryCtxReset == NULL and not gs_find(<void *>&gs_real.cuDevicePrimaryCtxReset):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuDevicePrimaryCtxReset(dev)
    if rc == 0:
        context_gone(primary_context(dev))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) noexcept nogil:
    """Reset the primary context: everything allocated in it is freed."""
    cdef CUresult rc
    if gs_real.cuDevicePrimaryCtxReset_v2 == NULL and not gs_find(<void *>&gs_real.cuDevicePrimaryCtxReset_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuDevicePrimaryCtxReset_v2(dev)
    if rc == 0:
        context_gone(primary_context(dev))
    gs_leave(GS_MEMORY)
    return rc
