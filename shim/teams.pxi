# The devices of multicast objects: the owner of one counts what all processes have added to it.
#
# While devices are missing, the application's own bind or map waits here and not in the driver, where no suspend could
# reach it.  No lock and no gate is held meanwhile.

cdef enum:
    MAX_JOINS = 65536
    TEAM_TIMEOUT_MS = 5000

# A device that some process has added to an object that is owned here.
ctypedef struct Join:
    uint32_t link
    Object *team
    uint64_t high           # the device's UUID
    uint64_t low

cdef Table joins


cdef void team_write(Out *o, const CUmulticastObjectProp *team) noexcept nogil:
    """Append what a peer must know to make a multicast object again; nothing for memory."""
    if team.numDevices != 0:
        out_number(o, b"devices", team.numDevices)
        out_number(o, b"team_bytes", team.size)
        out_number(o, b"handle_types", team.handleTypes)


cdef void team_read(const char *reply, CUmulticastObjectProp *team) noexcept nogil:
    """Read it; of memory numDevices is 0."""
    memset(team, 0, sizeof(team[0]))
    team.numDevices = <unsigned int>wire_number(reply, b"devices", 0)
    team.size = wire_number(reply, b"team_bytes", 0)
    team.handleTypes = wire_number(reply, b"handle_types", 0)


cdef Join *join_next(Object *team, uint32_t *cursor) noexcept nogil:
    """Return the next device of an object, or NULL; `tables_mutex` is held."""
    cdef Join *j
    while True:
        j = <Join *>table_next(&joins, sizeof(Join), cursor)
        if j == NULL or j.team == team:
            return j


cdef void join_note(Object *team, uint64_t high, uint64_t low) noexcept nogil:
    """Note that a device was added to an object that is owned here."""
    cdef uint32_t cursor = 0
    cdef Join *j
    gs_lock(&tables_mutex)
    while True:
        j = join_next(team, &cursor)
        if j == NULL or (j.high == high and j.low == low):
            break
    if j == NULL:
        j = <Join *>table_take(&joins, sizeof(Join), MAX_JOINS)
        if j != NULL:
            j.team = team
            j.high = high
            j.low = low
    gs_unlock(&tables_mutex)


cdef uint32_t joined_count(Object *team) noexcept nogil:
    """Return how many devices were added to an object that is owned here."""
    cdef uint32_t cursor = 0, n = 0
    gs_lock(&tables_mutex)
    while join_next(team, &cursor) != NULL:
        n += 1
    gs_unlock(&tables_mutex)
    return team.team.numDevices if team.complete else n


cdef void joins_forget(Object *team) noexcept nogil:
    """Forget the devices of an object."""
    cdef uint32_t cursor = 0
    cdef Join *j
    gs_lock(&tables_mutex)
    while joins.live != 0:
        j = join_next(team, &cursor)
        if j == NULL:
            break
        table_give(&joins, sizeof(Join), j)
    gs_unlock(&tables_mutex)


cdef int team_ask(Object *o, int device, uint64_t deadline) noexcept nogil:
    """Tell the owner of an object of a device (-1: none), and return how many it counts; -1: no answer."""
    cdef char[REPLY_BYTES] reply
    cdef char[160] request
    cdef uint64_t[2] uuid
    cdef Object *owner
    cdef Device *d = device_info(device)
    cdef Out text
    cdef int n = -1
    if d != NULL:
        memcpy(uuid, d.uuid.bytes, sizeof(uuid))
    if is_owned(o) or o.exporter == getpid():
        owner = object_pin_key(o.key_nonce, o.key_id)
        if owner == NULL:
            return -1
        if d != NULL:
            join_note(owner, uuid[0], uuid[1])
        n = <int>joined_count(owner)
        object_unpin(owner)
        return n
    out_begin(&text, request, sizeof(request))
    out_text(&text, b"1 team")
    out_key(&text, b"key", o.key_nonce, o.key_id)
    if d != NULL:
        out_key(&text, b"device", uuid[0], uuid[1])
    if peer_call(o.exporter, request, -1, reply, REPLY_BYTES, NULL, deadline) and reply_ok(reply):
        n = <int>wire_number(reply, b"joined", 0)
    return n


cdef int team_tell(Object *o, uint64_t deadline) noexcept nogil:
    """Tell the owner of what was added here and not told yet; returns how many devices it counts, -1: no answer."""
    cdef int device, n
    for device in range(MAX_DEVICES):
        if (o.added & ~o.told) >> device & 1:
            if team_ask(o, device, deadline) < 0:
                return -1
            o.told |= <uint64_t>1 << device
    n = team_ask(o, -1, deadline)
    if n >= <int>o.team.numDevices:
        o.complete = 1
    return n


cdef bint team_ready(Object *o) noexcept nogil:
    """Say whether a bind or a map of an object will not wait in the driver; True where nobody can tell."""
    if o.cls != CLASS_MULTICAST or o.complete or o.owner != OWNER_KNOWN:
        return True
    if team_tell(o, deadline_in(TEAM_TIMEOUT_MS)) < 0:
        return not is_stopped(o.exporter)
    return o.complete != 0


cdef Object *enter_with_team(uint64_t handle) noexcept nogil:
    """Enter the memory gate and return the object of a handle, pinned, or NULL; waits for the devices of a team."""
    cdef uint32_t pause_ms = 1
    cdef Object *o
    while True:
        gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
        o = object_pin(handle) if is_virtual(handle) else NULL
        if o == NULL or team_ready(o):
            return o
        object_unpin(o)
        gs_leave(GS_MEMORY)
        sleep_us(pause_ms * 1000)
        pause_ms += 1 if pause_ms < MOST_PAUSE_MS else 0
