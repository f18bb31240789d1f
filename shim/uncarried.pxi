# Objects of kinds that are not carried through a suspend: counted while they live, so that a suspend can refuse a
# process and name them.  cuMem objects of such kinds (fabric, and multicast on old drivers) stand in the table of
# objects with their kind; everything else stands here.

cdef enum:
    KIND_CARRIED = 0
    KIND_MULTICAST = 1
    KIND_FABRIC = 2
    KIND_POOL = 3
    KIND_POOL_POINTER = 4
    KIND_EXTERNAL_MEMORY = 5
    KIND_EXTERNAL_SEMAPHORE = 6
    KIND_MANAGED = 7
    KIND_NATIVE_IPC = 8
    KIND_UNKNOWN_ABI = 9
    KIND_FOREIGN = 10
    KIND_MAPPED_ARRAY = 11
    KIND_DMABUF = 12
    KIND_GREEN_CONTEXT = 13
    KIND_GRAPHICS = 14
    KIND_COUNT = 15
    MAX_UNCARRIED = 65536
    MAX_NAME = 128

ctypedef struct Uncarried:
    uint32_t link
    uint32_t kind
    uint64_t value          # what the application knows it by
    char[MAX_NAME] name     # of a variable; the beginning of it

cdef Table uncarried
cdef uint32_t[KIND_COUNT] uncarried_counts


cdef const char *kind_name(uint32_t kind) noexcept nogil:
    """Return the protocol's word for a kind."""
    if kind == KIND_MULTICAST:
        return b"multicast"
    if kind == KIND_FABRIC:
        return b"fabric"
    if kind == KIND_POOL or kind == KIND_POOL_POINTER:
        return b"exported-pool"
    if kind == KIND_EXTERNAL_MEMORY:
        return b"external-memory"
    if kind == KIND_EXTERNAL_SEMAPHORE:
        return b"external-semaphore"
    if kind == KIND_MANAGED:
        return b"managed"
    if kind == KIND_NATIVE_IPC:
        return b"native-ipc"
    if kind == KIND_UNKNOWN_ABI:
        return b"unknown-abi"
    if kind == KIND_FOREIGN:
        return b"foreign-import"
    if kind == KIND_DMABUF:
        return b"dma-buf"
    if kind == KIND_GREEN_CONTEXT:
        return b"green-context"
    if kind == KIND_GRAPHICS:
        return b"graphics"
    return b"mapped-array"


cdef void copy_name(char *target, const char *name) noexcept nogil:
    """Copy a name up to what no word of the protocol may have in it."""
    cdef int at = 0
    while name != NULL and at < MAX_NAME - 1 and 32 < name[at] < 127 and name[at] != c'|':
        target[at] = name[at]
        at += 1
    target[at] = 0


cdef void uncarried_add(uint32_t kind, uint64_t value, const char *name=NULL) noexcept nogil:
    """Count an object, once; where the table is full it stays counted for ever, which is the safe side."""
    cdef Uncarried *u
    cdef uint32_t cursor = 0
    gs_lock(&tables_mutex)
    while True:
        u = <Uncarried *>table_next(&uncarried, sizeof(Uncarried), &cursor)
        if u == NULL or (u.kind == kind and u.value == value):
            break
    if u == NULL:
        uncarried_counts[kind] += 1
        u = <Uncarried *>table_take(&uncarried, sizeof(Uncarried), MAX_UNCARRIED)
        if u != NULL:
            u.kind = kind
            u.value = value
            copy_name(u.name, name)
    gs_unlock(&tables_mutex)


cdef bint uncarried_remove(uint32_t kind, uint64_t value) noexcept nogil:
    """Stop counting an object; False if it was not counted."""
    cdef Uncarried *u
    cdef uint32_t cursor = 0
    if gs_load(&uncarried_counts[kind]) == 0:
        return False
    gs_lock(&tables_mutex)
    while True:
        u = <Uncarried *>table_next(&uncarried, sizeof(Uncarried), &cursor)
        if u == NULL or (u.kind == kind and u.value == value):
            break
    if u != NULL:
        uncarried_counts[kind] -= 1
        table_give(&uncarried, sizeof(Uncarried), u)
    gs_unlock(&tables_mutex)
    return u != NULL


cdef bint next_uncarried_copy(uint32_t *cursor, Uncarried *copy) noexcept nogil:
    """Copy the next counted object; False at the end."""
    cdef Uncarried *u
    gs_lock(&tables_mutex)
    u = <Uncarried *>table_next(&uncarried, sizeof(Uncarried), cursor)
    if u != NULL:
        copy[0] = u[0]
    gs_unlock(&tables_mutex)
    return u != NULL


cdef uint32_t uncarried_total() noexcept nogil:
    """Return how many objects stand in the way of a suspend."""
    cdef uint32_t total = 0, kind, cursor = 0
    cdef Object *o
    gs_lock(&tables_mutex)
    for kind in range(KIND_COUNT):
        total += uncarried_counts[kind]
    while True:
        o = <Object *>table_next(&objects, sizeof(Object), &cursor)
        if o == NULL:
            break
        if o.kind != KIND_CARRIED:
            total += 1
    gs_unlock(&tables_mutex)
    return total
