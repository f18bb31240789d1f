# What every part uses: atomics, locks, log, text, clock, random bytes, threads. It must not know CUDA objects, phases
# or the protocol.
#
#   gs_lock(&m) gs_trylock(&m) gs_unlock(&m)   futex mutexes; all are defined, with their order, in platform.h
#   gs_load gs_store gs_add gs_or gs_swap gs_cas (and ...64)   sequentially consistent, on uint32_t * (uint64_t *)
#   gs_futex_wait(word, seen, timeout_ms)   returns at a wake, a signal, the timeout or if *word != seen; -1 waits on
#   gs_log(format, ...)                one line to stderr where GPUSHARE_LOG=1; %s %.*s %d %u %x %c with l, ll, z
#   gs_format(out, size, format, ...)  -> length written; the same formats, always NUL-terminated, cut at size
#   now_ns()                           monotonic clock
#   sleep_us(n)
#   random_bytes(p, n) -> bint
#   start_thread(function, argument) -> bint   named nvsnap-gpushare, all signals blocked, passes the gates
#   gs_self.bypass                     thread-local; not 0: the gates do not hold this thread

cdef extern from "platform.h" nogil:
    ctypedef struct gs_mutex:
        uint32_t state
        uint32_t order
    ctypedef struct gs_shard:
        uint32_t in_flight[2]
    ctypedef struct gs_thread:
        gs_shard *shard
        uint32_t depth
        uint32_t bypass
    gs_thread gs_self
    gs_mutex start_mutex, hostfunc_mutex, phase_mutex, peer_mutex, tables_mutex
    void gs_lock(gs_mutex *m)
    bint gs_trylock(gs_mutex *m)
    void gs_unlock(gs_mutex *m)
    void gs_reset_locks()
    uint32_t gs_load(uint32_t *p)
    void gs_store(uint32_t *p, uint32_t v)
    uint32_t gs_add(uint32_t *p, uint32_t v)
    uint32_t gs_or(uint32_t *p, uint32_t v)
    uint32_t gs_swap(uint32_t *p, uint32_t v)
    bint gs_cas(uint32_t *p, uint32_t old, uint32_t fresh)
    uint64_t gs_load64(uint64_t *p)
    void gs_store64(uint64_t *p, uint64_t v)
    uint64_t gs_add64(uint64_t *p, uint64_t v)
    bint gs_cas64(uint64_t *p, uint64_t old, uint64_t fresh)
    void *gs_load_pointer(void **p)
    void gs_store_pointer(void **p, void *v)
    void gs_futex_wait(uint32_t *word, uint32_t seen, int timeout_ms)
    void gs_futex_wake(uint32_t *word, int count)
    size_t gs_format(char *out, size_t size, const char *format, ...)
    void gs_log(const char *format, ...)
    bint gs_in_shim(const void *p)

cdef extern from "platform.h" nogil:
    ctypedef unsigned long pthread_t
    ctypedef struct sigset_t:
        pass
    struct timespec:
        long tv_sec
        long tv_nsec
    enum:
        SIG_SETMASK
        CLOCK_MONOTONIC
        PR_SET_NAME
    int pthread_create(pthread_t *thread, const void *attributes, void *(*function)(void *) noexcept nogil,
                       void *argument)
    int pthread_detach(pthread_t thread)
    int pthread_sigmask(int how, const sigset_t *set, sigset_t *old)
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)
    int sigfillset(sigset_t *set)
    int prctl(int option, ...)
    int clock_gettime(int clock, timespec *ts)
    int nanosleep(const timespec *wanted, timespec *left)
    ssize_t getrandom(void *buffer, size_t size, unsigned int flags)
    int strcmp(const char *a, const char *b)


cdef uint64_t now_ns() noexcept nogil:
    """Return the monotonic clock in nanoseconds."""
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <uint64_t>ts.tv_sec * 1000000000 + <uint64_t>ts.tv_nsec


cdef void sleep_us(uint32_t us) noexcept nogil:
    """Sleep for that many microseconds, or less if a signal comes."""
    cdef timespec ts
    ts.tv_sec = us // 1000000
    ts.tv_nsec = (us % 1000000) * 1000
    nanosleep(&ts, NULL)


cdef bint random_bytes(void *out, size_t size) noexcept nogil:
    """Fill `out` with random bytes; False if the kernel has none to give."""
    return getrandom(out, size, 0) == <ssize_t>size


# What a new thread runs; filled in under start_mutex, read once by the thread.
ctypedef struct ThreadStart:
    void (*function)(void *) noexcept nogil
    void *argument
    uint32_t taken

cdef ThreadStart thread_start


cdef void *thread_main(void *unused) noexcept nogil:
    """Begin a thread of ours: take the name that the freezer spares, pass the gates, run."""
    cdef ThreadStart start = thread_start
    prctl(PR_SET_NAME, b"nvsnap-gpushare")
    gs_store(&thread_start.taken, 1)
    gs_futex_wake(&thread_start.taken, 1)
    gs_self.bypass = 1
    start.function(start.argument)
    return NULL


cdef bint start_thread(void (*function)(void *) noexcept nogil, void *argument) noexcept nogil:
    """Run `function(argument)` in a detached thread of ours; False if none can be made. Takes start_mutex."""
    cdef pthread_t thread
    cdef sigset_t all_signals, before
    cdef bint made
    gs_lock(&start_mutex)
    thread_start.function = function
    thread_start.argument = argument
    gs_store(&thread_start.taken, 0)
    # The thread inherits the mask: a signal of the application never runs its handler on our stack.
    sigfillset(&all_signals)
    pthread_sigmask(SIG_SETMASK, &all_signals, &before)
    made = pthread_create(&thread, NULL, thread_main, NULL) == 0
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    if made:
        pthread_detach(thread)
        while gs_load(&thread_start.taken) == 0:
            gs_futex_wait(&thread_start.taken, 0, -1)
    gs_unlock(&start_mutex)
    return made
