# Waiting until the GPU is quiet: the drain after the launch gate has closed, and the last part of quiesce.

cdef uint32_t drain_wanted
cdef uint32_t drain_running
cdef uint32_t drain_done        # a pass has ended well since the gate closed
cdef uint32_t drain_admitted    # launches that had been admitted when that pass began
cdef uint32_t drain_error       # what the driver said to a pass that failed
cdef uint32_t gates_turn        # changes whenever the gates are opened


cdef bint is_capture_error(CUresult rc) noexcept nogil:
    """Say whether contexts cannot be waited for because some stream is being captured: the drain tries again."""
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED <= rc <= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED + 8


cdef CUcontext next_context(uint32_t *cursor) noexcept nogil:
    """Return the next context, or NULL."""
    cdef Context *c
    cdef CUcontext ctx = NULL
    gs_lock(&tables_mutex)
    c = <Context *>table_next(&contexts, sizeof(Context), cursor)
    if c != NULL:
        ctx = c.ctx
    gs_unlock(&tables_mutex)
    return ctx


cdef bint context_exists(CUcontext ctx) noexcept nogil:
    """Say whether a context is still there."""
    cdef bint found
    gs_lock(&tables_mutex)
    found = context_find(ctx) != NULL
    gs_unlock(&tables_mutex)
    return found


cdef CUresult synchronize_all() noexcept nogil:
    """Wait for the work of all contexts; a context that goes meanwhile is no error.  Not while a graph is recorded."""
    cdef uint32_t cursor = 0
    cdef CUcontext ctx
    cdef CUresult rc
    if captures_live() != 0:
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    while True:
        ctx = next_context(&cursor)
        if ctx == NULL:
            return 0
        rc = context_wait(ctx, False)
        if rc != 0 and context_exists(ctx):
            return rc


cdef void drain_begin() noexcept nogil:
    """Have the worker drain, if it does not."""
    gs_store(&drain_wanted, 1)
    worker_wake()


cdef void drain_pass() noexcept nogil:
    """Wait for the launches inside the driver, then for all contexts."""
    cdef uint32_t admitted, turn = gs_load(&gates_turn)
    cdef CUresult rc
    gs_store(&drain_running, 1)
    gs_store(&drain_wanted, 0)
    admitted = gate_admitted()
    while gate_in_flight(GS_LAUNCH) != 0 and gs_load(&gates_turn) == turn:
        sleep_us(500)
    rc = synchronize_all()
    if gs_load(&gates_turn) == turn:
        if rc == 0:
            gs_store(&drain_admitted, admitted)
            gs_store(&drain_done, 1)
        elif is_capture_error(rc):
            sleep_us(10000)
        else:
            gs_store(&drain_error, <uint32_t>rc)
    gs_store(&drain_running, 0)


cdef bint is_drained() noexcept nogil:
    """Say whether nothing was launched since a pass that ended well; starts another pass if not."""
    # In the order in which a launch that was let through passes: on its way, then inside, then counted for good. Looked
    # at the other way round, one could be overlooked, and wait for another rank's once the memory gate is closed.
    if gate_expects_launch():
        return False
    if gate_in_flight(GS_LAUNCH) == 0 and gs_load(&drain_done) and gs_load(&drain_admitted) == gate_admitted():
        return True
    if gs_load(&drain_running) == 0 and gs_load(&drain_error) == 0:
        drain_begin()
    return False


cdef void close_launch() noexcept nogil:
    """Close the launch gate and begin to drain."""
    global phase
    if gate_is_closed(GS_LAUNCH):
        return
    gs_store(&drain_done, 0)
    gs_store(&drain_error, 0)
    gate_close(GS_LAUNCH)
    phase = PHASE_QUIESCING
    drain_begin()


cdef bint any_unresolved(uint64_t *object) noexcept nogil:
    """Say whether the owner of some import is not known."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return False
        if is_shared_import(o) and o.owner == OWNER_UNKNOWN:
            object[0] = o.id
            return True


cdef bint refuse_uncarried(Failure *f) noexcept nogil:
    """Refuse while an object of a kind lives that is not carried."""
    if uncarried_total() + unknown_abi_count() == 0:
        return True
    return fail(f, b"uncarried", b"close-memory", b"objects live that cannot be carried")


cdef bint close_memory(uint64_t deadline, Failure *f) noexcept nogil:
    """Close the memory gate, wait until nobody is inside, drain once more, and know whose every import is."""
    cdef uint32_t turn = gs_load(&gates_turn)
    cdef CUresult rc
    global phase
    if not gate_is_closed(GS_LAUNCH):
        return fail(f, b"phase", b"close-memory", b"the launch gate is open")
    if phase > PHASE_QUIESCED:
        return True
    if not refuse_uncarried(f):
        return False
    gate_close(GS_MEMORY)
    while gate_in_flight(GS_MEMORY) + gate_in_flight(GS_LAUNCH) != 0:
        if gs_load(&gates_turn) != turn or not sleep_before(deadline, 1):
            return fail(f, b"deadline", b"in-flight", b"a call of the application does not return")
    rc = synchronize_all()
    if rc != 0:
        return fail_cuda(f, b"drain", rc, NULL, 0)
    if not refuse_uncarried(f):
        return False
    refresh_imports()
    if any_unresolved(&f.object):
        return fail(f, b"unresolved", b"imports", b"nobody knows whose this import is")
    if gs_load(&gates_turn) != turn:
        return fail(f, b"phase", b"close-memory", b"the gates were opened meanwhile")
    phase = PHASE_QUIESCED
    return True
