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
    void *thread            # whose default stream that is, NULL: a stream that was made
    CUcontext ctx

cdef Table captures


cdef uint32_t captures_live() noexcept nogil:
    """Return how many captures live or are about to begin."""
    return gs_load(&captures.live)


cdef CUstream named_stream(CUstream stream, int how) noexcept nogil:
    """Return the stream that a call means."""
    return GS_STREAM_PER_THREAD if how == GS_STREAM_PTSZ and stream == NULL else stream


cdef void *thread_of(CUstream stream) noexcept nogil:
    """Return what tells threads apart that call their own default stream by the same name; NULL for other streams."""
    return <void *>&gs_self if stream == GS_STREAM_PER_THREAD else NULL


cdef CUcontext context_of_stream(CUstream stream) noexcept nogil:
    """Return the context of a stream, or NULL."""
    cdef CUcontext ctx = NULL
    if gs_real.cuStreamGetCtx != NULL and gs_real.cuStreamGetCtx(stream, &ctx) == 0:
        return ctx
    gs_real.cuCtxGetCurrent(&ctx)
    return ctx


cdef Capture *capture_enter(CUstream stream, int how) noexcept nogil:
    """Enter the gate and record a capture that is about to begin, or return NULL, outside."""
    cdef CUstream named = named_stream(stream, how)
    cdef Capture *c
    gs_enter(GS_LAUNCH, stream, how)
    gs_lock(&tables_mutex)
    c = <Capture *>table_take(&captures, sizeof(Capture), MAX_CAPTURES)
    if c != NULL:
        c.stream = named
        c.thread = thread_of(named)
    gs_unlock(&tables_mutex)
    if c == NULL:
        gs_log(b"table of captures is full")
        gs_leave(GS_LAUNCH)
        return NULL
    c.ctx = context_of_stream(named)
    return c


cdef CUresult capture_leave(Capture *c, CUresult rc) noexcept nogil:
    """Keep the record if the capture has begun, and leave the gate."""
    if rc != 0:
        gs_lock(&tables_mutex)
        table_give(&captures, sizeof(Capture), c)
        gs_unlock(&tables_mutex)
    gs_leave(GS_LAUNCH)
    return rc


cdef bint capture_forget(CUstream named, bint look_only) noexcept nogil:
    """Forget one capture that began on a stream, or only look; False if there is none."""
    cdef uint32_t cursor = 0
    cdef Capture *c
    gs_lock(&tables_mutex)
    while True:
        c = <Capture *>table_next(&captures, sizeof(Capture), &cursor)
        if c == NULL or (c.stream == named and c.thread == thread_of(named)):
            break
    if c != NULL and not look_only:
        table_give(&captures, sizeof(Capture), c)
    gs_unlock(&tables_mutex)
    return c != NULL


cdef CUresult capture_ended(CUstream stream, int how, CUresult rc) noexcept nogil:
    """Forget a capture that has ended, well or not; one that only this call may not end goes on."""
    cdef CUstream named = named_stream(stream, how)
    if rc == 0 or (capture_forget(named, True) and not is_captured(stream, how)):
        capture_forget(named, False)
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
        if c.ctx == ctx:
            table_give(&captures, sizeof(Capture), c)
    gs_unlock(&tables_mutex)


cdef CUresult wait_beside_captures() noexcept nogil:
    """Wait for all work of the current context beside captures: by a free of the driver's own, which waits (measured).

    It breaks what freeing native memory would break, relaxed captures not among them.
    """
    cdef CUdeviceptr small = 0
    cdef CUresult rc = gs_real.cuMemAlloc_v2(&small, 256)
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


cdef public CUresult cuStreamDestroy(CUstream hStream) noexcept nogil:
    """Destroy a stream (ABI of CUDA 2), and the capture that began on it."""
    if gs_real.cuStreamDestroy == NULL and not gs_find(<void *>&gs_real.cuStreamDestroy):
        return gs_absent()
    while capture_forget(hStream, False):
        # Before the call: after it, somebody else may have a new stream of that name.
        pass
    return gs_real.cuStreamDestroy(hStream)


cdef public CUresult cuStreamDestroy_v2(CUstream hStream) noexcept nogil:
    """Destroy a stream, and the capture that began on it."""
    if gs_real.cuStreamDestroy_v2 == NULL and not gs_find(<void *>&gs_real.cuStreamDestroy_v2):
        return gs_absent()
    while capture_forget(hStream, False):
        # Before the call: after it, somebody else may have a new stream of that name.
        pass
    return gs_real.cuStreamDestroy_v2(hStream)
