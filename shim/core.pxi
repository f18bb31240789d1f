# The shim core: its parts are included here, in the order in which they build on each other.

cdef void control_start() noexcept nogil:
    """Start the control threads and their socket."""
    pass


cdef void core_fork_child() noexcept nogil:
    """In a forked child: empty all tables, close the sockets."""
    pass
