# What the driver says about an address, as it would about native memory.
#
# Only a question that the driver has to answer waits at the gate: while memory is away it would answer wrongly.

cdef uint64_t shown_buffer_id(uint64_t id) noexcept nogil:
    """Return a buffer id far from the driver's own, which count up from 1."""
    return id | <uint64_t>1 << 62


cdef int shown_device(const Allocation *a) noexcept nogil:
    """Return the device that native memory shows: opened memory that of the context which opened it (measured)."""
    cdef Context *c
    cdef int device = a.device
    if a.type == OPENED:
        gs_lock(&tables_mutex)
        c = context_find(a.ctx)
        if c != NULL:
            device = c.device
        gs_unlock(&tables_mutex)
    return device


cdef bint native_answer(const Allocation *a, CUpointer_attribute attribute, uint64_t va, void *data) noexcept nogil:
    """Write what native memory shows; False where the driver's own answer is right."""
    if attribute == CU_POINTER_ATTRIBUTE_CONTEXT:
        (<CUcontext *>data)[0] = a.ctx
    elif attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        (<unsigned int *>data)[0] = CU_MEMORYTYPE_DEVICE
    elif attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        (<CUdeviceptr *>data)[0] = va
    elif attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID:
        (<unsigned long long *>data)[0] = shown_buffer_id(a.id)
    elif attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED:
        (<unsigned int *>data)[0] = 0
    elif attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        (<int *>data)[0] = shown_device(a)
    elif attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        (<int *>data)[0] = 0 if a.type == OPENED else 1
    elif attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR or attribute == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        (<CUdeviceptr *>data)[0] = a.va
    elif attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE or attribute == CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        (<size_t *>data)[0] = a.size
    elif attribute == CU_POINTER_ATTRIBUTE_MAPPED:
        (<int *>data)[0] = 1
    elif attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        (<unsigned long long *>data)[0] = 0
    elif attribute == CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        (<int *>data)[0] = 1 if a.rdma else 0
    elif attribute == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        (<int *>data)[0] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    elif attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        (<void **>data)[0] = NULL
    else:
        return False
    return True


cdef bint mapped_answer(CUpointer_attribute attribute, uint64_t va, void *data) noexcept nogil:
    """Write what must not change about mapped memory: its buffer id, by which libraries key what they know of it."""
    cdef Mapping *m
    if attribute != CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return False
    gs_lock(&tables_mutex)
    m = mapping_at(va)
    if m != NULL:
        (<unsigned long long *>data)[0] = shown_buffer_id(m.buffer_id)
    gs_unlock(&tables_mutex)
    return m != NULL


cdef void hide_descriptor(CUpointer_attribute attribute, uint64_t va, void *data) noexcept nogil:
    """Take out of the driver's answer that memory for fabric handles can be exported as a descriptor, too."""
    cdef Mapping *m
    if attribute != CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return
    gs_lock(&tables_mutex)
    m = mapping_at(va)
    if m != NULL and is_for_fabric_alone(m.object):
        (<int *>data)[0] &= ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    gs_unlock(&tables_mutex)


cdef bint allocation_copy(uint64_t va, Allocation *out) noexcept nogil:
    """Copy the allocation that contains an address; False if there is none."""
    cdef Allocation *a
    gs_lock(&tables_mutex)
    a = allocation_at(va)
    if a != NULL:
        out[0] = a[0]
    gs_unlock(&tables_mutex)
    return a != NULL


cdef public CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) noexcept nogil:
    """Answer for our allocations as native memory does; everything else is the driver's to answer."""
    cdef Allocation a
    cdef CUresult rc
    if gs_real.cuPointerGetAttribute == NULL and not gs_find(<void *>&gs_real.cuPointerGetAttribute):
        return gs_absent()
    if data != NULL and allocation_copy(ptr, &a):
        if native_answer(&a, attribute, ptr, data):
            return 0
    elif data != NULL and mapped_answer(attribute, ptr, data):
        return 0
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuPointerGetAttribute(data, attribute, ptr)
    gs_leave(GS_MEMORY)
    if rc == 0 and data != NULL:
        hide_descriptor(attribute, ptr, data)
    return rc


cdef public CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
                                            CUdeviceptr ptr) noexcept nogil:
    """Answer several at once: the driver first, then what native memory shows over it."""
    cdef Allocation a
    cdef CUresult rc
    cdef unsigned int i
    cdef bint ours
    if gs_real.cuPointerGetAttributes == NULL and not gs_find(<void *>&gs_real.cuPointerGetAttributes):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuPointerGetAttributes(numAttributes, attributes, data, ptr)
    gs_leave(GS_MEMORY)
    if rc != 0:
        return rc
    ours = allocation_copy(ptr, &a)
    for i in range(numAttributes):
        if data[i] == NULL:
            continue
        if ours:
            native_answer(&a, attributes[i], ptr, data[i])
        else:
            mapped_answer(attributes[i], ptr, data[i])
            hide_descriptor(attributes[i], ptr, data[i])
    return rc


cdef public CUresult cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) noexcept nogil:
    """Return base and size of an allocation as the application asked for it."""
    cdef Allocation a
    cdef CUresult rc
    if gs_real.cuMemGetAddressRange_v2 == NULL and not gs_find(<void *>&gs_real.cuMemGetAddressRange_v2):
        return gs_absent()
    if not allocation_copy(dptr, &a):
        gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
        rc = gs_real.cuMemGetAddressRange_v2(pbase, psize, dptr)
        gs_leave(GS_MEMORY)
        return rc
    if pbase != NULL:
        pbase[0] = a.va
    if psize != NULL:
        psize[0] = a.size
    return 0


cdef public CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                                    CUdeviceptr ptr) noexcept nogil:
    """Ask the driver; native memory has no access list, so ours must show none."""
    cdef CUresult rc = CUDA_ERROR_INVALID_VALUE
    if gs_real.cuMemGetAccess == NULL and not gs_find(<void *>&gs_real.cuMemGetAccess):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if not is_internal(ptr):
        rc = gs_real.cuMemGetAccess(flags, location, ptr)
    gs_leave(GS_MEMORY)
    return rc
