# Descriptors that stand for memory of others and that this process makes no use of: received and never imported, or
# imported once and no more.  They keep the memory, and the driver's file open, so a suspend has to replace them, too.
#
# No hook has seen them, or what it knew has gone with the import.  They are told by the exporter's tag and looked for
# at release, while all exporters know their descriptors (until seal), and at seal for those that came since.  What is
# found is an object of class UNUSED: it has no memory of its own, no phase makes it again, and it is forgotten before
# the gates open, so that nothing of ours keeps the memory once the application closes the descriptor.

cdef uint32_t fds_lost      # descriptors for which the last unseal got no memory


cdef bint received_note(int number) noexcept nogil:
    """Make a record of a descriptor that carries a tag and that nothing here knows, if the process in it knows it.

    False if it should be known and cannot be.
    """
    cdef Object *o
    cdef bint known
    if fcntl(number, F_GETOWN) <= 0:
        return True
    o = object_pin_fd(number, NULL)
    if o != NULL:
        object_unpin(o)
        return True
    o = object_new(ORIGIN_IMPORTED)
    if o == NULL:
        return False
    o.cls = CLASS_UNUSED
    known = resolve_import(o, number)
    if known and fdref_new(o, number, True):
        return True
    object_unpin(o)
    return not known


cdef bint received_find(Failure *f) noexcept nogil:
    """Look for such descriptors."""
    cdef FdWalk walk
    cdef int number
    if not walk_begin(&walk):
        f.error = errno
        return fail(f, b"fd", b"/proc/thread-self/fd", b"the descriptors of this process cannot be listed")
    while True:
        number = walk_next(&walk, GS_DRIVER_FILES)
        if number < 0:
            return True
        if not received_note(number):
            f.error = errno
            return fail(f, b"fd", b"received", b"there is no descriptor left to know a received one by")


cdef void received_refresh() noexcept nogil:
    """Ask which incarnation the owners have now; what was never replaced may stand for an earlier one."""
    cdef uint32_t cursor = 0, epoch = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return
        if o.cls == CLASS_UNUSED and ask_owner(o, &epoch) == 1:
            o.epoch = epoch


cdef void received_forget() noexcept nogil:
    """Forget all of them."""
    cdef uint32_t cursor = 0
    cdef Object *o
    while True:
        o = next_object(&cursor)
        if o == NULL:
            return
        if o.cls == CLASS_UNUSED:
            object_unpin(o)
