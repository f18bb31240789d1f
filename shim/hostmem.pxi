# Host memory that the application page-locks stays registered.  The driver carries a registration through a checkpoint,
# and a copy in a graph keeps the registration itself: unregistered, it would be broken, registered again or not
# (docs/decisions/host-registrations.md).  Remap looks that each is there still, at the address that it had for the GPU;
# what a driver has lost is registered again.

cdef enum:
    MAX_REGISTRATIONS = 65536

ctypedef struct Registration:
    uint32_t link
    unsigned int flags
    uint64_t address
    uint64_t size
    uint64_t device_address     # what the GPU calls it, 0: unknown
    CUcontext ctx               # where it was registered
    uint8_t entered

cdef Table registrations


cdef Registration *registration_at(uint64_t address) noexcept nogil:
    """Return the registration that begins at an address, or NULL; `tables_mutex` is held."""
    cdef uint32_t cursor = 0
    cdef Registration *r
    while True:
        r = <Registration *>table_next(&registrations, sizeof(Registration), &cursor)
        if r == NULL or (r.entered and r.address == address):
            return r


cdef CUresult device_address_of(uint64_t address, uint64_t *on_device) noexcept nogil:
    """Find the address of registered memory as the GPU knows it."""
    cdef CUdeviceptr found = 0
    cdef CUresult rc = gs_real.cuMemHostGetDevicePointer_v2(&found, <void *>address, 0)
    on_device[0] = found if rc == 0 else 0
    return rc


cdef CUresult register_host(void *p, size_t size, unsigned int flags, bint current) noexcept nogil:
    """Register, through the ABI that the application used, and record it."""
    cdef Registration *r
    cdef CUcontext ctx = NULL
    cdef CUresult rc
    gs_lock(&tables_mutex)
    r = <Registration *>table_take(&registrations, sizeof(Registration), MAX_REGISTRATIONS)
    gs_unlock(&tables_mutex)
    if r == NULL:
        gs_log(b"registration table is full")
        return CUDA_ERROR_OUT_OF_MEMORY
    gs_real.cuCtxGetCurrent(&ctx)
    rc = gs_real.cuMemHostRegister_v2(p, size, flags) if current else gs_real.cuMemHostRegister(p, size, flags)
    gs_lock(&tables_mutex)
    if rc == 0:
        r.address = <uint64_t>p
        r.size = size
        r.flags = flags
        r.ctx = ctx
        r.entered = 1
    else:
        table_give(&registrations, sizeof(Registration), r)
    gs_unlock(&tables_mutex)
    if rc == 0:
        # Not mapped for the GPU, then the address stays 0.
        device_address_of(<uint64_t>p, &r.device_address)
    return rc


cdef public CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags) noexcept nogil:
    """Page-lock memory of the application (ABI before 6.5)."""
    cdef CUresult rc
    if gs_real.cuMemHostRegister == NULL and not gs_find(<void *>&gs_real.cuMemHostRegister):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = register_host(p, bytesize, Flags, False)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags) noexcept nogil:
    """Page-lock memory of the application."""
    cdef CUresult rc
    if gs_real.cuMemHostRegister_v2 == NULL and not gs_find(<void *>&gs_real.cuMemHostRegister_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = register_host(p, bytesize, Flags, True)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemHostUnregister(void *p) noexcept nogil:
    """Let memory of the application go."""
    cdef Registration *r
    cdef CUresult rc
    if gs_real.cuMemHostUnregister == NULL and not gs_find(<void *>&gs_real.cuMemHostUnregister):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemHostUnregister(p)
    if rc == 0:
        gs_lock(&tables_mutex)
        r = registration_at(<uint64_t>p)
        if r != NULL:
            table_give(&registrations, sizeof(Registration), r)
        gs_unlock(&tables_mutex)
    gs_leave(GS_MEMORY)
    return rc


cdef void registrations_forget(CUcontext ctx) noexcept nogil:
    """Forget what was registered in a context that is gone, unless the driver still knows it."""
    cdef uint32_t cursor = 0
    cdef Registration *r
    gs_lock(&tables_mutex)
    while True:
        r = <Registration *>table_next(&registrations, sizeof(Registration), &cursor)
        if r == NULL:
            break
        if r.entered and r.ctx == ctx:
            table_give(&registrations, sizeof(Registration), r)
    gs_unlock(&tables_mutex)


cdef Registration *next_registration(uint32_t *cursor) noexcept nogil:
    """Return the next registration, or NULL; for phases."""
    cdef Registration *r
    gs_lock(&tables_mutex)
    while True:
        r = <Registration *>table_next(&registrations, sizeof(Registration), cursor)
        if r == NULL or r.entered:
            break
    gs_unlock(&tables_mutex)
    return r


cdef bint is_mapped(uint64_t address, uint64_t size) noexcept nogil:
    """Say whether the whole range is mapped in this process."""
    cdef unsigned char[256] resident
    cdef uint64_t at = address & ~<uint64_t>4095, end = address + size, n
    while at < end:
        n = end - at if end - at < 256 * 4096 else 256 * 4096
        if mincore(<void *>at, n, resident) != 0:
            return errno != ENOMEM
        at += n
    return True


cdef CUresult registration_enter(Registration *r) noexcept nogil:
    """Make the context current in which memory was registered."""
    cdef int device = 0
    return gs_real.cuCtxPushCurrent_v2(r.ctx if r.ctx != NULL else context_any(&device))


cdef CUresult register_again(Registration *r) noexcept nogil:
    """Register what the driver has lost, at the old address with the old flags."""
    cdef CUresult rc
    if gs_real.cuMemHostRegister_v2 != NULL:
        rc = gs_real.cuMemHostRegister_v2(<void *>r.address, r.size, r.flags)
    else:
        rc = gs_real.cuMemHostRegister(<void *>r.address, r.size, r.flags)
    return 0 if rc == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED else rc


cdef CUresult registration_restore(Registration *r, bint *moved) noexcept nogil:
    """See to it that the driver knows the memory; `*moved` if by another address for the GPU than before."""
    cdef CUcontext before = NULL
    cdef uint64_t now = 0
    cdef CUresult rc
    moved[0] = False
    if r.device_address == 0:
        return 0
    rc = registration_enter(r)
    if rc != 0:
        return rc
    rc = device_address_of(r.address, &now)
    if rc != 0 and not is_mapped(r.address, r.size):
        # What the application has unmapped could not be registered again.
        rc = 0
        now = r.device_address
    elif rc != 0:
        rc = register_again(r)
        if rc == 0:
            rc = device_address_of(r.address, &now)
    moved[0] = rc == 0 and now != r.device_address
    gs_real.cuCtxPopCurrent_v2(&before)
    return rc
