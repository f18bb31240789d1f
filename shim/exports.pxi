# Exported memory and the descriptors that stand for it.
#
# Every export is an open file of its own.  Of each one that the application made or received a close-on-exec duplicate
# is kept, by which a descriptor that turns up later (from a peer that asks "whose is this?", or in /proc/self/fd at
# seal) is recognised.  The duplicate goes with the object, so it pins no memory longer than the object lives.

cdef enum:
    F_DUPFD_QUERY = 1027
    KCMP_FILE = 0


cdef int same_file_by_lock(int a, int b) noexcept nogil:
    """Say whether two descriptors are one open file: a lock taken through one does not stand against the other.

    Works wherever descriptors do; it needs the two to be the same inode, or the answer would always be yes.
    """
    cdef struct_flock lock
    cdef struct_stat first, second
    cdef int answer
    if fstat(a, &first) != 0 or fstat(b, &second) != 0:
        return 0
    if first.st_dev != second.st_dev or first.st_ino != second.st_ino:
        return 0
    memset(&lock, 0, sizeof(lock))
    lock.l_type = F_WRLCK
    lock.l_whence = SEEK_SET
    lock.l_start = <off_t>(process_nonce >> 2)
    lock.l_len = 1
    if fcntl(a, F_OFD_SETLK, &lock) != 0:
        return 0
    answer = 1 if fcntl(b, F_OFD_GETLK, &lock) == 0 and lock.l_type == F_UNLCK else 0
    lock.l_type = F_UNLCK
    lock.l_whence = SEEK_SET
    lock.l_start = <off_t>(process_nonce >> 2)
    lock.l_len = 1
    lock.l_pid = 0
    fcntl(a, F_OFD_SETLK, &lock)
    return answer


cdef bint same_file(int a, int b) noexcept nogil:
    """Say whether two descriptors of this process are one open file.

    F_DUPFD_QUERY is new in 6.10; kcmp is refused under a container's default seccomp; the lock works everywhere.
    """
    cdef int answer = fcntl(a, F_DUPFD_QUERY, b)
    cdef long order
    if answer >= 0:
        return answer == 1
    if errno == EBADF:
        return False
    order = syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, a, b)
    if order >= 0:
        return order == 0
    return same_file_by_lock(a, b) == 1


cdef bint fdref_new(Object *o, int fd, bint received) noexcept nogil:
    """Keep a duplicate of an exported descriptor; False if there is none left, or the table is full.

    An export that is not recognised later would keep the memory of before a suspend: without a duplicate there is none.
    """
    cdef FdRef *ref
    cdef int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3)
    if copy < 0:
        gs_log(b"no descriptor left for the identity of an export")
        return False
    gs_lock(&tables_mutex)
    ref = <FdRef *>table_take(&fdrefs, sizeof(FdRef), MAX_FDREFS)
    if ref != NULL:
        ref.fd = copy
        ref.number = fd
        ref.received = received
        ref.epoch = o.epoch
        ref.object = o
    gs_unlock(&tables_mutex)
    if ref == NULL:
        close(copy)
    return ref != NULL


cdef void fdrefs_renew(Object *o) noexcept nogil:
    """Note that what is known of an import's descriptors is its newest incarnation; `tables_mutex` is held."""
    cdef uint32_t cursor = 0
    cdef FdRef *ref
    while fdrefs.live != 0:
        ref = <FdRef *>table_next(&fdrefs, sizeof(FdRef), &cursor)
        if ref == NULL:
            return
        if ref.object == o:
            ref.epoch = o.epoch


cdef bint is_stale(FdRef *ref) noexcept nogil:
    """Say whether an export is of an incarnation that is no more."""
    return ref.epoch != ref.object.epoch


cdef void fdrefs_drop(Object *o, bint stale) noexcept nogil:
    """Drop what is known about the descriptors of an object (NULL: of all), or only what is stale."""
    cdef uint32_t cursor = 0
    cdef FdRef *ref
    while True:
        gs_lock(&tables_mutex)
        while True:
            ref = <FdRef *>table_next(&fdrefs, sizeof(FdRef), &cursor)
            if ref == NULL or ((o == NULL or ref.object == o) and (not stale or is_stale(ref))):
                break
        if ref != NULL:
            close(ref.fd)
            table_give(&fdrefs, sizeof(FdRef), ref)
        gs_unlock(&tables_mutex)
        if ref == NULL:
            return


cdef bint fdrefs_of(Object *o, bint current) noexcept nogil:
    """Say whether descriptors of an object are known, or, with `current`, of its newest incarnation."""
    cdef uint32_t cursor = 0
    cdef FdRef *ref = NULL
    gs_lock(&tables_mutex)
    while fdrefs.live != 0:
        ref = <FdRef *>table_next(&fdrefs, sizeof(FdRef), &cursor)
        if ref == NULL or (ref.object == o and not (current and is_stale(ref))):
            break
    gs_unlock(&tables_mutex)
    return ref != NULL


cdef int fdref_current(Object *o) noexcept nogil:
    """Return a duplicate of a descriptor that still stands for the newest incarnation of an object, or -1."""
    cdef uint32_t cursor = 0
    cdef FdRef *ref
    cdef int fd = -1
    gs_lock(&tables_mutex)
    while fdrefs.live != 0:
        ref = <FdRef *>table_next(&fdrefs, sizeof(FdRef), &cursor)
        if ref == NULL:
            break
        if ref.object == o and not is_stale(ref):
            fd = fcntl(ref.fd, F_DUPFD_CLOEXEC, 3)
            break
    gs_unlock(&tables_mutex)
    return fd


cdef Object *object_pin_fd(int fd, FdRef *found) noexcept nogil:
    """Return the object that a descriptor stands for, pinned, and a copy of what is known of it; or NULL."""
    cdef uint32_t cursor = 0
    cdef FdRef *ref
    cdef Object *o = NULL
    gs_lock(&tables_mutex)
    while fdrefs.live != 0:
        ref = <FdRef *>table_next(&fdrefs, sizeof(FdRef), &cursor)
        if ref == NULL:
            break
        if ref.object.dying == 0 and same_file(ref.fd, fd):
            o = ref.object
            o.pins += 1
            if found != NULL:
                found[0] = ref[0]
            break
    gs_unlock(&tables_mutex)
    return o


cdef CUresult export_fd(Object *o, int *fd) noexcept nogil:
    """Export a pinned object that is live; the open file carries our pid as a hint for whoever receives it.

    An import cannot be exported.  One that was adopted and not yet made again is handed on by the export it came from.
    """
    cdef CUresult rc = gs_real.cuMemExportToShareableHandle(fd, o.real, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
    if rc != 0 and o.origin == ORIGIN_ADOPTED:
        fd[0] = fdref_current(o)
        rc = 0 if fd[0] >= 0 else rc
    if rc == 0:
        fcntl(fd[0], F_SETOWN, getpid())
    return rc


cdef CUresult export_object(void *out, Object *o, int type, uint64_t flags) noexcept nogil:
    """Export for the application and remember the open file."""
    cdef CUresult rc
    if type == CU_MEM_HANDLE_TYPE_FABRIC:
        return export_fabric(out, o, flags)
    if is_for_fabric_alone(o):
        return CUDA_ERROR_INVALID_VALUE
    rc = gs_real.cuMemExportToShareableHandle(out, o.real, type, flags)
    if rc != 0 or type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        return rc
    fcntl((<int *>out)[0], F_SETOWN, getpid())
    if not fdref_new(o, (<int *>out)[0], False):
        close((<int *>out)[0])
        return CUDA_ERROR_OUT_OF_MEMORY
    return 0


cdef public CUresult cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                  CUmemAllocationHandleType handleType,
                                                  unsigned long long flags) noexcept nogil:
    """Export memory, to be recognised when it comes back."""
    cdef Object *o
    cdef CUresult rc = CUDA_ERROR_INVALID_VALUE
    if gs_real.cuMemExportToShareableHandle == NULL and not gs_find(<void *>&gs_real.cuMemExportToShareableHandle):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if is_virtual(handle):
        o = object_pin(handle)
        if o != NULL:
            rc = export_object(shareableHandle, o, handleType, flags)
            object_unpin(o)
    else:
        rc = gs_real.cuMemExportToShareableHandle(shareableHandle, handle, handleType, flags)
    gs_leave(GS_MEMORY)
    return rc
