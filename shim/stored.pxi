# Memory that the supervisor keeps: it passes piece by piece through a ring, which is an arena whose places the
# supervisor gives out.
#
# The supervisor lists the pieces, has each copied out to a place that it names, and keeps the content where it likes.
# When all is safe it releases the memory to a checkpoint, a word that means nothing here; what was not copied out since
# the gates closed is not released.  On the way back each piece is copied in again.  The list stays from the release
# until the gates open, whatever happens to the ring.

cdef enum:
    CHECKPOINT_BYTES = 64
    MOST_ACCESS_TOLD = 16

cdef char[CHECKPOINT_BYTES] stored_in   # the checkpoint to which memory is released; empty: to none


cdef bint is_stored() noexcept nogil:
    """Say whether memory is released to a checkpoint, as a whole or in part."""
    return stored_in[0] != 0


cdef const char *stored_word() noexcept nogil:
    """Return the protocol's word for the checkpoint, or a dash."""
    if is_stored():
        return stored_in
    return b"-"


cdef void store_name(const char *word) noexcept nogil:
    """Remember to which checkpoint the memory is released."""
    cdef int n = 0
    while n < CHECKPOINT_BYTES - 1 and word[n] != 0 and word[n] != c' ':
        stored_in[n] = word[n]
        n += 1
    stored_in[n] = 0


# ---- the list ----

cdef bint pieces_list(uint64_t step, Failure *f) noexcept nogil:
    """List what must be saved, each object cut into pieces of `step` bytes from its beginning."""
    cdef uint32_t cursor = 0
    cdef Object *o
    if phase != PHASE_QUIESCED:
        return fail(f, b"phase", b"list", b"pieces are listed in a quiesced process")
    if step == 0 or step > ARENA_STEP:
        return fail(f, b"argument", b"list", b"pieces need a size")
    pieces_clear()
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return True
        if is_saved_here(o) and o.real != 0 and not pieces_cut(o, step):
            return fail(f, b"memory", b"list", b"the list of pieces cannot grow")


cdef bint pieces_cut(Object *o, uint64_t step) noexcept nogil:
    """List the pieces of an object."""
    cdef uint64_t offset = 0
    cdef Piece *p
    while offset < o.size:
        gs_lock(&tables_mutex)
        p = <Piece *>table_take(&pieces, sizeof(Piece), MAX_PIECES)
        if p != NULL:
            o.listed = arena.round
            p.object = o
            p.offset = offset
            p.size = step if step < o.size - offset else o.size - offset
            p.state = PIECE_LISTED
        gs_unlock(&tables_mutex)
        if p == NULL:
            return False
        offset += step
    return True


cdef bint piece_is_missing(const Piece *p) noexcept nogil:
    """Say whether the supervisor has content that the memory lacks."""
    return p.state == PIECE_OUT and p.object.content_lost != 0


cdef uint64_t missing_bytes() noexcept nogil:
    """Return the bytes that have to be copied in."""
    cdef uint64_t bytes = 0
    cdef uint32_t cursor = 0
    cdef Piece *p
    while True:
        p = next_piece(&cursor)
        if p == NULL:
            return bytes
        if piece_is_missing(p):
            bytes += p.size


cdef bint pieces_are_out(Failure *f) noexcept nogil:
    """Make sure that the supervisor has all content that a release would drop."""
    cdef uint32_t cursor = 0
    cdef Object *o
    cdef Piece *p
    while True:
        o = next_object(&cursor)
        if o == NULL:
            break
        if is_saved_here(o) and o.real != 0 and o.listed != arena.round:
            f.object = o.id
            return fail(f, b"phase", b"release", b"an object was not listed since the gates closed")
    cursor = 0
    while True:
        p = next_piece(&cursor)
        if p == NULL:
            return True
        if p.state != PIECE_OUT:
            f.object = p.object.id
            return fail(f, b"phase", b"release", b"a piece was not copied out since the gates closed")


cdef void verb_pieces(Request *q, Reply *r, Failure *f) noexcept nogil:
    """List the pieces; anew where nothing is released yet and the first page is asked for."""
    cdef uint64_t first = wire_number(q.text, b"from", 0)
    cdef bint released = is_stored() or phase > PHASE_QUIESCED
    cdef uint32_t cursor = 0
    cdef Piece *p
    if not released and first == 0 and not pieces_list(wire_number(q.text, b"bytes", 0), f):
        return
    r.is_list = True
    out_word(&r.text, b"stored", stored_word())
    while True:
        p = next_piece(&cursor)
        if p == NULL:
            return
        if reply_row(r, first):
            out_number(&r.groups, b"piece", cursor - 1)
            out_hex(&r.groups, b"object", p.object.id)
            out_number(&r.groups, b"offset", p.offset)
            out_number(&r.groups, b"bytes", p.size)
            out_number(&r.groups, b"missing", 1 if piece_is_missing(p) else 0)
            if p.state == PIECE_IN_ARENA and p.object.content_lost:
                out_number(&r.groups, b"at", p.place)
            if p.offset == 0:
                object_write(&r.groups, p.object)


cdef void object_write(Out *o, Object *object) noexcept nogil:
    """Append what a checkpoint says of an object: where it is, and what it would take to make it elsewhere."""
    cdef Device *d = device_info(object.props.location.id)
    cdef Mapping *m = <Mapping *>object.first
    cdef Access *a
    cdef uint32_t number = m.access if m != NULL else 0
    cdef int told = 0
    if d != NULL:
        out_uuid(o, b"device", d.uuid.bytes)
    out_number(o, b"size", object.size)
    out_hex(o, b"addr", m.va - m.offset if m != NULL else 0)
    out_number(o, b"handle_types", <uint64_t>object.props.requestedHandleTypes)
    out_number(o, b"flags", object.flags)
    while number != 0 and told < MOST_ACCESS_TOLD:
        a = access_at(number)
        number = a.next
        if told == 0:
            out_name(o, b"access")
        else:
            out_text(o, b",")
        out_digits(o, <uint64_t>a.type, 10)
        out_text(o, b":")
        out_digits(o, <uint64_t>a.id, 10)
        out_text(o, b":")
        out_digits(o, <uint64_t>a.flags, 10)
        told += 1


# ---- through the ring ----

cdef Piece *piece_numbered(uint64_t number) noexcept nogil:
    """Return the piece with a number, or NULL."""
    cdef Piece *p = NULL
    gs_lock(&tables_mutex)
    if number < pieces.used:
        p = <Piece *>table_at(&pieces, sizeof(Piece), <uint32_t>number)
        if p.link != TABLE_USED:
            p = NULL
    gs_unlock(&tables_mutex)
    return p


cdef bint piece_exists(const Piece *p, Failure *f) noexcept nogil:
    """Say whether there is such a piece, and the supervisor's."""
    return (p != NULL and p.state != PIECE_IN_ARENA) or fail(f, b"argument", b"piece", b"there is no such piece")


cdef bint piece_may_fill(const Piece *p, Failure *f) noexcept nogil:
    """Say whether a piece lacks its content, and its memory is there."""
    if phase == PHASE_LOADING and piece_is_missing(p):
        return True
    return fail(f, b"phase", b"piece", b"nothing of this piece is missing, or its memory is not made yet")


cdef bint piece_may_move(const Piece *p, bint out, uint64_t at, Failure *f) noexcept nogil:
    """Say whether a piece may be copied out to, or in from, a place in the ring."""
    if not piece_exists(p, f):
        return False
    if at > arena.size or p.size > arena.size - at or at % ARENA_STEP + p.size > ARENA_STEP:
        return fail(f, b"argument", b"place", b"the piece does not fit there")
    if out and (phase != PHASE_QUIESCED or is_stored()):
        return fail(f, b"phase", b"copy-out", b"pieces are copied out of a quiesced process")
    return out or piece_may_fill(p, f)


cdef bint piece_move(Request *q, bint out, uint64_t deadline, uint64_t *bytes, Failure *f) noexcept nogil:
    """Copy one piece out to the ring, or in from there.

    Streams stay for the next one, until the ring is given up.  A copy that does not end keeps its mapping, too.
    """
    cdef Piece *p = piece_numbered(wire_number(q.text, b"piece", <uint64_t>-1))
    cdef uint64_t at = wire_number(q.text, b"at", <uint64_t>-1)
    cdef bint done
    if not piece_may_move(p, out, at, f) or not lanes_wait(deadline, f):
        return False
    p.place = at
    done = piece_copy(p, out, f)
    if not lanes_wait(deadline, f) or not spare_unmap(p.object, f) or not done:
        return False
    p.state = PIECE_OUT if out else PIECE_BACK
    bytes[0] = p.size
    return True


# ---- zeros ----

cdef bint piece_clear(Piece *p, Failure *f) noexcept nogil:
    """Put zeros into a piece, in the stream of its device."""
    cdef int device = p.object.props.location.id
    cdef uint64_t va = 0
    cdef CUresult rc
    if not piece_address(p, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &va, f) or not lane_open(device, f):
        return False
    rc = gs_real.cuMemsetD8Async(va, 0, p.size, lanes[device].stream)
    lane_leave()
    if rc != 0:
        return fail_cuda(f, b"cuMemsetD8Async", rc, p.object, va)
    lanes[device].busy = 1
    return True


cdef bint pieces_clear_on_device(Request *q, uint64_t deadline, uint64_t *bytes, Failure *f) noexcept nogil:
    """Set pieces that follow each other in the list to zeros; none counts as done before all are."""
    cdef uint64_t first = wire_number(q.text, b"piece", <uint64_t>-1)
    cdef uint64_t count = wire_number(q.text, b"count", 1)
    cdef uint64_t number
    cdef bint done = True
    if count == 0 or count > MAX_PIECES or first > MAX_PIECES:
        return fail(f, b"argument", b"piece", b"there are not so many pieces")
    for number in range(first, first + count):
        if not piece_exists(piece_numbered(number), f) or not piece_may_fill(piece_numbered(number), f):
            return False
    if not lanes_wait(deadline, f):
        return False
    for number in range(first, first + count):
        done = done and piece_clear(piece_numbered(number), f)
    # As for copies: what does not end keeps its mapping.
    if not lanes_wait(deadline, f) or not spares_unmap(f) or not done:
        return False
    for number in range(first, first + count):
        piece_numbered(number).state = PIECE_BACK
        bytes[0] += piece_numbered(number).size
    return True
