/* A libcuda.so.1 that has checkpoint calls and nothing else, for the answers that the simulated driver never gives.
 *
 * The pid decides: 1 success, 2 result 401, 3 result 4242 (unknown), 4 state 77 (unknown), 5 waits until the file named
 * by FAKE_RELEASE exists (and makes FAKE_RELEASE.entered before), 6 ends the calling process.  FAKE_INIT is the result
 * of cuInit, FAKE_VERSION the driver's version, FAKE_OLD hides the unlock, FAKE_PAIRS names a file for the GPU pairs of
 * a restore.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int answer(int pid)
{
    const char *release = getenv("FAKE_RELEASE");
    if (pid == 5 && release) {
        char entered[4096];
        snprintf(entered, sizeof entered, "%s.entered", release);
        close(creat(entered, 0600));
        while (access(release, F_OK))
            usleep(1000);
    }
    if (pid == 6)
        _exit(9);
    return pid == 2 ? 401 : pid == 3 ? 4242 : 0;
}

static int init(unsigned flags)
{
    (void)flags;
    puts("a driver that prints");
    fflush(stdout);
    return getenv("FAKE_INIT") ? atoi(getenv("FAKE_INIT")) : 0;
}

static int version(int *value)
{
    *value = 13000;
    return 0;
}

static int state(int pid, int *value)
{
    *value = pid == 4 ? 77 : 2;
    return answer(pid);
}

static int thread(int pid, int *value)
{
    *value = pid + 100;
    return answer(pid);
}

static int lock(int pid, const unsigned *arguments)
{
    return arguments[0] == 0 ? 1 : answer(pid);
}

static int plain(int pid, void *arguments)
{
    return arguments ? 1 : answer(pid);
}

static int restore(int pid, const void *arguments)
{
    const char *path = getenv("FAKE_PAIRS");
    if (arguments && path) {
        unsigned char *pairs;
        unsigned count;
        memcpy(&pairs, arguments, sizeof pairs);
        memcpy(&count, (const char *)arguments + sizeof pairs, sizeof count);
        FILE *file = fopen(path, "wb");
        fwrite(pairs, 32, count, file);
        fclose(file);
    }
    return answer(pid);
}

int simcudaVersion(void)
{
    return 13000;
}

const char *simcudaDriverVersionString(void)
{
    return getenv("FAKE_VERSION") ? getenv("FAKE_VERSION") : "580.159.04";
}

int cuGetProcAddress_v2(const char *name, void **function, int version_number, unsigned long flags, int *status);

int cuGetProcAddress_v2(const char *name, void **function, int version_number, unsigned long flags, int *status)
{
    static const struct {
        const char *name;
        void *function;
    } known[] = {
        {"cuInit", init},
        {"cuDriverGetVersion", version},
        {"cuGetProcAddress", cuGetProcAddress_v2},
        {"cuCheckpointProcessGetState", state},
        {"cuCheckpointProcessGetRestoreThreadId", thread},
        {"cuCheckpointProcessLock", lock},
        {"cuCheckpointProcessCheckpoint", plain},
        {"cuCheckpointProcessRestore", restore},
        {"cuCheckpointProcessUnlock", plain},
    };
    (void)version_number;
    (void)flags;
    if (status)
        *status = 0;
    *function = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name) && !(getenv("FAKE_OLD") && strstr(name, "Unlock")))
            *function = known[i].function;
    return *function ? 0 : 500;
}
