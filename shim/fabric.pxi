# Fabric handles: 64 bytes that name memory, on every node of a fabric, and do not keep it.
#
# Memory that is made for them is made to be exported as a descriptor, too, and is carried by that: an import by bytes
# that some shim of this machine knows is an import of a descriptor from it.  The bytes that the application got first
# stay good for whoever imports by them here; the driver's own change when the memory is made again.  What no shim knows
# is memory of another node (or of a process without the shim), and stands in the way of a suspend.

cdef enum:
    MAX_NAMES = 65536
    FABRIC_BYTES = 64
    WALK_BYTES = 16384

# The bytes by which the application knows an object.
ctypedef struct Name:
    uint32_t link
    uint8_t made            # exported here
    Object *object
    char[FABRIC_BYTES] bytes

# A walk over the sockets on which shims listen.
ctypedef struct SocketWalk:
    int fd
    size_t at
    size_t filled
    char[WALK_BYTES] text

cdef Table names


cdef int types_asked(Object *o) noexcept nogil:
    """Return for which types of handle the application has made an object."""
    return <int>o.team.handleTypes if o.cls == CLASS_MULTICAST else o.props.requestedHandleTypes


cdef bint is_for_fabric(Object *o) noexcept nogil:
    """Say whether an object can be exported by bytes."""
    return types_asked(o) & CU_MEM_HANDLE_TYPE_FABRIC != 0


cdef bint is_for_fabric_alone(Object *o) noexcept nogil:
    """Say whether it can be exported by bytes and, for all that the application knows, not as a descriptor."""
    return is_for_fabric(o) and types_asked(o) & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == 0


# ---- names ----

cdef Object *name_pin(const char *bytes) noexcept nogil:
    """Return the object that is known by some bytes, pinned, or NULL."""
    cdef uint32_t cursor = 0
    cdef Name *n
    cdef Object *o = NULL
    gs_lock(&tables_mutex)
    while names.live != 0:
        n = <Name *>table_next(&names, sizeof(Name), &cursor)
        if n == NULL:
            break
        if n.object.dying == 0 and memcmp(n.bytes, bytes, FABRIC_BYTES) == 0:
            o = n.object
            o.pins += 1
            break
    gs_unlock(&tables_mutex)
    return o


cdef bint name_keep(Object *o, char *bytes, bint made) noexcept nogil:
    """Keep the bytes by which the application knows an object; where there are some already, return those."""
    cdef uint32_t cursor = 0
    cdef Name *n
    gs_lock(&tables_mutex)
    while True:
        n = <Name *>table_next(&names, sizeof(Name), &cursor)
        if n == NULL or n.object == o:
            break
    if n != NULL:
        memcpy(bytes, n.bytes, FABRIC_BYTES)
    else:
        n = <Name *>table_take(&names, sizeof(Name), MAX_NAMES)
        if n != NULL:
            n.object = o
            memcpy(n.bytes, bytes, FABRIC_BYTES)
    if n != NULL and made:
        n.made = 1
    gs_unlock(&tables_mutex)
    return n != NULL


cdef void name_forget(Object *o) noexcept nogil:
    """Forget the bytes of an object."""
    cdef uint32_t cursor = 0
    cdef Name *n
    gs_lock(&tables_mutex)
    while names.live != 0:
        n = <Name *>table_next(&names, sizeof(Name), &cursor)
        if n == NULL:
            break
        if n.object == o:
            table_give(&names, sizeof(Name), n)
    gs_unlock(&tables_mutex)


cdef uint32_t names_made() noexcept nogil:
    """Return how many objects the application has exported by bytes."""
    cdef uint32_t cursor = 0, count = 0
    cdef Name *n
    gs_lock(&tables_mutex)
    while True:
        n = <Name *>table_next(&names, sizeof(Name), &cursor)
        if n == NULL:
            break
        count += n.made
    gs_unlock(&tables_mutex)
    return count


cdef CUresult export_fabric(void *out, Object *o, uint64_t flags) noexcept nogil:
    """Export by bytes: the same ones for as long as the object lives, whatever incarnation of it there is."""
    cdef char[FABRIC_BYTES] bytes
    cdef CUresult rc = gs_real.cuMemExportToShareableHandle(bytes, o.real, CU_MEM_HANDLE_TYPE_FABRIC, flags)
    if rc != 0:
        return rc
    if not name_keep(o, bytes, True):
        gs_log(b"table of fabric handles is full")
        return CUDA_ERROR_OUT_OF_MEMORY
    memcpy(out, bytes, FABRIC_BYTES)
    return 0


# ---- whose bytes ----

cdef bint sockets_begin(SocketWalk *w) noexcept nogil:
    """Begin to walk over the sockets of this network namespace."""
    w.at = w.filled = 0
    w.fd = open(b"/proc/net/unix", O_RDONLY | O_CLOEXEC)
    return w.fd >= 0


cdef char *sockets_line(SocketWalk *w) noexcept nogil:
    """Return the next line, or NULL at the end."""
    cdef char *line
    cdef char *end
    cdef ssize_t n
    while True:
        line = w.text + w.at
        end = <char *>memchr(line, c'\n', w.filled - w.at)
        if end != NULL:
            end[0] = 0
            w.at = <size_t>(end + 1 - w.text)
            return line
        memmove(w.text, line, w.filled - w.at)
        w.filled -= w.at
        w.at = 0
        n = read(w.fd, w.text + w.filled, WALK_BYTES - w.filled) if w.filled < WALK_BYTES else 0
        if n <= 0:
            return NULL
        w.filled += <size_t>n


cdef int next_shim(SocketWalk *w) noexcept nogil:
    """Return the next other process in which a shim listens, or -1; ends the walk at the end."""
    cdef uint64_t pid = 0
    cdef char *line
    cdef const char *name
    while True:
        line = sockets_line(w)
        if line == NULL:
            close(w.fd)
            return -1
        name = strstr(line, b" @nvsnap-gpushare.")
        # 00010000: it listens.
        if name == NULL or strstr(line, b" 00010000 ") == NULL:
            continue
        if read_digits(name + 18, 10, &pid) != NULL and <int>pid != getpid():
            return <int>pid


cdef bint ask_for_name(int pid, const char *bytes, IpcHandle *h) noexcept nogil:
    """Ask one shim whether it knows some bytes; fills in whose memory they name."""
    cdef char[REPLY_BYTES] reply
    cdef char[192] request
    cdef Out text
    out_begin(&text, request, sizeof(request))
    out_text(&text, b"1 whose")
    out_octets(&text, b"fabric", bytes, FABRIC_BYTES)
    if not peer_call(pid, request, -1, reply, REPLY_BYTES, NULL, deadline_in(PEER_TIMEOUT_MS)) or not reply_ok(reply):
        return False
    h.pid = <int>wire_number(reply, b"pid", <uint64_t>pid)
    return wire_key(reply, b"key", &h.object_nonce, &h.object_id)


cdef bint find_name(const char *bytes, IpcHandle *h) noexcept nogil:
    """Find out, here and from all other shims of the machine, whose memory some bytes name."""
    cdef SocketWalk walk
    cdef Object *o = name_pin(bytes)
    cdef bint known = False
    cdef int pid
    memset(h, 0, sizeof(h[0]))
    if o != NULL:
        known = o.owner == OWNER_KNOWN
        h.pid = owner_pid(o)
        h.object_nonce = o.key_nonce
        h.object_id = o.key_id
        object_unpin(o)
    if known or not sockets_begin(&walk):
        return known
    while True:
        pid = next_shim(&walk)
        if pid < 0:
            return known
        known = known or ask_for_name(pid, bytes, h)


cdef CUresult import_fabric(Object **out, void *os_handle) noexcept nogil:
    """Import by bytes: from the process that made them, if its shim is on this machine.

    The driver is asked first, whether this process may: the bytes may be too old for it and good all the same.
    """
    cdef char[FABRIC_BYTES] bytes
    cdef Object *foreign = NULL
    cdef IpcHandle h
    cdef CUresult rc = import_foreign(&foreign, os_handle, CU_MEM_HANDLE_TYPE_FABRIC)
    if os_handle == NULL or not (rc == 0 or rc == CUDA_ERROR_INVALID_VALUE):
        return rc
    memcpy(bytes, os_handle, FABRIC_BYTES)
    if not find_name(bytes, &h):
        out[0] = foreign
        return rc
    if foreign != NULL:
        object_unpin(foreign)
    rc = import_key(out, &h)
    if rc == CUDA_ERROR_NOT_FOUND:
        return CUDA_ERROR_INVALID_VALUE
    if rc == 0 and not name_keep(out[0], bytes, False):
        gs_log(b"table of fabric handles is full")
    return rc
