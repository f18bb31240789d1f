# The text of the control protocol (docs/reference/control-protocol.md): reading requests, writing replies, and calling
# a peer.  Knows no verb.

cdef enum:
    # Names that a process tries: so many of one network namespace may have its pid, in pid namespaces of their own.
    SAME_PIDS = 16
    CONNECT_AGAIN_US = 1000

ctypedef struct Out:
    char *text
    size_t used
    size_t room
    bint full


cdef void out_begin(Out *o, char *text, size_t room) noexcept nogil:
    """Start a text in a buffer."""
    o.text = text
    o.used = 0
    o.room = room
    o.full = False
    text[0] = 0


cdef void out_bytes(Out *o, const char *bytes, size_t n) noexcept nogil:
    """Append bytes; what does not fit marks the text as full."""
    if o.used + n + 1 > o.room:
        o.full = True
        return
    memcpy(o.text + o.used, bytes, n)
    o.used += n
    o.text[o.used] = 0


cdef void out_text(Out *o, const char *text) noexcept nogil:
    """Append a string."""
    out_bytes(o, text, strlen(text))


cdef void out_digits(Out *o, uint64_t value, uint32_t base) noexcept nogil:
    """Append a number."""
    cdef char[24] digits
    cdef int at = 24
    cdef uint32_t digit
    while True:
        at -= 1
        digit = <uint32_t>(value % base)
        digits[at] = <char>(digit + 48 if digit < 10 else digit + 87)
        value = value // base
        if value == 0:
            break
    out_bytes(o, digits + at, 24 - at)


cdef void out_name(Out *o, const char *name) noexcept nogil:
    """Append the beginning of a pair."""
    out_text(o, b" ")
    out_text(o, name)
    out_text(o, b"=")


cdef void out_number(Out *o, const char *name, uint64_t value) noexcept nogil:
    """Append a pair with a decimal number."""
    out_name(o, name)
    out_digits(o, value, 10)


cdef void out_hex(Out *o, const char *name, uint64_t value) noexcept nogil:
    """Append a pair with a hexadecimal number."""
    out_name(o, name)
    out_text(o, b"0x")
    out_digits(o, value, 16)


cdef void out_word(Out *o, const char *name, const char *value) noexcept nogil:
    """Append a pair with a word."""
    out_name(o, name)
    out_text(o, value)


cdef void out_key(Out *o, const char *name, uint64_t nonce, uint64_t id) noexcept nogil:
    """Append a pair with the key of an object."""
    out_name(o, name)
    out_digits(o, nonce, 16)
    out_text(o, b".")
    out_digits(o, id, 16)


cdef void out_uuid(Out *o, const char *name, const char *bytes) noexcept nogil:
    """Append a pair with a GPU's UUID as NVIDIA's tools print it."""
    cdef int i
    cdef unsigned char byte
    out_name(o, name)
    out_text(o, b"GPU-")
    for i in range(16):
        if i == 4 or i == 6 or i == 8 or i == 10:
            out_text(o, b"-")
        byte = <unsigned char>bytes[i]
        out_digits(o, byte >> 4, 16)
        out_digits(o, byte & 15, 16)


cdef void out_octets(Out *o, const char *name, const char *bytes, size_t n) noexcept nogil:
    """Append a pair with bytes, two hexadecimal digits each."""
    cdef unsigned char byte
    cdef size_t i
    out_name(o, name)
    for i in range(n):
        byte = <unsigned char>bytes[i]
        out_digits(o, byte >> 4, 16)
        out_digits(o, byte & 15, 16)


# ---- reading ----

cdef const char *wire_value(const char *text, const char *name) noexcept nogil:
    """Return where the value of `name` begins in a datagram's head, or NULL."""
    cdef size_t n = strlen(name)
    cdef const char *at = text
    while at[0] != 0:
        if at[0] == c' ':
            if at[1] == c'|' or strncmp(at, b" msg=", 5) == 0:
                return NULL
            if strncmp(at + 1, name, n) == 0 and at[1 + n] == c'=':
                return at + n + 2
        at += 1
    return NULL


cdef int digit_of(char c) noexcept nogil:
    """Return the value of a hexadecimal digit, or -1."""
    if c'0' <= c <= c'9':
        return c - c'0'
    if c'a' <= c <= c'f':
        return c - c'a' + 10
    if c'A' <= c <= c'F':
        return c - c'A' + 10
    return -1


cdef const char *read_digits(const char *at, int base, uint64_t *value) noexcept nogil:
    """Read a number and return where it ends, or NULL if there is none or it is too large."""
    cdef const char *start = at
    cdef uint64_t n = 0
    cdef int digit
    while True:
        digit = digit_of(at[0])
        if digit < 0 or digit >= base:
            break
        if n > (<uint64_t>0xFFFFFFFFFFFFFFFF - <uint64_t>digit) // <uint64_t>base:
            return NULL
        n = n * base + digit
        at += 1
    value[0] = n
    if at == start:
        return NULL
    return at


cdef bint wire_read(const char *text, const char *name, uint64_t *value) noexcept nogil:
    """Read a number, decimal or with 0x; False if it is absent or malformed."""
    cdef const char *at = wire_value(text, name)
    if at == NULL:
        return False
    if at[0] == c'0' and at[1] == c'x':
        at = read_digits(at + 2, 16, value)
    else:
        at = read_digits(at, 10, value)
    return at != NULL and (at[0] == 0 or at[0] == c' ')


cdef uint64_t wire_number(const char *text, const char *name, uint64_t absent) noexcept nogil:
    """Return a number of a datagram, or `absent`."""
    cdef uint64_t value = 0
    return value if wire_read(text, name, &value) else absent


cdef bint wire_key(const char *text, const char *name, uint64_t *nonce, uint64_t *id) noexcept nogil:
    """Read the key of an object."""
    cdef const char *at = wire_value(text, name)
    if at == NULL:
        return False
    at = read_digits(at, 16, nonce)
    if at == NULL or at[0] != c'.':
        return False
    at = read_digits(at + 1, 16, id)
    return at != NULL and (at[0] == 0 or at[0] == c' ')


cdef bint wire_octets(const char *text, const char *name, char *bytes, size_t n) noexcept nogil:
    """Read so many bytes; False if they are absent or malformed."""
    cdef const char *at = wire_value(text, name)
    cdef int high, low
    cdef size_t i
    if at == NULL:
        return False
    for i in range(n):
        high = digit_of(at[0])
        low = digit_of(at[1]) if high >= 0 else -1
        if low < 0:
            return False
        bytes[i] = <char>(high << 4 | low)
        at += 2
    return at[0] == 0 or at[0] == c' '


cdef bint wire_is(const char *text, const char *name, const char *word) noexcept nogil:
    """Say whether a pair has a certain word as its value."""
    cdef const char *at = wire_value(text, name)
    cdef size_t n = strlen(word)
    return at != NULL and strncmp(at, word, n) == 0 and (at[n] == 0 or at[n] == c' ')


cdef bint reply_ok(const char *reply) noexcept nogil:
    """Say whether a reply is a good one of version 1."""
    return strncmp(reply, b"ok 1", 4) == 0 and (reply[4] == 0 or reply[4] == c' ')


# ---- datagrams ----

cdef ssize_t receive_datagram(int connection, char *text, size_t room, int *fd, int flags) noexcept nogil:
    """Receive one datagram as a string and at most one descriptor; 0 at the end, -1 with errno.

    EMSGSIZE: it was longer than there is room, and half a number is a wrong number.
    """
    cdef struct_msghdr message
    cdef struct_iovec part
    cdef char[128] control
    cdef struct_cmsghdr *header
    cdef ssize_t n
    cdef size_t i, count
    cdef int *fds
    fd[0] = -1
    memset(&message, 0, sizeof(message))
    part.iov_base = text
    part.iov_len = room - 1
    message.msg_iov = &part
    message.msg_iovlen = 1
    message.msg_control = control
    message.msg_controllen = sizeof(control)
    while True:
        n = recvmsg(connection, &message, MSG_CMSG_CLOEXEC | flags)
        if n >= 0 or errno != EINTR:
            break
    if n < 0:
        return n
    header = CMSG_FIRSTHDR(&message)
    while header != NULL:
        if header.cmsg_level == SOL_SOCKET and header.cmsg_type == SCM_RIGHTS:
            fds = <int *>CMSG_DATA(header)
            count = (header.cmsg_len - CMSG_LEN(0)) // sizeof(int)
            for i in range(count):
                if fd[0] < 0:
                    fd[0] = fds[i]
                else:
                    close(fds[i])
        header = CMSG_NXTHDR(&message, header)
    text[n] = 0
    if message.msg_flags & MSG_TRUNC:
        errno_set(EMSGSIZE)
        return -1
    return n


cdef bint send_datagram(int connection, const char *text, size_t n, int fd, int flags) noexcept nogil:
    """Send one datagram, with a descriptor if `fd` is one."""
    cdef struct_msghdr message
    cdef struct_iovec part
    cdef char[64] control
    cdef struct_cmsghdr *header
    cdef ssize_t sent
    memset(&message, 0, sizeof(message))
    memset(control, 0, sizeof(control))
    part.iov_base = <void *>text
    part.iov_len = n
    message.msg_iov = &part
    message.msg_iovlen = 1
    if fd >= 0:
        message.msg_control = control
        message.msg_controllen = CMSG_SPACE(sizeof(int))
        header = CMSG_FIRSTHDR(&message)
        header.cmsg_level = SOL_SOCKET
        header.cmsg_type = SCM_RIGHTS
        header.cmsg_len = CMSG_LEN(sizeof(int))
        (<int *>CMSG_DATA(header))[0] = fd
    while True:
        sent = sendmsg(connection, &message, MSG_NOSIGNAL | flags)
        if sent >= 0 or errno != EINTR:
            return sent == <ssize_t>n


cdef socklen_t socket_address(struct_sockaddr_un *address, int pid, int place) noexcept nogil:
    """Fill in one of the abstract names of a process's socket, the first at place 0, and return its length."""
    cdef Out name
    memset(address, 0, sizeof(address[0]))
    address.sun_family = AF_UNIX
    out_begin(&name, address.sun_path + 1, sizeof(address.sun_path) - 1)
    out_text(&name, b"nvsnap-gpushare.")
    out_digits(&name, <uint64_t>pid, 10)
    if place > 0:
        out_text(&name, b".")
        out_digits(&name, <uint64_t>place, 10)
    return <socklen_t>(sizeof(address.sun_family) + 1 + name.used)


# ---- calling a peer ----

cdef int connect_at(int pid, int place) noexcept nogil:
    """Connect to one of a process's names and make sure that it is that process; -1 with errno.

    Never waits: whoever has the name may be of another pid namespace, and frozen.
    """
    cdef struct_sockaddr_un address
    cdef struct_ucred cred
    cdef socklen_t n = sizeof(cred)
    cdef int error
    cdef int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)
    if connection < 0:
        return -1
    if connect(connection, <sockaddr *>&address, socket_address(&address, pid, place)) == 0:
        if getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &cred, &n) == 0 and cred.pid == pid:
            return connection
        errno_set(EPERM)
    error = errno
    close(connection)
    errno_set(error)
    return -1


cdef int connect_anywhere(int pid) noexcept nogil:
    """Connect to a process by whichever name it has; -1 with errno, EAGAIN if it may be one that is too busy now."""
    cdef int error = ECONNREFUSED
    cdef int place, connection
    for place in range(SAME_PIDS):
        connection = connect_at(pid, place)
        if connection >= 0:
            return connection
        if errno != ECONNREFUSED and error != EAGAIN:
            error = errno
    errno_set(error)
    return -1


cdef int peer_connect(int pid, uint64_t deadline) noexcept nogil:
    """Connect to the shim of a process, for answers until a deadline; -1 with errno."""
    cdef struct_timeval limit
    cdef uint64_t left
    cdef int connection = connect_anywhere(pid)
    while connection < 0 and errno == EAGAIN and time_left(deadline) != 0:
        sleep_us(CONNECT_AGAIN_US)
        connection = connect_anywhere(pid)
    if connection < 0:
        return -1
    left = time_left(deadline)
    if left == 0:
        left = 1
    limit.tv_sec = <time_t>(left // 1000)
    limit.tv_usec = <suseconds_t>(left % 1000 * 1000)
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit))
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit))
    fcntl(connection, F_SETFL, 0)
    return connection


cdef bint peer_is_gone(int pid) noexcept nogil:
    """Say whether no shim listens for a process any more: it has exited, or another one has its number."""
    cdef int connection = peer_connect(pid, deadline_in(1000))
    if connection >= 0:
        close(connection)
        return False
    return errno == ECONNREFUSED or errno == EPERM


cdef bint peer_call(int pid, const char *request, int fd, char *reply, size_t room, int *reply_fd,
                    uint64_t deadline) noexcept nogil:
    """Ask a peer one thing; False if it does not answer in time.  A descriptor nobody wants is closed."""
    cdef int received = -1
    cdef ssize_t n = -1
    cdef int connection = peer_connect(pid, deadline)
    if connection < 0:
        return False
    if send_datagram(connection, request, strlen(request), fd, 0):
        n = receive_datagram(connection, reply, room, &received, 0)
    close(connection)
    if received >= 0 and (n <= 0 or reply_fd == NULL):
        close(received)
    elif reply_fd != NULL:
        reply_fd[0] = received
    return n > 0
