# The two gates: what holds the application's calls while memory is away. It must not know objects or phases.
#
#   gs_enter(cls, stream, how)   at the start of a hook; waits while the gate of `cls` is closed
#   gs_leave(cls)                at its end, with the same cls; nothing may be allocated or waited for in between
#       cls: GS_LAUNCH or GS_MEMORY.  how: GS_NO_STREAM, GS_STREAM_PLAIN, GS_STREAM_PTSZ (NULL means the thread's own)
#   gate_close(cls)              new calls of that class wait from now on; those inside go on (see gate_in_flight)
#   gate_open_all()              opens both and wakes everybody
#   gate_admit(thread)           lets the launch of that thread (0: of the first one) through the closed launch gate
#   gate_is_closed(cls)  gate_in_flight(cls)  gate_waiting(cls)  gate_admitted()   admitted: launches since it closed
#   gate_expects_launch()        somebody was let through and is not inside yet
#   gs_waiters, waiter_idle(w)   launches that wait, each a thread and its stream; whether that has nothing left to do
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
        uint32_t admitted
        uint32_t arrivals
        uint32_t waiting[2]
        uint32_t threads
    Gates gates
    enum:
        GS_WAITERS
        GS_FREE
        GS_TAKEN
        GS_WAITING
        GS_ADMITTED
    ctypedef struct Waiter "gs_waiter":
        uint32_t state
        uint32_t thread
        uint32_t arrival
        uint32_t known
        void *stream
        void *context
    Waiter gs_waiters[]
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


cdef Waiter *waiter_take(CUstream stream, int how) noexcept nogil:
    """Write down that this thread's launch waits; NULL while too many do."""
    cdef CUcontext context = NULL
    cdef Waiter *w
    cdef int i
    for i in range(GS_WAITERS):
        w = &gs_waiters[i]
        if gs_load(&w.state) == GS_FREE and gs_cas(&w.state, GS_FREE, GS_TAKEN):
            w.thread = <uint32_t>syscall(SYS_gettid)
            w.arrival = gs_add(&gates.arrivals, 1)
            w.stream = <void *>stream
            w.known = (how == GS_STREAM_PLAIN and stream != GS_STREAM_PER_THREAD
                       and gs_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS and context != NULL)
            w.context = <void *>context
            gs_store(&w.state, GS_WAITING)
            return w
    return NULL


cdef bint waiter_idle(Waiter *w) noexcept nogil:
    """Say whether all that a waiting launch would come after is done. Asks the driver; False where that cannot tell."""
    cdef CUcontext before = NULL
    cdef CUresult rc
    if not w.known or captures_known() or gs_real.cuCtxPushCurrent_v2(<CUcontext>w.context) != CUDA_SUCCESS:
        return False
    rc = gs_real.cuStreamQuery(<CUstream>w.stream)
    gs_real.cuCtxPopCurrent_v2(&before)
    return rc == CUDA_SUCCESS


cdef bint gate_enter_admitted(Waiter *w) noexcept nogil:
    """Count in if this launch was let through the closed launch gate."""
    gs_add(&gs_self.shard.in_flight[GS_LAUNCH], 1)
    if gs_cas(&w.state, GS_ADMITTED, GS_TAKEN):
        gs_add(&gates.admitted, 1)
        return True
    gs_add(&gs_self.shard.in_flight[GS_LAUNCH], <uint32_t>-1)
    return False


cdef void gate_wait(int cls, CUstream stream, int how) noexcept nogil:
    """Wait at a closed gate, not counted as inside; return counted in. A thread's first call comes here too."""
    cdef Waiter *me = NULL
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
        if cls == GS_LAUNCH:
            me = waiter_take(stream, how) if me == NULL else me
            if me != NULL and gate_enter_admitted(me):
                break
        gs_futex_wait(&gates.turn, turn, -1)
    gs_add(&gates.waiting[cls], <uint32_t>-1)
    if me != NULL:
        gs_store(&me.state, GS_FREE)


cdef void gate_turn() noexcept nogil:
    """Make everybody who waits look again."""
    gs_add(&gates.turn, 1)
    gs_futex_wake(&gates.turn, 0x7FFFFFFF)


cdef void gate_close(int cls) noexcept nogil:
    """Close a gate. Admissions that were not used lapse."""
    cdef int i
    if cls == GS_LAUNCH and not gate_is_closed(GS_LAUNCH):
        gs_store(&gates.admitted, 0)
    gs_or(&gates.closed, 1 << cls)
    for i in range(GS_WAITERS):
        gs_cas(&gs_waiters[i].state, GS_ADMITTED, GS_WAITING)
    gate_turn()


cdef void gate_open_all() noexcept nogil:
    """Open both gates."""
    gs_store(&gates.closed, 0)
    gate_turn()


cdef Waiter *waiter_of(uint32_t thread) noexcept nogil:
    """Return the launch of a thread that waits, or with 0 the one that waits longest; NULL if there is none."""
    cdef Waiter *found = NULL
    cdef Waiter *w
    cdef int i
    for i in range(GS_WAITERS):
        w = &gs_waiters[i]
        if gs_load(&w.state) != GS_WAITING or (thread != 0 and w.thread != thread):
            continue
        if found == NULL or <int32_t>(w.arrival - found.arrival) < 0:
            found = w
    return found


cdef void gate_admit(uint32_t thread) noexcept nogil:
    """Let one launch that waits through the closed launch gate; none once the memory gate is closed too."""
    cdef Waiter *w = waiter_of(thread)
    if w == NULL or not gs_cas(&w.state, GS_WAITING, GS_ADMITTED):
        return
    if gs_load(&gates.closed) != 1 << GS_LAUNCH:
        gs_cas(&w.state, GS_ADMITTED, GS_WAITING)
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
    cdef int i
    for i in range(GS_WAITERS):
        if gs_load(&gs_waiters[i].state) == GS_ADMITTED:
            return True
    return False


cdef uint32_t gate_admitted() noexcept nogil:
    """Return how many launches were admitted since the launch gate was closed."""
    return gs_load(&gates.admitted)


cdef void gates_forget() noexcept nogil:
    """In a forked child: both open, nobody inside but calls of this thread, nobody waiting."""
    cdef int i
    for i in range(GS_SHARDS):
        gs_shards[i].in_flight[GS_LAUNCH] = 0
        gs_shards[i].in_flight[GS_MEMORY] = 0
    for i in range(GS_WAITERS):
        gs_waiters[i].state = GS_FREE
    gates.closed = gates.admitted = 0
    gates.waiting[GS_LAUNCH] = gates.waiting[GS_MEMORY] = 0
