# From the first call to the end of the process, and through fork. It must not know what starts, only when.
#
# Before the first hooked call nothing of this library has run. The first call finds the driver's functions; the first
# successful cuInit starts the core (control_start). A forked child cannot use the driver that its parent initialised;
# it starts empty, and starts anew if its own cuInit ever succeeds.

cdef enum:
    FORK_TRIES = 100

cdef uint32_t core_started
cdef uint32_t forks_watched
cdef int forking            # the thread that holds tables_mutex for its fork, 0: none


cdef public CUresult cuInit(unsigned int Flags) noexcept nogil:
    """Initialise the driver, and after the first success start the core."""
    cdef CUresult rc
    if not gs_ready() or gs_real.cuInit == NULL:
        return gs_absent()
    rc = gs_real.cuInit(Flags)
    if rc == CUDA_SUCCESS and not gs_start():
        return CUDA_ERROR_OUT_OF_MEMORY
    return rc


cdef bint gs_start() noexcept nogil:
    """Start the core once; False if it cannot be, and the next cuInit tries again."""
    if gs_cas(&core_started, 0, 1) and not control_start():
        gs_store(&core_started, 0)
        return False
    return True


cdef void watch_forks() noexcept nogil:
    """Have forked children start empty; start_mutex is held. A child inherits this too, so once is enough."""
    global forks_watched
    if forks_watched == 0 and pthread_atfork(before_fork, after_fork, forget_everything) == 0:
        forks_watched = 1


cdef void before_fork() noexcept nogil:
    """Let no table be in the middle of a change in the child, which closes what stands in them.

    Not for ever: a signal handler may fork in the middle of a change of its own thread.
    """
    global forking
    cdef int tries = FORK_TRIES
    while not gs_trylock(&tables_mutex):
        tries -= 1
        if tries == 0:
            return
        sleep_us(1000)
    forking = <int>syscall(SYS_gettid)


cdef void after_fork() noexcept nogil:
    """In the parent: let the tables change again."""
    global forking
    if forking == <int>syscall(SYS_gettid):
        forking = 0
        gs_unlock(&tables_mutex)


cdef void forget_everything() noexcept nogil:
    """In a forked child: no lock held, gates open, nothing counted, not started; threads and sockets are not ours."""
    global core_started, forking
    forking = 0
    gs_reset_locks()
    gates_forget()
    hostfuncs_forget()
    gs_self.bypass = 0
    core_started = 0
    core_fork_child()
