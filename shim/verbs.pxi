# The verbs of the control protocol (docs/reference/control-protocol.md), one function each.  Quick ones run in the
# listener, long ones in the worker.

cdef enum:
    V_UNKNOWN = 0
    V_HELLO = 1
    V_STATUS = 2
    V_PLAN = 3
    V_UNCARRIED = 4
    V_LEASE = 5
    V_UNLEASE = 6
    V_CLOSE_LAUNCH = 7
    V_DRAIN = 8
    V_ADMIT = 9
    V_ORPHANS = 10
    V_ADOPT = 11
    V_REDIRECT = 12
    V_OPEN = 13
    V_FDS = 14
    V_WHOSE = 15
    V_OWNER = 16
    V_EXPORT = 17
    V_SHARE = 18
    V_TEAM = 19
    V_FIRST_LONG = 20       # from here on: for the worker
    V_IMPORTS = 20
    V_ARENA = 21
    V_CLOSE_MEMORY = 22
    V_FIRST_PHASE = 23      # from here on: the gates stay closed until it has ended
    V_PIECES = 23
    V_COPY_OUT = 24
    V_COPY_IN = 25
    V_CLEAR = 26
    V_RELEASE = 27
    V_SEAL = 28
    V_FIRST_RESUME = 29     # from here on: nothing to do where nothing was touched
    V_LOAD = 29
    V_REMAP = 30
    V_UNSEAL = 31
    V_BIND = 32
    V_CHECK = 33
    V_END = 34


cdef const char *verb_name(int verb) noexcept nogil:
    """Return the word of a verb."""
    cdef const char **names = [
        b"", b"hello", b"status", b"plan", b"uncarried", b"lease", b"unlease", b"close-launch", b"drain", b"admit",
        b"orphans", b"adopt", b"redirect", b"open", b"fds", b"whose", b"owner", b"export", b"share", b"team",
        b"imports", b"arena", b"close-memory", b"pieces", b"copy-out", b"copy-in", b"clear", b"release",
        b"seal", b"load", b"remap", b"unseal", b"bind", b"check",
    ]
    return names[verb]


cdef int verb_of(const char *text) noexcept nogil:
    """Return the verb that a request names; the version stands before it."""
    cdef int verb
    cdef const char *name
    cdef size_t n
    for verb in range(1, V_END):
        name = verb_name(verb)
        n = strlen(name)
        if strncmp(text, name, n) == 0 and (text[n] == 0 or text[n] == c' '):
            return verb
    return V_UNKNOWN


cdef bint verb_begin(Request *q, Reply *r) noexcept nogil:
    """Answer a request, or hand it to the worker (False: the answer comes later)."""
    if strncmp(q.text, b"1 ", 2) != 0:
        reply_error(r, b"version")
        out_text(&r.text, b" supported=1")
        return True
    q.verb = verb_of(q.text + 2)
    if q.verb == V_UNKNOWN:
        reply_error(r, b"verb")
        return True
    if q.verb < V_FIRST_LONG:
        verb_quick(q, r)
        return True
    if q.verb >= V_FIRST_RESUME and is_untouched(q.verb):
        return True
    if job_give(q):
        return False
    reply_error(r, b"busy")
    out_word(&r.text, b"verb", verb_name(job.verb))
    return True


cdef bint is_untouched(int verb) noexcept nogil:
    """Say whether a verb of resume has nothing to do, so that a rollback need not wait for a drain that hangs.

    Memory of others may have been made again as soon as this process is quiesced: a remap then looks.
    """
    if verb == V_REMAP:
        return phase == PHASE_RUNNING or phase == PHASE_QUIESCING
    return not disturbed


cdef void verb_quick(Request *q, Reply *r) noexcept nogil:
    """Answer in the listener."""
    if q.verb == V_HELLO:
        verb_hello(r)
    elif q.verb == V_STATUS:
        verb_status(r)
    elif q.verb == V_PLAN:
        verb_plan(r)
    elif q.verb == V_UNCARRIED:
        verb_uncarried(r, wire_number(q.text, b"from", 0))
    elif q.verb == V_LEASE:
        q.connection.lease = 1
        gs_store(&lease, LEASE_HELD)
    elif q.verb == V_UNLEASE:
        if q.connection.lease:
            q.connection.lease = 0
            gs_store(&lease, LEASE_NONE)
    elif q.verb == V_CLOSE_LAUNCH:
        close_launch()
    elif q.verb == V_DRAIN:
        verb_drain(r)
    elif q.verb == V_ADMIT:
        gate_admit(<uint32_t>wire_number(q.text, b"thread", 0))
        out_number(&r.text, b"admitted", gate_admitted())
    elif q.verb == V_ORPHANS:
        verb_orphans(r, wire_number(q.text, b"from", 0))
    elif q.verb == V_ADOPT or q.verb == V_REDIRECT:
        verb_elect(q, r)
    elif q.verb == V_OPEN:
        verb_open(r)
    elif q.verb == V_FDS:
        verb_fds(r, wire_number(q.text, b"from", 0))
    else:
        verb_peer(q, r)


cdef void verb_run(Request *q, Reply *r) noexcept nogil:
    """Run a long verb in the worker."""
    cdef Failure f
    cdef uint64_t bytes = 0, freed = 0, us = 0, count = 0, missing = 0, begun = now_ns()
    memset(&f, 0, sizeof(f))
    if q.verb == V_IMPORTS:
        verb_imports(r, wire_number(q.text, b"from", 0))
    elif q.verb == V_ARENA:
        if arena_unlock(&f) if wire_number(q.text, b"unlock", 0) != 0 else arena_take(
            q.fd, wire_number(q.text, b"bytes", 0), wire_number(q.text, b"apart", 0) != 0,
            deadline_of(q, LANES_TIMEOUT_MS), &f
        ):
            out_number(&r.text, b"bytes", arena.size)
            out_number(&r.text, b"apart", arena.apart != NULL)
            out_number(&r.text, b"locked_bytes", arena.locked)
    elif q.verb == V_CLOSE_MEMORY:
        close_memory(deadline_of(q, REMAP_TIMEOUT_MS), &f)
    elif q.verb == V_PIECES:
        verb_pieces(q, r, &f)
    elif q.verb == V_COPY_OUT or q.verb == V_COPY_IN:
        if piece_move(q, q.verb == V_COPY_OUT, deadline_of(q, COPY_TIMEOUT_MS), &bytes, &f):
            out_number(&r.text, b"bytes", bytes)
    elif q.verb == V_CLEAR:
        if pieces_clear_on_device(q, deadline_of(q, COPY_TIMEOUT_MS), &bytes, &f):
            out_number(&r.text, b"bytes", bytes)
    elif q.verb == V_RELEASE:
        if phase_release(wire_value(q.text, b"stored"), deadline_of(q, COPY_TIMEOUT_MS), &bytes, &freed, &us, &f):
            out_number(&r.text, b"saved_bytes", bytes)
            out_number(&r.text, b"freed_bytes", freed)
            out_number(&r.text, b"copy_us", us)
            out_number(&r.text, b"lock_us", locking_ns // 1000)
            copies_write(r, begun)
    elif q.verb == V_SEAL or q.verb == V_UNSEAL:
        if verb_stop(q, &count, &bytes, &f):
            out_number(&r.text, b"fds", count)
            out_number(&r.text, b"host_bytes", bytes)
    elif q.verb == V_LOAD:
        if phase_load(deadline_of(q, COPY_TIMEOUT_MS), &bytes, &missing, &us, &f):
            out_number(&r.text, b"loaded_bytes", bytes)
            out_number(&r.text, b"missing_bytes", missing)
            out_number(&r.text, b"copy_us", us)
            out_number(&r.text, b"lock_us", locking_ns // 1000)
            copies_write(r, begun)
    elif q.verb == V_REMAP:
        phase_remap(deadline_of(q, REMAP_TIMEOUT_MS), &f)
    elif q.verb == V_BIND:
        phase_bind(&f)
    elif q.verb == V_CHECK:
        if phase_check(deadline_in(CANARY_TIMEOUT_MS), &bytes, &f):
            out_number(&r.text, b"bytes", bytes)
    if f.code != NULL:
        reply_failure(r, &f)


cdef void copies_write(Reply *r, uint64_t begun) noexcept nogil:
    """Add when each device copied, counted from the beginning of the verb: the clock of another process may differ."""
    cdef CopyTime *t
    cdef Device *d
    cdef int i
    for i in range(MAX_DEVICES):
        t = &copy_times[i]
        d = device_info(i) if t.begun != 0 else NULL
        if d != NULL and reply_row(r, 0):
            out_uuid(&r.groups, b"device", d.uuid.bytes)
            out_number(&r.groups, b"bytes", t.bytes)
            out_number(&r.groups, b"at_us", (t.begun - begun) // 1000)
            out_number(&r.groups, b"us", (t.ended - t.begun) // 1000)


cdef bint verb_stop(Request *q, uint64_t *count, uint64_t *bytes, Failure *f) noexcept nogil:
    """Seal or unseal."""
    if q.verb == V_SEAL:
        return phase_seal(wire_number(q.text, b"host", 1) != 0, deadline_of(q, SEAL_TIMEOUT_MS), count, bytes, f)
    return phase_unseal(deadline_of(q, SEAL_TIMEOUT_MS), count, bytes, f)


cdef uint64_t deadline_of(Request *q, uint64_t absent_ms) noexcept nogil:
    """Return the deadline that a request names, else one that far away."""
    return q.deadline if q.deadline != 0 else deadline_in(absent_ms)


# ---- what there is ----

cdef void verb_hello(Reply *r) noexcept nogil:
    """Say who answers."""
    out_number(&r.text, b"pid", <uint64_t>getpid())
    out_hex(&r.text, b"nonce", process_nonce)
    out_word(&r.text, b"phase", phase_name())
    out_word(&r.text, b"build", b"1")
    out_number(&r.text, b"cuda", 1 if contexts.live != 0 else 0)
    out_number(&r.text, b"driver", <uint64_t>driver_version())
    out_number(&r.text, b"simulated", 1 if gs_real.simcudaVersion != NULL else 0)
    out_number(&r.text, b"uid", geteuid())


cdef const char *gate_word(int cls) noexcept nogil:
    """Return the protocol's word for the state of a gate."""
    return b"closed" if gate_is_closed(cls) else b"open"


cdef const char *busy_word() noexcept nogil:
    """Return what the worker does, or a dash: a request that comes while it drains waits for the end of that."""
    if gs_load(&drain_running):
        return b"drain"
    if gs_load(&job_state) != JOB_NONE:
        return verb_name(job.verb)
    return b"-"


cdef void verb_status(Reply *r) noexcept nogil:
    """Say how things stand."""
    cdef uint32_t cursor = 0, imports = 0, exports = 0
    cdef uint64_t carried = 0
    cdef const char *lease_word = b"none"
    cdef Object o
    while next_object_copy(&cursor, &o):
        imports += 0 if is_owned(&o) or o.cls == CLASS_UNUSED else 1
        carried += o.size if is_owned(&o) and o.kind == KIND_CARRIED and o.cls != CLASS_MULTICAST else 0
    exports = count_exports() + names_made()
    if gs_load(&lease) == LEASE_HELD:
        lease_word = b"held"
    elif gs_load(&lease) == LEASE_LOST:
        lease_word = b"lost"
    out_word(&r.text, b"phase", phase_name())
    out_word(&r.text, b"launch", gate_word(GS_LAUNCH))
    out_word(&r.text, b"memory", gate_word(GS_MEMORY))
    out_number(&r.text, b"waiting_launch", gate_waiting(GS_LAUNCH))
    out_number(&r.text, b"waiting_memory", gate_waiting(GS_MEMORY))
    out_number(&r.text, b"in_flight", gate_in_flight(GS_LAUNCH) + gate_in_flight(GS_MEMORY))
    out_number(&r.text, b"admitted", gate_admitted())
    out_number(&r.text, b"objects", objects.live)
    out_number(&r.text, b"imports", imports)
    out_number(&r.text, b"exports", exports)
    out_number(&r.text, b"lost_fds", fds_lost)
    out_number(&r.text, b"mappings", mappings.live)
    out_number(&r.text, b"allocations", allocations.live)
    out_number(&r.text, b"host_registrations", registrations.live)
    out_number(&r.text, b"carried_bytes", carried)
    out_number(&r.text, b"arena_bytes", arena.size)
    out_number(&r.text, b"leftover_bytes", leftover.size if leftover.refused else 0)
    out_word(&r.text, b"stored", stored_word())
    out_word(&r.text, b"lease", lease_word)
    out_word(&r.text, b"busy", busy_word())


cdef uint32_t count_exports() noexcept nogil:
    """Return how many open files the application has made by exporting."""
    cdef uint32_t cursor = 0, n = 0
    cdef FdRef *ref
    gs_lock(&tables_mutex)
    while True:
        ref = <FdRef *>table_next(&fdrefs, sizeof(FdRef), &cursor)
        if ref == NULL:
            break
        n += 0 if ref.received else 1
    gs_unlock(&tables_mutex)
    return n


cdef void verb_plan(Reply *r) noexcept nogil:
    """Say what a suspend would save."""
    cdef uint64_t[MAX_DEVICES] per_device
    cdef uint64_t device_bytes = 0, host_bytes = 0
    cdef uint32_t cursor = 0, unresolved = 0
    cdef Device *d
    cdef Object o
    cdef int i
    memset(per_device, 0, sizeof(per_device))
    while next_object_copy(&cursor, &o):
        if is_import_in_use(&o) and o.owner == OWNER_UNKNOWN:
            unresolved += 1
        if is_saved_here(&o):
            device_bytes += o.size
            if 0 <= o.props.location.id < MAX_DEVICES:
                per_device[o.props.location.id] += o.size
        elif is_carried(&o, CLASS_HOST) and is_owned(&o):
            host_bytes += o.size
    out_number(&r.text, b"arena_bytes", device_bytes)
    out_number(&r.text, b"host_bytes", host_bytes)
    out_number(&r.text, b"unresolved", unresolved)
    out_number(&r.text, b"uncarried", uncarried_total() + unknown_abi_count())
    for i in range(MAX_DEVICES):
        d = device_info(i) if per_device[i] != 0 else NULL
        if d != NULL and reply_row(r, 0):
            out_uuid(&r.groups, b"device", d.uuid.bytes)
            out_number(&r.groups, b"bytes", per_device[i])


cdef void uncarried_row(Reply *r, uint64_t first, uint32_t kind, uint64_t object, const char *name) noexcept nogil:
    """Add what is not carried to a list."""
    if reply_row(r, first):
        out_word(&r.groups, b"kind", kind_name(kind))
        out_hex(&r.groups, b"object", object)
        if name[0] != 0:
            out_word(&r.groups, b"name", name)


cdef void verb_uncarried(Reply *r, uint64_t first) noexcept nogil:
    """List what stands in the way of a suspend."""
    cdef uint32_t cursor = 0
    cdef int row
    cdef Uncarried u
    cdef Object o
    r.is_list = True
    for row in range(GS_HOOK_COUNT):
        if is_unknown_abi(row):
            uncarried_row(r, first, KIND_UNKNOWN_ABI, 0, gs_hook_rows[row].name)
    while next_uncarried_copy(&cursor, &u):
        uncarried_row(r, first, u.kind, u.value, u.name)
    cursor = 0
    while next_object_copy(&cursor, &o):
        if o.kind != KIND_CARRIED:
            uncarried_row(r, first, o.kind, handle_of(&o), b"")


cdef const char *owner_word(const Object *o) noexcept nogil:
    """Return the protocol's word for what is known about an import."""
    if o.owner == OWNER_KNOWN:
        return b"resolved"
    return b"orphan" if o.owner == OWNER_GONE else b"unresolved"


cdef void verb_imports(Reply *r, uint64_t first) noexcept nogil:
    """List the imports, after asking their owners."""
    cdef uint32_t cursor = 0
    cdef Object o
    r.is_list = True
    if first == 0:
        refresh_imports()
    while next_object_copy(&cursor, &o):
        if is_import_in_use(&o) and reply_row(r, first):
            out_key(&r.groups, b"key", o.key_nonce, o.key_id)
            out_number(&r.groups, b"pid", <uint64_t>o.exporter)
            out_word(&r.groups, b"state", owner_word(&o))
            out_number(&r.groups, b"bytes", o.size)
            out_hex(&r.groups, b"object", o.id)


cdef void verb_orphans(Reply *r, uint64_t first) noexcept nogil:
    """List imports that nobody owns; the last `imports` or `close-memory` found them."""
    cdef uint32_t cursor = 0
    cdef Object o
    r.is_list = True
    while next_object_copy(&cursor, &o):
        if is_shared_import(&o) and o.owner == OWNER_GONE and reply_row(r, first):
            out_key(&r.groups, b"key", o.key_nonce, o.key_id)
            out_number(&r.groups, b"bytes", o.size)


cdef void verb_fds(Reply *r, uint64_t first) noexcept nogil:
    """List the descriptors of this process that are exports."""
    cdef FdWalk walk
    cdef FdRef ref
    cdef Object *o
    cdef int number
    cdef const char *kind
    r.is_list = True
    if fdrefs.live == 0:
        return
    if not walk_begin(&walk):
        reply_error(r, b"fd")
        out_number(&r.text, b"errno", <uint64_t>errno)
        return
    while True:
        number = walk_next(&walk, GS_DRIVER_FILES)
        if number < 0:
            return
        o = object_pin_fd(number, &ref)
        if o == NULL:
            continue
        kind = b"received" if ref.received else (b"export" if ref.number == number else b"copy")
        if reply_row(r, first):
            out_number(&r.groups, b"fd", <uint64_t>number)
            out_word(&r.groups, b"kind", kind)
            out_hex(&r.groups, b"object", o.id)
        object_unpin(o)


# ---- quiesce, election, open ----

cdef void verb_drain(Reply *r) noexcept nogil:
    """Say how far the drain is."""
    cdef uint32_t error
    cdef bint drained = gate_is_closed(GS_LAUNCH) and is_drained()
    error = gs_swap(&drain_error, 0)
    if error != 0:
        reply_error(r, b"cuda")
        out_word(&r.text, b"step", b"drain")
        out_number(&r.text, b"cuda", error)
        out_word(&r.text, b"msg", b"a context cannot be waited for; a kernel that failed in it has spoilt it for good")
        return
    out_number(&r.text, b"drained", 1 if drained else 0)
    out_number(&r.text, b"waiting", gate_waiting(GS_LAUNCH))
    out_number(&r.text, b"admitted", gate_admitted())
    out_number(&r.text, b"in_flight", gate_in_flight(GS_LAUNCH))
    out_number(&r.text, b"captures", captures_live())
    drain_rows(r, drained)


cdef void drain_rows(Reply *r, bint drained) noexcept nogil:
    """List the launches that wait; one that was let through is no longer waiting."""
    cdef Waiter *w
    cdef int i
    for i in range(GS_WAITERS):
        w = &gs_waiters[i]
        if gs_load(&w.state) == GS_WAITING and reply_row(r, 0):
            out_number(&r.groups, b"thread", w.thread)
            out_number(&r.groups, b"idle", 1 if drained or waiter_idle(w) else 0)


cdef void verb_elect(Request *q, Reply *r) noexcept nogil:
    """Make this process the owner of an import (adopt), or another one (redirect)."""
    cdef uint64_t nonce = 0, id = 0
    cdef bint adopt = q.verb == V_ADOPT
    cdef int pid = getpid() if adopt else <int>wire_number(q.text, b"pid", 0)
    if not wire_key(q.text, b"key", &nonce, &id) or pid <= 0:
        reply_error(r, b"argument")
    elif not elect(nonce, id, pid, adopt) and not (adopt and owns_key(nonce, id)):
        reply_error(r, b"gone")


cdef bint owns_key(uint64_t nonce, uint64_t id) noexcept nogil:
    """Say whether this process owns an object."""
    cdef Object *o = object_pin_key(nonce, id)
    if o != NULL:
        object_unpin(o)
    return o != NULL


cdef void verb_open(Reply *r) noexcept nogil:
    """Open the gates, if everything is there; a verb that changes objects must have ended."""
    cdef Failure f
    memset(&f, 0, sizeof(f))
    if gs_load(&job_state) != JOB_NONE and job.verb >= V_FIRST_PHASE:
        reply_error(r, b"busy")
        out_word(&r.text, b"verb", verb_name(job.verb))
    elif not phase_open(&f):
        reply_failure(r, &f)
    else:
        worker_wake()  # it frees what was kept until the application runs


# ---- peers ----

cdef void verb_peer(Request *q, Reply *r) noexcept nogil:
    """Answer another shim."""
    cdef uint64_t nonce = 0, id = 0
    if q.verb == V_WHOSE:
        verb_whose(q, r)
    elif not wire_key(q.text, b"key", &nonce, &id):
        reply_error(r, b"argument")
    elif q.verb == V_OWNER:
        verb_owner(nonce, id, r)
    elif q.verb == V_EXPORT:
        verb_export(q, nonce, id, r)
    elif q.verb == V_TEAM:
        verb_team(q, nonce, id, r)
    else:
        verb_share(nonce, id, r)


cdef void verb_whose(Request *q, Reply *r) noexcept nogil:
    """Say which object a descriptor, or a fabric handle, stands for."""
    cdef char[FABRIC_BYTES] bytes
    cdef Object *o = NULL
    if q.fd >= 0:
        o = object_pin_fd(q.fd, NULL)
    elif wire_octets(q.text, b"fabric", bytes, FABRIC_BYTES):
        o = name_pin(bytes)
    if o != NULL and o.owner != OWNER_UNKNOWN:
        out_key(&r.text, b"key", o.key_nonce, o.key_id)
        out_number(&r.text, b"bytes", o.size)
        out_number(&r.text, b"pid", <uint64_t>owner_pid(o))
        out_number(&r.text, b"epoch", o.epoch)
        team_write(&r.text, &o.team)
    else:
        reply_error(r, b"unknown")
    if o != NULL:
        object_unpin(o)


cdef void verb_owner(uint64_t nonce, uint64_t id, Reply *r) noexcept nogil:
    """Say whether this process has an object."""
    cdef Object *o = object_pin_key(nonce, id)
    if o == NULL:
        reply_error(r, b"gone")
        return
    out_word(&r.text, b"state", b"live" if o.real != 0 else b"dropped")
    out_number(&r.text, b"epoch", o.epoch)
    out_number(&r.text, b"bytes", o.size)
    object_unpin(o)


cdef void verb_export(Request *q, uint64_t nonce, uint64_t id, Reply *r) noexcept nogil:
    """Export an object for a peer; not for a new use of it while it is away, or about to be made again."""
    cdef Fetched f
    cdef CUresult rc = CUDA_ERROR_NOT_READY
    if wire_number(q.text, b"open", 0) == 0 or phase <= PHASE_QUIESCED:
        rc = export_by_key(nonce, id, wire_number(q.text, b"remember", 0) != 0, &f)
    if rc == 0:
        r.fd = f.fd
        out_number(&r.text, b"epoch", f.epoch)
        out_number(&r.text, b"bytes", f.size)
        team_write(&r.text, &f.team)
    elif rc == CUDA_ERROR_NOT_FOUND:
        reply_error(r, b"gone")
    elif rc == CUDA_ERROR_NOT_READY:
        reply_error(r, b"not-ready")
    else:
        reply_error(r, b"cuda")
        out_number(&r.text, b"cuda", <uint64_t>rc)


cdef void verb_share(uint64_t nonce, uint64_t id, Reply *r) noexcept nogil:
    """Give a peer the placeholder of sealed host-class memory."""
    cdef int fd = share_by_key(nonce, id)
    if fd >= 0:
        r.fd = fd
    else:
        reply_error(r, b"gone" if fd == NOT_SHARED_ANY_MORE else b"not-ready")


cdef void verb_team(Request *q, uint64_t nonce, uint64_t id, Reply *r) noexcept nogil:
    """Say how many devices were added to a multicast object that is owned here, after noting the peer's."""
    cdef Object *o = object_pin_key(nonce, id)
    cdef int pid = <int>wire_number(q.text, b"pid", 0)
    if o == NULL:
        reply_error(r, b"gone")
        return
    if pid > 0:
        join_note(o, pid, <int>wire_number(q.text, b"device", 0))
    out_number(&r.text, b"joined", joined_count(o))
    out_number(&r.text, b"devices", o.team.numDevices)
    object_unpin(o)
