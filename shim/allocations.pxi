# cuMemAlloc on cuMem: large allocations have an object of their own, small ones share slabs of one granule.
#
# What the application sees is what native memory would show: its size, its base, its attributes, a free that waits.
# Memory belongs to the context that was current when it was made, and goes with it.

cdef enum:
    MAX_ALLOCATIONS = 262144
    MAX_SLABS = 16384
    SLAB_UNITS = 4096
    SLAB_WORDS = 64         # SLAB_UNITS / 64
    SMALLEST_UNIT = 512     # what cuMemAlloc aligns to, beyond the 256 that it promises
    PITCH_ALIGNMENT = 512
    OWN = 1                 # an object and a reservation of its own
    PIECE = 2               # a part of a slab
    OPENED = 3              # memory of another process, from cuIpcOpenMemHandle

# A reserved address range on which one object is wholly mapped.
ctypedef struct Span:
    uint64_t va
    uint64_t size

ctypedef struct Slab:
    uint32_t link
    int device
    CUcontext ctx
    Span span
    size_t unit
    uint32_t taken          # units in use
    uint64_t[SLAB_WORDS] bits

ctypedef struct Allocation:
    uint32_t link
    uint8_t type            # OWN, PIECE or OPENED
    uint8_t freeing
    uint8_t rdma
    uint64_t va
    uint64_t size           # as the application asked
    CUcontext ctx
    int device              # where the memory is
    uint32_t opens          # of OPENED: times opened
    Span span               # of OWN and OPENED
    Slab *slab              # of PIECE
    uint64_t id             # unique in this process, never used twice; the application sees it as the buffer's id
    uint64_t remote_nonce   # of OPENED: whose allocation, and which
    uint64_t remote_id

cdef Table allocations
cdef Order allocations_by_va
cdef Table slabs


cdef Allocation *allocation_new() noexcept nogil:
    """Return an allocation that is in no list yet, with room for it in the list, or NULL."""
    cdef Allocation *a = NULL
    gs_lock(&tables_mutex)
    if order_room(&allocations_by_va, MAX_ALLOCATIONS):
        a = <Allocation *>table_take(&allocations, sizeof(Allocation), MAX_ALLOCATIONS)
    gs_unlock(&tables_mutex)
    if a == NULL:
        gs_log(b"allocation table is full")
    return a


cdef void allocation_cancel(Allocation *a) noexcept nogil:
    """Put back an allocation that was not entered."""
    gs_lock(&tables_mutex)
    table_give(&allocations, sizeof(Allocation), a)
    gs_unlock(&tables_mutex)


cdef void allocation_enter(Allocation *a) noexcept nogil:
    """Make an allocation known."""
    global last_buffer_id
    gs_lock(&tables_mutex)
    last_buffer_id += 1
    a.id = last_buffer_id
    order_insert(&allocations_by_va, &allocations, sizeof(Allocation), <Range *>a)
    gs_unlock(&tables_mutex)


cdef Allocation *allocation_at(uint64_t va) noexcept nogil:
    """Return the allocation that contains an address, or NULL; `tables_mutex` is held."""
    return <Allocation *>order_find(&allocations_by_va, &allocations, sizeof(Allocation), va)


# ---- spans ----

cdef CUresult span_grant(Span *span, CUcontext ctx, int device) noexcept nogil:
    """Give a span to its device and to every device whose peer access to `ctx` is on."""
    cdef CUmemAccessDesc[MAX_DEVICES] desc
    cdef uint32_t seen
    cdef size_t n
    cdef CUresult rc
    while True:
        seen = gs_load(&peers_changes)
        desc[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE
        desc[0].location.id = device
        desc[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        n = 1 + peers_of(ctx, device, &desc[1], MAX_DEVICES - 1)
        rc = set_access(span.va, span.size, desc, n)
        if rc != 0 or seen == gs_load(&peers_changes):
            return rc


cdef CUresult span_map(Span *span, Object *o, CUcontext ctx, int device) noexcept nogil:
    """Reserve addresses for a pinned object, map all of it there and give access; undoes what it did if it fails."""
    cdef CUdeviceptr va = 0
    cdef CUresult rc = gs_real.cuMemAddressReserve(&va, o.size, 0, 0, 0)
    if rc != 0:
        return rc
    span.va = va
    span.size = o.size
    rc = map_object(o, va, o.size, 0, 0)
    if rc == 0:
        rc = span_grant(span, ctx, device)
        if rc != 0:
            unmap_range(va, o.size)
    if rc != 0:
        gs_real.cuMemAddressFree(va, o.size)
    return rc


cdef CUresult span_unmap(Span *span) noexcept nogil:
    """Unmap a span; its object goes with its last mapping.  The addresses stay reserved."""
    return unmap_range(span.va, span.size)


cdef void span_free(Span *span) noexcept nogil:
    """Give the addresses of an unmapped span back."""
    if gs_real.cuMemAddressFree(span.va, span.size) != 0:
        gs_log(b"cuMemAddressFree failed, the addresses stay reserved")


cdef CUresult span_new(Span *span, size_t size, CUcontext ctx, int device, Device *d) noexcept nogil:
    """Create device memory and map it."""
    cdef CUmemAllocationProp prop
    cdef Object *o = NULL
    cdef CUresult rc
    allocation_props(&prop, device, d.rdma)
    rc = create_object(&o, size, &prop, 0)
    if rc == CUDA_ERROR_NOT_SUPPORTED or rc == CUDA_ERROR_INVALID_VALUE and d.rdma:
        # The attribute promises RDMA where the kernel module for it is missing, too.
        allocation_props(&prop, device, False)
        rc = create_object(&o, size, &prop, 0)
    if rc != 0:
        return rc
    o.internal = 1
    rc = span_map(span, o, ctx, device)
    object_unpin(o)
    return rc


# ---- slabs ----

cdef void slab_mark(Slab *s, uint32_t first, uint32_t n, bint taken) noexcept nogil:
    """Take or give units."""
    cdef uint32_t i
    for i in range(first, first + n):
        if taken:
            s.bits[i // 64] |= <uint64_t>1 << (i % 64)
        else:
            s.bits[i // 64] &= ~(<uint64_t>1 << (i % 64))
    s.taken = s.taken + n if taken else s.taken - n


cdef int slab_find(Slab *s, uint32_t n) noexcept nogil:
    """Return the first of `n` free units in a row, or -1."""
    cdef uint32_t i = 0, run = 0
    while i < SLAB_UNITS:
        if i % 64 == 0 and s.bits[i // 64] == <uint64_t>0xFFFFFFFFFFFFFFFF:
            run = 0
            i += 64
            continue
        run = 0 if s.bits[i // 64] >> (i % 64) & 1 else run + 1
        i += 1
        if run == n:
            return <int>(i - n)
    return -1


cdef uint32_t slab_units(Slab *s, size_t size) noexcept nogil:
    """Return how many units hold `size` bytes."""
    return <uint32_t>((size + s.unit - 1) // s.unit)


cdef Slab *slab_take(CUcontext ctx, int device, size_t size, uint64_t *va) noexcept nogil:
    """Take a piece of a slab that has room, or return NULL."""
    cdef uint32_t cursor = 0, n
    cdef Slab *s
    cdef int first
    gs_lock(&tables_mutex)
    while True:
        s = <Slab *>table_next(&slabs, sizeof(Slab), &cursor)
        if s == NULL:
            break
        if s.unit == 0 or s.ctx != ctx or s.device != device:
            continue
        n = slab_units(s, size)
        first = slab_find(s, n) if n <= SLAB_UNITS - s.taken else -1
        if first >= 0:
            slab_mark(s, <uint32_t>first, n, True)
            va[0] = s.span.va + <uint64_t>first * s.unit
            break
    gs_unlock(&tables_mutex)
    return s


cdef CUresult slab_new(CUcontext ctx, int device, Device *d) noexcept nogil:
    """Add a slab; it has a unit size, and is used, once its memory is there."""
    cdef Slab *s
    cdef CUresult rc
    gs_lock(&tables_mutex)
    s = <Slab *>table_take(&slabs, sizeof(Slab), MAX_SLABS)
    gs_unlock(&tables_mutex)
    if s == NULL:
        gs_log(b"slab table is full")
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = span_new(&s.span, d.granularity, ctx, device, d)
    gs_lock(&tables_mutex)
    if rc == 0:
        s.ctx = ctx
        s.device = device
        s.unit = d.granularity // SLAB_UNITS
        if s.unit < SMALLEST_UNIT:
            s.unit = SMALLEST_UNIT
    else:
        table_give(&slabs, sizeof(Slab), s)
    gs_unlock(&tables_mutex)
    return rc


cdef CUresult slab_give(Slab *s, uint64_t va, size_t size) noexcept nogil:
    """Give a piece back; an empty slab goes."""
    cdef size_t unit = s.unit
    cdef CUresult rc
    cdef Span span
    gs_lock(&tables_mutex)
    slab_mark(s, <uint32_t>((va - s.span.va) // unit), slab_units(s, size), False)
    if s.taken != 0:
        gs_unlock(&tables_mutex)
        return 0
    s.unit = 0
    span = s.span
    gs_unlock(&tables_mutex)
    rc = span_unmap(&span)
    gs_lock(&tables_mutex)
    if rc == 0:
        table_give(&slabs, sizeof(Slab), s)
    else:
        s.unit = unit
        slab_mark(s, <uint32_t>((va - span.va) // unit), slab_units(s, size), True)
    gs_unlock(&tables_mutex)
    if rc == 0:
        span_free(&span)
    return rc


# ---- allocating ----

cdef CUresult allocate_piece(Allocation *a, Device *d) noexcept nogil:
    """Back an allocation by a part of a slab."""
    cdef CUresult rc
    a.type = PIECE
    while True:
        a.slab = slab_take(a.ctx, a.device, a.size, &a.va)
        if a.slab != NULL:
            return 0
        rc = slab_new(a.ctx, a.device, d)
        if rc != 0:
            return rc


cdef CUresult allocate_own(Allocation *a, Device *d) noexcept nogil:
    """Back an allocation by an object of its own."""
    cdef CUresult rc
    a.type = OWN
    if a.size > <size_t>0xFFFFFFFFFFFFFFFF - d.granularity:
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = span_new(&a.span, round_up(a.size, d.granularity), a.ctx, a.device, d)
    a.va = a.span.va
    return rc


cdef CUresult allocate(CUdeviceptr *out, size_t size) noexcept nogil:
    """Allocate in the current context."""
    cdef Allocation *a
    cdef Device *d
    cdef CUcontext ctx = NULL
    cdef int device = 0
    cdef CUresult rc = current_context(&ctx, &device)
    if rc != 0:
        return rc
    d = device_info(device)
    if d == NULL:
        return CUDA_ERROR_UNKNOWN
    if not d.vmm:
        return gs_real.cuMemAlloc_v2(out, size)
    if d.granularity == 0:
        gs_log(b"the driver says that its granularity is 0")
        return CUDA_ERROR_NOT_SUPPORTED
    a = allocation_new()
    if a == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    a.ctx = ctx
    a.device = device
    a.size = size
    a.rdma = d.rdma
    rc = allocate_piece(a, d) if size < d.granularity else allocate_own(a, d)
    if rc != 0:
        allocation_cancel(a)
        return rc
    allocation_enter(a)
    out[0] = a.va
    return 0


cdef public CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) noexcept nogil:
    """Allocate memory that can be shared and carried."""
    cdef CUresult rc
    if gs_real.cuMemAlloc_v2 == NULL and not gs_find(<void *>&gs_real.cuMemAlloc_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if dptr == NULL or bytesize == 0:
        rc = gs_real.cuMemAlloc_v2(dptr, bytesize)
    else:
        rc = allocate(dptr, bytesize)
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult allocate_pitch(CUdeviceptr *out, size_t *pitch, size_t width, size_t height) noexcept nogil:
    """Allocate rows whose length is a multiple of what the driver uses as well."""
    cdef size_t row
    cdef CUresult rc
    if width > <size_t>0xFFFFFFFFFFFFFFFF - PITCH_ALIGNMENT:
        return CUDA_ERROR_OUT_OF_MEMORY
    row = round_up(width, PITCH_ALIGNMENT)
    if height > <size_t>0xFFFFFFFFFFFFFFFF // row:
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = allocate(out, row * height)
    if rc == 0:
        pitch[0] = row
    return rc


cdef public CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                        unsigned int ElementSizeBytes) noexcept nogil:
    """Allocate rows; what the driver would refuse it is asked for, so that the answer is its own."""
    cdef CUresult rc
    cdef bint legal = ElementSizeBytes == 4 or ElementSizeBytes == 8 or ElementSizeBytes == 16
    if gs_real.cuMemAllocPitch_v2 == NULL and not gs_find(<void *>&gs_real.cuMemAllocPitch_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if legal and dptr != NULL and pPitch != NULL and WidthInBytes != 0 and Height != 0:
        rc = allocate_pitch(dptr, pPitch, WidthInBytes, Height)
    else:
        rc = gs_real.cuMemAllocPitch_v2(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes)
    gs_leave(GS_MEMORY)
    return rc


# ---- freeing ----

cdef Allocation *allocation_seize(uint64_t va, bint opened) noexcept nogil:
    """Return the allocation that begins at an address and mark it as being freed; NULL if there is none."""
    cdef Allocation *a
    gs_lock(&tables_mutex)
    a = allocation_at(va)
    if a != NULL and (a.va != va or a.freeing or (a.type == OPENED) != opened):
        a = NULL
    if a != NULL:
        a.freeing = 1
    gs_unlock(&tables_mutex)
    return a


cdef void allocation_leave(Allocation *a) noexcept nogil:
    """Forget an allocation.  Its addresses are still ours: nobody else can have been given them."""
    gs_lock(&tables_mutex)
    order_remove(&allocations_by_va, &allocations, sizeof(Allocation), <Range *>a)
    table_give(&allocations, sizeof(Allocation), a)
    gs_unlock(&tables_mutex)


cdef CUresult allocation_free(Allocation *a) noexcept nogil:
    """Free a seized allocation; if the driver refuses it is as before."""
    cdef Slab *slab = a.slab
    cdef Span span = a.span
    cdef uint64_t va = a.va
    cdef size_t size = a.size
    cdef CUresult rc = 0
    if a.type == PIECE:
        allocation_leave(a)
        return slab_give(slab, va, size)
    rc = span_unmap(&span)
    if rc != 0:
        a.freeing = 0
        return rc
    allocation_leave(a)
    span_free(&span)
    return 0


cdef CUresult free_pointer(uint64_t va) noexcept nogil:
    """Free what cuMemAlloc gave, once all work of its context is done, as native memory is freed."""
    cdef Allocation *a = allocation_seize(va, False)
    cdef CUresult rc
    if a == NULL:
        rc = gs_real.cuMemFree_v2(va)
        if rc == 0:
            uncarried_remove(KIND_MANAGED, va)
            uncarried_remove(KIND_POOL_POINTER, va)
            uncarried_remove(KIND_DMABUF, va)
        return rc
    rc = context_wait(a.ctx, True)
    if rc != 0:
        a.freeing = 0
        return rc
    return allocation_free(a)


cdef public CUresult cuMemFree_v2(CUdeviceptr dptr) noexcept nogil:
    """Free memory; pointers that are not ours go to the driver."""
    cdef CUresult rc
    if gs_real.cuMemFree_v2 == NULL and not gs_find(<void *>&gs_real.cuMemFree_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = free_pointer(dptr)
    gs_leave(GS_MEMORY)
    return rc


cdef void allocations_of_context_free(CUcontext ctx) noexcept nogil:
    """Free everything that was allocated or opened in a context that is no more."""
    cdef uint32_t cursor = 0
    cdef Allocation *a
    while True:
        gs_lock(&tables_mutex)
        while True:
            a = <Allocation *>table_next(&allocations, sizeof(Allocation), &cursor)
            if a == NULL or (a.ctx == ctx and a.id != 0 and not a.freeing):
                break
        if a != NULL:
            a.freeing = 1
        gs_unlock(&tables_mutex)
        if a == NULL:
            return
        if allocation_free(a) != 0:
            gs_log(b"memory of a destroyed context cannot be freed")
