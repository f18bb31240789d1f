/* Small things that every part uses: pages, clocks, threads, pools of handles. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simcuda.h"

/* Return zeroed private pages, or NULL. */
void *pages_alloc(size_t size) {
    void *memory = mmap(NULL, round_up(size, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void pages_free(void *memory, size_t size) {
    if (memory)
        munmap(memory, round_up(size, PAGE));
}

/* Sleep while a word of this process has that value, or until somebody wakes. */
void futex_wait(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

void futex_wake(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0); }

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void nap_us(unsigned us) {
    struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};
    nanosleep(&t, NULL);
}

uint64_t random_u64(void) {
    uint64_t value = 0;
    while (getrandom(&value, sizeof value, 0) != sizeof value || value == 0)
        ;
    return value;
}

/* The folder that is the simulated machine: SIMCUDA_STATE, else one of the user's own in /dev/shm. */
const char *state_folder(void) {
    static char folder[512];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!folder[0]) {
        const char *named = getenv("SIMCUDA_STATE");
        if (named && named[0])
            snprintf(folder, sizeof folder, "%s", named);
        else
            snprintf(folder, sizeof folder, "/dev/shm/simcuda-%u", (unsigned)getuid());
    }
    pthread_mutex_unlock(&lock);
    return folder;
}

struct start {
    void *(*body)(void *);
    void *argument;
    char name[16];
};

static void *named_thread(void *data) {
    struct start start = *(struct start *)data;
    free(data);
    pthread_setname_np(pthread_self(), start.name);
    return start.body(start.argument);
}

/* Start a detached thread that takes none of the application's signals. */
bool start_thread(void *(*body)(void *), void *argument, const char *name, pthread_t *out) {
    struct start *start = calloc(1, sizeof *start);
    if (!start)
        return false;
    start->body = body;
    start->argument = argument;
    snprintf(start->name, sizeof start->name, "%s", name);
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 2 << 20);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    int failed = pthread_create(&thread, &attributes, named_thread, start);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed) {
        free(start);
        return false;
    }
    if (out)
        *out = thread;
    return true;
}

/* Return a zeroed object of the pool with its mark set, or NULL. */
void *pool_new(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    struct pooled *object = pool->free;
    if (object)
        pool->free = object->next_free;
    pthread_mutex_unlock(&pool->lock);
    if (object)
        memset(object, 0, pool->size);
    else
        object = calloc(1, pool->size);
    if (object)
        object->magic = pool->magic;
    return object;
}

void pool_delete(struct pool *pool, void *dead) {
    struct pooled *object = dead;
    pthread_mutex_lock(&pool->lock);
    object->magic = 0;
    object->next_free = pool->free;
    pool->free = object;
    pthread_mutex_unlock(&pool->lock);
}

/* Tell whether a handle that the application passed is a live object of the pool. */
bool pool_holds(const struct pool *pool, const void *object) {
    return (uintptr_t)object > 0xffff && (uintptr_t)object % 8 == 0 && ((const struct pooled *)object)->magic == pool->magic;
}
