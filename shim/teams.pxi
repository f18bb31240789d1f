# The devices of multicast objects: the owner of one counts what all processes have added to it.
#
# While devices are missing, the application's own bind or map waits here and not in the driver, where no suspend could
# reach it.  No lock and no gate is held meanwhile.
#
# An object that is made again is for fewer devices where a process has died: it would never be complete otherwise.

cdef enum:
    MAX_JOINS = 65536
    TEAM_TIMEOUT_MS = 2000
    TEAM_TRIES = 5

# A device that some process has added to an object that is owned here.
ctypedef struct Join:
    uint32_t link
    int pid
    int device              # as that process numbers it
    uint8_t added           # to the present incarnation
    Object *team

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


cdef void join_note(Object *team, int pid, int device) noexcept nogil:
    """Note that a process has added a device to an object that is owned here."""
    cdef uint32_t cursor = 0
    cdef Join *j
    gs_lock(&tables_mutex)
    while True:
        j = join_next(team, &cursor)
        if j == NULL or (j.pid == pid and j.device == device):
            break
    if j == NULL:
        j = <Join *>table_take(&joins, sizeof(Join), MAX_JOINS)
    if j != NULL:
        j.team = team
        j.pid = pid
        j.device = device
        j.added = 1
    gs_unlock(&tables_mutex)


cdef uint32_t joined_count(Object *team) noexcept nogil:
    """Return how many devices were added to an object that is owned here."""
    cdef uint32_t cursor = 0, n = 0
    cdef Join *j
    gs_lock(&tables_mutex)
    while True:
        j = join_next(team, &cursor)
        if j == NULL:
            break
        n += j.added
    gs_unlock(&tables_mutex)
    return team.team.numDevices if team.complete else n


cdef void joins_forget(Object *team) noexcept nogil:
    """Forget the devices of an object."""
    cdef uint32_t cursor = 0
    cdef Join *j
    gs_lock(&tables_mutex)
    while True:
        j = join_next(team, &cursor)
        if j == NULL:
            break
        table_give(&joins, sizeof(Join), j)
    gs_unlock(&tables_mutex)


cdef bint is_lost(Join *j) noexcept nogil:
    """Say whether nobody is left to add a device again."""
    return j.added == 0 and j.pid != getpid() and peer_is_gone(j.pid)


cdef Join *join_in_phase(Object *team, uint32_t *cursor) noexcept nogil:
    """Return the next device of an object, or NULL; for phases, in which it stays."""
    cdef Join *j
    gs_lock(&tables_mutex)
    j = join_next(team, cursor)
    gs_unlock(&tables_mutex)
    return j


cdef bint joins_lost(Object *team) noexcept nogil:
    """Say whether an object waits for a device of a process that is gone; for phases."""
    cdef uint32_t cursor = 0
    cdef Join *j
    while True:
        j = join_in_phase(team, &cursor)
        if j == NULL or is_lost(j):
            return j != NULL


cdef void joins_renew(Object *team) noexcept nogil:
    """Expect all devices to be added again, but for those of processes that are gone; for phases."""
    cdef uint32_t cursor = 0
    cdef Join *j
    team.complete = 0
    while True:
        j = join_in_phase(team, &cursor)
        if j == NULL:
            return
        j.added = 0
        if is_lost(j):
            gs_lock(&tables_mutex)
            team.team.numDevices -= 1
            table_give(&joins, sizeof(Join), j)
            gs_unlock(&tables_mutex)


cdef int team_ask(Object *o, int device, uint64_t deadline) noexcept nogil:
    """Tell the owner of an object of a device (-1: none), and return how many it counts; -1: no answer."""
    cdef char[REPLY_BYTES] reply
    cdef char[160] request
    cdef Object *owner
    cdef Out text
    cdef int n
    if is_owned(o) or o.exporter == getpid():
        owner = object_pin_key(o.key_nonce, o.key_id)
        if owner == NULL:
            return -1
        if device >= 0:
            join_note(owner, getpid(), device)
        n = <int>joined_count(owner)
        o.team.numDevices = owner.team.numDevices
        object_unpin(owner)
        return n
    out_begin(&text, request, sizeof(request))
    out_text(&text, b"1 team")
    out_key(&text, b"key", o.key_nonce, o.key_id)
    if device >= 0:
        out_number(&text, b"pid", <uint64_t>getpid())
        out_number(&text, b"device", <uint64_t>device)
    if not peer_call(o.exporter, request, -1, reply, REPLY_BYTES, NULL, deadline) or not reply_ok(reply):
        return -1
    o.team.numDevices = <unsigned int>wire_number(reply, b"devices", o.team.numDevices)
    return <int>wire_number(reply, b"joined", 0)


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


cdef int asked_pid(Object *o) noexcept nogil:
    """Return which process an object's owner is, or is said to be by the tag on its descriptor; 0: nobody knows."""
    cdef int fd, pid
    if o.owner != OWNER_UNKNOWN:
        return owner_pid(o)
    fd = fdref_current(o)
    if fd < 0:
        return 0
    pid = fcntl(fd, F_GETOWN)
    close(fd)
    return pid


cdef void team_tell_surely(Object *o) noexcept nogil:
    """Tell the owner of an object of the devices that were just added: without that its own binds wait for ever.

    A stopped owner is waited for; one that runs and does not answer is given up.
    """
    cdef uint32_t unanswered = 0
    while unanswered != TEAM_TRIES:
        if o.owner == OWNER_UNKNOWN:
            retry_unknown(o)
        if o.cls != CLASS_MULTICAST or o.owner == OWNER_KNOWN and team_tell(o, deadline_in(TEAM_TIMEOUT_MS)) >= 0:
            return
        if peer_is_gone(asked_pid(o)):
            return
        unanswered += 0 if is_stopped(asked_pid(o)) else 1
    gs_log(b"the owner of a multicast object was not told of a device")


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
