# cuIpc* on exports of our own: handles of any size of allocation, stable, and good after a restore too.
#
# A handle names an allocation; nothing is exported until somebody opens it, and then by the exporter's listener.

cdef enum:
    IPC_TRY_MS = 2000
    IPC_TRIES = 5

# The 64 bytes of a CUipcMemHandle.
ctypedef struct IpcHandle:
    char[8] magic           # IPC_MAGIC
    int pid                 # of the exporter, as its own pid namespace numbers it
    uint32_t zero
    uint64_t nonce          # of the exporter's process
    uint64_t object_nonce   # with object_id: the key of the memory
    uint64_t object_id
    uint64_t offset         # of the allocation in the object
    uint64_t size           # of the allocation
    uint64_t allocation     # unique in the exporter: a freed address that is used again makes another handle


cdef bint is_our_handle(const IpcHandle *h) noexcept nogil:
    """Say whether a handle was made by a shim."""
    return memcmp(h.magic, b"GSIPC1\0\0", 8) == 0


cdef bint describe_allocation(IpcHandle *h, uint64_t va) noexcept nogil:
    """Fill in the handle of the allocation that contains an address; False if it is none of ours."""
    cdef Allocation *a
    cdef Mapping *m = NULL
    memset(h, 0, sizeof(h[0]))
    gs_lock(&tables_mutex)
    a = allocation_at(va)
    if a != NULL and a.type != OPENED and not a.freeing:
        m = mapping_at(a.va)
    if m != NULL:
        memcpy(h.magic, b"GSIPC1\0\0", 8)
        h.pid = getpid()
        h.nonce = process_nonce
        h.object_nonce = m.object.key_nonce
        h.object_id = m.object.key_id
        h.offset = a.va - m.va
        h.size = a.size
        h.allocation = a.id
    gs_unlock(&tables_mutex)
    return m != NULL


cdef public CUresult cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr) noexcept nogil:
    """Return the handle of an allocation: the same bytes at every call."""
    cdef CUresult rc = 0
    if gs_real.cuIpcGetMemHandle == NULL and not gs_find(<void *>&gs_real.cuIpcGetMemHandle):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if pHandle == NULL or not describe_allocation(<IpcHandle *>pHandle, dptr):
        rc = gs_real.cuIpcGetMemHandle(pHandle, dptr)
        if rc == 0:
            uncarried_add(KIND_NATIVE_IPC, dptr)
    gs_leave(GS_MEMORY)
    return rc


cdef bint reopen(const IpcHandle *h, CUcontext ctx, CUdeviceptr *out, CUresult *rc) noexcept nogil:
    """Count another open of what is open already; as the driver, in one context of the process only."""
    cdef uint32_t cursor = 0
    cdef Allocation *a
    rc[0] = 0
    gs_lock(&tables_mutex)
    while True:
        a = <Allocation *>table_next(&allocations, sizeof(Allocation), &cursor)
        if a == NULL:
            break
        if a.type != OPENED or a.id == 0 or a.freeing or a.remote_nonce != h.nonce or a.remote_id != h.allocation:
            continue
        if a.ctx == ctx:
            a.opens += 1
            out[0] = a.va
        else:
            rc[0] = CUDA_ERROR_INVALID_HANDLE
        break
    gs_unlock(&tables_mutex)
    return a != NULL


cdef bint is_stopped(int pid) noexcept nogil:
    """Say whether a process is stopped by a signal or a tracer: it answers nothing, and is not at fault."""
    cdef char[64] path
    cdef char[1024] text
    cdef const char *state
    cdef ssize_t n = -1
    cdef int fd
    gs_format(path, sizeof(path), b"/proc/%d/stat", pid)
    fd = open(path, O_RDONLY | O_CLOEXEC)
    if fd >= 0:
        n = read(fd, text, sizeof(text) - 1)
        close(fd)
    if n <= 0:
        return False
    text[n] = 0
    state = strrchr(text, c')')     # the name before it may hold anything
    return state != NULL and state[1] == c' ' and (state[2] == c'T' or state[2] == c't')


cdef CUresult fetch_to_open(const IpcHandle *h, Fetched *f) noexcept nogil:
    """Get a descriptor of what a handle names.

    The driver opens memory without its exporter having to run.  So a stopped exporter is waited for, and a suspended
    one as at a gate; one that runs and does not answer is given up.
    """
    cdef uint32_t unanswered = 0
    cdef CUresult rc
    while True:
        rc = fetch_export(h.pid, h.object_nonce, h.object_id, FOR_OPEN, f, deadline_in(IPC_TRY_MS))
        if rc != CUDA_ERROR_TIMEOUT:
            return rc
        unanswered += 0 if f.not_ready or is_stopped(h.pid) else 1
        if unanswered == IPC_TRIES:
            return rc


cdef CUresult import_key(Object **out, const IpcHandle *h) noexcept nogil:
    """Import the memory that a handle names; `*out` is pinned."""
    cdef Fetched f
    cdef CUresult rc = fetch_to_open(h, &f)
    if rc != 0:
        return rc
    rc = import_object(out, f.fd)
    if rc == 0:
        import_known(out[0], h.object_nonce, h.object_id, h.pid, f.epoch, f.size, &f.team)
        if not fdref_new(out[0], f.fd, True):
            object_unpin(out[0])
            rc = CUDA_ERROR_OUT_OF_MEMORY
    close(f.fd)
    return rc


cdef CUresult peer_reachable(int device, int memory_device) noexcept nogil:
    """Say whether a device can use the memory of another."""
    cdef int can = 0
    if device == memory_device:
        return 0
    if gs_real.cuDeviceCanAccessPeer(&can, device, memory_device) == 0 and can != 0:
        return 0
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED


cdef CUresult open_remote(Allocation *a, const IpcHandle *h, int device) noexcept nogil:
    """Import and map what a handle names, for a device and those that have peer access to its context."""
    cdef Object *o = NULL
    cdef CUresult rc = import_key(&o, h)
    if rc == CUDA_ERROR_NOT_FOUND:
        return CUDA_ERROR_INVALID_VALUE
    if rc == CUDA_ERROR_TIMEOUT:
        return CUDA_ERROR_MAP_FAILED
    if rc != 0:
        return rc
    o.internal = 1
    a.device = o.props.location.id
    a.rdma = o.props.allocFlags.gpuDirectRDMACapable
    rc = CUDA_ERROR_INVALID_VALUE
    if h.offset + h.size <= o.size:
        rc = peer_reachable(device, a.device)
    if rc == 0:
        rc = span_map(&a.span, o, a.ctx, device)
    a.va = a.span.va + h.offset
    object_unpin(o)
    return rc


cdef CUresult open_handle(CUdeviceptr *out, const IpcHandle *h, unsigned int flags) noexcept nogil:
    """Open memory of another process in the current context."""
    cdef Allocation *a
    cdef CUcontext ctx = NULL
    cdef int device = 0
    cdef CUresult rc = current_context(&ctx, &device)
    if rc != 0:
        return rc
    if flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS:
        return CUDA_ERROR_INVALID_VALUE
    if h.nonce == process_nonce:
        return CUDA_ERROR_INVALID_CONTEXT
    if reopen(h, ctx, out, &rc):
        return rc
    a = allocation_new()
    if a == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    a.type = OPENED
    a.ctx = ctx
    a.size = h.size
    a.opens = 1
    a.remote_nonce = h.nonce
    a.remote_id = h.allocation
    rc = open_remote(a, h, device)
    if rc != 0:
        allocation_cancel(a)
        return rc
    allocation_enter(a)
    out[0] = a.va
    return 0


cdef public CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) noexcept nogil:
    """Open a handle (ABI before 11.0)."""
    cdef CUresult rc
    if gs_real.cuIpcOpenMemHandle == NULL and not gs_find(<void *>&gs_real.cuIpcOpenMemHandle):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if pdptr != NULL and is_our_handle(<IpcHandle *>&handle):
        rc = open_handle(pdptr, <IpcHandle *>&handle, Flags)
    else:
        rc = gs_real.cuIpcOpenMemHandle(pdptr, handle, Flags)
        if rc == 0:
            uncarried_add(KIND_NATIVE_IPC, pdptr[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                           unsigned int Flags) noexcept nogil:
    """Open a handle."""
    cdef CUresult rc
    if gs_real.cuIpcOpenMemHandle_v2 == NULL and not gs_find(<void *>&gs_real.cuIpcOpenMemHandle_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if pdptr != NULL and is_our_handle(<IpcHandle *>&handle):
        rc = open_handle(pdptr, <IpcHandle *>&handle, Flags)
    else:
        rc = gs_real.cuIpcOpenMemHandle_v2(pdptr, handle, Flags)
        if rc == 0:
            uncarried_add(KIND_NATIVE_IPC, pdptr[0])
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult close_opened(Allocation *a) noexcept nogil:
    """Close a seized allocation once: the last close unmaps it, after the work of its context."""
    cdef CUresult rc
    if a.opens > 1:
        a.opens -= 1
        a.freeing = 0
        return 0
    rc = context_wait(a.ctx, True)
    if rc != 0:
        a.freeing = 0
        return rc
    return allocation_free(a)


cdef public CUresult cuIpcCloseMemHandle(CUdeviceptr dptr) noexcept nogil:
    """Close what was opened."""
    cdef Allocation *a
    cdef CUresult rc
    if gs_real.cuIpcCloseMemHandle == NULL and not gs_find(<void *>&gs_real.cuIpcCloseMemHandle):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    a = allocation_seize(dptr, True)
    if a != NULL:
        rc = close_opened(a)
    else:
        rc = gs_real.cuIpcCloseMemHandle(dptr)
        if rc == 0:
            uncarried_remove(KIND_NATIVE_IPC, dptr)
    gs_leave(GS_MEMORY)
    return rc
