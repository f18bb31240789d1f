# Objects: one entry for each physical allocation that this process created, imported or adopted.
#
# The value the application sees as a handle is made from the object's id and never changes; the driver's handle is
# swapped underneath.  Of the driver's references an object holds exactly one, from its creation until nothing of ours
# needs it: no reference of the application, no mapping, no pin.  A pin is held by a call in progress.

cdef enum:
    ORIGIN_CREATED = 1
    ORIGIN_IMPORTED = 2
    ORIGIN_ADOPTED = 3      # imported, owned here since its exporter is gone
    CLASS_DEVICE = 1
    CLASS_HOST = 2          # HOST, HOST_NUMA and HOST_NUMA_CURRENT: CPU threads use it without asking
    CLASS_OTHER = 3         # imported by a handle that nobody here knows
    CLASS_UNUSED = 4        # of somebody else and not imported: only descriptors of it are here (received.pxi)
    CLASS_MULTICAST = 5     # no memory of its own: what is bound to it (multicast.pxi)
    OWNER_KNOWN = 1
    OWNER_UNKNOWN = 2       # the exporter has not answered yet
    OWNER_GONE = 3          # the exporter has freed it or has exited
    SLOT_BITS = 20
    MAX_OBJECTS = 262144
    MAX_MAPPINGS = 262144
    MAX_ACCESS = 262144
    MAX_FDREFS = 65536

ctypedef struct Object:
    uint32_t link
    uint32_t refs           # the application's references
    uint32_t maps
    uint32_t pins
    uint64_t id
    uint64_t real           # the driver's handle, 0: dropped
    uint64_t size
    uint64_t flags          # as given to cuMemCreate
    CUmemAllocationProp props
    CUmulticastObjectProp team  # of multicast objects; numDevices is 0 for others
    uint64_t joined         # devices that this process has added to it, a bit each
    uint64_t added          # of those, the ones that the driver has added to the incarnation `added_to`
    uint64_t told           # and the ones of which its owner knows
    uint32_t added_to
    uint8_t complete        # every device of the group has been added
    uint64_t key_nonce      # with key_id: the name of the memory among processes
    uint64_t key_id
    int exporter            # inner pid of the process to ask, 0: unknown
    uint32_t epoch          # incarnation of the memory
    uint8_t origin
    uint8_t cls
    uint8_t owner           # of imports: OWNER_...
    uint8_t internal        # backs cuMemAlloc or cuIpcOpenMemHandle
    uint8_t kind            # CARRIED, or what it is counted as
    uint8_t dying           # its last user gives it back to the driver: nobody may pin it any more
    uint8_t content_lost    # the content is in the arena or the memfd and not in the memory
    uint8_t shared          # the memfd is complete
    int memfd               # holds the bytes of sealed host-class memory, else -1
    uint32_t listed         # round in which its pieces were listed
    void *first             # its first Mapping
    uint64_t spare_va       # address of a mapping of ours, made for a copy; 0: none
    uint8_t spare_mapped

ctypedef struct Access:
    uint32_t link
    uint32_t next           # number (index + 1) of the next one of the mapping
    uint64_t start          # from the beginning of the mapping
    uint64_t size
    int type
    int id
    int flags

ctypedef struct Mapping:
    uint32_t link
    uint32_t access         # number of the first Access
    uint64_t va
    uint64_t size
    uint64_t offset
    Object *object
    Mapping *sibling        # next mapping of the object
    uint64_t buffer_id      # what the application sees as the buffer's id; the driver's own changes
    uint8_t mapped
    uint8_t granted         # the access list is in force
    uint8_t placed          # the placeholder lies at the address

# An open file that is an export: `fd` is a duplicate of ours that tells it apart.
ctypedef struct FdRef:
    uint32_t link
    int fd
    int number              # the number that the application got or gave
    uint8_t received        # came from a peer, or was made for one
    uint32_t epoch          # the incarnation that it stands for
    Object *object

cdef Table objects
cdef Table mappings
cdef Order mappings_by_va
cdef Table accesses
cdef uint32_t accesses_promised
cdef Table fdrefs
cdef uint64_t process_nonce
cdef uint64_t last_buffer_id


cdef Object *object_new(uint8_t origin) noexcept nogil:
    """Return a new object with one pin, or NULL when the table is full."""
    cdef Object *o
    cdef uint64_t generation
    gs_lock(&tables_mutex)
    if process_nonce == 0:
        random_bytes(&process_nonce, sizeof(process_nonce))
    generation = object_generation()
    o = <Object *>table_take(&objects, sizeof(Object), MAX_OBJECTS)
    if o != NULL:
        o.id = generation << SLOT_BITS | table_index(&objects, sizeof(Object), o)
        o.origin = origin
        o.pins = 1
        if origin == ORIGIN_IMPORTED:
            o.owner = OWNER_UNKNOWN
        else:
            o.owner = OWNER_KNOWN
            o.key_nonce = process_nonce
            o.key_id = o.id
        o.memfd = -1
    gs_unlock(&tables_mutex)
    if o == NULL:
        gs_log(b"object table is full")
    return o


cdef uint64_t next_generation


cdef uint64_t object_generation() noexcept nogil:
    """Return a number that no earlier object of this process has; 28 bits, counted over all slots."""
    global next_generation
    next_generation = next_generation + 1 & 0xFFFFFFF
    if next_generation == 0:
        next_generation = 1
    return next_generation


cdef uint64_t handle_of(Object *o) noexcept nogil:
    """Return the value that the application knows as the object's handle."""
    return <uint64_t>HANDLE_TAG << 48 | o.id


cdef bint is_virtual(uint64_t handle) noexcept nogil:
    """Say whether a handle value is one of ours."""
    return handle >> 48 == HANDLE_TAG


cdef Object *object_by_id(uint64_t id) noexcept nogil:
    """Return the object with an id, or NULL; `tables_mutex` is held."""
    cdef uint64_t slot = id & ((1 << SLOT_BITS) - 1)
    cdef Object *o
    if slot >= objects.used:
        return NULL
    o = <Object *>table_at(&objects, sizeof(Object), <uint32_t>slot)
    return o if o.link == TABLE_USED and o.id == id and o.dying == 0 else NULL


cdef Object *object_pin(uint64_t handle) noexcept nogil:
    """Return the object of a handle that the application may use, pinned, or NULL."""
    cdef Object *o
    gs_lock(&tables_mutex)
    o = object_by_id(handle & ((<uint64_t>1 << 48) - 1))
    if o != NULL and o.refs == 0:
        o = NULL
    if o != NULL:
        o.pins += 1
    gs_unlock(&tables_mutex)
    return o


cdef Object *object_pin_id(uint64_t id) noexcept nogil:
    """Return the object with an id, pinned, or NULL."""
    cdef Object *o
    gs_lock(&tables_mutex)
    o = object_by_id(id)
    if o != NULL:
        o.pins += 1
    gs_unlock(&tables_mutex)
    return o


cdef Object *object_pin_key(uint64_t nonce, uint64_t id) noexcept nogil:
    """Return the object that is owned here under a key, pinned, or NULL."""
    cdef Object *o = NULL
    cdef uint32_t cursor = 0
    gs_lock(&tables_mutex)
    if nonce == process_nonce:
        o = object_by_id(id)
    if o == NULL or not is_owned(o) or o.key_id != id:
        while True:
            o = <Object *>table_next(&objects, sizeof(Object), &cursor)
            if o == NULL or (is_owned(o) and o.dying == 0 and o.key_nonce == nonce and o.key_id == id):
                break
    if o != NULL:
        o.pins += 1
    gs_unlock(&tables_mutex)
    return o


cdef Object *object_pin_any(uint64_t nonce, uint64_t id) noexcept nogil:
    """Return an object under a key, pinned, or NULL: the owned one first, then an import that the application uses.

    What is known of a descriptor belongs to the owner, where that is here: an import of its own export may go first.
    """
    cdef Object *found = NULL
    cdef Object *o
    cdef uint32_t cursor = 0
    gs_lock(&tables_mutex)
    while found == NULL or not is_owned(found):
        o = <Object *>table_next(&objects, sizeof(Object), &cursor)
        if o == NULL:
            break
        if o.dying == 0 and o.key_nonce == nonce and o.key_id == id:
            if found == NULL or is_owned(o) or found.cls == CLASS_UNUSED:
                found = o
    if found != NULL:
        found.pins += 1
    gs_unlock(&tables_mutex)
    return found


cdef bint is_owned(Object *o) noexcept nogil:
    """Say whether this process saves and re-creates the object."""
    return o.origin != ORIGIN_IMPORTED


cdef CUresult object_unpin(Object *o) noexcept nogil:
    """Drop a pin; the last user releases the driver's reference and forgets the object."""
    cdef uint64_t real
    cdef CUresult rc = 0
    gs_lock(&tables_mutex)
    o.pins -= 1
    if o.pins != 0 or o.refs != 0 or o.maps != 0:
        gs_unlock(&tables_mutex)
        return 0
    real = o.real
    o.dying = 1
    gs_unlock(&tables_mutex)
    if real != 0:
        rc = gs_real.cuMemRelease(real)
        if rc != 0:
            gs_log(b"cuMemRelease of an unused object failed")
    object_forget(o)
    return rc


cdef void object_forget(Object *o) noexcept nogil:
    """Remove an object that nobody uses; its duplicates of exported descriptors close."""
    fdrefs_drop(o, False)
    pieces_forget(o)
    team_forget(o)
    name_forget(o)
    if o.memfd >= 0:
        close(o.memfd)
    gs_lock(&tables_mutex)
    table_give(&objects, sizeof(Object), o)
    gs_unlock(&tables_mutex)


cdef bint next_object_copy(uint32_t *cursor, Object *copy) noexcept nogil:
    """Copy the next object that is in use and stays so; for questions while the application works.

    What a copy points to may be gone: it is for the words and numbers of an answer.
    """
    cdef Object *o
    gs_lock(&tables_mutex)
    while True:
        o = <Object *>table_next(&objects, sizeof(Object), cursor)
        if o == NULL or o.dying == 0:
            break
    if o != NULL:
        copy[0] = o[0]
    gs_unlock(&tables_mutex)
    return o != NULL


cdef Object *next_object(uint32_t *cursor) noexcept nogil:
    """Return the next object in use, or NULL; for phases, when no call of the application is in progress."""
    cdef Object *o
    gs_lock(&tables_mutex)
    o = <Object *>table_next(&objects, sizeof(Object), cursor)
    gs_unlock(&tables_mutex)
    return o


# ---- mappings ----

cdef Mapping *mapping_new() noexcept nogil:
    """Return a mapping that is in no list yet, with room for it in the list, or NULL."""
    cdef Mapping *m = NULL
    gs_lock(&tables_mutex)
    if order_room(&mappings_by_va, MAX_MAPPINGS):
        m = <Mapping *>table_take(&mappings, sizeof(Mapping), MAX_MAPPINGS)
    gs_unlock(&tables_mutex)
    if m == NULL:
        gs_log(b"mapping table is full")
    return m


cdef void mapping_cancel(Mapping *m) noexcept nogil:
    """Put back a mapping that was not entered."""
    gs_lock(&tables_mutex)
    table_give(&mappings, sizeof(Mapping), m)
    gs_unlock(&tables_mutex)


cdef void mapping_enter(Mapping *m, Object *o, uint64_t va, uint64_t size, uint64_t offset) noexcept nogil:
    """Record what the driver has mapped."""
    global last_buffer_id
    gs_lock(&tables_mutex)
    m.va = va
    m.size = size
    m.offset = offset
    m.object = o
    m.mapped = 1
    m.granted = 1
    last_buffer_id += 1
    m.buffer_id = last_buffer_id
    m.sibling = <Mapping *>o.first
    o.first = m
    o.maps += 1
    order_insert(&mappings_by_va, &mappings, sizeof(Mapping), <Range *>m)
    gs_unlock(&tables_mutex)


cdef void mapping_leave(Mapping *m) noexcept nogil:
    """Forget a mapping; the caller holds a pin on its object and `tables_mutex`."""
    cdef Mapping *before = <Mapping *>m.object.first
    while m.access != 0:
        access_remove(m, &m.access)
    if before == m:
        m.object.first = m.sibling
    else:
        while before.sibling != m:
            before = before.sibling
        before.sibling = m.sibling
    order_remove(&mappings_by_va, &mappings, sizeof(Mapping), <Range *>m)
    m.object.maps -= 1
    table_give(&mappings, sizeof(Mapping), m)


cdef Mapping *mapping_at(uint64_t va) noexcept nogil:
    """Return the mapping that contains an address, or NULL; `tables_mutex` is held."""
    return <Mapping *>order_find(&mappings_by_va, &mappings, sizeof(Mapping), va)


cdef Mapping *next_mapping(uint32_t *cursor) noexcept nogil:
    """Return the next mapping in use, or NULL; for phases."""
    cdef Mapping *m
    gs_lock(&tables_mutex)
    while True:
        m = <Mapping *>table_next(&mappings, sizeof(Mapping), cursor)
        if m == NULL or m.object != NULL:
            break
    gs_unlock(&tables_mutex)
    return m


# ---- access ----

cdef Access *access_at(uint32_t number) noexcept nogil:
    """Return the access entry with a number."""
    return <Access *>table_at(&accesses, sizeof(Access), number - 1)


cdef void access_remove(Mapping *m, uint32_t *link) noexcept nogil:
    """Unlink and free the entry that `link` points to; `tables_mutex` is held."""
    cdef Access *a = access_at(link[0])
    link[0] = a.next
    table_give(&accesses, sizeof(Access), a)


cdef void access_add(Mapping *m, uint64_t start, uint64_t size, const CUmemAccessDesc *d) noexcept nogil:
    """Add an entry; the room was promised; `tables_mutex` is held."""
    cdef Access *a = <Access *>table_take(&accesses, sizeof(Access), MAX_ACCESS)
    if a == NULL:
        return
    a.start = start
    a.size = size
    a.type = d.location.type
    a.id = d.location.id
    a.flags = d.flags
    a.next = m.access
    m.access = table_index(&accesses, sizeof(Access), a) + 1


cdef bint same_location(Access *a, const CUmemAccessDesc *d) noexcept nogil:
    """Say whether two entries speak of one location; the id of a host location means nothing."""
    if a.type == CU_MEM_LOCATION_TYPE_DEVICE:
        return d.location.type == a.type and d.location.id == a.id
    return d.location.type == a.type


cdef void access_set(Mapping *m, uint64_t start, uint64_t size, const CUmemAccessDesc *d) noexcept nogil:
    """Record that `d` now holds for a part of a mapping; uses at most two new entries; `tables_mutex` is held."""
    cdef uint32_t *link = &m.access
    cdef Access *a
    cdef CUmemAccessDesc rest
    cdef uint64_t end = start + size, a_end
    while link[0] != 0:
        a = access_at(link[0])
        a_end = a.start + a.size
        if not same_location(a, d) or a.start >= end or a_end <= start:
            link = &a.next
            continue
        if a.start < start and a_end > end:
            a.size = start - a.start
            rest.location.type = a.type
            rest.location.id = a.id
            rest.flags = a.flags
            access_add(m, end, a_end - end, &rest)
        elif a.start < start:
            a.size = start - a.start
        elif a_end > end:
            a.size = a_end - end
            a.start = end
        else:
            access_remove(m, link)
            continue
        link = &a.next
    if d.flags != CU_MEM_ACCESS_FLAGS_PROT_NONE:
        access_add(m, start, size, d)


cdef bint access_promise(uint32_t n) noexcept nogil:
    """Make sure that `n` more entries can be added; `tables_mutex` is held."""
    global accesses_promised
    if accesses.live + accesses_promised + n > MAX_ACCESS:
        return False
    if not table_commit(&accesses, sizeof(Access), MAX_ACCESS, accesses.used + accesses_promised + n):
        return False
    accesses_promised += n
    return True


cdef void access_promise_end(uint32_t n) noexcept nogil:
    """Give a promise back; `tables_mutex` is held."""
    global accesses_promised
    accesses_promised -= n


cdef bint access_covers(Mapping *m, int type, int id, int flags) noexcept nogil:
    """Say whether a location may use the whole mapping with `flags`."""
    cdef uint32_t number
    cdef Access *a
    cdef uint64_t covered = 0, best
    while covered < m.size:
        best = covered
        number = m.access
        while number != 0:
            a = access_at(number)
            if a.type == type and (type != CU_MEM_LOCATION_TYPE_DEVICE or a.id == id) and a.flags & flags == flags:
                if a.start <= covered and a.start + a.size > best:
                    best = a.start + a.size
            number = a.next
        if best == covered:
            return False
        covered = best
    return True
