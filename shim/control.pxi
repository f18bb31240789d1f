# The control socket: who may speak, what the two threads do, and how one request becomes one reply.
#
# The listener answers everything that is quick, at any phase, so that peers are served while this process loads.  The
# worker runs one long verb at a time, and the drain.  What a verb does stands in verbs.pxi.

cdef enum:
    DATAGRAM_BYTES = 32768
    MAX_CONNECTIONS = 128
    BACKLOG = 128
    REQUEST_BYTES = 1024
    JOB_NONE = 0
    JOB_QUEUED = 1
    JOB_RUNNING = 2
    EFD_CLOEXEC = 0o2000000
    EFD_NONBLOCK = 0o4000
    SPARE_FDS = 4
    ACCEPT_PAUSE_MS = 100
    LISTEN_AGAIN_US = 500000
    POLL_FOREVER_MS = 0x7FFFFFFF
    LEASE_NONE = 0
    LEASE_HELD = 1
    LEASE_LOST = 2

ctypedef struct Connection:
    int fd                  # plus one; 0: free
    uint8_t lease
    uint32_t busy           # its request is with the worker

# A request and where its answer goes.
ctypedef struct Request:
    char[REQUEST_BYTES] text
    int fd                  # the descriptor that came along, or -1
    Connection *connection
    int verb
    uint64_t deadline       # 0: none
    uint32_t answered

# What a thread needs for a reply.
ctypedef struct Reply:
    Out text
    Out groups
    int fd                  # the descriptor that goes along, or -1
    uint32_t total
    uint32_t next
    bint is_list
    char[DATAGRAM_BYTES] text_bytes
    char[DATAGRAM_BYTES] group_bytes

cdef Connection[MAX_CONNECTIONS] connections
cdef int listening          # the socket, plus one
cdef int wake_listener      # an eventfd, plus one
cdef int[SPARE_FDS] spares  # descriptors kept for connections, plus one; 0: lent out
cdef uint64_t accept_after  # no connection is accepted before this moment
cdef Request listener_request
cdef Request job
cdef uint32_t job_state     # futex
cdef Reply listener_reply
cdef Reply worker_reply
cdef uint32_t lease

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int value, int flags)

cdef extern from "<unistd.h>" nogil:
    ssize_t write(int fd, const void *bytes, size_t n)
    ssize_t read(int fd, void *bytes, size_t n)


# ---- replies ----

cdef void reply_begin(Reply *r) noexcept nogil:
    """Start a good reply."""
    out_begin(&r.text, r.text_bytes, DATAGRAM_BYTES)
    out_begin(&r.groups, r.group_bytes, DATAGRAM_BYTES - 256)
    out_text(&r.text, b"ok 1")
    r.fd = -1
    r.total = 0
    r.next = 0
    r.is_list = False


cdef bint reply_row(Reply *r, uint64_t first) noexcept nogil:
    """Begin a group of a list; False where the row is not on this page.  Rows are offered in a stable order."""
    cdef uint32_t row = r.total
    r.is_list = True
    r.total += 1
    if row < first or r.next != 0:
        return False
    if r.groups.used > r.groups.room - 512:
        r.next = row
        return False
    out_text(&r.groups, b" |")
    return True


cdef void reply_error(Reply *r, const char *code) noexcept nogil:
    """Make the reply an error."""
    out_begin(&r.text, r.text_bytes, DATAGRAM_BYTES)
    out_begin(&r.groups, r.group_bytes, DATAGRAM_BYTES - 256)
    out_text(&r.text, b"err 1")
    out_word(&r.text, b"code", code)
    r.is_list = False
    if r.fd >= 0:
        close(r.fd)
        r.fd = -1


cdef void reply_failure(Reply *r, const Failure *f) noexcept nogil:
    """Make the reply the error of a phase."""
    reply_error(r, f.code)
    out_word(&r.text, b"step", b"")
    out_words(&r.text, f.step)
    if f.cuda != 0:
        out_number(&r.text, b"cuda", <uint64_t>f.cuda)
    if f.object != 0:
        out_hex(&r.text, b"object", f.object)
    if f.address != 0:
        out_hex(&r.text, b"addr", f.address)
    if f.error != 0:
        out_number(&r.text, b"errno", <uint64_t>f.error)
    if f.need != 0:
        out_number(&r.text, b"need", f.need)
    out_word(&r.text, b"msg", f.message)


cdef void out_words(Out *o, const char *text) noexcept nogil:
    """Append a phrase as one word: values hold no space."""
    cdef char[2] one
    one[1] = 0
    while text[0] != 0:
        one[0] = c'-' if text[0] == c' ' else text[0]
        out_bytes(o, one, 1)
        text += 1


cdef void reply_send(Reply *r, int connection) noexcept nogil:
    """Send a reply.  A client that does not read loses its connection: nobody else is kept waiting for it."""
    if r.is_list:
        out_number(&r.text, b"total", r.total)
        out_number(&r.text, b"next", r.next)
        out_bytes(&r.text, r.groups.text, r.groups.used)
    if r.text.full:
        reply_error(r, b"size")
    if not send_datagram(connection, r.text.text, r.text.used, r.fd, MSG_DONTWAIT):
        shutdown(connection, SHUT_RDWR)
    if r.fd >= 0:
        close(r.fd)
        r.fd = -1


# ---- the worker ----

cdef void worker_wake() noexcept nogil:
    """Have the worker look for work."""
    gs_add(&worker_turn, 1)
    gs_futex_wake(&worker_turn, 1)

cdef uint32_t worker_turn


cdef void job_answer(Reply *r) noexcept nogil:
    """Answer the request that the worker has, unless that was done at its deadline.

    The worker counts as free before the client reads the answer: its next request must not find it busy.
    """
    cdef uint64_t one = 1
    cdef Connection *c = job.connection
    cdef bint late = gs_swap(&job.answered, 1) != 0
    if job.fd >= 0:
        close(job.fd)
        job.fd = -1
    gs_store(&job_state, JOB_NONE)
    if late:
        return
    reply_send(r, c.fd - 1)
    gs_store(&c.busy, 0)
    if write(wake_listener - 1, &one, sizeof(one)) < 0:
        gs_log(b"the listener cannot be woken")


cdef void worker_main(void *unused) noexcept nogil:
    """Run long verbs, and drains in between."""
    cdef uint32_t turn
    cdef Failure f
    capture_mode_relaxed()
    while True:
        turn = gs_load(&worker_turn)
        if gs_cas(&job_state, JOB_QUEUED, JOB_RUNNING):
            reply_begin(&worker_reply)
            verb_run(&job, &worker_reply)
            job_answer(&worker_reply)
        elif gs_load(&drain_wanted) != 0:
            drain_pass()
        elif leftover.size != 0 and not leftover.refused and phase == PHASE_RUNNING:
            memset(&f, 0, sizeof(f))
            leftover_free(&f)
        else:
            gs_futex_wait(&worker_turn, turn, -1)


cdef void capture_mode_relaxed() noexcept nogil:
    """Keep our driver calls from spoiling a capture that the application has begun on another thread."""
    cdef CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED
    if gs_real.cuThreadExchangeStreamCaptureMode != NULL:
        gs_real.cuThreadExchangeStreamCaptureMode(&mode)


# ---- the listener ----

cdef bint may_speak(int connection) noexcept nogil:
    """Say whether the other end may: visible in our pid namespace, and root or our own user."""
    cdef struct_ucred cred
    cdef socklen_t n = sizeof(cred)
    if getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &cred, &n) != 0 or cred.pid <= 0:
        return False
    return cred.uid == 0 or cred.uid == geteuid()


cdef void spare_take(int number) noexcept nogil:
    """Keep a descriptor's number for a connection to come, in place of what it was; -1: any number.

    A process that has used up its descriptors while it is suspended must still be brought back.
    """
    cdef int i = 0
    while i < SPARE_FDS and spares[i] != 0:
        i += 1
    if i == SPARE_FDS:
        close(number)
    elif number < 0:
        spares[i] = fcntl(wake_listener - 1, F_DUPFD_CLOEXEC, 3) + 1
    else:
        spares[i] = dup3(wake_listener - 1, number, O_CLOEXEC) + 1
        if spares[i] == 0:
            close(number)


cdef bint spare_give() noexcept nogil:
    """Free a number that was kept; False if none is left."""
    cdef int i
    for i in range(SPARE_FDS):
        if spares[i] != 0:
            close(spares[i] - 1)
            spares[i] = 0
            return True
    return False


cdef int accept_now() noexcept nogil:
    """Accept a connection, under a spare number if there is no other; -1: none now.

    What cannot be accepted keeps the socket readable, so the listener looks away from it for a moment.
    """
    global accept_after
    cdef int connection
    while True:
        connection = accept4(listening - 1, NULL, NULL, SOCK_CLOEXEC)
        if connection >= 0 or errno == EAGAIN or errno == EINTR or errno == ECONNABORTED:
            return connection
        if errno != EMFILE or not spare_give():
            accept_after = deadline_in(ACCEPT_PAUSE_MS)
            return -1


cdef void listener_accept() noexcept nogil:
    """Accept a connection; who may not speak, or does not fit, gets no reply."""
    cdef int connection = accept_now()
    cdef int i
    if connection < 0:
        return
    if may_speak(connection):
        for i in range(MAX_CONNECTIONS):
            if connections[i].fd == 0:
                connections[i].fd = connection + 1
                connections[i].lease = 0
                gs_store(&connections[i].busy, 0)
                return
    spare_take(connection)


cdef void connection_close(Connection *c) noexcept nogil:
    """End a connection; one that held the lease loses it."""
    if c.lease:
        c.lease = 0
        gs_store(&lease, LEASE_LOST)
        gs_log(b"the supervisor is gone without taking leave")
    spare_take(c.fd - 1)
    c.fd = 0


cdef void listener_receive(Connection *c) noexcept nogil:
    """Take one request and answer it, or hand it to the worker."""
    cdef Request *q = &listener_request
    cdef Reply *r = &listener_reply
    cdef ssize_t n = receive_datagram(c.fd - 1, q.text, REQUEST_BYTES, &q.fd, MSG_DONTWAIT)
    if n < 0 and (errno == EAGAIN or errno == EINTR):
        return
    if n <= 0 and not (n < 0 and errno == EMSGSIZE):
        connection_close(c)
        return
    q.connection = c
    reply_begin(r)
    if n < 0:
        reply_error(r, b"size")
    elif not verb_begin(q, r):
        return
    if q.fd >= 0:
        close(q.fd)
    reply_send(r, c.fd - 1)


cdef bint job_give(Request *q) noexcept nogil:
    """Hand a request to the worker; False if it has one."""
    cdef uint64_t limit
    global job
    if gs_load(&job_state) != JOB_NONE:
        return False
    job = q[0]
    limit = wire_number(q.text, b"timeout_ms", 0)
    job.deadline = deadline_in(limit) if limit != 0 else 0
    gs_store(&job.answered, 0)
    gs_store(&q.connection.busy, 1)
    gs_store(&job_state, JOB_QUEUED)
    worker_wake()
    return True


cdef void job_expire() noexcept nogil:
    """Answer for the worker where a verb has passed its deadline; the verb itself goes on."""
    if gs_load(&job_state) == JOB_NONE or job.deadline == 0 or time_left(job.deadline) != 0:
        return
    if gs_load(&job.answered) != 0:
        return
    reply_begin(&listener_reply)
    reply_error(&listener_reply, b"deadline")
    out_word(&listener_reply.text, b"step", verb_name(job.verb))
    out_word(&listener_reply.text, b"msg", b"not done in time, and still going on")
    if gs_swap(&job.answered, 1) == 0:
        reply_send(&listener_reply, job.connection.fd - 1)
        gs_store(&job.connection.busy, 0)


cdef int poll_timeout() noexcept nogil:
    """Return how long the listener may sleep."""
    cdef uint64_t pause = time_left(accept_after)
    cdef uint64_t limit = pause + 1 if pause != 0 else POLL_FOREVER_MS
    if gs_load(&job_state) != JOB_NONE and job.deadline != 0 and gs_load(&job.answered) == 0:
        if time_left(job.deadline) + 1 < limit:
            limit = time_left(job.deadline) + 1
    return <int>limit


cdef struct_pollfd[MAX_CONNECTIONS + 2] listener_polls


cdef void listener_main(void *unused) noexcept nogil:
    """Serve the socket for ever."""
    cdef unsigned long n
    cdef uint64_t woken
    cdef int i
    capture_mode_relaxed()
    while listening == 0:
        sleep_us(LISTEN_AGAIN_US)
        control_listen()
    while True:
        listener_polls[0].fd = listening - 1 if time_left(accept_after) == 0 else -1
        listener_polls[1].fd = wake_listener - 1
        for i in range(MAX_CONNECTIONS):
            # A connection whose request runs is left alone; its number must not be used for another one meanwhile.
            listener_polls[i + 2].fd = -1 if gs_load(&connections[i].busy) else connections[i].fd - 1
        for i in range(MAX_CONNECTIONS + 2):
            listener_polls[i].events = POLLIN
            listener_polls[i].revents = 0
        n = MAX_CONNECTIONS + 2
        poll(listener_polls, n, poll_timeout())
        if listener_polls[1].revents:
            # Nothing to read means that somebody else was faster; either way the listener looks again.
            if read(wake_listener - 1, &woken, sizeof(woken)) < 0:
                pass
        for i in range(MAX_CONNECTIONS):
            if listener_polls[i + 2].revents:
                listener_receive(&connections[i])
        if listener_polls[0].revents:
            listener_accept()
        job_expire()


cdef bint listen_anywhere(int fd) noexcept nogil:
    """Listen under the first name of this process that is free: with equal pids others may have some of them."""
    cdef struct_sockaddr_un address
    cdef int place
    for place in range(SAME_PIDS):
        if bind(fd, <sockaddr *>&address, socket_address(&address, getpid(), place)) == 0:
            return listen(fd, BACKLOG) == 0
        if errno != EADDRINUSE:
            break
    return False


cdef bint control_listen() noexcept nogil:
    """Open the socket under this process's name."""
    global listening, wake_listener
    cdef int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), i
    if fd < 0:
        return False
    if not listen_anywhere(fd):
        close(fd)
        return False
    wake_listener = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) + 1
    if wake_listener == 0:
        close(fd)
        return False
    listening = fd + 1
    for i in range(SPARE_FDS):
        spare_take(-1)
    return True


cdef bint control_start() noexcept nogil:
    """Start the control threads and their socket; False if there can be no thread.

    The threads run even where the socket cannot be opened yet: a process that has loaded this library and has no thread
    of it counts as one that does not use CUDA, whatever descriptors of the driver it has.
    """
    if not control_listen():
        gs_log(b"the control socket cannot be opened, errno %d; it is tried again", errno)
    return start_thread(listener_main, NULL) and start_thread(worker_main, NULL)


cdef void core_fork_child() noexcept nogil:
    """In a forked child: empty all tables, close the sockets."""
    cdef int i
    if listening != 0:
        close(listening - 1)
    if wake_listener != 0:
        close(wake_listener - 1)
    for i in range(MAX_CONNECTIONS):
        if connections[i].fd != 0:
            close(connections[i].fd - 1)
    while spare_give():
        pass
    if job.fd > 0:
        close(job.fd)
    memset(connections, 0, sizeof(connections))
    memset(&job, 0, sizeof(job))
    control_forget()
    tables_forget()


cdef void control_forget() noexcept nogil:
    """Return the control state to that of a fresh process."""
    global listening, wake_listener, job_state, lease, drain_wanted, phase, disturbed, fds_sealed, accept_after
    listening = wake_listener = 0
    fds_sealed = 0
    job_state = JOB_NONE
    accept_after = 0
    lease = LEASE_NONE
    drain_wanted = 0
    phase = PHASE_RUNNING
    disturbed = 0


cdef void tables_forget() noexcept nogil:
    """Forget all objects: they are the parent's."""
    global process_nonce, accesses_promised
    cdef uint32_t cursor = 0
    cdef Object *o
    fdrefs_drop(NULL, False)
    while True:
        o = next_object(&cursor)
        if o == NULL:
            break
        if o.memfd >= 0:
            close(o.memfd)
    for_each_table_forget()
    mappings_by_va.count = 0
    allocations_by_va.count = 0
    accesses_promised = 0
    memset(&arena, 0, sizeof(arena))
    stored_in[0] = 0
    memset(&leftover, 0, sizeof(leftover))
    memset(lanes, 0, sizeof(lanes))
    memset(devices, 0, sizeof(devices))
    memset(uncarried_counts, 0, sizeof(uncarried_counts))
    memset(&canary, 0, sizeof(canary))
    process_nonce = 0


cdef void for_each_table_forget() noexcept nogil:
    """Empty every table."""
    table_forget(&objects)
    table_forget(&captures)
    table_forget(&mappings)
    table_forget(&accesses)
    table_forget(&fdrefs)
    table_forget(&allocations)
    table_forget(&slabs)
    table_forget(&contexts)
    table_forget(&peers)
    table_forget(&registrations)
    table_forget(&uncarried)
    table_forget(&binds)
    table_forget(&joins)
    table_forget(&names)
    table_forget(&pieces)
