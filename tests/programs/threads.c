/* A process of many threads that can be watched from outside: each counts in a slot of a shared file.
 *
 *     threads FILE THREADS [leaderless] [vfork] [spawn] [undumpable]
 *
 * Slot 0 counts signals (SIGRTMIN, queued) that arrived; slot 1 is the thread named nvsnap-gpushare, slot 2 the one
 * named simcuda-gpu, slot 3 threads made by `spawn`, slot 4 becomes 1 when everything runs; the child of `vfork` runs
 * until somebody else writes into slot 5, and its parent has slot 6; the rest are plain threads.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { SIGNALS, CONTROL, GPU, SPAWNED, READY, RELEASED, PLAIN };
static volatile uint64_t *slots;

static void on_signal(int number)
{
    (void)number;
    __atomic_add_fetch(&slots[SIGNALS], 1, __ATOMIC_SEQ_CST);
}

static void *count(void *argument)
{
    size_t slot = (size_t)argument;
    if (slot == CONTROL || slot == GPU) {
        /* The signals of the test are for threads that are stopped. */
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, NULL);
        prctl(PR_SET_NAME, slot == CONTROL ? "nvsnap-gpushare" : "simcuda-gpu");
    }
    for (;;) {
        slots[slot]++;
        usleep(500);
    }
    return NULL;
}

static void *one_count(void *argument)
{
    (void)argument;
    __atomic_add_fetch(&slots[SPAWNED], 1, __ATOMIC_SEQ_CST);
    usleep(200);
    return NULL;
}

static void *spawn(void *argument)
{
    (void)argument;
    for (;;) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, one_count, NULL) == 0)
            pthread_detach(thread);
        usleep(50);
    }
    return NULL;
}

static void *block_in_vfork(void *argument)
{
    (void)argument;
    /* The parent thread stays in the kernel, uninterruptible but for SIGKILL, until the child ends. */
    if (vfork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        slots[PLAIN] = 1;
        while (!slots[RELEASED])
            usleep(1000);
        _exit(0);
    }
    return count((void *)(size_t)PLAIN);
}

static void wait_for(size_t slot)
{
    while (!slots[slot])
        usleep(1000);
}

int main(int argc, char **argv)
{
    int threads = atoi(argv[2]);
    int fd = open(argv[1], O_RDWR);
    slots = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || slots == MAP_FAILED)
        return 1;
    signal(SIGRTMIN, on_signal);
    pthread_t thread;
    for (size_t slot = CONTROL; slot <= GPU; slot++)
        if (pthread_create(&thread, NULL, count, (void *)slot))
            return 1;
    int leaderless = 0, spawning = 0, blocked = 0;
    for (int i = 3; i < argc; i++) {
        if (!strcmp(argv[i], "leaderless"))
            leaderless = 1;
        if (!strcmp(argv[i], "spawn") && (spawning = 1) && pthread_create(&thread, NULL, spawn, NULL))
            return 1;
        if (!strcmp(argv[i], "vfork") && (blocked = 1) && pthread_create(&thread, NULL, block_in_vfork, NULL))
            return 1;
        if (!strcmp(argv[i], "undumpable"))
            prctl(PR_SET_DUMPABLE, 0);
    }
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread, NULL, count, (void *)(size_t)(PLAIN + 1 + i)))
            return 1;
    for (int slot = CONTROL; slot <= PLAIN + threads; slot++)
        if (slot <= GPU || slot > PLAIN || (slot == SPAWNED && spawning) || (slot == PLAIN && blocked))
            wait_for((size_t)slot);
    slots[READY] = 1;
    if (leaderless)
        pthread_exit(NULL);
    for (;;)
        pause();
}
