# The last step of a suspend and its counterpart, done while the application's threads are stopped: descriptors that
# stand for memory, and memory that CPU threads use without asking anybody.
#
# A descriptor is replaced in place, since its number is the application's: first by a placeholder, later, where the
# number still holds one, by a fresh export.  A placeholder is a memfd that says what it stands for, so threads that run
# meanwhile may duplicate it and send it to others: `unseal` puts an export behind every number that leads to one, and
# an import that meets one later does the same (import_for_application).  Host-class memory is replaced by a memfd with
# its bytes, one for all processes that map it, so that what they write to each other until the next stop arrives.

cdef enum:
    NOT_SHARED_YET = -1
    NOT_SHARED_ANY_MORE = -2
    SEAL_TIMEOUT_MS = 30000
    PROBE_TIMEOUT_MS = 5000
    LOCK_TRIES = 100
    MFD_NOEXEC_SEAL = 8     # newer than the headers that we build with

cdef extern from "platform.h" nogil:
    const char *GS_PLACEHOLDER
    const char *GS_DRIVER_FILES

# The content of a placeholder: the key of the memory, and the process to ask for it.
ctypedef struct Placeholder:
    char[16] magic
    uint64_t nonce
    uint64_t id
    uint64_t pid

# A walk over /proc/thread-self/fd.
ctypedef struct FdWalk:
    int folder
    long filled
    long at
    char[2048] entries

cdef uint32_t fds_sealed    # descriptors that were replaced and are not put back yet


# ---- descriptors ----

cdef bint walk_begin(FdWalk *w) noexcept nogil:
    """Begin to walk over the descriptors of this process."""
    w.filled = 0
    w.at = 0
    w.folder = open(b"/proc/thread-self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
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


cdef int walk_next(FdWalk *w, const char *wanted) noexcept nogil:
    """Return the next descriptor whose file has `wanted` in its name, or -1; ends the walk at the end."""
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
        if strstr(target, wanted) != NULL and not is_own_duplicate(<int>number):
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
    """Return how many descriptors were replaced and are still to be put back."""
    return fds_sealed


cdef int memfd_new(const char *name) noexcept nogil:
    """Make a memfd."""
    cdef int fd = memfd_create(name, MFD_CLOEXEC)
    if fd < 0:
        # vm.memfd_noexec=2 demands this; elsewhere it is left out, since CRIU does not give it back as it was.
        fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    return fd


cdef int placeholder_new(Object *o) noexcept nogil:
    """Return a new placeholder for descriptors of an object, or -1."""
    cdef Placeholder p
    cdef int fd = memfd_new(GS_PLACEHOLDER)
    memset(&p, 0, sizeof(p))
    memcpy(p.magic, GS_PLACEHOLDER, sizeof(p.magic))
    p.nonce = o.key_nonce
    p.id = o.key_id
    p.pid = <uint64_t>owner_pid(o)
    if fd >= 0 and write(fd, &p, sizeof(p)) != <ssize_t>sizeof(p):
        close(fd)
        return -1
    return fd


cdef bint placeholder_read(int number, Placeholder *p) noexcept nogil:
    """Read what a placeholder stands for; False if the descriptor is none."""
    cdef char[64] path
    cdef char[64] target
    cdef ssize_t n
    gs_format(path, sizeof(path), b"/proc/thread-self/fd/%d", number)
    n = readlinkat(AT_FDCWD, path, target, sizeof(target) - 1)
    if n <= 0:
        return False
    target[n] = 0
    return (strstr(target, GS_PLACEHOLDER) != NULL and pread(number, p, sizeof(p[0]), 0) == <ssize_t>sizeof(p[0])
            and memcmp(p.magic, GS_PLACEHOLDER, sizeof(p.magic)) == 0)


cdef bint replace_fd(int number, int fd) noexcept nogil:
    """Put another open file behind a number of the application, which keeps its flag; `fd` is used up."""
    cdef int flags = fcntl(number, F_GETFD)
    cdef bint done = fd >= 0 and dup3(fd, number, O_CLOEXEC if flags & FD_CLOEXEC else 0) >= 0
    cdef int error = errno
    if fd >= 0:
        close(fd)
    errno_set(error)
    return done


cdef bint seal_fd(int number, Object *o, Failure *f) noexcept nogil:
    """Replace one descriptor by a placeholder."""
    global fds_sealed
    if not replace_fd(number, placeholder_new(o)):
        f.error = errno
        return fail(f, b"fd", b"placeholder", b"a descriptor cannot be replaced")
    fds_sealed += 1
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
    if not walk_begin(&walk):
        f.error = errno
        return fail(f, b"fd", b"/proc/thread-self/fd", b"the descriptors of this process cannot be listed")
    while True:
        number = walk_next(&walk, GS_DRIVER_FILES)
        if number < 0:
            break
        o = object_pin_fd(number, &ref)
        if o == NULL:
            continue
        if done and (not stale_only or is_stale(&ref)):
            done = seal_fd(number, o, f)
        object_unpin(o)
    return done


cdef bint unseal_fd(int number, Placeholder *p, uint64_t deadline, Failure *f) noexcept nogil:
    """Put a fresh export where a placeholder is, or /dev/null where memory that is not used here is gone.

    Where only the owner is gone (it died before all was sealed) the export that was there serves.
    """
    global fds_lost
    cdef Fetched got
    cdef Object *o = object_pin_any(p.nonce, p.id)
    cdef int pid = owner_pid(o) if o != NULL else <int>p.pid
    cdef bint used = o != NULL and o.cls != CLASS_UNUSED
    cdef bint done = False
    cdef CUresult rc = fetch_export(pid, p.nonce, p.id, FOR_REMAP if pid == getpid() else FOR_FD, &got, deadline)
    if rc == CUDA_ERROR_NOT_FOUND and o != NULL:
        got.fd = fdref_current(o)
        rc = 0 if got.fd >= 0 else rc
    if rc == CUDA_ERROR_NOT_FOUND and not used:
        fds_lost += 1
        got.fd = open(b"/dev/null", O_RDWR | O_CLOEXEC)
        rc = 0
    if rc != 0:
        fail_cuda(f, b"export", rc, o, 0)
    elif not replace_fd(number, got.fd):
        f.error = errno
        fail(f, b"fd", b"dup3", b"a descriptor cannot be put back")
    else:
        done = True
        if used and not fdref_new(o, number, not is_owned(o)):
            gs_log(b"a descriptor that was put back has no identity")
    if o != NULL:
        object_unpin(o)
    return done


cdef bint unseal_fds(uint64_t deadline, uint64_t *count, Failure *f) noexcept nogil:
    """Put fresh exports back, and replace those of an incarnation that is no more."""
    cdef FdWalk walk
    cdef Placeholder p
    cdef bint done = True
    cdef int number
    global fds_sealed
    received_refresh()
    if not seal_fds(True, f):
        return False
    fdrefs_drop(NULL, True)
    if not walk_begin(&walk):
        f.error = errno
        return fail(f, b"fd", b"/proc/thread-self/fd", b"the descriptors of this process cannot be listed")
    while True:
        number = walk_next(&walk, GS_PLACEHOLDER)
        if number < 0:
            break
        if done and placeholder_read(number, &p):
            done = unseal_fd(number, &p, deadline, f)
            count[0] += done
    if done:
        fds_sealed = 0
    return done


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
        o.memfd = memfd_new(b"gpushare-host")
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
    """Replace descriptors and, with `host`, host-class memory: the driver's checkpoint follows."""
    global phase, checkpointed
    if phase != PHASE_RELEASED and phase != PHASE_SEALED:
        return fail(f, b"phase", b"seal", b"seal needs a released process")
    if not tables_are_free(f) or not driver_is_free(f):
        return False
    checkpointed = checkpointed or host
    phase = PHASE_SEALED  # before the first descriptor is replaced: whoever turns back half-way has to unseal
    if not seal_fds(False, f):
        return False
    fds[0] = sealed_fds()
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
