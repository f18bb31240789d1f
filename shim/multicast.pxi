# Multicast objects: devices that are added to one, memory that is bound to it, and how both are had again.
#
# An object has no content: a suspend undoes its mappings and binds (release) and gives it back (seal); a resume makes
# it again in its owner (load), imports it elsewhere and adds every process's devices (remap), and only when all have
# done so binds and maps it (bind), since the driver's calls wait for the devices of all.

cdef enum:
    MAX_BINDS = 65536

# Memory that the application has bound.  It keeps the memory, as the driver does, by a pin.
ctypedef struct Bind:
    uint32_t link
    int device
    uint8_t for_device      # made by a call that names the device
    uint8_t bound
    Object *team
    Object *memory          # NULL: the driver's own (of a pool), known by its address
    uint64_t offset         # in the multicast object
    uint64_t size
    uint64_t inside         # offset in the memory, or its address

cdef Table binds


# ---- making and joining ----

cdef CUresult make_multicast(CUmemGenericAllocationHandle *real, const CUmulticastObjectProp *wanted) noexcept nogil:
    """Have the driver make an object; one for fabric handles can be exported as a descriptor, too."""
    cdef CUmulticastObjectProp prop = wanted[0]
    if prop.handleTypes & CU_MEM_HANDLE_TYPE_FABRIC:
        prop.handleTypes |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return gs_real.cuMulticastCreate(real, &prop)


cdef CUresult create_multicast(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop) noexcept nogil:
    """Create a multicast object whose handle is virtual."""
    cdef Object *o = object_new(ORIGIN_CREATED)
    cdef CUmemGenericAllocationHandle real = 0
    cdef CUresult rc
    if o == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = make_multicast(&real, prop)
    if rc != 0:
        object_unpin(o)
        return rc
    o.real = real
    o.size = prop.size
    o.team = prop[0]
    o.cls = CLASS_MULTICAST
    o.kind = multicast_kind()
    handle[0] = handle_of(o)
    give_reference(o)
    return 0


cdef public CUresult cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle,
                                       const CUmulticastObjectProp *prop) noexcept nogil:
    """Create a multicast object."""
    cdef CUresult rc
    if gs_real.cuMulticastCreate == NULL and not gs_find(<void *>&gs_real.cuMulticastCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if is_hidden(HIDE_MULTICAST):
        rc = CUDA_ERROR_NOT_SUPPORTED
    elif mcHandle == NULL or prop == NULL:
        rc = gs_real.cuMulticastCreate(mcHandle, prop)
    elif asks_for_hidden_fabric(<int>prop.handleTypes):
        rc = CUDA_ERROR_NOT_PERMITTED
    else:
        rc = create_multicast(mcHandle, prop)
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult add_device(Object *o, int device) noexcept nogil:
    """Add a device to a pinned object."""
    cdef CUresult rc = gs_real.cuMulticastAddDevice(o.real, device)
    if rc == 0 and o.cls == CLASS_MULTICAST and 0 <= device < MAX_DEVICES:
        o.joined |= <uint64_t>1 << device
        o.added |= <uint64_t>1 << device
        o.added_to = o.epoch
    return rc


cdef public CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle mcHandle, CUdevice dev) noexcept nogil:
    """Add a device to a multicast object, and tell its owner, meanwhile outside the gate: it may be stopped."""
    cdef CUresult rc = CUDA_ERROR_INVALID_VALUE
    cdef Object *o = NULL
    if gs_real.cuMulticastAddDevice == NULL and not gs_find(<void *>&gs_real.cuMulticastAddDevice):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if is_virtual(mcHandle):
        o = object_pin(mcHandle)
        if o != NULL:
            rc = add_device(o, dev)
    else:
        rc = gs_real.cuMulticastAddDevice(mcHandle, dev)
    if o != NULL and rc == 0:
        gs_leave(GS_MEMORY)
        team_tell_surely(o)
        gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if o != NULL:
        object_unpin(o)
    gs_leave(GS_MEMORY)
    return rc


# ---- binding ----

cdef Bind *bind_new(Object *team, uint64_t offset, uint64_t size) noexcept nogil:
    """Return a bind that is not in force yet, or NULL."""
    cdef Bind *b
    gs_lock(&tables_mutex)
    b = <Bind *>table_take(&binds, sizeof(Bind), MAX_BINDS)
    gs_unlock(&tables_mutex)
    if b == NULL:
        gs_log(b"bind table is full")
        return NULL
    b.team = team
    b.offset = offset
    b.size = size
    return b


cdef void bind_remove(Bind *b) noexcept nogil:
    """Forget a bind and let its memory go."""
    cdef Object *memory = b.memory
    gs_lock(&tables_mutex)
    table_give(&binds, sizeof(Bind), b)
    gs_unlock(&tables_mutex)
    if memory != NULL:
        object_unpin(memory)


cdef CUresult bind_make(Bind *b) noexcept nogil:
    """Have the driver bind what a bind describes, by the call that the application made."""
    cdef CUresult rc
    if b.memory == NULL:
        if b.for_device:
            rc = gs_real.cuMulticastBindAddr_v2(b.team.real, b.device, b.offset, b.inside, b.size, 0)
        else:
            rc = gs_real.cuMulticastBindAddr(b.team.real, b.offset, b.inside, b.size, 0)
    elif b.for_device:
        rc = gs_real.cuMulticastBindMem_v2(b.team.real, b.device, b.offset, b.memory.real, b.inside, b.size, 0)
    else:
        rc = gs_real.cuMulticastBindMem(b.team.real, b.offset, b.memory.real, b.inside, b.size, 0)
    b.bound = rc == 0
    return rc


cdef CUresult bind_keep(Bind *b, CUresult rc) noexcept nogil:
    """Keep a bind that was made for the application, or forget it."""
    if rc != 0:
        bind_remove(b)
    return rc


cdef CUresult bind_memory(Object *team, int device, size_t offset, CUmemGenericAllocationHandle handle, size_t inside,
                          size_t size) noexcept nogil:
    """Bind memory by its handle; `device` is -1 where the call names none."""
    cdef Object *memory = object_pin(handle) if is_virtual(handle) else NULL
    cdef Bind *b
    if memory == NULL:
        return CUDA_ERROR_INVALID_VALUE
    b = bind_new(team, offset, size)
    if b == NULL:
        object_unpin(memory)
        return CUDA_ERROR_OUT_OF_MEMORY
    b.memory = memory
    b.inside = inside
    b.for_device = device >= 0
    b.device = device if device >= 0 else memory.props.location.id
    return bind_keep(b, bind_make(b))


cdef Object *pin_at(uint64_t va, size_t size, uint64_t *inside, bint *internal) noexcept nogil:
    """Return the object that is mapped at all of a range, pinned, and where in it; NULL if that is not one of ours."""
    cdef Object *o = NULL
    cdef Mapping *m
    gs_lock(&tables_mutex)
    m = mapping_at(va)
    internal[0] = m != NULL and m.object.internal
    if m != NULL and size <= m.va + m.size - va:
        o = m.object
        o.pins += 1
        inside[0] = m.offset + va - m.va
    gs_unlock(&tables_mutex)
    return o


cdef int device_at(uint64_t va) noexcept nogil:
    """Return the device of memory that is the driver's own."""
    cdef int device = 0
    return device if gs_real.cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, va) == 0 else 0


cdef CUresult bind_address(Object *team, int device, size_t offset, uint64_t va, size_t size) noexcept nogil:
    """Bind memory by its address; what is behind cuMemAlloc is refused, as the driver refuses native memory.

    The bind is of the memory, not of the address, so ours is bound again by its handle, wherever it is mapped then.
    """
    cdef uint64_t inside = va
    cdef bint internal = False
    cdef Object *memory = pin_at(va, size, &inside, &internal)
    cdef CUresult rc = CUDA_ERROR_INVALID_VALUE if internal else 0
    cdef Bind *b = bind_new(team, offset, size) if rc == 0 else NULL
    if b == NULL:
        if memory != NULL:
            object_unpin(memory)
        return rc if rc != 0 else CUDA_ERROR_OUT_OF_MEMORY
    b.inside = va
    b.for_device = device >= 0
    b.device = device
    rc = bind_make(b)
    if rc == 0 and device < 0:
        b.device = memory.props.location.id if memory != NULL else device_at(va)
    b.inside = inside
    b.memory = memory
    return bind_keep(b, rc)


cdef public CUresult cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                                        CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
                                        unsigned long long flags) noexcept nogil:
    """Bind memory to a multicast object."""
    cdef CUresult rc
    cdef Object *team
    if gs_real.cuMulticastBindMem == NULL and not gs_find(<void *>&gs_real.cuMulticastBindMem):
        return gs_absent()
    team = enter_with_team(mcHandle)
    if team == NULL or flags != 0:
        rc = CUDA_ERROR_INVALID_VALUE
    else:
        rc = bind_memory(team, -1, mcOffset, memHandle, memOffset, size)
    unpin_translated(team)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
                                           CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
                                           unsigned long long flags) noexcept nogil:
    """Bind memory of a device to a multicast object."""
    cdef CUresult rc
    cdef Object *team
    if gs_real.cuMulticastBindMem_v2 == NULL and not gs_find(<void *>&gs_real.cuMulticastBindMem_v2):
        return gs_absent()
    team = enter_with_team(mcHandle)
    if team == NULL or flags != 0:
        rc = CUDA_ERROR_INVALID_VALUE
    elif dev < 0:
        rc = CUDA_ERROR_INVALID_DEVICE
    else:
        rc = bind_memory(team, dev, mcOffset, memHandle, memOffset, size)
    unpin_translated(team)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr,
                                         size_t size, unsigned long long flags) noexcept nogil:
    """Bind mapped memory to a multicast object."""
    cdef CUresult rc
    cdef Object *team
    if gs_real.cuMulticastBindAddr == NULL and not gs_find(<void *>&gs_real.cuMulticastBindAddr):
        return gs_absent()
    team = enter_with_team(mcHandle)
    if team == NULL or flags != 0:
        rc = CUDA_ERROR_INVALID_VALUE
    else:
        rc = bind_address(team, -1, mcOffset, memptr, size)
    unpin_translated(team)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
                                            CUdeviceptr memptr, size_t size, unsigned long long flags) noexcept nogil:
    """Bind mapped memory of a device to a multicast object."""
    cdef CUresult rc
    cdef Object *team
    if gs_real.cuMulticastBindAddr_v2 == NULL and not gs_find(<void *>&gs_real.cuMulticastBindAddr_v2):
        return gs_absent()
    team = enter_with_team(mcHandle)
    if team == NULL or flags != 0:
        rc = CUDA_ERROR_INVALID_VALUE
    elif dev < 0:
        rc = CUDA_ERROR_INVALID_DEVICE
    else:
        rc = bind_address(team, dev, mcOffset, memptr, size)
    unpin_translated(team)
    gs_leave(GS_MEMORY)
    return rc


cdef Bind *bind_find(Object *team, int device, uint64_t offset, uint64_t size) noexcept nogil:
    """Return a bind of the application, or NULL."""
    cdef uint32_t cursor = 0
    cdef Bind *b
    gs_lock(&tables_mutex)
    while True:
        b = <Bind *>table_next(&binds, sizeof(Bind), &cursor)
        if b == NULL or (b.team == team and b.device == device and b.offset == offset and b.size == size and b.bound):
            break
    gs_unlock(&tables_mutex)
    return b


cdef CUresult unbind(Object *team, int device, uint64_t offset, uint64_t size) noexcept nogil:
    """Undo a bind of the application."""
    cdef CUresult rc = gs_real.cuMulticastUnbind(team.real, device, offset, size)
    cdef Bind *b = bind_find(team, device, offset, size) if rc == 0 else NULL
    if b != NULL:
        bind_remove(b)
    return rc


cdef public CUresult cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
                                       size_t size) noexcept nogil:
    """Unbind a range of a multicast object."""
    cdef CUresult rc = CUDA_ERROR_INVALID_VALUE
    cdef Object *team
    if gs_real.cuMulticastUnbind == NULL and not gs_find(<void *>&gs_real.cuMulticastUnbind):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if is_virtual(mcHandle):
        team = object_pin(mcHandle)
        if team != NULL:
            rc = unbind(team, dev, mcOffset, size)
            object_unpin(team)
    else:
        rc = gs_real.cuMulticastUnbind(mcHandle, dev, mcOffset, size)
    gs_leave(GS_MEMORY)
    return rc


cdef void team_forget(Object *o) noexcept nogil:
    """Forget the binds and devices of an object that nobody here uses any more; the driver's go with the object."""
    cdef Bind *b
    cdef uint32_t cursor = 0
    if o.cls != CLASS_MULTICAST:
        return
    joins_forget(o)
    while True:
        b = next_bind(o, &cursor)
        if b == NULL:
            return
        bind_remove(b)


# ---- what the phases do ----

cdef Bind *next_bind(Object *o, uint32_t *cursor) noexcept nogil:
    """Return the next bind to an object, or of its memory, or NULL."""
    cdef Bind *b
    gs_lock(&tables_mutex)
    while True:
        b = <Bind *>table_next(&binds, sizeof(Bind), cursor)
        if b == NULL or b.team == o or b.memory == o:
            break
    gs_unlock(&tables_mutex)
    return b


cdef bint has_binds(Object *o) noexcept nogil:
    """Say whether something may be bound to an object, or its memory somewhere: that would be pinned."""
    return binds.live != 0 and (o.cls == CLASS_MULTICAST or o.pins != 0)


cdef bint binds_undo(Object *o, Failure *f) noexcept nogil:
    """Undo what is bound to an object, and what of its memory is bound anywhere."""
    cdef uint32_t cursor = 0
    cdef Bind *b
    cdef CUresult rc
    while has_binds(o):
        b = next_bind(o, &cursor)
        if b == NULL:
            return True
        if b.bound:
            rc = gs_real.cuMulticastUnbind(b.team.real, b.device, b.offset, b.size)
            if rc != 0:
                return fail_cuda(f, b"cuMulticastUnbind", rc, b.team, 0)
            b.bound = 0
    return True


cdef bint binds_whole(Object *o) noexcept nogil:
    """Say whether everything is bound to an object that was, and all of its memory that was."""
    cdef uint32_t cursor = 0
    cdef Bind *b
    while has_binds(o):
        b = next_bind(o, &cursor)
        if b == NULL:
            return True
        if not b.bound:
            return False
    return True


cdef bint teams_part(Failure *f) noexcept nogil:
    """Unmap all multicast objects and undo their binds; the objects stay until seal, with their devices."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_carried(o, CLASS_MULTICAST) and not (object_unmap(o, f) and binds_undo(o, f)):
            return False


cdef bint team_create(Object *o, Failure *f) noexcept nogil:
    """Make an object of ours again: another incarnation, to which nobody has added a device."""
    cdef CUmemGenericAllocationHandle real = 0
    cdef CUresult rc
    joins_renew(o)
    rc = make_multicast(&real, &o.team)
    if rc != 0:
        return fail_cuda(f, b"cuMulticastCreate", rc, o, 0)
    o.epoch += 1
    o.real = real
    return True


cdef bint team_load(Object *o, Failure *f) noexcept nogil:
    """Make an object of ours again, if it is not there, or if it can never be complete."""
    if o.real != 0 and not o.complete and joins_lost(o) and not object_drop(o, f):
        return False
    return object_create(o, f)


cdef bint team_join(Object *o, Failure *f) noexcept nogil:
    """Add the devices that this process had added, and tell the owner."""
    cdef int device
    cdef CUresult rc
    if o.added_to != o.epoch:
        o.added = o.told = 0
        o.complete = 0
        o.added_to = o.epoch
    for device in range(MAX_DEVICES):
        if (o.joined & ~o.added) >> device & 1:
            rc = gs_real.cuMulticastAddDevice(o.real, device)
            if rc != 0:
                return fail_cuda(f, b"cuMulticastAddDevice", rc, o, 0)
            o.added |= <uint64_t>1 << device
    if o.added & ~o.told and team_tell(o, deadline_in(TEAM_TIMEOUT_MS)) < 0:
        f.object = o.id
        return fail(f, b"deadline", b"team", b"the owner of a multicast object does not answer")
    return True


cdef bint teams_join(Failure *f) noexcept nogil:
    """Add this process's devices to all multicast objects."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_carried(o, CLASS_MULTICAST) and not team_join(o, f):
            return False


cdef bint team_bind(Object *o, Failure *f) noexcept nogil:
    """Bind again what was bound to an object, and map it; never without all devices, since the driver would wait."""
    cdef uint32_t cursor = 0
    cdef Bind *b = next_bind(o, &cursor)
    cdef CUresult rc
    if b == NULL and o.first == NULL:
        return True
    if not o.complete:
        team_tell(o, deadline_in(TEAM_TIMEOUT_MS))
    if not o.complete:
        f.object = o.id
        return fail(f, b"team", b"bind", b"a device of this multicast object has not been added again")
    while b != NULL:
        rc = 0 if b.bound else bind_make(b)
        if rc != 0:
            return fail_cuda(f, b"cuMulticastBind", rc, o, 0)
        b = next_bind(o, &cursor)
    return object_map(o, f)


cdef bint phase_bind(Failure *f) noexcept nogil:
    """Bind and map all multicast objects; all processes have added their devices."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_carried(o, CLASS_MULTICAST) and not team_bind(o, f):
            return False
