# Imported memory: who owns it, and how it is had again.
#
# The tag on the open file (F_SETOWN) is a hint; the process that it names compares open files and answers with the
# key of the object.  An import whose owner has not answered yet keeps its duplicate and asks again at close-memory.

cdef enum:
    PEER_TIMEOUT_MS = 5000
    REPLY_BYTES = 512
    MOST_PAUSE_MS = 50
    FOR_REMAP = 0           # to have again what was dropped
    FOR_FD = 1              # to put behind a descriptor of the application: the owner remembers it
    FOR_OPEN = 2            # for a call of the application: not while the owner is suspended


cdef bint resolve_locally(Object *o, int fd) noexcept nogil:
    """Find the owner of an import among what this process exported or received before."""
    cdef Object *owner = object_pin_fd(fd, NULL)
    cdef Object known
    if owner == NULL:
        return False
    gs_lock(&tables_mutex)
    known = owner[0]
    gs_unlock(&tables_mutex)
    if owner != o and known.owner == OWNER_KNOWN:
        import_known(o, known.key_nonce, known.key_id, owner_pid(&known), known.epoch, known.size, &known.team)
    object_unpin(owner)
    return o.owner == OWNER_KNOWN


cdef int owner_pid(Object *o) noexcept nogil:
    """Return the process that owns an object, as its inner pid."""
    return getpid() if is_owned(o) else o.exporter


cdef void import_known(Object *o, uint64_t nonce, uint64_t id, int pid, uint32_t epoch, uint64_t size,
                       const CUmulticastObjectProp *team) noexcept nogil:
    """Record who owns an import, and of a multicast object for how many devices it is."""
    gs_lock(&tables_mutex)
    o.key_nonce = nonce
    o.key_id = id
    o.exporter = pid
    if o.added_to == o.epoch:
        o.added_to = epoch
    o.epoch = epoch
    o.size = size
    o.owner = OWNER_KNOWN
    o.kind = KIND_CARRIED
    o.team = team[0]
    if team.numDevices != 0:
        o.kind = multicast_kind()
        o.cls = CLASS_UNUSED if o.cls == CLASS_UNUSED else CLASS_MULTICAST
    fdrefs_renew(o)
    gs_unlock(&tables_mutex)


cdef bint resolve_import(Object *o, int fd) noexcept nogil:
    """Find out who owns an import; False if nobody says so now."""
    cdef char[REPLY_BYTES] reply
    cdef CUmulticastObjectProp team
    cdef int pid = fcntl(fd, F_GETOWN)
    cdef uint64_t nonce = 0, id = 0
    if resolve_locally(o, fd):
        return True
    if pid == 0:
        # Nobody has put a tag on it: the exporter runs without a shim.
        o.kind = KIND_FOREIGN
    if pid <= 0 or pid == getpid():
        return False
    if not peer_call(pid, b"1 whose", fd, reply, REPLY_BYTES, NULL, deadline_in(PEER_TIMEOUT_MS)):
        return False
    if not reply_ok(reply) or not wire_key(reply, b"key", &nonce, &id):
        return False
    team_read(reply, &team)
    import_known(o, nonce, id, <int>wire_number(reply, b"pid", <uint64_t>pid),
                 <uint32_t>wire_number(reply, b"epoch", 0), wire_number(reply, b"bytes", 0), &team)
    return True


cdef CUresult import_object(Object **out, int fd) noexcept nogil:
    """Import a descriptor; on success `*out` is pinned, its owner may be unknown yet."""
    cdef Object *o = object_new(ORIGIN_IMPORTED)
    cdef CUmemGenericAllocationHandle real = 0
    cdef CUresult rc
    if o == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = gs_real.cuMemImportFromShareableHandle(&real, <void *><uintptr_t>fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    if rc != 0:
        object_unpin(o)
        return rc
    o.real = real
    rc = gs_real.cuMemGetAllocationPropertiesFromHandle(&o.props, real)
    if rc == 0:
        o.cls = class_of(&o.props)
        out[0] = o
        return 0
    if rc == CUDA_ERROR_INVALID_VALUE or rc == CUDA_ERROR_INVALID_HANDLE or rc == CUDA_ERROR_NOT_SUPPORTED:
        # What is no allocation is a multicast object, of which its owner knows more.
        o.cls = CLASS_MULTICAST
        o.kind = multicast_kind()
        out[0] = o
        return 0
    object_unpin(o)
    return rc


cdef CUresult import_for_application(Object **out, void *os_handle) noexcept nogil:
    """Import what the application received, remember the open file, and ask whose it is."""
    cdef int fd = <int><intptr_t>os_handle
    cdef Object *o = NULL
    cdef Placeholder p
    cdef Failure f
    cdef CUresult rc
    memset(&f, 0, sizeof(f))
    if placeholder_read(fd, &p) and not unseal_fd(fd, &p, deadline_in(PEER_TIMEOUT_MS), &f):
        return CUDA_ERROR_INVALID_VALUE
    rc = import_object(&o, fd)
    if rc != 0:
        return rc
    resolve_import(o, fd)
    if not fdref_new(o, fd, True):
        object_unpin(o)
        return CUDA_ERROR_OUT_OF_MEMORY
    out[0] = o
    return 0


cdef CUresult import_foreign(Object **out, void *os_handle, int type) noexcept nogil:
    """Import by a handle that is no descriptor: tracked, so that a suspend refuses while it lives."""
    cdef Object *o = object_new(ORIGIN_IMPORTED)
    cdef CUmemGenericAllocationHandle real = 0
    cdef CUresult rc
    if o == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    rc = gs_real.cuMemImportFromShareableHandle(&real, os_handle, type)
    if rc != 0:
        object_unpin(o)
        return rc
    o.real = real
    o.cls = CLASS_OTHER
    o.kind = KIND_FABRIC if type == CU_MEM_HANDLE_TYPE_FABRIC else KIND_FOREIGN
    out[0] = o
    return 0


cdef public CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                    CUmemAllocationHandleType shHandleType) noexcept nogil:
    """Import memory of another process, or what this process exported itself."""
    cdef Object *o = NULL
    cdef CUresult rc
    if gs_real.cuMemImportFromShareableHandle == NULL and not gs_find(<void *>&gs_real.cuMemImportFromShareableHandle):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if handle == NULL:
        rc = gs_real.cuMemImportFromShareableHandle(handle, osHandle, shHandleType)
    elif asks_for_hidden_fabric(shHandleType):
        rc = CUDA_ERROR_NOT_PERMITTED
    elif shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        rc = import_for_application(&o, osHandle)
    elif shHandleType == CU_MEM_HANDLE_TYPE_FABRIC:
        rc = import_fabric(&o, osHandle)
    else:
        rc = import_foreign(&o, osHandle, shHandleType)
    if rc == 0 and o != NULL:
        handle[0] = handle_of(o)
        give_reference(o)
    gs_leave(GS_MEMORY)
    return rc


# ---- what the phases ask about imports ----

cdef bint is_shared_import(Object *o) noexcept nogil:
    """Say whether an object is memory of somebody that must be had again from there."""
    return o.origin == ORIGIN_IMPORTED and o.cls != CLASS_OTHER and o.cls != CLASS_UNUSED


cdef bint is_import_in_use(Object *o) noexcept nogil:
    """Say whether the application has it already: nobody need know yet whose it is while the import is under way."""
    return is_shared_import(o) and (o.refs != 0 or o.maps != 0)


cdef void retry_unknown(Object *o) noexcept nogil:
    """Ask again whose an import is, by the duplicate that was kept."""
    cdef int fd = fdref_current(o)
    if fd >= 0:
        resolve_import(o, fd)
        close(fd)


cdef int ask_owner(Object *o, uint32_t *epoch) noexcept nogil:
    """Return whether the owner of an import still has the memory: 1 yes, 0 gone, -1 no answer."""
    cdef char[REPLY_BYTES] reply
    cdef char[128] request
    cdef Out text
    cdef Object *owner
    epoch[0] = o.epoch
    if o.exporter == getpid():
        owner = object_pin_key(o.key_nonce, o.key_id)
        if owner == NULL:
            return 0
        epoch[0] = owner.epoch
        object_unpin(owner)
        return 1
    out_begin(&text, request, sizeof(request))
    out_text(&text, b"1 owner")
    out_key(&text, b"key", o.key_nonce, o.key_id)
    if not peer_call(o.exporter, request, -1, reply, REPLY_BYTES, NULL, deadline_in(PEER_TIMEOUT_MS)):
        return 0 if peer_is_gone(o.exporter) else -1
    if reply_ok(reply):
        epoch[0] = <uint32_t>wire_number(reply, b"epoch", o.epoch)
        return 1
    return 0 if wire_is(reply, b"code", b"gone") else -1


cdef uint32_t elections     # changes whenever the supervisor names another owner


cdef void owner_refresh(Object *o) noexcept nogil:
    """Ask the owner of an import again; an answer that an election has overtaken counts for nothing."""
    cdef uint32_t epoch = 0, seen = gs_load(&elections)
    cdef int answer
    if o.owner == OWNER_UNKNOWN:
        retry_unknown(o)
    if o.owner == OWNER_UNKNOWN:
        return
    answer = ask_owner(o, &epoch)
    gs_lock(&tables_mutex)
    if answer >= 0 and seen == gs_load(&elections):
        o.owner = OWNER_KNOWN if answer == 1 else OWNER_GONE
    gs_unlock(&tables_mutex)


cdef void refresh_imports() noexcept nogil:
    """Ask all owners again; marks orphans, and finds owners that were not known.

    An import that is still under way is left to the call that makes it.
    """
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object_pinned(&cursor)
        if o == NULL:
            return
        if is_import_in_use(o):
            owner_refresh(o)
        object_unpin(o)


cdef bint elect(uint64_t nonce, uint64_t id, int pid, bint adopt) noexcept nogil:
    """Name the owner of every import with a key; with `adopt` the first of them becomes ours. False: there is none."""
    cdef uint32_t cursor = 0, found = 0
    cdef Object *o
    gs_lock(&tables_mutex)
    gs_add(&elections, 1)
    while True:
        o = <Object *>table_next(&objects, sizeof(Object), &cursor)
        if o == NULL:
            break
        if o.dying or not is_shared_import(o) or o.key_nonce != nonce or o.key_id != id:
            continue
        if adopt and found == 0:
            o.origin = ORIGIN_ADOPTED
        o.exporter = pid
        o.owner = OWNER_KNOWN
        found += 1
    gs_unlock(&tables_mutex)
    return found != 0


cdef Object *next_object_pinned(uint32_t *cursor) noexcept nogil:
    """Return the next object in use, pinned, or NULL."""
    cdef Object *o
    gs_lock(&tables_mutex)
    while True:
        o = <Object *>table_next(&objects, sizeof(Object), cursor)
        if o == NULL or o.dying == 0:
            break
    if o != NULL:
        o.pins += 1
    gs_unlock(&tables_mutex)
    return o


ctypedef struct Fetched:
    int fd
    bint not_ready          # the owner has said that the memory is away
    uint32_t epoch
    uint64_t size
    CUmulticastObjectProp team


cdef CUresult fetch_export(int pid, uint64_t nonce, uint64_t id, int purpose, Fetched *f,
                           uint64_t deadline) noexcept nogil:
    """Get a fresh descriptor of an object from its owner; waits while the owner has not re-created it.

    NOT_FOUND when nobody has it, TIMEOUT at the deadline; else what the driver said here or there.
    """
    cdef char[REPLY_BYTES] reply
    cdef char[128] request
    cdef Out text
    cdef CUresult rc
    cdef uint32_t pause_ms = 2
    out_begin(&text, request, sizeof(request))
    out_text(&text, b"1 export")
    out_key(&text, b"key", nonce, id)
    if purpose == FOR_FD:
        out_number(&text, b"remember", 1)
    elif purpose == FOR_OPEN:
        out_number(&text, b"open", 1)
    while True:
        f.fd = -1
        f.not_ready = pid == getpid()
        if pid == getpid():
            rc = export_by_key(nonce, id, purpose == FOR_FD, f)
        else:
            rc = fetch_from_peer(pid, request, reply, f, deadline)
        if rc != CUDA_ERROR_NOT_READY:
            return rc
        if not sleep_before(deadline, pause_ms):
            return CUDA_ERROR_TIMEOUT
        pause_ms += 1 if pause_ms < MOST_PAUSE_MS else 0


cdef CUresult fetch_from_peer(int pid, const char *request, char *reply, Fetched *f, uint64_t deadline) noexcept nogil:
    """Ask one peer once; NOT_READY means ask again."""
    if not peer_call(pid, request, -1, reply, REPLY_BYTES, &f.fd, deadline):
        return CUDA_ERROR_NOT_FOUND if peer_is_gone(pid) else CUDA_ERROR_NOT_READY
    if reply_ok(reply) and f.fd >= 0:
        f.epoch = <uint32_t>wire_number(reply, b"epoch", 0)
        f.size = wire_number(reply, b"bytes", 0)
        team_read(reply, &f.team)
        return 0
    if f.fd >= 0:
        close(f.fd)
        f.fd = -1
    if wire_is(reply, b"code", b"not-ready"):
        f.not_ready = True
        return CUDA_ERROR_NOT_READY
    if wire_is(reply, b"code", b"gone"):
        return CUDA_ERROR_NOT_FOUND
    return <CUresult>wire_number(reply, b"cuda", CUDA_ERROR_UNKNOWN)


cdef CUresult export_by_key(uint64_t nonce, uint64_t id, bint remember, Fetched *f) noexcept nogil:
    """Export what is owned here: NOT_FOUND if it is gone, NOT_READY while it is not there."""
    cdef Object *o = object_pin_key(nonce, id)
    cdef CUresult rc = CUDA_ERROR_NOT_READY
    if o == NULL:
        return CUDA_ERROR_NOT_FOUND
    f.epoch = o.epoch
    f.size = o.size
    f.team = o.team
    if o.real != 0 and not (o.cls == CLASS_HOST and o.content_lost):
        rc = export_fd(o, &f.fd)
    if rc == 0 and remember and not fdref_new(o, f.fd, True):
        close(f.fd)
        f.fd = -1
        rc = CUDA_ERROR_OUT_OF_MEMORY
    object_unpin(o)
    return rc
