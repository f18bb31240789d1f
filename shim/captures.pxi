# Which streams record a graph.  cuCtxSynchronize breaks every capture of its context, in the relaxed mode too
# (measured: 900, and the capture ends with 901), so whoever waits for a whole context asks here first.
#
# A capture begins as a launch does, at the launch gate: once that is closed and nobody is inside, no new one begins,
# and the drain waits for those that live.  Work on a captured stream passes the gates, so a capture can end.

cdef enum:
    MAX_CAPTURES = 4096

ctypedef struct Capture:
    uint32_t link
    CUstream stream         # that it began on
    int thread              # whose default stream that is, 0: a stream that was made
    CUcontext ctx
    uint8_t settled         # has begun; 0: a call that begins it, or destroys its stream, has the record

cdef Table captures


cdef bint captures_known() noexcept nogil:
    """Say whether any capture was begun and not ended: a wait for its whole context would break it, or fail."""
    return gs_load(&captures.live) != 0


cdef bint thread_is_gone(int thread) noexcept nogil:
    """Say whether a thread of this process has ended."""
    return syscall(SYS_tgkill, getpid(), thread, 0) != 0 and errno == ESRCH


cdef uint32_t captures_live() noexcept nogil:
    """Return how many captures may still end or are about to begin.

    One on the default stream of a thread that has ended is not waited for: nobody else can end it.
    """
    cdef uint32_t cursor = 0, live = 0
    cdef Capture *c
    if not captures_known():
        return 0
    gs_lock(&tables_mutex)
    while True:
        c = <Capture *>table_next(&captures, sizeof(Capture), &cursor)
        if c == NULL:
            break
        live += 0 if c.thread != 0 and thread_is_gone(c.thread) else 1
    gs_unlock(&tables_mutex)
    return live


cdef CUstream named_stream(CUstream stream, int how) noexcept nogil:
    """Return the stream that a call means."""
    return GS_STREAM_PER_THREAD if how == GS_STREAM_PTSZ and stream == NULL else stream


cdef int thread_of(CUstream stream) noexcept nogil:
    """Return the calling thread, if it means its own default stream by a name that all threads use; else 0."""
    return <int>syscall(SYS_gettid) if stream == GS_STREAM_PER_THREAD else 0


cdef CUcontext context_of_stream(CUstream stream) noexcept nogil:
    """Return the context of a stream, or NULL."""
    cdef CUcontext ctx = NULL
    if gs_real.cuStreamGetCtx != NULL and gs_real.cuStreamGetCtx(stream, &ctx) == 0:
        return ctx
    gs_real.cuCtxGetCurrent(&ctx)
    return ctx


cdef Capture capture_named(CUstream stream, int how) noexcept nogil:
    """Return what the record of a capture on a stream looks like."""
    cdef Capture c
    memset(&c, 0, sizeof(c))
    c.stream = named_stream(stream, how)
    c.thread = thread_of(c.stream)
    c.ctx = context_of_stream(c.stream)
    return c


cdef Capture *capture_enter(CUstream stream, int how) noexcept nogil:
    """Enter the gate and record a capture that is about to begin, or return NULL, outside."""
    cdef Capture named
    cdef Capture *c
    gs_enter(GS_LAUNCH, stream, how)
    named = capture_named(stream, how)
    gs_lock(&tables_mutex)
    c = <Capture *>table_take(&captures, sizeof(Capture), MAX_CAPTURES)
    if c != NULL:
        named.link = c.link
        c[0] = named
    gs_unlock(&tables_mutex)
    if c == NULL:
        gs_log(b"table of captures is full")
        gs_leave(GS_LAUNCH)
    return c


cdef CUresult capture_leave(Capture *c, CUresult rc) noexcept nogil:
    """Keep the record if the capture has begun, and leave the gate."""
    gs_lock(&tables_mutex)
    if rc == 0:
        # An earlier one of that name was of a thread that had the same number and has ended, or has ended unseen.
        capture_drop(c)
        c.settled = 1
    else:
        table_give(&captures, sizeof(Capture), c)
    gs_unlock(&tables_mutex)
    gs_leave(GS_LAUNCH)
    return rc


cdef Capture *capture_like(const Capture *named) noexcept nogil:
    """Return the settled record of a capture of that name, or NULL; `tables_mutex` is held.

    A thread's own default stream is another one in each context, under one name.
    """
    cdef uint32_t cursor = 0
    cdef Capture *c
    while True:
        c = <Capture *>table_next(&captures, sizeof(Capture), &cursor)
        if c == NULL or (c.settled and c.stream == named.stream and c.thread == named.thread
                         and (c.thread == 0 or c.ctx == named.ctx)):
            return c


cdef void capture_drop(const Capture *named) noexcept nogil:
    """Forget a capture of that name, if there is one; `tables_mutex` is held."""
    cdef Capture *c = capture_like(named)
    if c != NULL:
        table_give(&captures, sizeof(Capture), c)


cdef CUresult capture_ended(CUstream stream, int how, CUresult rc) noexcept nogil:
    """Forget a capture that has ended, well or not; one that only this call may not end goes on."""
    cdef Capture named
    if captures_known() and (rc == 0 or not is_captured(stream, how)):
        named = capture_named(stream, how)
        gs_lock(&tables_mutex)
        capture_drop(&named)
        gs_unlock(&tables_mutex)
    return rc


cdef Capture *capture_hold(CUstream stream) noexcept nogil:
    """Take hold of the capture of a stream that is about to be destroyed, or return NULL.

    Once it is destroyed somebody else may have a new stream of that name.
    """
    cdef Capture named
    cdef Capture *c = NULL
    if captures_known():
        named = capture_named(stream, GS_STREAM_PLAIN)
        gs_lock(&tables_mutex)
        c = capture_like(&named)
        if c != NULL:
            c.settled = 0
        gs_unlock(&tables_mutex)
    return c


cdef CUresult capture_let_go(Capture *c, CUresult rc) noexcept nogil:
    """Forget the capture of a stream that was destroyed, or let go of it."""
    if c != NULL:
        gs_lock(&tables_mutex)
        if rc == 0:
            table_give(&captures, sizeof(Capture), c)
        else:
            c.settled = 1
        gs_unlock(&tables_mutex)
    return rc


cdef void captures_forget(CUcontext ctx) noexcept nogil:
    """Forget the captures of a context that is gone."""
    cdef uint32_t cursor = 0
    cdef Capture *c
    gs_lock(&tables_mutex)
    while True:
        c = <Capture *>table_next(&captures, sizeof(Capture), &cursor)
        if c == NULL:
            break
        if c.settled and c.ctx == ctx:
            table_give(&captures, sizeof(Capture), c)
    gs_unlock(&tables_mutex)


cdef CUresult wait_beside_captures() noexcept nogil:
    """Wait for all work of the current context beside captures: by a free of the driver's own, which waits (measured).

    It breaks what freeing native memory would break, relaxed captures not among them.  On a full GPU, where it cannot
    be had, a wait for the context does it, unless a capture is known.
    """
    cdef CUdeviceptr small = 0
    cdef CUresult rc = gs_real.cuMemAlloc_v2(&small, 256)
    if rc == CUDA_ERROR_OUT_OF_MEMORY and not captures_known():
        return gs_real.cuCtxSynchronize()
    return gs_real.cuMemFree_v2(small) if rc == 0 else rc


cdef public CUresult cuStreamBeginCapture(CUstream hStream) noexcept nogil:
    """Begin to record a graph (ABI before 10.1)."""
    cdef Capture *c
    if gs_real.cuStreamBeginCapture == NULL and not gs_find(<void *>&gs_real.cuStreamBeginCapture):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PLAIN)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCapture(hStream))


cdef public CUresult cuStreamBeginCapture_ptsz(CUstream hStream) noexcept nogil:
    """Begin to record a graph (ABI before 10.1); NULL is the thread's own stream."""
    cdef Capture *c
    if gs_real.cuStreamBeginCapture_ptsz == NULL and not gs_find(<void *>&gs_real.cuStreamBeginCapture_ptsz):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PTSZ)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCapture_ptsz(hStream))


cdef public CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) noexcept nogil:
    """Begin to record a graph."""
    cdef Capture *c
    if gs_real.cuStreamBeginCapture_v2 == NULL and not gs_find(<void *>&gs_real.cuStreamBeginCapture_v2):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PLAIN)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCapture_v2(hStream, mode))


cdef public CUresult cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode) noexcept nogil:
    """Begin to record a graph; NULL is the thread's own stream."""
    cdef Capture *c
    if gs_real.cuStreamBeginCapture_v2_ptsz == NULL and not gs_find(<void *>&gs_real.cuStreamBeginCapture_v2_ptsz):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PTSZ)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCapture_v2_ptsz(hStream, mode))


cdef public CUresult cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                                 const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                 CUstreamCaptureMode mode) noexcept nogil:
    """Begin to record into a graph."""
    cdef Capture *c
    if gs_real.cuStreamBeginCaptureToGraph == NULL and not gs_find(<void *>&gs_real.cuStreamBeginCaptureToGraph):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PLAIN)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCaptureToGraph(hStream, hGraph, dependencies, dependencyData,
                                                                numDependencies, mode))


cdef public CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                                      const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                      CUstreamCaptureMode mode) noexcept nogil:
    """Begin to record into a graph; NULL is the thread's own stream."""
    cdef Capture *c
    if gs_real.cuStreamBeginCaptureToGraph_ptsz == NULL and (
            not gs_find(<void *>&gs_real.cuStreamBeginCaptureToGraph_ptsz)):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PTSZ)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCaptureToGraph_ptsz(hStream, hGraph, dependencies, dependencyData,
                                                                     numDependencies, mode))


cdef public CUresult cuStreamBeginCaptureToCig(CUstream hStream,
                                               CUstreamCigCaptureParams *streamCigCaptureParams) noexcept nogil:
    """Begin to record for a graphics client."""
    cdef Capture *c
    if gs_real.cuStreamBeginCaptureToCig == NULL and not gs_find(<void *>&gs_real.cuStreamBeginCaptureToCig):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PLAIN)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCaptureToCig(hStream, streamCigCaptureParams))


cdef public CUresult cuStreamBeginCaptureToCig_ptsz(CUstream hStream,
                                                    CUstreamCigCaptureParams *streamCigCaptureParams) noexcept nogil:
    """Begin to record for a graphics client; NULL is the thread's own stream."""
    cdef Capture *c
    if gs_real.cuStreamBeginCaptureToCig_ptsz == NULL and not gs_find(<void *>&gs_real.cuStreamBeginCaptureToCig_ptsz):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PTSZ)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginCaptureToCig_ptsz(hStream, streamCigCaptureParams))


cdef public CUresult cuStreamBeginRecaptureToGraph(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                                                   CUgraphRecaptureCallback callbackFunc,
                                                   void *userData) noexcept nogil:
    """Begin to record a graph anew."""
    cdef Capture *c
    if gs_real.cuStreamBeginRecaptureToGraph == NULL and not gs_find(<void *>&gs_real.cuStreamBeginRecaptureToGraph):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PLAIN)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginRecaptureToGraph(hStream, mode, hGraph, callbackFunc, userData))


cdef public CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                                                        CUgraphRecaptureCallback callbackFunc,
                                                        void *userData) noexcept nogil:
    """Begin to record a graph anew; NULL is the thread's own stream."""
    cdef Capture *c
    if gs_real.cuStreamBeginRecaptureToGraph_ptsz == NULL and (
            not gs_find(<void *>&gs_real.cuStreamBeginRecaptureToGraph_ptsz)):
        return gs_absent()
    c = capture_enter(hStream, GS_STREAM_PTSZ)
    if c == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    return capture_leave(c, gs_real.cuStreamBeginRecaptureToGraph_ptsz(hStream, mode, hGraph, callbackFunc, userData))


cdef public CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph) noexcept nogil:
    """End the recording of a graph."""
    if gs_real.cuStreamEndCapture == NULL and not gs_find(<void *>&gs_real.cuStreamEndCapture):
        return gs_absent()
    return capture_ended(hStream, GS_STREAM_PLAIN, gs_real.cuStreamEndCapture(hStream, phGraph))


cdef public CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph) noexcept nogil:
    """End the recording of a graph; NULL is the thread's own stream."""
    if gs_real.cuStreamEndCapture_ptsz == NULL and not gs_find(<void *>&gs_real.cuStreamEndCapture_ptsz):
        return gs_absent()
    return capture_ended(hStream, GS_STREAM_PTSZ, gs_real.cuStreamEndCapture_ptsz(hStream, phGraph))


cdef public CUresult cuStreamEndCaptureToCig(CUstream hStream) noexcept nogil:
    """End the recording for a graphics client."""
    if gs_real.cuStreamEndCaptureToCig == NULL and not gs_find(<void *>&gs_real.cuStreamEndCaptureToCig):
        return gs_absent()
    return capture_ended(hStream, GS_STREAM_PLAIN, gs_real.cuStreamEndCaptureToCig(hStream))


cdef public CUresult cuStreamEndCaptureToCig_ptsz(CUstream hStream) noexcept nogil:
    """End the recording for a graphics client; NULL is the thread's own stream."""
    if gs_real.cuStreamEndCaptureToCig_ptsz == NULL and not gs_find(<void *>&gs_real.cuStreamEndCaptureToCig_ptsz):
        return gs_absent()
    return capture_ended(hStream, GS_STREAM_PTSZ, gs_real.cuStreamEndCaptureToCig_ptsz(hStream))


cdef public CUresult cuStreamDestroy(CUstream hStream) noexcept nogil:
    """Destroy a stream (ABI of CUDA 2), and the capture that began on it."""
    cdef Capture *c
    if gs_real.cuStreamDestroy == NULL and not gs_find(<void *>&gs_real.cuStreamDestroy):
        return gs_absent()
    c = capture_hold(hStream)
    return capture_let_go(c, gs_real.cuStreamDestroy(hStream))


cdef public CUresult cuStreamDestroy_v2(CUstream hStream) noexcept nogil:
    """Destroy a stream, and the capture that began on it."""
    cdef Capture *c
    if gs_real.cuStreamDestroy_v2 == NULL and not gs_find(<void *>&gs_real.cuStreamDestroy_v2):
        return gs_absent()
    c = capture_hold(hStream)
    return capture_let_go(c, gs_real.cuStreamDestroy_v2(hStream))
