/* The two driver threads of each process.
 *
 * simcuda-restore listens on the abstract socket @simcuda-<folder>-<pid> and does what other processes ask through
 * cuCheckpointProcess*: it is the "restore thread" whose id is given out and which must run during checkpoint and
 * restore. simcuda-driver does the locking: measured, a lock hangs when every thread but the restore thread is stopped.
 * One connection serves one request, so nothing is connected while idle and CRIU can dump the process. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "simcuda.h"

static int listener = -1;
static atomic_int restore_tid;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static int lock_client = -1; /* waiting for simcuda-driver, with its timeout */
static unsigned lock_timeout_ms;

/* Write the socket's name, which starts with a zero byte; returns its length. */
size_t service_socket_name(pid_t pid, char *out, size_t size) {
    uint32_t hash = 2166136261u; /* FNV-1a of the folder: machines do not see each other */
    for (const char *c = state_folder(); *c; c++)
        hash = (hash ^ (unsigned char)*c) * 16777619u;
    out[0] = 0;
    return 1 + (size_t)snprintf(out + 1, size - 1, "simcuda-%08x-%d", hash, (int)pid);
}

static bool peer_allowed(int client) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &length))
        return false;
    return peer.uid == 0 || peer.uid == geteuid();
}

static void answer(int client, CUresult result, int value) {
    struct reply reply = {result, value};
    /* A caller that has gone needs no answer. */
    if (send(client, &reply, sizeof reply, MSG_NOSIGNAL) < 0)
        errno = 0;
    close(client);
}

static void pass_to_driver_thread(int client, unsigned timeout_ms) {
    pthread_mutex_lock(&lock);
    bool busy = lock_client >= 0;
    if (!busy) {
        lock_client = client;
        lock_timeout_ms = timeout_ms;
        pthread_cond_signal(&work);
    }
    pthread_mutex_unlock(&lock);
    if (busy)
        answer(client, CUDA_ERROR_ILLEGAL_STATE, 0);
}

static void serve(int client) {
    struct request request = {0};
    struct timeval patience = {.tv_sec = 5};
    setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (!peer_allowed(client)) {
        answer(client, CUDA_ERROR_NOT_PERMITTED, 0);
        return;
    }
    if (recv(client, &request, sizeof request, 0) != sizeof request) {
        close(client);
        return;
    }
    switch (request.verb) {
    case VERB_STATE: answer(client, CUDA_SUCCESS, checkpoint_state()); return;
    case VERB_THREAD: answer(client, CUDA_SUCCESS, atomic_load(&restore_tid)); return;
    case VERB_LOCK: pass_to_driver_thread(client, request.timeout_ms); return;
    case VERB_CHECKPOINT: answer(client, checkpoint_checkpoint(client), 0); return;
    case VERB_RESTORE: answer(client, checkpoint_restore(&request), 0); return;
    case VERB_UNLOCK: answer(client, checkpoint_unlock(), 0); return;
    default: answer(client, CUDA_ERROR_INVALID_VALUE, 0);
    }
}

static void *restore_thread(void *unused) {
    (void)unused;
    atomic_store(&restore_tid, (int)syscall(SYS_gettid));
    for (;;) {
        int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client >= 0)
            serve(client);
        else if (errno != EINTR && errno != ECONNABORTED)
            nap_us(10000); /* out of descriptors: the caller waits */
    }
    return NULL;
}

static void *driver_thread(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (lock_client < 0)
            pthread_cond_wait(&work, &lock);
        int client = lock_client;
        unsigned timeout_ms = lock_timeout_ms;
        pthread_mutex_unlock(&lock);
        CUresult result = checkpoint_lock(timeout_ms, client);
        pthread_mutex_lock(&lock);
        lock_client = -1;
        pthread_mutex_unlock(&lock);
        answer(client, result, 0);
    }
    return NULL;
}

/* Open the socket and start both threads. */
CUresult service_start(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = service_socket_name(getpid(), address.sun_path, sizeof address.sun_path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)) || listen(fd, 16)) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    listener = fd;
    if (!start_thread(restore_thread, NULL, "simcuda-restore", NULL) || !start_thread(driver_thread, NULL, "simcuda-driver", NULL))
        return CUDA_ERROR_OPERATING_SYSTEM;
    while (!atomic_load(&restore_tid))
        nap_us(50);
    return CUDA_SUCCESS;
}

void service_forked_child(void) {
    if (listener >= 0)
        close(listener);
    listener = -1;
}
