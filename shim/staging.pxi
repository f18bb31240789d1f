# Copying device memory to and from the arena that the supervisor hands over.
#
# What must move is a list of pieces, made before the copy and apart from it.  Each device has a stream of ours for the
# time of one copy; the copies of all devices run at once, and the wait polls, so that it can end at a deadline.

cdef enum:
    ARENA_STEP = 1 << 30    # page-locked in steps; a copy must not cross from one registration into the next
    MAX_ARENA_STEPS = 16384
    LEFTOVER_STEP = 1 << 26
    APART_ROOM = 1 << 30    # more than a context takes while it is made (measured: 523 MiB)
    APART_SHARE = 16        # of a GPU's memory one part of so many stays free beside a context of ours
    MAX_PIECES = 262144
    LANES_TIMEOUT_MS = 5000
    PIECE_IN_ARENA = 0      # its place is in the arena, and its own
    PIECE_LISTED = 1        # to pass through a ring (stored.pxi)
    PIECE_OUT = 2           # it has, and the supervisor keeps the content
    PIECE_BACK = 3          # the content is in the memory again

ctypedef struct Piece:
    uint32_t link
    Object *object
    uint64_t offset         # in the object
    uint64_t size
    uint64_t place          # in the arena
    uint8_t state           # PIECE_...

ctypedef struct Arena:
    char *base
    uint64_t size
    uint64_t locked         # bytes from the beginning that are page-locked
    uint8_t refused         # the driver locks no more of it
    CUcontext apart         # the context of our own that they are locked in; NULL: in one of the application's
    uint64_t used           # bytes that pieces occupy
    uint32_t round          # changes whenever the list of pieces begins anew

# A device while it copies.
ctypedef struct Lane:
    CUcontext ctx
    CUstream stream
    uint8_t retained        # the primary context is held by us for the time being
    uint8_t busy

# When a device copied last: from its first copy until all were seen to have ended, in nanoseconds of `now_ns`.
ctypedef struct CopyTime:
    uint64_t begun          # 0: not at all
    uint64_t ended
    uint64_t bytes

# Why a phase did not succeed: the words of an error reply.
ctypedef struct Failure:
    const char *code
    const char *step
    const char *message
    CUresult cuda
    uint64_t object
    uint64_t address
    uint64_t need
    int error

# An arena that nothing is in any more: unlocked, where it is page-locked apart, and freed when the application runs.
ctypedef struct Leftover:
    char *base
    uint64_t size
    uint64_t locked
    CUcontext apart
    uint8_t refused         # the driver does not unlock it: tried again when the next arena comes

cdef Table pieces
cdef Arena arena
cdef Leftover leftover
cdef bint checkpointed          # the driver may have: contexts from before are restored ones
cdef Lane[MAX_DEVICES] lanes
cdef CopyTime[MAX_DEVICES] copy_times
cdef uint64_t locking_ns        # of the last copies: how long the arena was being locked in between


cdef bint fail(Failure *f, const char *code, const char *step, const char *message) noexcept nogil:
    """Note the first failure; returns False."""
    if f.code == NULL:
        f.code = code
        f.step = step
        f.message = message
    return False


cdef bint fail_cuda(Failure *f, const char *step, CUresult rc, Object *o, uint64_t address) noexcept nogil:
    """Note a driver call that failed; returns False."""
    if f.code == NULL:
        f.cuda = rc
        f.object = o.id if o != NULL else 0
        f.address = address
        fail(f, b"cuda", step, b"the driver refused")
    return False


# ---- the arena ----

cdef CUcontext apart_make() noexcept nogil:
    """Make a context of our own to page-lock in; NULL where memory of the GPU would become short, or on refusal.

    Memory is unregistered with a lock of the driver held that only waits for the context which it was registered in.
    Not after a checkpoint: a kernel of a restored context keeps the GPU from other contexts until it ends (measured, of
    other processes), and may wait for calls that the driver holds up while it makes a context.
    """
    cdef CUcontext before = NULL
    cdef CUcontext made = NULL
    cdef size_t left = 0, total = 0
    cdef int device = 0
    cdef CUcontext ctx = context_any(&device)
    cdef CUresult rc
    if ctx == NULL or checkpointed or not (
        gs_find(<void *>&gs_real.cuCtxCreate_v2)
        and gs_find(<void *>&gs_real.cuMemGetInfo_v2)
        and gs_find(<void *>&gs_real.cuCtxSetLimit)
    ):
        return NULL
    if gs_real.cuCtxPushCurrent_v2(ctx) != 0:
        return NULL
    rc = gs_real.cuMemGetInfo_v2(&left, &total)
    if rc == 0 and left >= APART_ROOM + total // APART_SHARE:
        rc = gs_real.cuCtxCreate_v2(&made, 0, device)
        if rc == 0:
            # Nothing runs in it, and room for stacks is half of what it takes (measured: 259 MiB without).
            gs_real.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0)
            gs_real.cuCtxPopCurrent_v2(&before)
        else:
            made = NULL
    gs_real.cuCtxPopCurrent_v2(&before)
    return made


cdef void apart_end(CUcontext *ctx) noexcept nogil:
    """Destroy a context of our own, if there is one."""
    if ctx[0] != NULL:
        gs_real.cuCtxDestroy_v2(ctx[0])
        ctx[0] = NULL


cdef CUresult unlock(char *base, uint64_t *locked, CUcontext ctx) noexcept nogil:
    """Unregister what is page-locked, from its end, so that what is still registered stays known."""
    cdef CUcontext before = NULL
    cdef uint64_t at
    cdef CUresult rc
    if locked[0] == 0:
        return CUDA_SUCCESS
    rc = gs_real.cuCtxPushCurrent_v2(ctx)
    if rc != 0:
        return rc
    while rc == 0 and locked[0] != 0:
        at = (locked[0] - 1) // ARENA_STEP * ARENA_STEP
        rc = gs_real.cuMemHostUnregister(base + at)
        if rc == 0:
            locked[0] = at
    gs_real.cuCtxPopCurrent_v2(&before)
    return rc


cdef void arena_lock(uint64_t end) noexcept nogil:
    """Page-lock the arena from its beginning to `end`, as far as the driver allows; the rest is copied more slowly."""
    cdef CUcontext before = NULL
    cdef uint64_t n, begun = now_ns()
    cdef int device = 0
    cdef CUcontext ctx
    global locking_ns
    if arena.locked >= end or arena.refused:
        return
    ctx = arena.apart if arena.apart != NULL else context_any(&device)
    if ctx == NULL or gs_real.cuMemHostRegister_v2 == NULL or gs_real.cuCtxPushCurrent_v2(ctx) != 0:
        return
    while arena.locked < end:
        n = arena.size - arena.locked if arena.size - arena.locked < ARENA_STEP else ARENA_STEP
        if gs_real.cuMemHostRegister_v2(arena.base + arena.locked, n, CU_MEMHOSTREGISTER_PORTABLE) != 0:
            gs_log(b"%lu bytes of the arena are page-locked, the driver refuses more", arena.locked)
            arena.refused = 1
            break
        arena.locked += n
    gs_real.cuCtxPopCurrent_v2(&before)
    locking_ns += now_ns() - begun


cdef bint arena_unlock(Failure *f) noexcept nogil:
    """Unregister the arena; what is in it stays, and a copy has it locked again.

    Unregistering in a context of the application waits for the work there with a lock of the driver held.  A kernel
    that waits for a copy of another thread would never end, so the gates have to be closed and everything drained.
    """
    cdef int device = 0
    cdef CUresult rc
    if arena.locked != 0 and phase < PHASE_QUIESCED:
        return fail(f, b"phase", b"arena", b"an arena can be unlocked only between close-memory and open")
    rc = unlock(arena.base, &arena.locked, context_any(&device) if arena.apart == NULL else arena.apart)
    arena.refused = 0
    return rc == 0 or fail_cuda(f, b"unregister the arena", rc, NULL, <uint64_t><uintptr_t>arena.base)


cdef bint arena_give_up(Failure *f) noexcept nogil:
    """Let the arena go, unless the driver still has it registered: the GPU may reach into it then.

    One that is locked apart is unlocked when the application runs, which takes as long as the copies took; so is the
    freeing of its pages.
    """
    if phase >= PHASE_QUIESCED:
        # What copies through a ring have kept open between one and the next.
        if not spares_unmap(f):
            return False
        lanes_close()
    if arena.apart == NULL or checkpointed:
        if not arena_unlock(f):
            return False
        apart_end(&arena.apart)
    if not leftover_free(f):
        return False
    leftover.base = arena.base
    leftover.size = arena.size
    leftover.locked = arena.locked
    leftover.apart = arena.apart
    arena.base = NULL
    arena.size = arena.locked = 0
    arena.apart = NULL
    arena.refused = 0
    return True


cdef bint leftover_free(Failure *f) noexcept nogil:
    """Free the pages of an arena that was given up, step by step: others map memory in between."""
    cdef uint64_t n
    cdef CUresult rc = unlock(leftover.base, &leftover.locked, leftover.apart)
    leftover.refused = rc != 0
    if rc != 0:
        gs_log(b"the driver does not unlock an arena: %d", <int>rc)
        return fail_cuda(f, b"unregister the last arena", rc, NULL, <uint64_t><uintptr_t>leftover.base)
    apart_end(&leftover.apart)
    while leftover.size != 0:
        n = leftover.size if leftover.size < LEFTOVER_STEP else LEFTOVER_STEP
        leftover.size -= n
        munmap(leftover.base + leftover.size, n)
    leftover.base = NULL
    return True


cdef bint arena_take(int fd, uint64_t size, bint apart, uint64_t deadline, Failure *f) noexcept nogil:
    """Map and page-lock the memory that the supervisor hands over, in place of what was there.

    `apart`: in a context of our own, where there is room for one.
    """
    cdef struct_stat st
    cdef void *memory
    if pieces_lost():
        return fail(f, b"phase", b"arena", b"the arena holds memory that is not loaded yet")
    # A copy whose end was not seen may still run.
    if not lanes_wait(deadline, f) or not arena_give_up(f):
        return False
    # Not two at a time, and nothing of a ring stays for a dump.
    if (size != 0 or is_stored()) and not leftover_free(f):
        return False
    if not is_stored():
        pieces_clear()
    if size == 0:
        return True
    if fd < 0:
        f.error = EMFILE
        return fail(f, b"argument", b"arena", b"no descriptor arrived: this process has none left (RLIMIT_NOFILE)")
    if fstat(fd, &st) != 0 or <uint64_t>st.st_size < size or size > ARENA_STEP * <uint64_t>MAX_ARENA_STEPS:
        return fail(f, b"argument", b"arena", b"the descriptor is no memory of that size")
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if memory == MAP_FAILED:
        f.error = errno
        return fail(f, b"memory", b"arena", b"the arena cannot be mapped")
    madvise(memory, size, MADV_DONTFORK)
    arena.base = <char *>memory
    arena.size = size
    arena.apart = apart_make() if apart else NULL
    arena_lock(size)
    return True


# ---- pieces ----

cdef Piece *next_piece(uint32_t *cursor) noexcept nogil:
    """Return the next piece, or NULL."""
    cdef Piece *p
    gs_lock(&tables_mutex)
    p = <Piece *>table_next(&pieces, sizeof(Piece), cursor)
    gs_unlock(&tables_mutex)
    return p


cdef bint pieces_lost() noexcept nogil:
    """Say whether some content exists in the arena only."""
    cdef uint32_t cursor = 0
    cdef Piece *p
    while True:
        p = next_piece(&cursor)
        if p == NULL or (p.object.content_lost and p.state == PIECE_IN_ARENA):
            return p != NULL


cdef void pieces_clear() noexcept nogil:
    """Forget all pieces: the memory itself holds the content."""
    gs_lock(&tables_mutex)
    table_forget(&pieces)
    arena.used = 0
    arena.round += 1
    stored_in[0] = 0
    gs_unlock(&tables_mutex)


cdef void pieces_forget(Object *o) noexcept nogil:
    """Forget the pieces of an object that is no more."""
    cdef uint32_t cursor = 0
    cdef Piece *p
    if pieces.live == 0:
        return
    gs_lock(&tables_mutex)
    while True:
        p = <Piece *>table_next(&pieces, sizeof(Piece), &cursor)
        if p == NULL:
            break
        if p.object == o:
            table_give(&pieces, sizeof(Piece), p)
    gs_unlock(&tables_mutex)


cdef bint pieces_add(Object *o) noexcept nogil:
    """List an object's content, cut where the arena's registrations meet."""
    cdef uint64_t offset = 0, n
    cdef Piece *p
    while offset < o.size:
        n = ARENA_STEP - arena.used % ARENA_STEP
        if n > o.size - offset:
            n = o.size - offset
        gs_lock(&tables_mutex)
        p = <Piece *>table_take(&pieces, sizeof(Piece), MAX_PIECES)
        if p != NULL:
            o.listed = arena.round
            p.object = o
            p.offset = offset
            p.size = n
            p.place = arena.used
        gs_unlock(&tables_mutex)
        if p == NULL:
            return False
        arena.used += n
        offset += n
    return True


# ---- lanes ----

cdef bint lane_open(int device, Failure *f) noexcept nogil:
    """Make a context of the device current, and a stream of ours in it."""
    cdef Lane *lane
    cdef CUcontext ctx
    cdef CUresult rc
    if device < 0 or device >= MAX_DEVICES:
        return fail(f, b"cuda", b"device", b"a device number is out of range")
    lane = &lanes[device]
    if lane.ctx == NULL:
        ctx = context_on(device)
        if ctx == NULL:
            rc = gs_real.cuDevicePrimaryCtxRetain(&ctx, device)
            if rc != 0:
                return fail_cuda(f, b"cuDevicePrimaryCtxRetain", rc, NULL, 0)
            lane.retained = 1
        lane.ctx = ctx
    rc = gs_real.cuCtxPushCurrent_v2(lane.ctx)
    if rc != 0:
        return fail_cuda(f, b"cuCtxPushCurrent", rc, NULL, 0)
    if lane.stream == NULL:
        rc = gs_real.cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING)
        if rc != 0:
            lane.stream = NULL
            lane_leave()
            return fail_cuda(f, b"cuStreamCreate", rc, NULL, 0)
    return True


cdef void lane_leave() noexcept nogil:
    """Take the lane's context off the stack again."""
    cdef CUcontext before = NULL
    gs_real.cuCtxPopCurrent_v2(&before)


cdef bint lanes_wait(uint64_t deadline, Failure *f) noexcept nogil:
    """Wait for all copies; False at the first that failed, or at the deadline."""
    cdef int device
    cdef bint waiting = True
    cdef CUresult rc = 0
    while waiting:
        waiting = False
        for device in range(MAX_DEVICES):
            if not lanes[device].busy:
                continue
            rc = gs_real.cuCtxPushCurrent_v2(lanes[device].ctx)
            if rc == 0:
                rc = gs_real.cuStreamQuery(lanes[device].stream)
                lane_leave()
            if rc == 0:
                lanes[device].busy = 0
                copy_times[device].ended = now_ns()
            elif rc != CUDA_ERROR_NOT_READY:
                return fail_cuda(f, b"cuStreamQuery", rc, NULL, 0)
            else:
                waiting = True
        if waiting and not sleep_before(deadline, 1):
            return fail(f, b"deadline", b"copy", b"the GPU does not finish a copy")
    return True


cdef void lanes_close() noexcept nogil:
    """Let streams and contexts go."""
    cdef int device
    cdef Lane *lane
    for device in range(MAX_DEVICES):
        lane = &lanes[device]
        if lane.stream != NULL and gs_real.cuCtxPushCurrent_v2(lane.ctx) == 0:
            gs_real.cuStreamDestroy_v2(lane.stream)
            lane_leave()
        if lane.retained:
            gs_real.cuDevicePrimaryCtxRelease_v2(device)
        memset(lane, 0, sizeof(lane[0]))


# ---- addresses to copy from and to ----

cdef CUresult spare_map(Object *o, CUmemAccessDesc *desc) noexcept nogil:
    """Map an object at an address of our own."""
    cdef CUdeviceptr va = 0
    cdef CUresult rc = 0
    if o.spare_va == 0:
        rc = gs_real.cuMemAddressReserve(&va, o.size, 0, 0, 0)
        if rc != 0:
            return rc
        o.spare_va = va
    if not o.spare_mapped:
        rc = gs_real.cuMemMap(o.spare_va, o.size, 0, o.real, 0)
        if rc != 0:
            return rc
        o.spare_mapped = 1
    return gs_real.cuMemSetAccess(o.spare_va, o.size, desc, 1)


cdef bint spare_unmap(Object *o, Failure *f) noexcept nogil:
    """Undo `spare_map`, from wherever it got to."""
    cdef CUresult rc
    if o.spare_mapped:
        rc = gs_real.cuMemUnmap(o.spare_va, o.size)
        if rc != 0:
            return fail_cuda(f, b"cuMemUnmap", rc, o, o.spare_va)
        o.spare_mapped = 0
    if o.spare_va != 0:
        rc = gs_real.cuMemAddressFree(o.spare_va, o.size)
        if rc != 0:
            return fail_cuda(f, b"cuMemAddressFree", rc, o, o.spare_va)
        o.spare_va = 0
    return True


cdef bint spares_unmap(Failure *f) noexcept nogil:
    """Remove all mappings of our own."""
    cdef uint32_t cursor = 0
    cdef Object *o
    cdef bint done = True
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return done
        if o.spare_va != 0 and not spare_unmap(o, f):
            done = False


cdef uint64_t address_in(Object *o, uint64_t offset, uint64_t size, int type, int id, int flags) noexcept nogil:
    """Return where a location can reach a part of an object through one of its mappings, or 0."""
    cdef Mapping *m = <Mapping *>o.first
    while m != NULL:
        if m.mapped and m.granted and m.offset <= offset and offset + size <= m.offset + m.size:
            if access_covers(m, type, id, flags):
                return m.va + offset - m.offset
        m = m.sibling
    return 0


cdef bint piece_address(Piece *p, int flags, uint64_t *va, Failure *f) noexcept nogil:
    """Find where the object's own device can reach a piece; maps the object for the copy if it can nowhere."""
    cdef CUmemAccessDesc desc
    cdef Object *o = p.object
    cdef CUresult rc
    va[0] = address_in(o, p.offset, p.size, CU_MEM_LOCATION_TYPE_DEVICE, o.props.location.id, flags)
    if va[0] != 0:
        return True
    desc.location = o.props.location
    desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    rc = spare_map(o, &desc)
    if rc != 0:
        return fail_cuda(f, b"map for the copy", rc, o, o.spare_va)
    va[0] = o.spare_va + p.offset
    return True


cdef bint piece_copy(Piece *p, bint save, Failure *f) noexcept nogil:
    """Put the copy of one piece into the stream of its device."""
    cdef int device = p.object.props.location.id
    cdef int flags = CU_MEM_ACCESS_FLAGS_PROT_READ if save else CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    cdef uint64_t va = 0
    cdef CUresult rc
    if not piece_address(p, flags, &va, f) or not lane_open(device, f):
        return False
    if copy_times[device].begun == 0:
        copy_times[device].begun = now_ns()
    copy_times[device].bytes += p.size
    if save:
        rc = gs_real.cuMemcpyDtoHAsync_v2(arena.base + p.place, va, p.size, lanes[device].stream)
    else:
        rc = gs_real.cuMemcpyHtoDAsync_v2(va, arena.base + p.place, p.size, lanes[device].stream)
    lane_leave()
    if rc != 0:
        return fail_cuda(f, b"copy", rc, p.object, va)
    lanes[device].busy = 1
    return True


cdef bint pieces_copy(bint save, uint64_t deadline, uint64_t *bytes, Failure *f) noexcept nogil:
    """Copy every piece that must move: to the arena what is on the GPU, or back what was lost from there.

    What was unlocked for a checkpoint is locked while what is already so is copied: locking does not wait for the GPU.

    A copy that does not end keeps its stream and its mapping: taking them away under it would kill the context.
    """
    cdef uint32_t cursor = 0
    cdef Piece *p
    cdef bint done = lanes_wait(deadline, f)
    global locking_ns
    locking_ns = 0
    memset(copy_times, 0, sizeof(copy_times))
    while done:
        p = next_piece(&cursor)
        if p == NULL:
            break
        if p.state != PIECE_IN_ARENA or p.object.real == 0 or (p.object.content_lost != 0) == save:
            continue
        arena_lock(p.place + p.size)
        done = piece_copy(p, save, f)
        bytes[0] += p.size
    if not lanes_wait(deadline, f):
        return False
    done = spares_unmap(f) and done
    lanes_close()
    return done
