# The two gates: what holds the application's calls while memory is away. It must not know objects or phases.
#
#   gs_enter(cls, stream, how)   at the start of a hook; waits while the gate of `cls` is closed
#   gs_leave(cls)                at its end, with the same cls; nothing may be allocated or waited for in between
#       cls: GS_LAUNCH or GS_MEMORY.  how: GS_NO_STREAM, GS_STREAM_PLAIN, GS_STREAM_PTSZ (NULL means the thread's own)
#   gate_close(cls)              new calls of that class wait from now on; those inside go on (see gate_in_flight)
#   gate_open_all()              opens both and wakes everybody
#   gate_admit(n)                lets n more launches through the closed launch gate
#   gate_is_closed(cls)  gate_in_flight(cls)  gate_waiting(cls)  gate_admitted()   admitted: launches since it closed
#   gate_expects_launch()        an admission is not used yet
#
# Calls of one thread nest (a hook may call another hook): only the outermost waits and is counted.
# Who passes a closed gate: threads with gs_self.bypass (ours, and those of the driver while they run a host function:
# hostfuncs.pxi), since a drain waits for them; and calls on a stream that is being captured, since they do no work
# and holding them would keep the capture open for ever.
#
# Order of things: a caller counts itself first and looks at the gate second; the closer closes first and reads the
# counters second (both sequentially consistent). So once the sum is zero, nobody is inside and nobody gets in.

cdef extern from "platform.h" nogil:
    enum:
        GS_SHARDS
    gs_shard gs_shards[]
    ctypedef struct Gates "gs_gates":
        uint32_t closed
        uint32_t turn
        uint32_t credits
        uint32_t admitted
        uint32_t waiting[2]
        uint32_t threads
    Gates gates
    bint gs_count_in(int cls)
    void gs_count_out(int cls)

cdef enum:
    GS_LAUNCH = 0
    GS_MEMORY = 1
    GS_NO_STREAM = 0
    GS_STREAM_PLAIN = 1
    GS_STREAM_PTSZ = 2


cdef inline void gs_enter(int cls, CUstream stream, int how) noexcept nogil:
    """Enter a gated call: count this thread in, and wait if the gate is closed."""
    if not gs_count_in(cls):
        gate_wait(cls, stream, how)


cdef inline void gs_leave(int cls) noexcept nogil:
    """Leave a gated call."""
    gs_count_out(cls)


cdef void gate_join() noexcept nogil:
    """Give this thread a shard; threads beyond the number of shards share one."""
    gs_self.shard = &gs_shards[gs_add(&gates.threads, 1) % GS_SHARDS]


cdef bint is_captured(CUstream stream, int how) noexcept nogil:
    """Tell whether work on this stream goes into a graph instead of to the device. Asks the driver."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult rc
    if how == GS_NO_STREAM or gs_real.cuStreamIsCapturing == NULL:
        return False
    if how == GS_STREAM_PTSZ and stream == NULL:
        stream = GS_STREAM_PER_THREAD
    rc = gs_real.cuStreamIsCapturing(stream, &status)
    # IMPLICIT: the legacy stream while another one captures; the call itself is going to fail the same way.
    return rc == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT or (rc == CUDA_SUCCESS and status != CU_STREAM_CAPTURE_STATUS_NONE)


cdef bint gate_passes(CUstream stream, int how) noexcept nogil:
    """Tell whether this call passes a closed gate; only asked where it is closed."""
    return gs_self.bypass != 0 or is_captured(stream, how)


cdef bint gate_enter_open(int cls) noexcept nogil:
    """Count in if the gate is open."""
    gs_add(&gs_self.shard.in_flight[cls], 1)
    if gs_load(&gates.closed) & (1 << cls) == 0:
        return True
    gs_add(&gs_self.shard.in_flight[cls], <uint32_t>-1)
    return False


cdef bint gate_enter_admitted() noexcept nogil:
    """Count in if a launch may pass the closed launch gate, using up one admission."""
    cdef uint32_t credits
    gs_add(&gs_self.shard.in_flight[GS_LAUNCH], 1)
    credits = gs_load(&gates.credits)
    while credits:
        if gs_cas(&gates.credits, credits, credits - 1):
            gs_add(&gates.admitted, 1)
            return True
        credits = gs_load(&gates.credits)
    gs_add(&gs_self.shard.in_flight[GS_LAUNCH], <uint32_t>-1)
    return False


cdef void gate_wait(int cls, CUstream stream, int how) noexcept nogil:
    """Wait at a closed gate, not counted as inside; return counted in. A thread's first call comes here too."""
    cdef uint32_t turn
    if gs_self.shard == NULL:
        gate_join()
        if gate_enter_open(cls):
            return
    if gate_passes(stream, how):
        gs_add(&gs_self.shard.in_flight[cls], 1)
        return
    gs_add(&gates.waiting[cls], 1)
    while True:
        turn = gs_load(&gates.turn)
        if gate_enter_open(cls):
            break
        if cls == GS_LAUNCH and gate_enter_admitted():
            break
        gs_futex_wait(&gates.turn, turn, -1)
    gs_add(&gates.waiting[cls], <uint32_t>-1)


cdef void gate_turn() noexcept nogil:
    """Make everybody who waits look again."""
    gs_add(&gates.turn, 1)
    gs_futex_wake(&gates.turn, 0x7FFFFFFF)


cdef void gate_close(int cls) noexcept nogil:
    """Close a gate. Admissions that were not used lapse."""
    if cls == GS_LAUNCH and not gate_is_closed(GS_LAUNCH):
        gs_store(&gates.admitted, 0)
    gs_or(&gates.closed, 1 << cls)
    gs_store(&gates.credits, 0)
    gate_turn()


cdef void gate_open_all() noexcept nogil:
    """Open both gates."""
    gs_store(&gates.credits, 0)
    gs_store(&gates.closed, 0)
    gate_turn()


cdef void gate_admit(uint32_t count) noexcept nogil:
    """Let that many launches through the closed launch gate; none once the memory gate is closed too."""
    if gs_load(&gates.closed) == 1 << GS_LAUNCH:
        gs_add(&gates.credits, count)
        gate_turn()


cdef bint gate_is_closed(int cls) noexcept nogil:
    """Tell whether a gate is closed."""
    return gs_load(&gates.closed) & (1 << cls) != 0


cdef uint32_t gate_in_flight(int cls) noexcept nogil:
    """Return how many threads are inside a call of that class."""
    cdef uint32_t total = 0
    cdef int i
    for i in range(GS_SHARDS):
        total += gs_load(&gs_shards[i].in_flight[cls])
    return total


cdef uint32_t gate_waiting(int cls) noexcept nogil:
    """Return how many threads wait at a gate."""
    return gs_load(&gates.waiting[cls])


cdef bint gate_expects_launch() noexcept nogil:
    """Tell whether an admission is still to be used: somebody was woken for it and is not inside yet."""
    return gs_load(&gates.credits) != 0


cdef uint32_t gate_admitted() noexcept nogil:
    """Return how many launches were admitted since the launch gate was closed."""
    return gs_load(&gates.admitted)


cdef void gates_forget() noexcept nogil:
    """In a forked child: both open, nobody inside but calls of this thread, nobody waiting."""
    cdef int i
    for i in range(GS_SHARDS):
        gs_shards[i].in_flight[GS_LAUNCH] = 0
        gs_shards[i].in_flight[GS_MEMORY] = 0
    gates.closed = gates.credits = gates.admitted = 0
    gates.waiting[GS_LAUNCH] = gates.waiting[GS_MEMORY] = 0
