# Tables of fixed-size items in memory of their own: no malloc, and items never move.
#
# Each table reserves its whole address range once and makes it usable piece by piece, so a pointer to an item stays
# right while the table grows.  Every item begins with `link`: TABLE_USED while the item is in use, else the number
# (index + 1) of the next free one.  All functions here are called with `tables_mutex` held, except where they say so.
# Lock order: `tables_mutex` is the innermost lock; nobody calls the driver, a peer or another lock while holding it.

ctypedef struct Table:
    char *base
    uint32_t committed      # items whose memory is usable
    uint32_t used           # items that were ever taken
    uint32_t free_head      # number of the first free item, 0: none
    uint32_t live           # items in use
    uint32_t limit          # most items

# What every sorted item begins with.
ctypedef struct Range:
    uint32_t link
    uint32_t order          # unused by the item's owner
    uint64_t va
    uint64_t size

# A list of item indices, sorted by the items' addresses.
ctypedef struct Order:
    uint32_t *index
    uint32_t count
    uint32_t committed
    uint32_t limit

cdef enum:
    TABLE_USED = 0xFFFFFFFF
    TABLE_STEP_BYTES = 65536
    ORDER_STEP = 16384


cdef bint table_commit(Table *t, size_t item, uint32_t limit, uint32_t count) noexcept nogil:
    """Make room for `count` items altogether; False if the limit or the memory does not allow it."""
    cdef size_t have, need
    cdef void *memory
    if t.base == NULL:
        memory = mmap(NULL, item * limit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if memory == MAP_FAILED:
            return False
        t.base = <char *>memory
        t.limit = limit
    if count > t.limit:
        return False
    if count <= t.committed:
        return True
    have = round_up(t.committed * item, TABLE_STEP_BYTES)
    need = round_up(count * item, TABLE_STEP_BYTES)
    if need > item * t.limit:
        need = round_up(item * t.limit, 4096)
    if mprotect(t.base + have, need - have, PROT_READ | PROT_WRITE) != 0:
        return False
    t.committed = <uint32_t>(need // item)
    if t.committed > t.limit:
        t.committed = t.limit
    return True


cdef void *table_at(Table *t, size_t item, uint32_t index) noexcept nogil:
    """Return the item at `index`, in use or not."""
    return t.base + item * index


cdef void *table_next(Table *t, size_t item, uint32_t *cursor) noexcept nogil:
    """Return the first item in use at or after `cursor` and move the cursor behind it; NULL at the end."""
    cdef uint32_t *link
    while cursor[0] < t.used:
        link = <uint32_t *>table_at(t, item, cursor[0])
        cursor[0] += 1
        if link[0] == TABLE_USED:
            return link
    return NULL


cdef void *table_take(Table *t, size_t item, uint32_t limit) noexcept nogil:
    """Return a zeroed item that is now in use, or NULL when the table cannot grow."""
    cdef uint32_t *link
    if t.free_head != 0 and t.live < limit:
        link = <uint32_t *>table_at(t, item, t.free_head - 1)
        t.free_head = link[0]
    else:
        if not table_commit(t, item, limit, t.used + 1):
            return NULL
        link = <uint32_t *>table_at(t, item, t.used)
        t.used += 1
    memset(link, 0, item)
    link[0] = TABLE_USED
    t.live += 1
    return link


cdef uint32_t table_index(Table *t, size_t item, void *p) noexcept nogil:
    """Return the index of an item."""
    return <uint32_t>((<char *>p - t.base) // item)


cdef void table_give(Table *t, size_t item, void *p) noexcept nogil:
    """Put an item back."""
    (<uint32_t *>p)[0] = t.free_head
    t.free_head = table_index(t, item, p) + 1
    t.live -= 1


cdef void table_forget(Table *t) noexcept nogil:
    """Empty a table."""
    t.used = 0
    t.free_head = 0
    t.live = 0


cdef bint order_room(Order *o, uint32_t limit) noexcept nogil:
    """Make room for one more index; False if that is impossible."""
    cdef void *memory
    if o.index == NULL:
        memory = mmap(NULL, 4 * <size_t>limit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if memory == MAP_FAILED:
            return False
        o.index = <uint32_t *>memory
        o.limit = limit
    if o.count < o.committed:
        return True
    if o.committed + ORDER_STEP > o.limit:
        return False
    if mprotect(o.index + o.committed, 4 * ORDER_STEP, PROT_READ | PROT_WRITE) != 0:
        return False
    o.committed += ORDER_STEP
    return True


cdef uint32_t order_upper(Order *o, Table *t, size_t item, uint64_t va) noexcept nogil:
    """Return the position of the first item that begins after `va`."""
    cdef uint32_t low = 0, high = o.count, middle
    while low < high:
        middle = (low + high) // 2
        if (<Range *>table_at(t, item, o.index[middle])).va <= va:
            low = middle + 1
        else:
            high = middle
    return low


cdef Range *order_find(Order *o, Table *t, size_t item, uint64_t va) noexcept nogil:
    """Return the item that contains `va`, or NULL."""
    cdef uint32_t position = order_upper(o, t, item, va)
    cdef Range *r
    if position == 0:
        return NULL
    r = <Range *>table_at(t, item, o.index[position - 1])
    return r if va - r.va < r.size else NULL


cdef void order_insert(Order *o, Table *t, size_t item, Range *r) noexcept nogil:
    """Add an item; `order_room` has made the room."""
    cdef uint32_t position = order_upper(o, t, item, r.va)
    memmove(o.index + position + 1, o.index + position, 4 * <size_t>(o.count - position))
    o.index[position] = table_index(t, item, r)
    o.count += 1


cdef void order_remove(Order *o, Table *t, size_t item, Range *r) noexcept nogil:
    """Take an item out."""
    cdef uint32_t position = order_upper(o, t, item, r.va)
    cdef uint32_t wanted = table_index(t, item, r)
    while position > 0:
        position -= 1
        if o.index[position] == wanted:
            memmove(o.index + position, o.index + position + 1, 4 * <size_t>(o.count - position - 1))
            o.count -= 1
            return


cdef size_t round_up(size_t n, size_t step) noexcept nogil:
    """Return `n` rounded up to a multiple of `step`, which is not 0."""
    return (n + step - 1) // step * step
