# Peer access.  For native memory the driver opens every allocation of the peer's context to the caller's device; memory
# made by cuMem does not know contexts, so the grants are made here, for what exists and for what comes.

cdef enum:
    MAX_PEERS = 4096

# The device of `accessor` may use what was allocated in `owner`.
ctypedef struct Peer:
    uint32_t link
    int device
    CUcontext accessor
    CUcontext owner

cdef Table peers
cdef uint32_t peers_changes


cdef size_t peers_of(CUcontext owner, int own_device, CUmemAccessDesc *desc, size_t room) noexcept nogil:
    """Write a grant for each device that may use the memory of a context; returns how many."""
    cdef uint32_t cursor = 0
    cdef Peer *p
    cdef size_t n = 0, i
    gs_lock(&tables_mutex)
    while n < room:
        p = <Peer *>table_next(&peers, sizeof(Peer), &cursor)
        if p == NULL:
            break
        if p.owner != owner or p.device == own_device:
            continue
        i = 0
        while i < n and desc[i].location.id != p.device:
            i += 1
        desc[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE
        desc[i].location.id = p.device
        desc[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if i == n:
            n += 1
    gs_unlock(&tables_mutex)
    return n


cdef Peer *peer_add(CUcontext accessor, int device, CUcontext owner) noexcept nogil:
    """Record that peer access is on, or return NULL."""
    cdef Peer *p
    gs_lock(&tables_mutex)
    p = <Peer *>table_take(&peers, sizeof(Peer), MAX_PEERS)
    if p != NULL:
        p.accessor = accessor
        p.device = device
        p.owner = owner
        gs_add(&peers_changes, 1)
    gs_unlock(&tables_mutex)
    return p


cdef void peer_remove(CUcontext accessor, CUcontext owner) noexcept nogil:
    """Record that peer access is off."""
    cdef uint32_t cursor = 0
    cdef Peer *p
    gs_lock(&tables_mutex)
    while True:
        p = <Peer *>table_next(&peers, sizeof(Peer), &cursor)
        if p == NULL:
            break
        if p.accessor == accessor and p.owner == owner:
            table_give(&peers, sizeof(Peer), p)
            gs_add(&peers_changes, 1)
            break
    gs_unlock(&tables_mutex)


cdef void peers_forget(CUcontext ctx) noexcept nogil:
    """Forget the peer access of a context that is gone, in both directions."""
    cdef uint32_t cursor = 0
    cdef Peer *p
    gs_lock(&tables_mutex)
    while True:
        p = <Peer *>table_next(&peers, sizeof(Peer), &cursor)
        if p == NULL:
            break
        if p.accessor == ctx or p.owner == ctx:
            table_give(&peers, sizeof(Peer), p)
    gs_unlock(&tables_mutex)


cdef bint next_span_of(CUcontext owner, uint32_t *cursor, Span *span, int *device) noexcept nogil:
    """Find the next span of a context: allocations first, then slabs; the cursor counts both."""
    cdef Allocation *a
    cdef Slab *s
    cdef uint32_t at
    cdef bint found = False
    gs_lock(&tables_mutex)
    while not found and cursor[0] < allocations.used:
        a = <Allocation *>table_next(&allocations, sizeof(Allocation), cursor)
        if a == NULL:
            cursor[0] = allocations.used
        elif a.ctx == owner and a.id != 0 and a.type != PIECE and not a.freeing:
            span[0] = a.span
            device[0] = a.device
            found = True
    while not found and cursor[0] - allocations.used < slabs.used:
        at = cursor[0] - allocations.used
        s = <Slab *>table_next(&slabs, sizeof(Slab), &at)
        cursor[0] = allocations.used + (at if s != NULL else slabs.used)
        if s != NULL and s.ctx == owner and s.unit != 0:
            span[0] = s.span
            device[0] = s.device
            found = True
    gs_unlock(&tables_mutex)
    return found


cdef CUresult grant_all(CUcontext owner, int device, int flags) noexcept nogil:
    """Give or take a device's access to all memory of a context; its own device keeps what it has."""
    cdef uint32_t cursor = 0
    cdef CUmemAccessDesc desc
    cdef Span span
    cdef int home = 0
    cdef CUresult rc
    desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    desc.location.id = device
    desc.flags = flags
    span.va = span.size = 0
    while next_span_of(owner, &cursor, &span, &home):
        if home == device:
            continue
        rc = set_access(span.va, span.size, &desc, 1)
        if rc != 0:
            return rc
    return 0


cdef bint device_still_peer(CUcontext owner, int device) noexcept nogil:
    """Say whether another context of a device still has access to the memory of `owner`."""
    cdef CUmemAccessDesc[MAX_DEVICES] desc
    cdef size_t n = peers_of(owner, -1, desc, MAX_DEVICES), i
    for i in range(n):
        if desc[i].location.id == device:
            return True
    return False


cdef CUresult enable_peer(CUcontext owner, unsigned int flags) noexcept nogil:
    """Turn peer access on for native memory and for ours; if ours refuses, native is turned off again."""
    cdef CUcontext accessor = NULL
    cdef int device = 0
    cdef CUresult rc = current_context(&accessor, &device)
    if rc != 0:
        return gs_real.cuCtxEnablePeerAccess(owner, flags)
    rc = gs_real.cuCtxEnablePeerAccess(owner, flags)
    if rc != 0:
        return rc
    if peer_add(accessor, device, owner) != NULL:
        rc = grant_all(owner, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        if rc == 0:
            return 0
        peer_remove(accessor, owner)
        if not device_still_peer(owner, device):
            grant_all(owner, device, CU_MEM_ACCESS_FLAGS_PROT_NONE)
    else:
        rc = CUDA_ERROR_OUT_OF_MEMORY
    gs_real.cuCtxDisablePeerAccess(owner)
    return rc


cdef CUresult disable_peer(CUcontext owner) noexcept nogil:
    """Turn peer access off, for our memory only if no other context of the device has it on."""
    cdef CUcontext accessor = NULL
    cdef int device = 0
    cdef CUresult rc = gs_real.cuCtxDisablePeerAccess(owner)
    if rc != 0 or current_context(&accessor, &device) != 0:
        return rc
    peer_remove(accessor, owner)
    if not device_still_peer(owner, device):
        rc = grant_all(owner, device, CU_MEM_ACCESS_FLAGS_PROT_NONE)
    return rc


cdef bint reach(uint64_t va, int device) noexcept nogil:
    """Give a device access to the allocation at an address; False if it has it, cannot have it, or there is none."""
    cdef CUmemAccessDesc desc
    cdef Allocation *a
    cdef Mapping *m = NULL
    cdef Span span
    cdef int home = 0
    span.va = span.size = 0
    gs_lock(&tables_mutex)
    a = allocation_at(va)
    if a != NULL and not a.freeing:
        span = a.slab.span if a.type == PIECE else a.span
        home = a.device
        m = mapping_at(span.va)
    if m != NULL and access_covers(m, CU_MEM_LOCATION_TYPE_DEVICE, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE):
        m = NULL
    gs_unlock(&tables_mutex)
    if m == NULL or peer_reachable(device, home) != 0:
        return False
    desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    desc.location.id = device
    desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return set_access(span.va, span.size, &desc, 1) == 0


cdef bint reach_from(uint64_t va, CUcontext ctx) noexcept nogil:
    """Give the device of a context (NULL: of the current one) access to the allocation at an address."""
    cdef Context *c
    cdef int device = -1
    if va == 0:
        return False
    if ctx == NULL:
        return current_context(&ctx, &device) == 0 and reach(va, device)
    gs_lock(&tables_mutex)
    c = context_find(ctx)
    if c != NULL:
        device = c.device
    gs_unlock(&tables_mutex)
    return c != NULL and reach(va, device)


cdef bint peers_reach(uint64_t first, CUcontext from_first, uint64_t second, CUcontext from_second) noexcept nogil:
    """After a refused copy or memset: say whether another try is worth it, since access was given meanwhile.

    Native memory is copied and set from the context of any device, whether peer access is on or not.  Address 0 stands
    for an end that is none; a context is NULL where the call names none.
    """
    cdef bint given = reach_from(first, from_first)
    return reach_from(second, from_second) or given


cdef uint64_t copy_end(CUmemorytype type, CUdeviceptr address) noexcept nogil:
    """Return the device address of one end of a described copy, 0 if it is host memory or an array."""
    return address if type == CU_MEMORYTYPE_DEVICE or type == CU_MEMORYTYPE_UNIFIED else 0


cdef bint peers_reach_2d(const CUDA_MEMCPY2D *p) noexcept nogil:
    """The same for a copy of rows."""
    return p != NULL and peers_reach(copy_end(p.srcMemoryType, p.srcDevice), NULL,
                                     copy_end(p.dstMemoryType, p.dstDevice), NULL)


cdef bint peers_reach_3d(const CUDA_MEMCPY3D *p) noexcept nogil:
    """The same for a copy of slices."""
    return p != NULL and peers_reach(copy_end(p.srcMemoryType, p.srcDevice), NULL,
                                     copy_end(p.dstMemoryType, p.dstDevice), NULL)


cdef bint peers_reach_3d_peer(const CUDA_MEMCPY3D_PEER *p) noexcept nogil:
    """The same for a copy of slices between contexts."""
    return p != NULL and peers_reach(copy_end(p.srcMemoryType, p.srcDevice), p.srcContext,
                                     copy_end(p.dstMemoryType, p.dstDevice), p.dstContext)


cdef public CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) noexcept nogil:
    """Turn peer access on."""
    cdef CUresult rc
    if gs_real.cuCtxEnablePeerAccess == NULL and not gs_find(<void *>&gs_real.cuCtxEnablePeerAccess):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = enable_peer(peerContext, Flags)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuCtxDisablePeerAccess(CUcontext peerContext) noexcept nogil:
    """Turn peer access off."""
    cdef CUresult rc
    if gs_real.cuCtxDisablePeerAccess == NULL and not gs_find(<void *>&gs_real.cuCtxDisablePeerAccess):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = disable_peer(peerContext)
    gs_leave(GS_MEMORY)
    return rc
