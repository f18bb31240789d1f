# Hooks of the calls that take or return a cuMem handle, an address range or its access.
#
# A table entry is taken before the driver is called, so that a full table needs no undoing: the application gets
# OUT_OF_MEMORY and neither the driver nor the tables have changed.

cdef uint8_t class_of(const CUmemAllocationProp *prop) noexcept nogil:
    """Return the class that a location belongs to."""
    return CLASS_DEVICE if prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE else CLASS_HOST


cdef uint8_t kind_of(const CUmemAllocationProp *prop) noexcept nogil:
    """Return what an allocation is counted as: CARRIED, or the kind that a suspend refuses."""
    if prop.type == CU_MEM_ALLOCATION_TYPE_MANAGED:
        return KIND_MANAGED
    return KIND_CARRIED


cdef void add_descriptor(CUmemAllocationProp *prop) noexcept nogil:
    """Have memory for fabric handles exportable as a descriptor, too, by which it is carried."""
    if prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC:
        prop.requestedHandleTypes |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


cdef CUresult create_object(Object **out, size_t size, const CUmemAllocationProp *prop, uint64_t flags) noexcept nogil:
    """Create memory; on success `*out` is pinned and has no reference of the application yet."""
    cdef Object *o = object_new(ORIGIN_CREATED)
    cdef CUmemGenericAllocationHandle real = 0
    cdef CUmemAllocationProp props = prop[0]
    cdef CUresult rc
    if o == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    add_descriptor(&props)
    rc = gs_real.cuMemCreate(&real, size, &props, flags)
    if rc != 0:
        object_unpin(o)
        return rc
    o.size = size
    o.flags = flags
    o.props = prop[0]
    o.cls = class_of(prop)
    o.kind = kind_of(prop)
    o.real = real
    out[0] = o
    return 0


cdef void give_reference(Object *o) noexcept nogil:
    """Turn the caller's pin into a reference of the application."""
    gs_lock(&tables_mutex)
    o.refs += 1
    o.pins -= 1
    gs_unlock(&tables_mutex)


cdef public CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                 unsigned long long flags) noexcept nogil:
    """Create memory whose handle is virtual."""
    cdef Object *o = NULL
    cdef CUresult rc
    if gs_real.cuMemCreate == NULL and not gs_find(<void *>&gs_real.cuMemCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if handle == NULL or prop == NULL:
        rc = gs_real.cuMemCreate(handle, size, prop, flags)
    elif asks_for_hidden_fabric(prop.requestedHandleTypes):
        rc = CUDA_ERROR_NOT_PERMITTED
    else:
        rc = create_object(&o, size, prop, flags)
    if rc == 0 and o != NULL:
        handle[0] = handle_of(o)
        give_reference(o)
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult release_reference(uint64_t handle) noexcept nogil:
    """Drop one reference of the application; a driver that refuses leaves it in place."""
    cdef Object *o = object_pin(handle)
    cdef CUresult rc = 0
    cdef bint last
    if o == NULL:
        return CUDA_ERROR_INVALID_VALUE
    gs_lock(&tables_mutex)
    o.refs -= 1
    last = o.refs == 0 and o.maps == 0 and o.pins == 1
    o.dying = last
    if not last:
        o.pins -= 1
    gs_unlock(&tables_mutex)
    if not last:
        return 0
    if o.real != 0:
        rc = gs_real.cuMemRelease(o.real)
    if rc == 0:
        object_forget(o)
        return 0
    gs_lock(&tables_mutex)
    o.refs += 1
    o.pins -= 1
    o.dying = 0
    gs_unlock(&tables_mutex)
    return rc


cdef public CUresult cuMemRelease(CUmemGenericAllocationHandle handle) noexcept nogil:
    """Drop one of the application's references."""
    cdef CUresult rc
    if gs_real.cuMemRelease == NULL and not gs_find(<void *>&gs_real.cuMemRelease):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = release_reference(handle) if is_virtual(handle) else gs_real.cuMemRelease(handle)
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult map_object(Object *o, uint64_t va, size_t size, size_t offset, uint64_t flags) noexcept nogil:
    """Map a pinned object and record it."""
    cdef Mapping *m = mapping_new()
    cdef CUresult rc
    if m == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = gs_real.cuMemMap(va, size, offset, o.real, flags)
    if rc == 0:
        mapping_enter(m, o, va, size, offset)
    else:
        mapping_cancel(m)
    return rc


cdef public CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                              unsigned long long flags) noexcept nogil:
    """Map memory at a reserved address."""
    cdef Object *o
    cdef CUresult rc
    if gs_real.cuMemMap == NULL and not gs_find(<void *>&gs_real.cuMemMap):
        return gs_absent()
    o = enter_with_team(handle)
    if is_virtual(handle):
        rc = CUDA_ERROR_INVALID_VALUE
        if o != NULL:
            rc = map_object(o, ptr, size, offset, flags)
            object_unpin(o)
    else:
        rc = gs_real.cuMemMap(ptr, size, offset, handle, flags)
    gs_leave(GS_MEMORY)
    return rc


cdef bint is_internal(uint64_t va) noexcept nogil:
    """Say whether an address lies in memory that the application got from cuMemAlloc or cuIpcOpenMemHandle.

    The driver knows it as mapped memory; the application must see the refusal that native memory gives.
    """
    cdef Mapping *m
    cdef bint internal
    gs_lock(&tables_mutex)
    m = mapping_at(va)
    internal = m != NULL and m.object.internal
    gs_unlock(&tables_mutex)
    return internal


cdef void forget_mappings(uint64_t va, uint64_t size) noexcept nogil:
    """Remove what was recorded for a range that the driver has unmapped."""
    cdef uint32_t position
    cdef Mapping *m
    cdef Object *o
    while True:
        o = NULL
        gs_lock(&tables_mutex)
        position = order_upper(&mappings_by_va, &mappings, sizeof(Mapping), va + size - 1)
        if position != 0:
            m = <Mapping *>table_at(&mappings, sizeof(Mapping), mappings_by_va.index[position - 1])
            if m.va >= va:
                o = m.object
                o.pins += 1
                mapping_leave(m)
        gs_unlock(&tables_mutex)
        if o == NULL:
            return
        object_unpin(o)


cdef CUresult unmap_range(uint64_t va, size_t size) noexcept nogil:
    """Unmap whole mappings and forget them."""
    cdef CUresult rc = gs_real.cuMemUnmap(va, size)
    if rc == 0 and size != 0:
        forget_mappings(va, size)
    return rc


cdef public CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) noexcept nogil:
    """Unmap a range that may hold several mappings."""
    cdef CUresult rc
    if gs_real.cuMemUnmap == NULL and not gs_find(<void *>&gs_real.cuMemUnmap):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = CUDA_ERROR_INVALID_VALUE if is_internal(ptr) else unmap_range(ptr, size)
    gs_leave(GS_MEMORY)
    return rc


cdef uint32_t first_overlap(uint64_t va) noexcept nogil:
    """Return the position of the first mapping that ends after `va`; `tables_mutex` is held."""
    cdef uint32_t position = order_upper(&mappings_by_va, &mappings, sizeof(Mapping), va)
    cdef Mapping *m
    if position != 0:
        m = <Mapping *>table_at(&mappings, sizeof(Mapping), mappings_by_va.index[position - 1])
        if va - m.va < m.size:
            return position - 1
    return position


cdef Mapping *mapping_in_order(uint32_t position, uint64_t end) noexcept nogil:
    """Return the mapping at a position if it begins before `end`, or NULL; `tables_mutex` is held."""
    cdef Mapping *m
    if position >= mappings_by_va.count:
        return NULL
    m = <Mapping *>table_at(&mappings, sizeof(Mapping), mappings_by_va.index[position])
    return m if m.va < end else NULL


cdef uint32_t promise_for_range(uint64_t va, uint64_t size, size_t count) noexcept nogil:
    """Promise the entries that an access call over a range can need; 0 if it cannot, else the number plus one."""
    cdef uint32_t position, n = 0
    cdef bint fits
    gs_lock(&tables_mutex)
    position = first_overlap(va)
    while mapping_in_order(position, va + size) != NULL:
        position += 1
        n += 2 * <uint32_t>count
    fits = count < MAX_ACCESS and access_promise(n)
    gs_unlock(&tables_mutex)
    return n + 1 if fits else 0


cdef void record_access(uint64_t va, uint64_t size, const CUmemAccessDesc *desc, size_t count) noexcept nogil:
    """Record an access call over every mapping that it touches."""
    cdef uint32_t position
    cdef uint64_t low, high
    cdef Mapping *m
    cdef size_t i
    gs_lock(&tables_mutex)
    position = first_overlap(va)
    while True:
        m = mapping_in_order(position, va + size)
        if m == NULL:
            break
        low = va if va > m.va else m.va
        high = va + size if va + size < m.va + m.size else m.va + m.size
        for i in range(count):
            access_set(m, low - m.va, high - low, &desc[i])
        position += 1
    gs_unlock(&tables_mutex)


cdef CUresult set_access(uint64_t va, size_t size, const CUmemAccessDesc *desc, size_t count) noexcept nogil:
    """Set access and record it; the driver is not asked if the record has no room."""
    cdef uint32_t promised = promise_for_range(va, size, count)
    cdef CUresult rc
    if promised == 0:
        gs_log(b"access table is full")
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = gs_real.cuMemSetAccess(va, size, desc, count)
    if rc == 0:
        record_access(va, size, desc, count)
    gs_lock(&tables_mutex)
    access_promise_end(promised - 1)
    gs_unlock(&tables_mutex)
    return rc


cdef public CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc,
                                    size_t count) noexcept nogil:
    """Set access over a range that may span mappings; grants of different locations accumulate."""
    cdef CUresult rc
    if gs_real.cuMemSetAccess == NULL and not gs_find(<void *>&gs_real.cuMemSetAccess):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if is_internal(ptr):
        rc = CUDA_ERROR_INVALID_VALUE
    elif desc == NULL:
        rc = gs_real.cuMemSetAccess(ptr, size, desc, count)
    else:
        rc = set_access(ptr, size, desc, count)
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult retain_at(CUmemGenericAllocationHandle *handle, void *addr) noexcept nogil:
    """Return the handle that was mapped at an address, with one more reference; NOT_MAPPED if we mapped nothing."""
    cdef Mapping *m
    cdef CUresult rc = 0
    gs_lock(&tables_mutex)
    m = mapping_at(<uint64_t>addr)
    if m == NULL:
        rc = CUDA_ERROR_NOT_MAPPED
    elif m.object.internal:
        rc = CUDA_ERROR_INVALID_VALUE
    else:
        m.object.refs += 1
        handle[0] = handle_of(m.object)
    gs_unlock(&tables_mutex)
    return rc


cdef public CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) noexcept nogil:
    """Return the value that was originally mapped, as the driver does."""
    cdef CUresult rc = CUDA_ERROR_NOT_MAPPED
    if gs_real.cuMemRetainAllocationHandle == NULL and not gs_find(<void *>&gs_real.cuMemRetainAllocationHandle):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if handle != NULL:
        rc = retain_at(handle, addr)
    if rc == CUDA_ERROR_NOT_MAPPED:
        rc = gs_real.cuMemRetainAllocationHandle(handle, addr)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                            CUmemGenericAllocationHandle handle) noexcept nogil:
    """Ask the driver about the real handle."""
    cdef Object *o
    cdef CUresult rc = CUDA_ERROR_INVALID_VALUE
    if (gs_real.cuMemGetAllocationPropertiesFromHandle == NULL
            and not gs_find(<void *>&gs_real.cuMemGetAllocationPropertiesFromHandle)):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if is_virtual(handle):
        o = object_pin(handle)
        if o != NULL:
            rc = gs_real.cuMemGetAllocationPropertiesFromHandle(prop, o.real)
            if rc == 0 and (o.origin == ORIGIN_ADOPTED or is_for_fabric_alone(o)):
                # Made by us to be exported; to the application it is what it was.
                prop.requestedHandleTypes = o.props.requestedHandleTypes
            object_unpin(o)
    else:
        rc = gs_real.cuMemGetAllocationPropertiesFromHandle(prop, handle)
    gs_leave(GS_MEMORY)
    return rc
