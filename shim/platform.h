/* What Cython cannot say: thread-local storage, atomics, futexes, variadic formatting, assembler, linker symbols.
 *
 * Included once, by interposer.pyx. Nothing here is exported but dlsym and dlvsym, and nothing runs before a call. */
#ifndef GS_PLATFORM_H
#define GS_PLATFORM_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"

#define GS_STREAM_PER_THREAD CU_STREAM_PER_THREAD

/* ---- system calls ----
 * libc's functions of these names end a thread that was cancelled; one that ends inside the shim never gives back its
 * locks and its place at the gates. `syscall` does not look for cancellation. */
#define open(path, flags) ((int)syscall(SYS_openat, AT_FDCWD, path, flags))
#define close(fd) ((int)syscall(SYS_close, fd))
#define read(fd, bytes, size) ((ssize_t)syscall(SYS_read, fd, bytes, size))
#define pread(fd, bytes, size, at) ((ssize_t)syscall(SYS_pread64, fd, bytes, size, at))
#define write(fd, bytes, size) ((ssize_t)syscall(SYS_write, fd, bytes, size))
#define connect(fd, address, size) ((int)syscall(SYS_connect, fd, address, size))
#define sendmsg(fd, message, flags) ((ssize_t)syscall(SYS_sendmsg, fd, message, flags))
#define recvmsg(fd, message, flags) ((ssize_t)syscall(SYS_recvmsg, fd, message, flags))
#define getrandom(bytes, size, flags) ((ssize_t)syscall(SYS_getrandom, bytes, size, flags))
#define nanosleep(wanted, left) ((int)syscall(SYS_nanosleep, wanted, left))

/* ---- what is looked for in the names of open files; the first is the content's mark, too (seal.pxi) ---- */
#define GS_PLACEHOLDER "gpushare-export"
#define GS_DRIVER_FILES "nvidia"

/* ---- atomics ----
 * Sequentially consistent where two words are compared across threads (the gates), else acquire and release. */
static inline uint32_t gs_load(uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline void gs_store(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static inline uint32_t gs_add(uint32_t *p, uint32_t v) { return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST); }
static inline uint32_t gs_or(uint32_t *p, uint32_t v) { return __atomic_or_fetch(p, v, __ATOMIC_SEQ_CST); }
static inline uint32_t gs_swap(uint32_t *p, uint32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
static inline int gs_cas(uint32_t *p, uint32_t old, uint32_t fresh) {
    return __atomic_compare_exchange_n(p, &old, fresh, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline uint64_t gs_load64(uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline void gs_store64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static inline uint64_t gs_add64(uint64_t *p, uint64_t v) { return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST); }
static inline int gs_cas64(uint64_t *p, uint64_t old, uint64_t fresh) {
    return __atomic_compare_exchange_n(p, &old, fresh, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline void *gs_load_pointer(void **p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void gs_store_pointer(void **p, void *v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

static inline void gs_futex_wait(uint32_t *word, uint32_t seen, int timeout_ms) {
    struct timespec limit = {timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, timeout_ms < 0 ? NULL : &limit, NULL, 0);
}
static inline void gs_futex_wake(uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* ---- per thread ----
 * initial-exec: one instruction instead of a call, and no allocation at first use. A few bytes, which the loader's
 * spare static space holds if somebody opens the library late. */
typedef struct gs_shard {
    _Alignas(64) uint32_t in_flight[2];
} gs_shard;

typedef struct gs_thread {
    gs_shard *shard;     /* where this thread counts its gated calls */
    uint32_t depth;      /* gated calls of this thread, one inside the other */
    uint32_t bypass;     /* not 0: the gates do not hold this thread */
    uint32_t lock_order; /* debug: bits of the locks held */
} gs_thread;

static __thread gs_thread gs_self __attribute__((tls_model("initial-exec")));

/* ---- gates: gates.pxi ---- */
enum { GS_SHARDS = 64 };
static gs_shard gs_shards[GS_SHARDS];

typedef struct gs_gates {
    uint32_t closed;     /* bit 1 << cls */
    uint32_t turn;       /* futex: changes with every change of the gates */
    uint32_t admitted;   /* launches that were let through the closed launch gate */
    uint32_t arrivals;   /* launches that have waited at it, ever */
    uint32_t waiting[2];
    uint32_t threads;    /* threads that were given a shard */
} gs_gates;

static gs_gates gates;

/* A launch that waits at the closed launch gate. Its thread takes and gives back the place; who looks at it while it
 * is WAITING may find it gone, so the stream is asked about and nothing else is done with it. */
enum { GS_WAITERS = 64 };
enum { GS_FREE, GS_TAKEN, GS_WAITING, GS_ADMITTED };
typedef struct gs_waiter {
    uint32_t state;
    uint32_t thread;  /* its id */
    uint32_t arrival; /* who came first */
    uint32_t known;   /* the stream means the same to every thread */
    void *stream, *context;
} gs_waiter;

static gs_waiter gs_waiters[GS_WAITERS];

/* The path of every hooked call: inlined, and without a call of its own. False: not counted, go to gate_wait. */
static inline __attribute__((always_inline)) int gs_count_in(int cls) {
    gs_thread *self = &gs_self;
    if (self->depth++ != 0) return 1;
    if (__builtin_expect(self->shard == NULL, 0)) return 0;
    __atomic_add_fetch(&self->shard->in_flight[cls], 1, __ATOMIC_SEQ_CST);
    if (__builtin_expect((__atomic_load_n(&gates.closed, __ATOMIC_SEQ_CST) & (1u << cls)) == 0, 1)) return 1;
    __atomic_sub_fetch(&self->shard->in_flight[cls], 1, __ATOMIC_SEQ_CST);
    return 0;
}

static inline __attribute__((always_inline)) void gs_count_out(int cls) {
    gs_thread *self = &gs_self;
    if (--self->depth == 0) __atomic_sub_fetch(&self->shard->in_flight[cls], 1, __ATOMIC_SEQ_CST);
}

/* ---- locks ----
 * Zero is unlocked, so a lock needs no initialiser but its place in the order: a thread takes locks in rising order.
 * Debug builds (-DGS_DEBUG) stop at a violation. A forked child resets all of them: their holders are not in it. */
typedef struct gs_mutex {
    uint32_t state; /* 0 free, 1 held, 2 held and waited for */
    uint32_t order;
} gs_mutex;

#define GS_MUTEXES(X)                                              \
    X(start_mutex, 1)   /* resolving the driver, starting */       \
    X(hostfunc_mutex, 2) /* the table of host functions */         \
    X(phase_mutex, 3)   /* one long verb at a time */              \
    X(peer_mutex, 4)    /* connections to other shims */           \
    X(tables_mutex, 5)  /* objects, mappings, allocations: innermost, held for edits only */

#define GS_DEFINE_MUTEX(name, place) static gs_mutex name = {0, place};
GS_MUTEXES(GS_DEFINE_MUTEX)
#undef GS_DEFINE_MUTEX

static inline void gs_lock(gs_mutex *m) {
#ifdef GS_DEBUG
    if (gs_self.lock_order >> m->order) __builtin_trap();
    gs_self.lock_order |= 1u << m->order;
#endif
    uint32_t seen = 0;
    if (__atomic_compare_exchange_n(&m->state, &seen, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    while (__atomic_exchange_n(&m->state, 2, __ATOMIC_ACQUIRE) != 0) gs_futex_wait(&m->state, 2, -1);
}

/* Zero where somebody holds it, the calling thread included. */
static inline int gs_trylock(gs_mutex *m) {
    uint32_t seen = 0;
    if (!__atomic_compare_exchange_n(&m->state, &seen, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return 0;
#ifdef GS_DEBUG
    gs_self.lock_order |= 1u << m->order;
#endif
    return 1;
}

static inline void gs_unlock(gs_mutex *m) {
#ifdef GS_DEBUG
    gs_self.lock_order &= ~(1u << m->order);
#endif
    if (__atomic_exchange_n(&m->state, 0, __ATOMIC_RELEASE) == 2) gs_futex_wake(&m->state, 1);
}

static inline void gs_reset_locks(void) {
#define GS_RESET_MUTEX(name, place) name.state = 0;
    GS_MUTEXES(GS_RESET_MUTEX)
#undef GS_RESET_MUTEX
    gs_self.lock_order = 0;
}

/* ---- text ----
 * gs_format understands %s %.*s %d %u %x %c %% with l, ll and z; it always ends with a NUL and returns the length that
 * was written (a longer text is cut). stdio would allocate, and lock. */
static size_t gs_put_number(char *out, size_t room, uint64_t value, unsigned base) {
    char digits[20];
    size_t n = 0, i;
    do {
        digits[n++] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value);
    for (i = 0; i < n && i < room; i++) out[i] = digits[n - 1 - i];
    return i;
}

static size_t gs_put_text(char *out, size_t room, const char *text, size_t most) {
    size_t n = 0;
    while (text && n < most && n < room && text[n]) {
        out[n] = text[n];
        n++;
    }
    return n;
}

static uint64_t gs_take_number(va_list *args, int size, int is_signed) {
    if (size >= 2) return va_arg(*args, unsigned long long);
    if (size == 1) return va_arg(*args, unsigned long);
    return is_signed ? (uint64_t)(int64_t)va_arg(*args, int) : va_arg(*args, unsigned);
}

static size_t gs_vformat(char *out, size_t size, const char *format, va_list *args) {
    size_t n = 0, room = size ? size - 1 : 0;
    for (; *format && n < room; format++) {
        size_t most = SIZE_MAX;
        int width = 0;
        if (*format != '%') {
            out[n++] = *format;
            continue;
        }
        format++;
        if (format[0] == '.' && format[1] == '*') {
            most = (size_t)va_arg(*args, int);
            format += 2;
        }
        for (; *format == 'l' || *format == 'z'; format++) width++;
        if (*format == 's') {
            n += gs_put_text(out + n, room - n, va_arg(*args, const char *), most);
        } else if (*format == 'c') {
            out[n++] = (char)va_arg(*args, int);
        } else if (*format == 'u' || *format == 'x') {
            n += gs_put_number(out + n, room - n, gs_take_number(args, width, 0), *format == 'x' ? 16 : 10);
        } else if (*format == 'd') {
            int64_t value = (int64_t)gs_take_number(args, width, 1);
            if (value < 0) out[n++] = '-';
            n += gs_put_number(out + n, room - n, value < 0 ? 0 - (uint64_t)value : (uint64_t)value, 10);
        } else if (*format) {
            out[n++] = *format;
        } else {
            break;
        }
    }
    if (size) out[n] = 0;
    return n;
}

__attribute__((format(printf, 3, 4), unused)) static size_t gs_format(char *out, size_t size, const char *format, ...) {
    va_list args;
    va_start(args, format);
    size_t n = gs_vformat(out, size, format, &args);
    va_end(args);
    return n;
}

/* ---- log: to stderr, one write a line, only where GPUSHARE_LOG=1 asks for it ---- */
static int gs_log_wanted(void) {
    const char *value = getenv("GPUSHARE_LOG");
    return value && value[0] == '1' && value[1] == 0;
}

__attribute__((format(printf, 1, 2), unused)) static void gs_log(const char *format, ...) {
    char line[512];
    if (!gs_log_wanted()) return;
    int saved = errno;
    va_list args;
    va_start(args, format);
    size_t n = gs_format(line, sizeof line, "gpushare[%d]: ", (int)getpid());
    n += gs_vformat(line + n, sizeof line - n - 1, format, &args);
    va_end(args);
    line[n++] = '\n';
    if (write(STDERR_FILENO, line, n) < 0) { /* nowhere to say it */
    }
    errno = saved;
}

/* ---- the part of CUgraphNodeParams that host functions need; the rest is other kinds of node ---- */
typedef struct gs_node_params {
    int type;
    int reserved0[3];
    union {
        CUDA_HOST_NODE_PARAMS host;
        char bytes[232];
    };
    long long reserved1;
} gs_node_params;
_Static_assert(sizeof(gs_node_params) == 256, "CUgraphNodeParams has 256 bytes");

/* ---- this library's own range: what lies in it is never a real driver function ---- */
extern const char gs_image_start[] __asm__("__ehdr_start") __attribute__((visibility("hidden")));
extern const char gs_image_end[] __asm__("_end") __attribute__((visibility("hidden")));

static inline int gs_in_shim(const void *p) {
    return (uintptr_t)p >= (uintptr_t)gs_image_start && (uintptr_t)p < (uintptr_t)gs_image_end;
}

/* ---- dlsym and dlvsym ----
 * The function to go on with is chosen (resolve.pxi) and jumped to with the caller's return address untouched: the
 * genuine ones look at it to find out who asks, which is what RTLD_NEXT means. A C tail call is one at -O2 only. */
#define GS_OWN_DLSYM ((void *)dlsym)
#define GS_OWN_DLVSYM ((void *)dlvsym)
void *gs_choose_dlsym(void *handle, const char *name, void *caller);
void *gs_choose_dlvsym(void *handle, const char *name, void *caller);

#if defined(__x86_64__)
#define GS_LOOKUP_ENTRY(entry, choose)                   \
    __asm__(".pushsection .text." entry ",\"ax\",@progbits\n" \
            ".hidden " choose "\n"                       \
            ".globl " entry "\n"                         \
            ".type " entry ",@function\n"                \
            ".balign 16\n" entry ":\n"                   \
            ".cfi_startproc\n"                           \
            "endbr64\n"                                  \
            "push %rdi\n.cfi_adjust_cfa_offset 8\n"      \
            "push %rsi\n.cfi_adjust_cfa_offset 8\n"      \
            "push %rdx\n.cfi_adjust_cfa_offset 8\n"      \
            "mov 24(%rsp), %rdx\n"                       \
            "call " choose "\n"                          \
            "pop %rdx\n.cfi_adjust_cfa_offset -8\n"      \
            "pop %rsi\n.cfi_adjust_cfa_offset -8\n"      \
            "pop %rdi\n.cfi_adjust_cfa_offset -8\n"      \
            "jmp *%rax\n"                                \
            ".cfi_endproc\n"                             \
            ".size " entry ",.-" entry "\n"              \
            ".popsection\n")
#elif defined(__aarch64__)
#define GS_LOOKUP_ENTRY(entry, choose)                   \
    __asm__(".pushsection .text." entry ",\"ax\",@progbits\n" \
            ".hidden " choose "\n"                       \
            ".globl " entry "\n"                         \
            ".type " entry ",@function\n"                \
            ".balign 16\n" entry ":\n"                   \
            ".cfi_startproc\n"                           \
            "hint #34\n" /* bti c */                     \
            "stp x29, x30, [sp, #-48]!\n"                \
            ".cfi_def_cfa_offset 48\n"                   \
            ".cfi_offset 29, -48\n.cfi_offset 30, -40\n" \
            "stp x0, x1, [sp, #16]\n"                    \
            "str x2, [sp, #32]\n"                        \
            "mov x2, x30\n"                              \
            "bl " choose "\n"                            \
            "mov x16, x0\n"                              \
            "ldr x2, [sp, #32]\n"                        \
            "ldp x0, x1, [sp, #16]\n"                    \
            "ldp x29, x30, [sp], #48\n"                  \
            ".cfi_def_cfa_offset 0\n"                    \
            ".cfi_restore 29\n.cfi_restore 30\n"         \
            "br x16\n"                                   \
            ".cfi_endproc\n"                             \
            ".size " entry ",.-" entry "\n"              \
            ".popsection\n")
#else
#error "gpushare supports x86-64 and aarch64"
#endif

GS_LOOKUP_ENTRY("dlsym", "gs_choose_dlsym");
GS_LOOKUP_ENTRY("dlvsym", "gs_choose_dlvsym");

#endif
