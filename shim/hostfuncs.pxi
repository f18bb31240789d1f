# Host functions pass the gates: a drain waits for the work of a stream, and so for a function that the driver runs
# there; held at a gate, it would never end. It must not know what the functions do.
#
# The driver gets one of our two trampolines and an entry of the table below in the place of the application's function
# and argument. An entry of a call that runs once is free again as soon as it has run. One that went into a graph runs
# any number of times, in copies of the graph too, and nobody says when the last one is gone: such entries are kept for
# good, one for each distinct pair of function and argument. Where the table is full, the driver gets the application's
# own function, and calls made inside it wait like any others.

cdef extern from "platform.h" nogil:
    ctypedef struct gs_node_params:
        int type
        CUDA_HOST_NODE_PARAMS host
    void *mmap(void *address, size_t size, int protection, int flags, int fd, long offset)
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_ANONYMOUS
        MAP_NORESERVE
    void *MAP_FAILED

cdef enum:
    HOSTFUNC_LIMIT = 262144
    HOSTFUNC_BUCKETS = 524288   # of the index of those kept for good; a power of two

ctypedef struct HostFunction:
    void *function
    void *argument
    uint32_t next           # number (index + 1) of the next free entry
    uint32_t kept           # part of a graph

ctypedef struct HostFunctions:
    HostFunction *entries
    uint32_t *index         # numbers of the kept entries, open addressing
    uint32_t used
    uint32_t free_head

cdef HostFunctions hostfuncs


cdef bint hostfuncs_open() noexcept nogil:
    """Reserve the table at first use; hostfunc_mutex is held. Untouched pages of it cost nothing."""
    cdef size_t size = HOSTFUNC_LIMIT * sizeof(HostFunction) + HOSTFUNC_BUCKETS * sizeof(uint32_t)
    cdef void *memory
    if hostfuncs.entries != NULL:
        return True
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        return False
    hostfuncs.entries = <HostFunction *>memory
    hostfuncs.index = <uint32_t *>(hostfuncs.entries + HOSTFUNC_LIMIT)
    return True


cdef HostFunction *hostfunc_new() noexcept nogil:
    """Return an unused entry, NULL at the limit; hostfunc_mutex is held."""
    cdef HostFunction *entry
    if hostfuncs.free_head:
        entry = &hostfuncs.entries[hostfuncs.free_head - 1]
        hostfuncs.free_head = entry.next
        return entry
    if hostfuncs.used == HOSTFUNC_LIMIT:
        gs_log(b"more than %d host functions at once; the next ones wait at closed gates", HOSTFUNC_LIMIT)
        return NULL
    hostfuncs.used += 1
    return &hostfuncs.entries[hostfuncs.used - 1]


cdef uint32_t *hostfunc_bucket(void *function, void *argument) noexcept nogil:
    """Return the place in the index of a kept pair, or the empty place where it belongs; hostfunc_mutex is held."""
    cdef uint64_t h = (<uint64_t>function * 31 + <uint64_t>argument) * 0x9E3779B97F4A7C15ULL
    cdef uint32_t place = <uint32_t>(h >> 40) & (HOSTFUNC_BUCKETS - 1)
    cdef HostFunction *entry
    while hostfuncs.index[place]:
        entry = &hostfuncs.entries[hostfuncs.index[place] - 1]
        if entry.function == function and entry.argument == argument:
            break
        place = (place + 1) & (HOSTFUNC_BUCKETS - 1)
    return &hostfuncs.index[place]


cdef HostFunction *hostfunc_take(void *function, void *argument, bint keep) noexcept nogil:
    """Return the entry to give to the driver, NULL if the table is full or there is no function."""
    cdef HostFunction *entry = NULL
    cdef uint32_t *bucket = NULL
    if function == NULL:
        return NULL
    gs_lock(&hostfunc_mutex)
    if hostfuncs_open():
        if keep:
            bucket = hostfunc_bucket(function, argument)
        if bucket != NULL and bucket[0]:
            entry = &hostfuncs.entries[bucket[0] - 1]
        else:
            entry = hostfunc_new()
            if entry != NULL:
                entry.function = function
                entry.argument = argument
                entry.kept = keep
                if keep:
                    bucket[0] = <uint32_t>(entry - hostfuncs.entries) + 1
    gs_unlock(&hostfunc_mutex)
    return entry


cdef void hostfunc_done(HostFunction *entry) noexcept nogil:
    """Free an entry unless it is kept."""
    if entry == NULL or entry.kept:
        return
    gs_lock(&hostfunc_mutex)
    entry.next = hostfuncs.free_head
    hostfuncs.free_head = <uint32_t>(entry - hostfuncs.entries) + 1
    gs_unlock(&hostfunc_mutex)


cdef uint32_t hostfuncs_used() noexcept nogil:
    """Return how many entries were ever taken: in steady work it stops growing."""
    return hostfuncs.used


cdef void hostfuncs_forget() noexcept nogil:
    """In a forked child: a new table when it is needed. The parent's may have been in the middle of a change."""
    hostfuncs.entries = NULL
    hostfuncs.used = hostfuncs.free_head = 0


# ---- what the driver calls ----

cdef void run_host_function(void *given) noexcept nogil:
    """Run a host function of the application, passing the gates meanwhile."""
    cdef HostFunction call = (<HostFunction *>given)[0]
    hostfunc_done(<HostFunction *>given)
    gs_self.bypass += 1
    (<CUhostFn>call.function)(call.argument)
    gs_self.bypass -= 1


cdef void run_stream_callback(CUstream stream, CUresult status, void *given) noexcept nogil:
    """Run a stream callback of the application, passing the gates meanwhile."""
    cdef HostFunction call = (<HostFunction *>given)[0]
    hostfunc_done(<HostFunction *>given)
    gs_self.bypass += 1
    (<CUstreamCallback>call.function)(stream, status, call.argument)
    gs_self.bypass -= 1


# ---- streams ----

ctypedef CUresult (*launch_hostfunc)(CUstream, CUhostFn, void *) noexcept nogil
ctypedef CUresult (*launch_hostfunc_v2)(CUstream, CUhostFn, void *, unsigned int) noexcept nogil
ctypedef CUresult (*add_callback)(CUstream, CUstreamCallback, void *, unsigned int) noexcept nogil


cdef CUresult enqueue(launch_hostfunc real, launch_hostfunc_v2 real_v2, CUstream stream, int how, CUhostFn fn,
                      void *argument, unsigned int mode) noexcept nogil:
    """Put a host function into a stream with the driver's function of either ABI (the other one is NULL)."""
    cdef CUresult rc
    cdef HostFunction *entry
    gs_enter(GS_MEMORY, stream, how)
    entry = hostfunc_take(<void *>fn, argument, is_captured(stream, how))
    if entry != NULL:
        fn = run_host_function
        argument = entry
    if real != NULL:
        rc = real(stream, fn, argument)
    else:
        rc = real_v2(stream, fn, argument, mode)
    if rc != CUDA_SUCCESS:
        hostfunc_done(entry)
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult enqueue_callback(add_callback real, CUstream stream, int how, CUstreamCallback fn, void *argument,
                               unsigned int flags) noexcept nogil:
    """Put a stream callback into a stream; it cannot be captured, so it runs once."""
    cdef CUresult rc
    cdef HostFunction *entry
    gs_enter(GS_MEMORY, stream, how)
    entry = hostfunc_take(<void *>fn, argument, False)
    if entry != NULL:
        rc = real(stream, run_stream_callback, entry, flags)
    else:
        rc = real(stream, fn, argument, flags)
    if rc != CUDA_SUCCESS:
        hostfunc_done(entry)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData) noexcept nogil:
    """Put a host function into a stream."""
    if not gs_find(<void *>&gs_real.cuLaunchHostFunc):
        return gs_absent()
    return enqueue(gs_real.cuLaunchHostFunc, NULL, hStream, GS_STREAM_PLAIN, fn, userData, 0)


cdef public CUresult cuLaunchHostFunc_ptsz(CUstream hStream, CUhostFn fn, void *userData) noexcept nogil:
    """Put a host function into a stream, by default the thread's own."""
    if not gs_find(<void *>&gs_real.cuLaunchHostFunc_ptsz):
        return gs_absent()
    return enqueue(gs_real.cuLaunchHostFunc_ptsz, NULL, hStream, GS_STREAM_PTSZ, fn, userData, 0)


cdef public CUresult cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData,
                                         unsigned int syncMode) noexcept nogil:
    """Put a host function with a way of waiting into a stream."""
    if not gs_find(<void *>&gs_real.cuLaunchHostFunc_v2):
        return gs_absent()
    return enqueue(NULL, gs_real.cuLaunchHostFunc_v2, hStream, GS_STREAM_PLAIN, fn, userData, syncMode)


cdef public CUresult cuLaunchHostFunc_v2_ptsz(CUstream hStream, CUhostFn fn, void *userData,
                                              unsigned int syncMode) noexcept nogil:
    """Put a host function with a way of waiting into a stream, by default the thread's own."""
    if not gs_find(<void *>&gs_real.cuLaunchHostFunc_v2_ptsz):
        return gs_absent()
    return enqueue(NULL, gs_real.cuLaunchHostFunc_v2_ptsz, hStream, GS_STREAM_PTSZ, fn, userData, syncMode)


cdef public CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData,
                                         unsigned int flags) noexcept nogil:
    """Put a callback into a stream."""
    if not gs_find(<void *>&gs_real.cuStreamAddCallback):
        return gs_absent()
    return enqueue_callback(gs_real.cuStreamAddCallback, hStream, GS_STREAM_PLAIN, callback, userData, flags)


cdef public CUresult cuStreamAddCallback_ptsz(CUstream hStream, CUstreamCallback callback, void *userData,
                                              unsigned int flags) noexcept nogil:
    """Put a callback into a stream, by default the thread's own."""
    if not gs_find(<void *>&gs_real.cuStreamAddCallback_ptsz):
        return gs_absent()
    return enqueue_callback(gs_real.cuStreamAddCallback_ptsz, hStream, GS_STREAM_PTSZ, callback, userData, flags)


# ---- graph nodes: the application gives and gets its own function; the graph holds ours ----

cdef CUDA_HOST_NODE_PARAMS hidden(const CUDA_HOST_NODE_PARAMS *params) noexcept nogil:
    """Return the parameters for the driver."""
    cdef CUDA_HOST_NODE_PARAMS ours = params[0]
    cdef HostFunction *entry = hostfunc_take(<void *>params.fn, params.userData, True)
    if entry != NULL:
        ours.fn = run_host_function
        ours.userData = entry
    return ours


cdef void shown(CUDA_HOST_NODE_PARAMS *params) noexcept nogil:
    """Put the application's own function back into parameters that came from the driver."""
    cdef HostFunction *entry
    if params.fn == run_host_function:
        entry = <HostFunction *>params.userData
        params.fn = <CUhostFn>entry.function
        params.userData = entry.argument


cdef CUgraphNodeParams *hidden_node(CUgraphNodeParams *params, gs_node_params *copy) noexcept nogil:
    """Return the parameters for the driver: `copy` for a host node, else the application's own."""
    cdef gs_node_params *given = <gs_node_params *>params
    if given == NULL or given.type != CU_GRAPH_NODE_TYPE_HOST:
        return params
    copy[0] = given[0]
    copy.host = hidden(&given.host)
    return <CUgraphNodeParams *>copy


cdef public CUresult cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                        size_t numDependencies,
                                        const CUDA_HOST_NODE_PARAMS *nodeParams) noexcept nogil:
    """Add a host node to a graph."""
    cdef CUDA_HOST_NODE_PARAMS ours
    if not gs_find(<void *>&gs_real.cuGraphAddHostNode):
        return gs_absent()
    if nodeParams == NULL:
        return gs_real.cuGraphAddHostNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
    ours = hidden(nodeParams)
    return gs_real.cuGraphAddHostNode(phGraphNode, hGraph, dependencies, numDependencies, &ours)


cdef public CUresult cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams) noexcept nogil:
    """Return the function of a host node."""
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphHostNodeGetParams):
        return gs_absent()
    rc = gs_real.cuGraphHostNodeGetParams(hNode, nodeParams)
    if rc == CUDA_SUCCESS and nodeParams != NULL:
        shown(nodeParams)
    return rc


cdef public CUresult cuGraphHostNodeSetParams(CUgraphNode hNode,
                                              const CUDA_HOST_NODE_PARAMS *nodeParams) noexcept nogil:
    """Change the function of a host node."""
    cdef CUDA_HOST_NODE_PARAMS ours
    if not gs_find(<void *>&gs_real.cuGraphHostNodeSetParams):
        return gs_absent()
    if nodeParams == NULL:
        return gs_real.cuGraphHostNodeSetParams(hNode, nodeParams)
    ours = hidden(nodeParams)
    return gs_real.cuGraphHostNodeSetParams(hNode, &ours)


cdef public CUresult cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                                  const CUDA_HOST_NODE_PARAMS *nodeParams) noexcept nogil:
    """Change the function of a host node in an instantiated graph."""
    cdef CUDA_HOST_NODE_PARAMS ours
    if not gs_find(<void *>&gs_real.cuGraphExecHostNodeSetParams):
        return gs_absent()
    if nodeParams == NULL:
        return gs_real.cuGraphExecHostNodeSetParams(hGraphExec, hNode, nodeParams)
    ours = hidden(nodeParams)
    return gs_real.cuGraphExecHostNodeSetParams(hGraphExec, hNode, &ours)


cdef public CUresult cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                    size_t numDependencies, CUgraphNodeParams *nodeParams) noexcept nogil:
    """Add a node of any kind to a graph."""
    cdef gs_node_params copy
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphAddNode):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphAddNode(phGraphNode, hGraph, dependencies, numDependencies, hidden_node(nodeParams, &copy))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                       const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                       CUgraphNodeParams *nodeParams) noexcept nogil:
    """Add a node of any kind, with edge data, to a graph."""
    cdef gs_node_params copy
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphAddNode_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, dependencyData, numDependencies,
                                   hidden_node(nodeParams, &copy))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                       const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                       CUgraphNodeParams *nodeParams) noexcept nogil:
    """Add a node of any kind, with edge data, to a graph (the form of CUDA 13.4)."""
    cdef gs_node_params copy
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphAddNode_v3):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphAddNode_v3(phGraphNode, hGraph, dependencies, dependencyData, numDependencies,
                                   hidden_node(nodeParams, &copy))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams) noexcept nogil:
    """Change a node of any kind."""
    cdef gs_node_params copy
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphNodeSetParams):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphNodeSetParams(hNode, hidden_node(nodeParams, &copy))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphNodeSetParams_v2(CUgraphNode hNode, CUgraphNodeParams *nodeParams) noexcept nogil:
    """Change a node of any kind (the form of CUDA 13.4)."""
    cdef gs_node_params copy
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphNodeSetParams_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphNodeSetParams_v2(hNode, hidden_node(nodeParams, &copy))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                              CUgraphNodeParams *nodeParams) noexcept nogil:
    """Change a node of any kind in an instantiated graph."""
    cdef gs_node_params copy
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphExecNodeSetParams):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphExecNodeSetParams(hGraphExec, hNode, hidden_node(nodeParams, &copy))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphNodeGetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams) noexcept nogil:
    """Return the parameters of a node of any kind."""
    cdef CUresult rc
    if not gs_find(<void *>&gs_real.cuGraphNodeGetParams):
        return gs_absent()
    rc = gs_real.cuGraphNodeGetParams(hNode, nodeParams)
    if rc == CUDA_SUCCESS and nodeParams != NULL and (<gs_node_params *>nodeParams).type == CU_GRAPH_NODE_TYPE_HOST:
        shown(&(<gs_node_params *>nodeParams).host)
    return rc
