# The last step of a suspend and its counterpart, done while the application's threads are stopped: descriptors that
# stand for memory, and memory that CPU threads use without asking anybody.
#
# A descriptor is replaced in place, since its number is the application's: first by a placeholder, later, where the
# number still holds the placeholder, by a fresh export.  Host-class memory is replaced by a memfd with its bytes, one
# for all processes that map it, so that what they write to each other until the next stop arrives.

cdef enum:
    MAX_SEALED = 65536
    NOT_SHARED_YET = -1
    NOT_SHARED_ANY_MORE = -2
    SEAL_TIMEOUT_MS = 30000
    PROBE_TIMEOUT_MS = 5000
    LOCK_TRIES = 100
    MFD_NOEXEC_SEAL = 8     # newer than the headers that we build with

ctypedef struct SealedFd:
    uint32_t link
    int number
    uint8_t close_on_exec
    uint8_t received
    Object *object

# A walk over /proc/self/fd.
ctypedef struct FdWalk:
    int folder
    long filled
    long at
    char[2048] entries

cdef Table sealed
cdef int placeholder        # a descriptor of /dev/null, plus one; 0: none


# ---- descriptors ----

cdef bint walk_begin(FdWalk *w) noexcept nogil:
    """Begin to walk over the descriptors of this process."""
    w.filled = 0
    w.at = 0
    w.folder = open(b"/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    return w.folder >= 0


cdef const char *walk_name(FdWalk *w) noexcept nogil:
    """Return the next name, or NULL at the end."""
    cdef Dirent *entry
    while True:
        if w.at >= w.filled:
            w.filled = syscall(SYS_getdents64, w.folder, w.entries, sizeof(w.entries))
            w.at = 0
            if w.filled <= 0:
                return NULL
        entry = <Dirent *>(w.entries + w.at)
        w.at += entry.d_reclen
        if entry.d_name[0] != c'.':
            return entry.d_name


cdef int walk_next(FdWalk *w) noexcept nogil:
    """Return the next descriptor that leads to the driver, or -1; ends the walk at the end."""
    cdef const char *name
    cdef char[256] target
    cdef uint64_t number = 0
    cdef ssize_t n
    while True:
        name = walk_name(w)
        if name == NULL:
            close(w.folder)
            return -1
        n = readlinkat(w.folder, name, target, sizeof(target) - 1)
        if n <= 0 or read_digits(name, 10, &number) == NULL:
            continue
        target[n] = 0
        if strstr(target, b"nvidia") != NULL and not is_own_duplicate(<int>number):
            return <int>number


cdef bint is_own_duplicate(int fd) noexcept nogil:
    """Say whether a descriptor is one of our duplicates."""
    cdef uint32_t cursor = 0
    cdef FdRef *ref
    gs_lock(&tables_mutex)
    while True:
        ref = <FdRef *>table_next(&fdrefs, sizeof(FdRef), &cursor)
        if ref == NULL or ref.fd == fd:
            break
    gs_unlock(&tables_mutex)
    return ref != NULL


cdef uint32_t sealed_fds() noexcept nogil:
    """Return how many descriptors are replaced by the placeholder."""
    return sealed.live


cdef SealedFd *next_sealed(uint32_t *cursor) noexcept nogil:
    """Return the next replaced descriptor, or NULL."""
    cdef SealedFd *s
    gs_lock(&tables_mutex)
    s = <SealedFd *>table_next(&sealed, sizeof(SealedFd), cursor)
    gs_unlock(&tables_mutex)
    return s


cdef void sealed_remove(SealedFd *s) noexcept nogil:
    """Forget a replaced descriptor."""
    gs_lock(&tables_mutex)
    table_give(&sealed, sizeof(SealedFd), s)
    gs_unlock(&tables_mutex)


cdef bint placeholder_open(Failure *f) noexcept nogil:
    """Open the one placeholder that all replaced descriptors are duplicates of."""
    global placeholder
    cdef int fd
    if placeholder != 0:
        return True
    fd = open(b"/dev/null", O_RDWR | O_CLOEXEC)
    if fd < 0:
        f.error = errno
        return fail(f, b"fd", b"placeholder", b"/dev/null cannot be opened")
    placeholder = fd + 1
    return True


cdef bint seal_fd(int number, Object *o, bint received, Failure *f) noexcept nogil:
    """Replace one descriptor by the placeholder."""
    cdef SealedFd *s
    cdef int flags = fcntl(number, F_GETFD)
    gs_lock(&tables_mutex)
    s = <SealedFd *>table_take(&sealed, sizeof(SealedFd), MAX_SEALED)
    gs_unlock(&tables_mutex)
    if s == NULL:
        return fail(f, b"memory", b"seal", b"the list of descriptors cannot grow")
    s.number = number
    s.close_on_exec = flags & FD_CLOEXEC != 0
    s.received = received
    s.object = o
    if dup3(placeholder - 1, number, O_CLOEXEC if s.close_on_exec else 0) < 0:
        f.error = errno
        sealed_remove(s)
        return fail(f, b"fd", b"dup3", b"a descriptor cannot be replaced")
    return True


cdef bint seal_fds(bint stale_only, Failure *f) noexcept nogil:
    """Replace every descriptor that is an export, or only those of an incarnation that is no more."""
    cdef FdWalk walk
    cdef FdRef ref
    cdef Object *o
    cdef bint done = True
    cdef int number
    if not stale_only and not received_find(f):
        return False
    if fdrefs.live == 0:
        return True
    if not placeholder_open(f):
        return False
    if not walk_begin(&walk):
        f.error = errno
        return fail(f, b"fd", b"/proc/self/fd", b"the descriptors of this process cannot be listed")
    while True:
        number = walk_next(&walk)
        if number < 0:
            break
        o = object_pin_fd(number, &ref)
        if o == NULL:
            continue
        if done and (not stale_only or is_stale(&ref)):
            done = seal_fd(number, o, ref.received, f)
        object_unpin(o)
    return done


cdef bint unseal_fd(SealedFd *s, uint64_t deadline, Failure *f) noexcept nogil:
    """Put a fresh export where the placeholder still is, and leave it where memory that is not used here is gone.

    Where only the owner is gone (it died before all was sealed) the export that was there serves.
    """
    global fds_lost
    cdef Fetched got
    cdef CUresult rc
    cdef Object *o = s.object
    if not same_file(placeholder - 1, s.number):
        return True
    rc = fetch_export(owner_pid(o), o.key_nonce, o.key_id, FOR_REMAP if is_owned(o) else FOR_FD, &got, deadline)
    if rc == CUDA_ERROR_NOT_FOUND:
        got.fd = fdref_current(o)
        rc = 0 if got.fd >= 0 else rc
    if rc == CUDA_ERROR_NOT_FOUND and o.cls == CLASS_UNUSED:
        fds_lost += 1
        return True
    if rc != 0:
        return fail_cuda(f, b"export", rc, o, 0)
    if dup3(got.fd, s.number, O_CLOEXEC if s.close_on_exec else 0) < 0:
        f.error = errno
        close(got.fd)
        return fail(f, b"fd", b"dup3", b"a descriptor cannot be put back")
    if o.cls != CLASS_UNUSED and not fdref_new(o, s.number, s.received):
        gs_log(b"a descriptor that was put back has no identity")
    close(got.fd)
    return True


cdef bint unseal_fds(uint64_t deadline, uint64_t *count, Failure *f) noexcept nogil:
    """Put fresh exports back, and replace those of an incarnation that is no more."""
    cdef uint32_t cursor = 0
    cdef SealedFd *s
    global placeholder
    received_refresh()
    if not seal_fds(True, f):
        return False
    fdrefs_drop(NULL, True)
    while True:
        s = next_sealed(&cursor)
        if s == NULL:
            break
        if not unseal_fd(s, deadline, f):
            return False
        sealed_remove(s)
        count[0] += 1
    if placeholder != 0:
        close(placeholder - 1)
        placeholder = 0
    return True


# ---- host-class memory ----

cdef uint64_t cpu_address(Object *o) noexcept nogil:
    """Return where a CPU thread can use all of an object, or 0."""
    cdef uint64_t va = address_in(o, 0, o.size, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0, CU_MEM_ACCESS_FLAGS_PROT_READ)
    if va == 0:
        va = address_in(o, 0, o.size, CU_MEM_LOCATION_TYPE_HOST, 0, CU_MEM_ACCESS_FLAGS_PROT_READ)
    if va == 0:
        va = address_in(o, 0, o.size, CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0, CU_MEM_ACCESS_FLAGS_PROT_READ)
    return va


cdef bint cpu_may_use(Mapping *m) noexcept nogil:
    """Say whether CPU threads have access to a mapping."""
    cdef uint32_t number = m.access
    cdef Access *a
    while number != 0:
        a = access_at(number)
        if a.type != CU_MEM_LOCATION_TYPE_DEVICE:
            return True
        number = a.next
    return False


cdef bint spare_for_cpu(Object *o, Failure *f) noexcept nogil:
    """Map an object at an address of our own, for the CPU."""
    cdef CUmemAccessDesc desc
    cdef CUresult rc
    desc.location = o.props.location
    desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    rc = spare_map(o, &desc)
    return rc == 0 or fail_cuda(f, b"map for the copy", rc, o, o.spare_va)


cdef bint host_save(Object *o, Failure *f) noexcept nogil:
    """Copy the bytes of an object of ours into a memfd that whoever maps it can have."""
    cdef uint64_t va
    cdef void *copy
    if o.shared:
        return True
    if o.memfd < 0:
        o.memfd = memfd_create(b"gpushare-host", MFD_CLOEXEC)
    if o.memfd < 0:
        # vm.memfd_noexec=2 demands this; elsewhere it is left out, since CRIU does not give it back as it was.
        o.memfd = memfd_create(b"gpushare-host", MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    if o.memfd < 0 or ftruncate(o.memfd, <off_t>o.size) != 0:
        f.error = errno
        return fail(f, b"memory", b"memfd", b"no memory for the placeholder")
    copy = mmap(NULL, o.size, PROT_READ | PROT_WRITE, MAP_SHARED, o.memfd, 0)
    if copy == MAP_FAILED:
        f.error = errno
        return fail(f, b"memory", b"mmap", b"the placeholder cannot be mapped")
    va = cpu_address(o)
    if va == 0 and spare_for_cpu(o, f):
        va = o.spare_va
    if va != 0:
        memcpy(copy, <void *>va, o.size)
        o.shared = 1
    munmap(copy, o.size)
    return va != 0 and spare_unmap(o, f)


cdef bint host_load(Object *o, Failure *f) noexcept nogil:
    """Copy the bytes back into memory that was just made, before anybody can see it."""
    cdef void *copy
    if not o.content_lost:
        return True
    copy = mmap(NULL, o.size, PROT_READ, MAP_SHARED, o.memfd, 0)
    if copy == MAP_FAILED:
        f.error = errno
        return fail(f, b"memory", b"mmap", b"the placeholder cannot be mapped")
    if not spare_for_cpu(o, f):
        munmap(copy, o.size)
        return False
    memcpy(<void *>o.spare_va, copy, o.size)
    munmap(copy, o.size)
    if not spare_unmap(o, f):
        return False
    o.content_lost = 0
    return True


cdef bint host_fetch(Object *o, uint64_t deadline, Failure *f) noexcept nogil:
    """Get the owner's placeholder for an import."""
    cdef char[REPLY_BYTES] reply
    cdef char[128] request
    cdef Out text
    cdef int fd
    out_begin(&text, request, sizeof(request))
    out_text(&text, b"1 share")
    out_key(&text, b"key", o.key_nonce, o.key_id)
    while o.memfd < 0:
        fd = NOT_SHARED_YET
        if o.exporter == getpid():
            fd = share_by_key(o.key_nonce, o.key_id)
        elif not peer_call(o.exporter, request, -1, reply, REPLY_BYTES, &fd, deadline):
            fd = NOT_SHARED_ANY_MORE if peer_is_gone(o.exporter) else NOT_SHARED_YET
        elif not reply_ok(reply) and not wire_is(reply, b"code", b"not-ready"):
            fd = NOT_SHARED_ANY_MORE
        if fd == NOT_SHARED_ANY_MORE:
            f.object = o.id
            return fail(f, b"gone", b"share", b"the owner of this memory no longer has it")
        if fd >= 0:
            o.memfd = fd
        elif not sleep_before(deadline, 2):
            f.object = o.id
            return fail(f, b"deadline", b"share", b"the owner of this memory does not put it aside")
    return True


cdef int share_by_key(uint64_t nonce, uint64_t id) noexcept nogil:
    """Return a duplicate of the placeholder of memory that is owned here, or NOT_SHARED_..."""
    cdef Object *o = object_pin_key(nonce, id)
    cdef int fd = NOT_SHARED_YET
    if o == NULL:
        return NOT_SHARED_ANY_MORE
    if o.shared:
        fd = fcntl(o.memfd, F_DUPFD_CLOEXEC, 3)
    object_unpin(o)
    return fd


cdef bint place(Mapping *m, Failure *f) noexcept nogil:
    """Put the bytes at the address of an unmapped mapping: the driver left an inaccessible mapping there."""
    if m.placed or not cpu_may_use(m):
        return True
    if mmap(<void *>m.va, m.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m.object.memfd,
            <off_t>m.offset) == MAP_FAILED:
        f.error = errno
        f.address = m.va
        return fail(f, b"memory", b"mmap", b"the placeholder cannot be put at its address")
    m.placed = 1
    return True


cdef void unplace(Object *o) noexcept nogil:
    """Forget the placeholder of an object that is mapped again: the driver has mapped over it."""
    cdef Mapping *m = <Mapping *>o.first
    while m != NULL:
        m.placed = 0
        m = m.sibling
    o.shared = 0
    if o.memfd >= 0:
        close(o.memfd)
        o.memfd = -1


cdef bint host_drop(Object *o, Failure *f) noexcept nogil:
    """Unmap an object, each mapping with its placeholder at once, and give the driver's reference back."""
    cdef Mapping *m = <Mapping *>o.first
    cdef CUresult rc
    while m != NULL:
        if m.mapped:
            rc = gs_real.cuMemUnmap(m.va, m.size)
            if rc != 0:
                return fail_cuda(f, b"cuMemUnmap", rc, o, m.va)
            m.mapped = 0
            m.granted = 0
        if not place(m, f):
            return False
        m = m.sibling
    return object_drop(o, f)


cdef bint seal_host(bint owned, uint64_t deadline, uint64_t *bytes, Failure *f) noexcept nogil:
    """Release host-class memory, owned or imported."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if not is_carried(o, CLASS_HOST) or is_owned(o) != owned or o.real == 0:
            continue
        if not (host_save(o, f) if owned else host_fetch(o, deadline, f)) or not host_drop(o, f):
            return False
        bytes[0] += o.size if owned else 0


cdef bint save_all_host(Failure *f) noexcept nogil:
    """Put the bytes of all owned host-class memory aside, so that no importer waits for an unmap."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_carried(o, CLASS_HOST) and is_owned(o) and o.real != 0 and not host_save(o, f):
            return False


cdef bint unseal_host(bint owned, uint64_t deadline, uint64_t *bytes, Failure *f) noexcept nogil:
    """Bring host-class memory back: what is owned first, since importers wait for it."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if not is_carried(o, CLASS_HOST) or is_owned(o) != owned:
            continue
        if owned:
            if not object_create(o, f) or not host_load(o, f):
                return False
        elif not drop_if_stale(o, f) or not import_again(o, deadline, f):
            return False
        if not object_map(o, f):
            return False
        if o.memfd >= 0:
            bytes[0] += o.size if owned else 0
            unplace(o)


# ---- the two verbs ----

cdef bint tables_are_free(Failure *f) noexcept nogil:
    """Make sure that no stopped thread holds the lock of the tables."""
    cdef int tries = LOCK_TRIES
    while gs_load(&tables_mutex.state) != 0:
        tries -= 1
        if tries == 0:
            return fail(f, b"busy", b"lock", b"a stopped thread holds a lock")
        sleep_us(1000)
    return True


cdef bint driver_is_free(Failure *f) noexcept nogil:
    """Make sure that no stopped thread holds a lock of the driver that the verb needs."""
    cdef CUdeviceptr va = 0
    cdef uint64_t begin = now_ns()
    cdef CUresult rc = gs_real.cuMemAddressReserve(&va, 1 << 21, 0, 0, 0)
    if rc != 0:
        return fail_cuda(f, b"cuMemAddressReserve", rc, NULL, 0)
    gs_real.cuMemAddressFree(va, 1 << 21)
    if now_ns() - begin > <uint64_t>PROBE_TIMEOUT_MS * 1000000:
        return fail(f, b"deadline", b"lock", b"the driver was held up by a stopped thread")
    return True


cdef bint drop_held(bint host, Failure *f) noexcept nogil:
    """Drop what release has only unmapped (multicast objects, what descriptors kept), and our own duplicates."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if (is_carried(o, CLASS_DEVICE) or is_carried(o, CLASS_MULTICAST)) and not object_drop(o, f):
            return False
        if host or not is_carried(o, CLASS_HOST):
            fdrefs_drop(o, False)


cdef bint phase_seal(bint host, uint64_t deadline, uint64_t *fds, uint64_t *bytes, Failure *f) noexcept nogil:
    """Replace descriptors and, with `host`, host-class memory."""
    global phase
    if phase != PHASE_RELEASED and phase != PHASE_SEALED:
        return fail(f, b"phase", b"seal", b"seal needs a released process")
    if not tables_are_free(f) or not driver_is_free(f) or not seal_fds(False, f):
        return False
    fds[0] = sealed_fds()
    phase = PHASE_SEALED
    if host:
        if not save_all_host(f) or not seal_host(False, deadline, bytes, f) or not seal_host(True, deadline, bytes, f):
            return False
    return drop_held(host, f)


cdef bint phase_unseal(uint64_t deadline, uint64_t *fds, uint64_t *bytes, Failure *f) noexcept nogil:
    """Bring back host-class memory and descriptors."""
    global phase
    if not tables_are_free(f):
        return False
    if not unseal_host(True, deadline, bytes, f) or not unseal_host(False, deadline, bytes, f):
        return False
    if not unseal_fds(deadline, fds, f):
        return False
    if phase == PHASE_SEALED:
        phase = PHASE_RELEASED
    return True
