# Release, load, remap, check, open: what each phase does to the objects.
#
# Every object is live (the driver has it, everything is mapped), held (some mapping is gone) or dropped.  A mark
# changes only after the driver call succeeded, and each phase acts on exactly what is not in the state that it
# wants; so the same calls are rollback, retry and resume.  During these phases both gates are closed and no call of
# the application is in progress: objects are changed by the worker alone.

cdef enum:
    PHASE_RUNNING = 0
    PHASE_QUIESCING = 1
    PHASE_QUIESCED = 2
    PHASE_RELEASING = 3
    PHASE_RELEASED = 4
    PHASE_SEALED = 5
    PHASE_LOADING = 6
    PHASE_LOADED = 7
    PHASE_REMAPPED = 8
    COPY_TIMEOUT_MS = 3600000
    REMAP_TIMEOUT_MS = 60000
    CANARY_WORDS = 16384
    CANARY_BYTES = 65536    # 4 * CANARY_WORDS
    CANARY_TIMEOUT_MS = 5000

cdef uint32_t phase
cdef uint32_t disturbed     # something was released or sealed since the gates were open


cdef const char *phase_name() noexcept nogil:
    """Return the protocol's word for the phase."""
    if phase == PHASE_RUNNING:
        return b"running"
    if phase == PHASE_QUIESCING:
        return b"quiescing"
    if phase == PHASE_QUIESCED:
        return b"quiesced"
    if phase == PHASE_RELEASING:
        return b"releasing"
    if phase == PHASE_RELEASED:
        return b"released"
    if phase == PHASE_SEALED:
        return b"sealed"
    if phase == PHASE_LOADING:
        return b"loading"
    if phase == PHASE_LOADED:
        return b"loaded"
    return b"remapped"


cdef bint is_carried(Object *o, uint8_t cls) noexcept nogil:
    """Say whether an object is of a class and carried."""
    return o.cls == cls and o.kind == KIND_CARRIED


cdef bint is_saved_here(Object *o) noexcept nogil:
    """Say whether this process saves the object's content to the arena."""
    return is_carried(o, CLASS_DEVICE) and is_owned(o)


# ---- dropping and making again ----

cdef bint object_unmap(Object *o, Failure *f) noexcept nogil:
    """Remove an object's mappings; the addresses stay reserved."""
    cdef Mapping *m = <Mapping *>o.first
    cdef CUresult rc
    global disturbed
    disturbed = 1
    while m != NULL:
        if m.mapped:
            rc = gs_real.cuMemUnmap(m.va, m.size)
            if rc != 0:
                return fail_cuda(f, b"cuMemUnmap", rc, o, m.va)
            m.mapped = 0
            m.granted = 0
        m = m.sibling
    return True


cdef bint object_drop(Object *o, Failure *f) noexcept nogil:
    """Unmap an object, undo its binds and give the driver's reference back."""
    cdef CUresult rc
    if not object_unmap(o, f) or not binds_undo(o, f):
        return False
    if o.real != 0:
        rc = gs_real.cuMemRelease(o.real)
        if rc != 0:
            return fail_cuda(f, b"cuMemRelease", rc, o, 0)
        o.real = 0
        o.content_lost = is_owned(o) and o.cls != CLASS_MULTICAST
    return True


cdef bint object_create(Object *o, Failure *f) noexcept nogil:
    """Make a dropped object of ours again: another incarnation, without content."""
    cdef CUmemGenericAllocationHandle real = 0
    cdef CUmemAllocationProp props = o.props
    cdef CUresult rc
    if o.real != 0:
        return True
    if o.cls == CLASS_MULTICAST:
        return team_create(o, f)
    if o.origin == ORIGIN_ADOPTED:
        # What was imported says that it cannot be exported; ours has to be.
        props.requestedHandleTypes |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    add_descriptor(&props)
    rc = gs_real.cuMemCreate(&real, o.size, &props, o.flags)
    if rc != 0:
        return fail_cuda(f, b"cuMemCreate", rc, o, 0)
    o.epoch += 1
    o.real = real
    return True


cdef bint mapping_grant(Mapping *m, Failure *f) noexcept nogil:
    """Give every location the access that it had to every part of a mapping."""
    cdef CUmemAccessDesc desc
    cdef Access *a
    cdef uint32_t number = m.access
    cdef CUresult rc
    while number != 0:
        a = access_at(number)
        desc.location.type = a.type
        desc.location.id = a.id
        desc.flags = a.flags
        rc = gs_real.cuMemSetAccess(m.va + a.start, a.size, &desc, 1)
        if rc != 0:
            return fail_cuda(f, b"cuMemSetAccess", rc, m.object, m.va + a.start)
        number = a.next
    m.granted = 1
    return True


cdef bint object_map(Object *o, Failure *f) noexcept nogil:
    """Map an object wherever it was mapped, with the access that was there."""
    cdef Mapping *m = <Mapping *>o.first
    cdef CUresult rc
    while m != NULL:
        if not m.mapped:
            rc = gs_real.cuMemMap(m.va, m.size, m.offset, o.real, 0)
            if rc != 0:
                return fail_cuda(f, b"cuMemMap", rc, o, m.va)
            m.mapped = 1
        if not m.granted and not mapping_grant(m, f):
            return False
        m = m.sibling
    return True


cdef bint is_whole(Object *o) noexcept nogil:
    """Say whether an object is there, with its content and all its mappings."""
    cdef Mapping *m = <Mapping *>o.first
    if o.real == 0 or o.content_lost or not binds_whole(o):
        return False
    while m != NULL:
        if not m.mapped or not m.granted:
            return False
        m = m.sibling
    return True


# ---- release ----

cdef bint list_pieces(Failure *f) noexcept nogil:
    """List what must be saved; nothing has changed if the arena turns out too small."""
    cdef uint32_t cursor = 0
    cdef Object *o
    if is_stored():
        return fail(f, b"phase", b"list", b"the memory is released to a checkpoint")
    if not pieces_lost():
        pieces_clear()
    while True:
        o = next_object(&cursor)
        if o == NULL:
            break
        if is_saved_here(o) and o.real != 0 and o.listed != arena.round and not pieces_add(o):
            return fail(f, b"memory", b"list", b"the list of pieces cannot grow")
    if arena.used > arena.size:
        f.need = arena.used
        return fail(f, b"arena", b"list", b"the arena is too small")
    return True


cdef bint all_have_owners(Failure *f) noexcept nogil:
    """Make sure that every import can be had again: nothing may be dropped that nobody saves."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_shared_import(o) and o.owner != OWNER_KNOWN:
            f.object = o.id
            if o.owner == OWNER_GONE:
                return fail(f, b"orphan", b"release", b"nobody owns this import")
            return fail(f, b"unresolved", b"release", b"nobody knows whose this import is")


cdef bint drop_all(bint owned, uint64_t *freed, Failure *f) noexcept nogil:
    """Drop the imports of device memory, or what is owned here.

    What is owned and exported is only unmapped: its descriptors keep the memory until they are replaced (seal), and a
    rollback until then needs nothing but to map it again.
    """
    cdef uint32_t cursor = 0
    cdef Object *o
    cdef bint held
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_carried(o, CLASS_DEVICE) and is_owned(o) == owned:
            held = o.real != 0
            if not (object_unmap(o, f) if owned and fdrefs_of(o, False) else object_drop(o, f)):
                return False
            if not owned and o.internal:
                # The application has no descriptor of it, and ours would keep the memory.
                fdrefs_drop(o, False)
            if held and owned and o.real == 0:
                freed[0] += o.size


cdef bint phase_release(const char *checkpoint, uint64_t deadline, uint64_t *saved, uint64_t *freed,
                        uint64_t *copy_us, Failure *f) noexcept nogil:
    """Save owned memory, then undo multicast, drop imports and owned memory, in this order.

    With the word of a checkpoint the memory has been saved there, through a ring.
    """
    cdef uint64_t begin
    global phase, disturbed, fds_lost
    if phase != PHASE_QUIESCED and phase != PHASE_RELEASING and phase != PHASE_RELEASED:
        return fail(f, b"phase", b"release", b"release needs a quiesced process")
    if checkpoint != NULL and (checkpoint[0] == 0 or checkpoint[0] == c' '):
        return fail(f, b"argument", b"release", b"a checkpoint needs a name")
    if not all_have_owners(f) or not (pieces_are_out(f) if checkpoint != NULL else list_pieces(f)):
        return False
    if not received_find(f):
        return False
    phase = PHASE_RELEASING
    fds_lost = 0
    disturbed = 1
    if checkpoint != NULL:
        store_name(checkpoint)
    begin = now_ns()
    if not pieces_copy(True, deadline, saved, f):
        return False
    copy_us[0] = (now_ns() - begin) // 1000
    if not teams_part(f) or not drop_all(False, freed, f) or not drop_all(True, freed, f):
        return False
    phase = PHASE_RELEASED
    return True


# ---- load and remap ----

cdef bint phase_load(uint64_t deadline, uint64_t *loaded, uint64_t *missing, uint64_t *copy_us,
                     Failure *f) noexcept nogil:
    """Make owned device memory again at its addresses and copy the content back.

    What has to come through a ring is `missing`: the phase ends with the call that finds nothing missing any more.
    """
    cdef uint32_t cursor = 0
    cdef uint64_t begin
    cdef Object *o
    global phase
    phase = PHASE_LOADING
    while True:
        o = next_object(&cursor)
        if o == NULL:
            break
        if is_saved_here(o) and (not object_create(o, f) or not object_map(o, f)):
            return False
        if is_carried(o, CLASS_MULTICAST) and is_owned(o) and not team_load(o, f):
            return False
    begin = now_ns()
    if not pieces_copy(False, deadline, loaded, f):
        return False
    copy_us[0] = (now_ns() - begin) // 1000
    missing[0] = missing_bytes()
    if missing[0] != 0:
        return True
    cursor = 0
    while True:
        o = next_object(&cursor)
        if o == NULL:
            break
        if is_saved_here(o):
            o.content_lost = 0
    phase = PHASE_LOADED
    return True


cdef bint import_again(Object *o, uint64_t deadline, Failure *f) noexcept nogil:
    """Import a dropped object from its owner."""
    cdef CUmemGenericAllocationHandle real = 0
    cdef Fetched got
    cdef CUresult rc
    if o.real != 0:
        return True
    rc = fetch_export(o.exporter, o.key_nonce, o.key_id, FOR_REMAP, &got, deadline)
    if rc == CUDA_ERROR_NOT_FOUND:
        f.object = o.id
        return fail(f, b"gone", b"import", b"the process that owned this memory no longer has it")
    if rc == CUDA_ERROR_TIMEOUT:
        f.object = o.id
        return fail(f, b"deadline", b"import", b"the owner of this memory does not make it again")
    if rc != 0:
        return fail_cuda(f, b"export by the owner", rc, o, 0)
    rc = gs_real.cuMemImportFromShareableHandle(&real, <void *><uintptr_t>got.fd,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    if rc == 0:
        o.epoch = got.epoch
        o.real = real
        # What is known of older descriptors stays: unseal finds those that the application still holds by it.
        if not fdrefs_of(o, True):
            fdref_new(o, got.fd, True)
    close(got.fd)
    return rc == 0 or fail_cuda(f, b"cuMemImportFromShareableHandle", rc, o, 0)


cdef bint drop_if_stale(Object *o, Failure *f) noexcept nogil:
    """Drop an import whose owner has made the memory again: it would be another memory than the others see."""
    cdef uint32_t epoch = 0
    if o.real == 0 or o.owner != OWNER_KNOWN or ask_owner(o, &epoch) != 1 or epoch == o.epoch:
        return True
    return object_drop(o, f)


cdef bint remap_imports(uint64_t deadline, Failure *f) noexcept nogil:
    """Import what is not live, and what is live and stale, and map memory."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_owned(o) or not (is_carried(o, CLASS_DEVICE) or is_carried(o, CLASS_MULTICAST)):
            continue
        if not drop_if_stale(o, f) or not import_again(o, deadline, f):
            return False
        if o.cls == CLASS_DEVICE and not object_map(o, f):
            return False


cdef bint registrations_check(Failure *f) noexcept nogil:
    """Find all host memory registered; another device address is the end, since the application holds the old one."""
    cdef uint32_t cursor = 0
    cdef Registration *r
    cdef CUresult rc
    cdef bint moved = False
    while True:
        r = next_registration(&cursor)
        if r == NULL:
            return True
        rc = registration_restore(r, &moved)
        if rc != 0:
            return fail_cuda(f, b"cuMemHostRegister", rc, NULL, r.address)
        if moved:
            f.address = r.address
            return fail(f, b"address", b"cuMemHostRegister", b"host memory has another address on the GPU than before")


cdef bint phase_remap(uint64_t deadline, Failure *f) noexcept nogil:
    """Bring back imports and add devices to multicast objects; host memory has to be registered as before."""
    global phase
    if not registrations_check(f) or not remap_imports(deadline, f) or not teams_join(f):
        return False
    phase = PHASE_REMAPPED
    return True


# ---- check ----

cdef Object canary      # memory of our own for the check; stays where it could not be given back, for the next check


cdef bint canary_give_back(uint64_t deadline, Failure *f) noexcept nogil:
    """Give the canary's memory back, from wherever the last check got to."""
    cdef CUresult rc
    if canary.real == 0:
        return True
    if not lanes_wait(deadline, f):
        # A copy may still run: to take its memory away would kill the context.
        return False
    if not spare_unmap(&canary, f):
        return False
    rc = gs_real.cuMemRelease(canary.real)
    if rc != 0:
        return fail_cuda(f, b"canary cuMemRelease", rc, NULL, 0)
    canary.real = 0
    return True


cdef bint canary_device(int device, uint64_t deadline, Failure *f) noexcept nogil:
    """Fill memory of our own on a device, copy it back and compare."""
    cdef CUmemGenericAllocationHandle real = 0
    cdef CUmemAccessDesc desc
    cdef Device *d = device_info(device)
    cdef CUresult rc
    cdef bint good
    if d == NULL or d.granularity == 0:
        return True
    if not canary_give_back(deadline, f):
        return False
    memset(&canary, 0, sizeof(canary))
    allocation_props(&canary.props, device, False)
    canary.props.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE
    canary.size = d.granularity
    rc = gs_real.cuMemCreate(&real, canary.size, &canary.props, 0)
    if rc != 0:
        return fail_cuda(f, b"canary cuMemCreate", rc, NULL, 0)
    canary.real = real
    desc.location = canary.props.location
    desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    rc = spare_map(&canary, &desc)
    good = rc == 0 or fail_cuda(f, b"canary cuMemMap", rc, NULL, canary.spare_va)
    good = good and canary_compare(device, canary.spare_va, deadline, f)
    return canary_give_back(deadline, f) and good


cdef uint32_t[CANARY_WORDS] canary_out
cdef uint32_t[CANARY_WORDS] canary_back


cdef bint canary_compare(int device, uint64_t va, uint64_t deadline, Failure *f) noexcept nogil:
    """Copy a pattern to an address and back."""
    cdef uint32_t i
    cdef CUresult rc
    for i in range(CANARY_WORDS):
        canary_out[i] = i * <uint32_t>2654435761 + <uint32_t>device
        canary_back[i] = 0
    if not lane_open(device, f):
        return False
    lanes[device].busy = 1
    rc = gs_real.cuMemcpyHtoDAsync_v2(va, canary_out, CANARY_BYTES, lanes[device].stream)
    if rc == 0:
        rc = gs_real.cuMemcpyDtoHAsync_v2(canary_back, va, CANARY_BYTES, lanes[device].stream)
    lane_leave()
    if rc != 0:
        return fail_cuda(f, b"canary copy", rc, NULL, va)
    if not lanes_wait(deadline, f):
        return False
    if memcmp(canary_out, canary_back, CANARY_BYTES) != 0:
        return fail(f, b"canary", b"compare", b"the GPU gave back other bytes than it was given")
    return True


cdef bint read_mapping(Mapping *m, uint64_t deadline, Failure *f) noexcept nogil:
    """Read one word through a mapping, with a device that may."""
    cdef uint32_t number = m.access
    cdef Access *a
    cdef CUresult rc
    while number != 0:
        a = access_at(number)
        number = a.next
        if a.type != CU_MEM_LOCATION_TYPE_DEVICE or context_on(a.id) == NULL:
            continue
        if not lane_open(a.id, f):
            return False
        rc = gs_real.cuMemcpyDtoHAsync_v2(canary_back, m.va + a.start, 4, lanes[a.id].stream)
        lane_leave()
        if rc != 0:
            return fail_cuda(f, b"read", rc, m.object, m.va + a.start)
        lanes[a.id].busy = 1
        return True
    return True


cdef bint read_imports(uint64_t deadline, uint64_t *bytes, Failure *f) noexcept nogil:
    """Read one word through every mapping of an import."""
    cdef uint32_t cursor = 0
    cdef Mapping *m
    while True:
        m = next_mapping(&cursor)
        if m == NULL:
            return lanes_wait(deadline, f)
        if is_carried(m.object, CLASS_DEVICE) and not is_owned(m.object):
            if not read_mapping(m, deadline, f):
                return False
            bytes[0] += 4


cdef bint phase_check(uint64_t deadline, uint64_t *bytes, Failure *f) noexcept nogil:
    """Show that the GPU computes, copies, and reaches what was mapped; changes no byte of the application."""
    cdef int device
    cdef bint good = True
    for device in range(MAX_DEVICES):
        if good and context_on(device) != NULL:
            good = canary_device(device, deadline, f)
            bytes[0] += 2 * CANARY_BYTES
    good = good and read_imports(deadline, bytes, f)
    if lanes_wait(deadline, f):
        lanes_close()
    return good


# ---- open ----

cdef bint everything_live(Failure *f) noexcept nogil:
    """Say whether the application finds everything as it left it."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            break
        if o.cls != CLASS_UNUSED and not is_whole(o):
            f.object = o.id
            return fail(f, b"phase", b"open", b"an object is not live")
    if sealed_fds() != 0:
        return fail(f, b"phase", b"open", b"exported descriptors are not back")
    return True


cdef bint phase_open(Failure *f) noexcept nogil:
    """Let the application run on."""
    global phase, disturbed
    if not everything_live(f):
        return False
    received_forget()
    fdrefs_drop(NULL, True)
    pieces_clear()
    disturbed = 0
    phase = PHASE_RUNNING
    gs_add(&gates_turn, 1)
    gate_open_all()
    return True
