# What the core uses of libc and the kernel, and deadlines.

cdef extern from "platform.h" nogil:
    ctypedef long off_t
    ctypedef long time_t
    ctypedef long suseconds_t
    ctypedef unsigned int socklen_t
    ctypedef unsigned long intptr_t
    ctypedef unsigned long uintptr_t
    ctypedef struct struct_flock "struct flock":
        short l_type
        short l_whence
        off_t l_start
        off_t l_len
        int l_pid
    ctypedef struct struct_stat "struct stat":
        unsigned long st_dev
        unsigned long st_ino
        off_t st_size
    ctypedef struct struct_iovec "struct iovec":
        void *iov_base
        size_t iov_len
    ctypedef struct struct_msghdr "struct msghdr":
        struct_iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
        int msg_flags
    ctypedef struct struct_cmsghdr "struct cmsghdr":
        size_t cmsg_len
        int cmsg_level
        int cmsg_type
    ctypedef struct sockaddr "struct sockaddr":
        pass
    ctypedef struct struct_sockaddr_un "struct sockaddr_un":
        unsigned short sun_family
        char sun_path[108]
    ctypedef struct struct_ucred "struct ucred":
        int pid
        unsigned int uid
        unsigned int gid
    ctypedef struct struct_timeval "struct timeval":
        time_t tv_sec
        suseconds_t tv_usec
    ctypedef struct struct_pollfd "struct pollfd":
        int fd
        short events
        short revents
    enum:
        PROT_NONE
        MAP_SHARED
        MAP_FIXED
        MADV_DONTFORK
        F_GETFD
        F_SETOWN
        F_GETOWN
        F_SETFL
        F_DUPFD_CLOEXEC
        F_OFD_SETLK
        F_OFD_GETLK
        F_WRLCK
        F_UNLCK
        FD_CLOEXEC
        SEEK_SET
        AF_UNIX
        SOCK_SEQPACKET
        SOCK_CLOEXEC
        SOCK_NONBLOCK
        SOL_SOCKET
        SCM_RIGHTS
        SO_PEERCRED
        SO_RCVTIMEO
        SO_SNDTIMEO
        MSG_CMSG_CLOEXEC
        MSG_DONTWAIT
        MSG_NOSIGNAL
        MSG_TRUNC
        SHUT_RDWR
        O_CLOEXEC
        O_DIRECTORY
        O_RDONLY
        O_RDWR
        AT_FDCWD
        MFD_CLOEXEC
        POLLIN
        EBADF
        EINTR
        EADDRINUSE
        EAGAIN
        EMFILE
        EMSGSIZE
        ECONNABORTED
        EPERM
        ESRCH
        ENOMEM
        ECONNREFUSED
        SYS_kcmp
        SYS_getdents64
        SYS_gettid
        SYS_tgkill
    int errno
    int munmap(void *address, size_t size)
    int mprotect(void *address, size_t size, int protection)
    int madvise(void *address, size_t size, int advice)
    int mincore(void *address, size_t size, unsigned char *resident)
    int memfd_create(const char *name, unsigned int flags)
    int ftruncate(int fd, off_t size)
    int fstat(int fd, struct_stat *st)
    int fcntl(int fd, int command, ...)
    int open(const char *path, int flags, ...)
    int close(int fd)
    ssize_t read(int fd, void *out, size_t size)
    ssize_t pread(int fd, void *out, size_t size, off_t at)
    int dup3(int old, int fresh, int flags)
    ssize_t readlinkat(int folder, const char *path, char *out, size_t room)
    long syscall(long number, ...)
    int getpid()
    unsigned int geteuid()
    int socket(int domain, int type, int protocol)
    int bind(int fd, const sockaddr *address, socklen_t size)
    int listen(int fd, int backlog)
    int accept4(int fd, sockaddr *address, socklen_t *size, int flags)
    int connect(int fd, const sockaddr *address, socklen_t size)
    int getsockopt(int fd, int level, int name, void *value, socklen_t *size)
    int setsockopt(int fd, int level, int name, const void *value, socklen_t size)
    ssize_t sendmsg(int fd, const struct_msghdr *message, int flags)
    ssize_t recvmsg(int fd, struct_msghdr *message, int flags)
    int shutdown(int fd, int how)
    int poll(struct_pollfd *fds, unsigned long count, int timeout_ms)
    struct_cmsghdr *CMSG_FIRSTHDR(struct_msghdr *message)
    struct_cmsghdr *CMSG_NXTHDR(struct_msghdr *message, struct_cmsghdr *header)
    unsigned char *CMSG_DATA(struct_cmsghdr *header)
    size_t CMSG_LEN(size_t size)
    size_t CMSG_SPACE(size_t size)
    void *memcpy(void *to, const void *from_, size_t size)
    void *memmove(void *to, const void *from_, size_t size)
    void *memset(void *to, int byte, size_t size)
    int memcmp(const void *a, const void *b, size_t size)
    size_t strlen(const char *text)
    int strncmp(const char *a, const char *b, size_t size)
    void *memchr(const void *p, int byte, size_t n)
    const char *strstr(const char *text, const char *part)
    const char *strrchr(const char *text, int c)
    char *getenv(const char *name)

cdef extern from "<dirent.h>" nogil:
    # What getdents64 writes; on 64-bit systems the C library's own entry has that layout.
    ctypedef struct Dirent "struct dirent":
        unsigned short d_reclen
        char d_name[256]

cdef extern from "cuda_abi.h" nogil:
    enum:
        CUDA_ERROR_NOT_MAPPED
        CUDA_ERROR_TIMEOUT
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED


cdef uint64_t deadline_in(uint64_t ms) noexcept nogil:
    """Return the moment that many milliseconds from now, in nanoseconds of the monotonic clock."""
    return now_ns() + ms * 1000000


cdef uint64_t time_left(uint64_t deadline) noexcept nogil:
    """Return the milliseconds until a deadline, 0 once it has passed."""
    cdef uint64_t now = now_ns()
    return (deadline - now) // 1000000 if deadline > now else 0


cdef bint sleep_before(uint64_t deadline, uint32_t ms) noexcept nogil:
    """Sleep for a moment; False if the deadline has passed."""
    if time_left(deadline) == 0:
        return False
    sleep_us(ms * 1000)
    return True


cdef void errno_set(int value) noexcept nogil:
    """Set errno."""
    global errno
    errno = value
