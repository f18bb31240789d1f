/* cuCheckpointProcess*: the calling side. Each call is one request to the target's restore thread. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "simcuda.h"

/* Read the innermost value of a line such as "NSpid:\t12\t1" of a status file; 0 when there is none. */
static int innermost(const char *path, const char *key) {
    char line[256];
    int value = 0;
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key))) {
            char *last = strrchr(line, '\t');
            value = last ? atoi(last) : 0;
        }
    if (file)
        fclose(file);
    return value;
}

/* The target's own pid: sockets are named by it, in whatever pid namespace it lives. */
static int inner_pid(int pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    int is_leader = innermost(path, "Tgid:") == pid;
    int inner = innermost(path, "NSpid:");
    return is_leader ? (inner ? inner : pid) : 0;
}

static CUresult open_target(int pid, int *out) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int inner = pid > 0 ? inner_pid(pid) : 0;
    if (!inner)
        return CUDA_ERROR_OPERATING_SYSTEM;
    size_t length = service_socket_name(inner, address.sun_path, sizeof address.sun_path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (connect(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length))) {
        close(fd);
        return CUDA_ERROR_NOT_INITIALIZED; /* it never called cuInit */
    }
    *out = fd;
    return CUDA_SUCCESS;
}

/* Wait for the answer; timeout_ms < 0 waits for ever, as the driver does. */
static CUresult ask(int pid, const struct request *request, int timeout_ms, int *value) {
    int fd;
    struct reply reply;
    CUresult result = open_target(pid, &fd);
    if (result != CUDA_SUCCESS)
        return result;
    struct pollfd answer = {.fd = fd, .events = POLLIN};
    if (send(fd, request, sizeof *request, MSG_NOSIGNAL) != sizeof *request)
        result = CUDA_ERROR_OPERATING_SYSTEM;
    else if (poll(&answer, 1, timeout_ms) == 0)
        result = CUDA_ERROR_NOT_READY;
    else if (recv(fd, &reply, sizeof reply, 0) != sizeof reply)
        result = CUDA_ERROR_OPERATING_SYSTEM; /* it died */
    else {
        result = reply.result;
        if (value)
            *value = reply.value;
    }
    close(fd);
    return result;
}

/* Translate a thread id of the target's pid namespace into the caller's. */
static int outer_tid(int pid, int tid) {
    char path[320];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    int found = tid;
    for (struct dirent *entry; tasks && (entry = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/%d/task/%s/status", pid, entry->d_name);
        if (atoi(entry->d_name) && innermost(path, "NSpid:") == tid)
            found = atoi(entry->d_name);
    }
    if (tasks)
        closedir(tasks);
    return found;
}

/* NVML alone has the node of a GPU open, too, as a process with CUDA has; a test opens it to be such a process. */
static bool reads_nvml(int pid) {
    char path[700], target[700], wanted[600];
    bool found = false;
    snprintf(wanted, sizeof wanted, "%s/nvidia0", state_folder());
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *fds = opendir(path);
    for (struct dirent *entry; fds && !found && (entry = readdir(fds));) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, entry->d_name);
        ssize_t length = readlink(path, target, sizeof target - 1);
        target[length < 0 ? 0 : length] = 0;
        found = !strcmp(target, wanted);
    }
    if (fds)
        closedir(fds);
    return found;
}

/* Measured: a process that only reads NVML is said to be running, by its first thread. */
static CUresult ask_about(int pid, const struct request *request, int *out, int of_nvml) {
    CUresult result = out ? ask(pid, request, -1, out) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_ERROR_NOT_INITIALIZED || !reads_nvml(pid))
        return result;
    *out = of_nvml;
    return CUDA_SUCCESS;
}

/* Measured: needs no cuInit of the caller. */
API(CALL_ANY, cuCheckpointProcessGetState, (int pid, CUprocessState *out), (pid, out)) {
    return ask_about(pid, &(struct request){.verb = VERB_STATE}, (int *)out, CU_PROCESS_STATE_RUNNING);
}

API(CALL_UNLOCKED, cuCheckpointProcessGetRestoreThreadId, (int pid, int *out), (pid, out)) {
    int tid = 0;
    CUresult result = out ? ask_about(pid, &(struct request){.verb = VERB_THREAD}, &tid, pid) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = outer_tid(pid, tid);
    return result;
}

API(CALL_UNLOCKED, cuCheckpointProcessLock, (int pid, CUcheckpointLockArgs *args), (pid, args)) {
    unsigned timeout_ms = args ? args->timeoutMs : 0;
    /* The target keeps the time; a little more is given here for its answer. */
    return ask(pid, &(struct request){.verb = VERB_LOCK, .timeout_ms = timeout_ms}, timeout_ms ? (int)timeout_ms + 500 : -1, NULL);
}

API(CALL_UNLOCKED, cuCheckpointProcessCheckpoint, (int pid, CUcheckpointCheckpointArgs *args), (pid, args)) {
    (void)args;
    return ask(pid, &(struct request){.verb = VERB_CHECKPOINT}, -1, NULL);
}

API(CALL_UNLOCKED, cuCheckpointProcessRestore, (int pid, CUcheckpointRestoreArgs *args), (pid, args)) {
    struct request request = {.verb = VERB_RESTORE};
    if (args && args->gpuPairsCount > MAX_DEVICES)
        return CUDA_ERROR_INVALID_VALUE;
    if (args && args->gpuPairsCount && !args->gpuPairs)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; args && i < args->gpuPairsCount; i++)
        request.pairs[request.pair_count++] = args->gpuPairs[i];
    return ask(pid, &request, -1, NULL);
}

API(CALL_UNLOCKED, cuCheckpointProcessUnlock, (int pid, CUcheckpointUnlockArgs *args), (pid, args)) {
    (void)args;
    return ask(pid, &(struct request){.verb = VERB_UNLOCK}, -1, NULL);
}
