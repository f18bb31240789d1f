/* Probe of the bare driver: HOST_NUMA memory taken off an address and put back, with the live bytes left there meanwhile.
 *
 *   gcc -o host_placeholder host_placeholder.c -I$CUDA/include -lcuda -lpthread
 *   ./host_placeholder cycle     unmap, private placeholder at the address, driver checkpoint and restore, map again
 *   ./host_placeholder keep      the same, and the placeholder still lies there when the driver maps again
 *   ./host_placeholder before    placeholder moved over the mapping first, then cuMemUnmap (loses the placeholder)
 *   ./host_placeholder frozen    300 times: ptrace-stop 8 threads that call the driver, then unmap, map and set access
 * Exit status 0: everything as docs/reference/driver-facts.md says.  */
#define _GNU_SOURCE
#include <cuda.h>
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SIZE = 2 << 20, STOPS = 300, THREADS = 8 };

static int from_parent, to_parent;

#define CHECK(call) do { CUresult result_ = (call); \
        if (result_ != CUDA_SUCCESS) { printf("%s -> %d\n", #call, result_); exit(1); } } while (0)
#define REQUIRE(what) do { if (!(what)) { printf("not so: %s\n", #what); exit(1); } } while (0)

static CUmemGenericAllocationHandle create_host_memory(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    CUmemGenericAllocationHandle handle = 0;
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    CHECK(cuMemCreate(&handle, SIZE, &prop, 0));
    return handle;
}

static void map(CUdeviceptr va, CUmemGenericAllocationHandle handle) {
    CUmemAccessDesc access[2] = {{.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[1].location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    CHECK(cuMemMap(va, SIZE, 0, handle, 0));
    CHECK(cuMemSetAccess(va, SIZE, access, 2));
}

static CUcontext start_cuda(void) {
    CUdevice device; CUcontext context;
    CHECK(cuInit(0)); CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device)); CHECK(cuCtxSetCurrent(context));
    return context;
}

static void *copy_of(const void *bytes) {
    void *copy = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(copy, bytes, SIZE);
    return copy;
}

static int is_inaccessible(CUdeviceptr va) {
    FILE *maps = fopen("/proc/self/maps", "re"); char line[512]; int found = 0; unsigned long from, to; char mode[5];
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %4s", &from, &to, mode) == 3 && from <= va && va < to) found = !strcmp(mode, "---p");
    fclose(maps);
    return found;
}

static void cycle(const char *variant) {
    CUdeviceptr va = 0, device_copy = 0; CUmemGenericAllocationHandle handle; unsigned char seen[8]; char byte = 0;
    int before = !strcmp(variant, "before");
    start_cuda();
    handle = create_host_memory();
    CHECK(cuMemAddressReserve(&va, SIZE, 0, 0, 0));
    map(va, handle);
    volatile unsigned char *host = (unsigned char *)va;
    memset((void *)host, 7, SIZE);
    CHECK(cuMemAlloc(&device_copy, SIZE)); CHECK(cuMemcpy(device_copy, va, SIZE));

    void *placeholder = copy_of((void *)host);
    if (!before) { CHECK(cuMemUnmap(va, SIZE)); CHECK(cuMemRelease(handle)); REQUIRE(is_inaccessible(va)); }
    REQUIRE(mremap(placeholder, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)va) == (void *)va);
    if (before) { CHECK(cuMemUnmap(va, SIZE)); CHECK(cuMemRelease(handle)); REQUIRE(is_inaccessible(va)); }

    if (write(to_parent, "c", 1) != 1 || read(from_parent, &byte, 1) != 1) exit(1);      /* the parent checkpoints and restores */

    void *live = NULL;
    if (!before) { REQUIRE(host[5] == 7); host[6] = 9; live = copy_of((void *)host); }
    if (!strcmp(variant, "cycle"))
        REQUIRE(mmap((void *)va, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == (void *)va);
    map(va, create_host_memory());
    if (live) memcpy((void *)host, live, SIZE);
    CHECK(cuMemcpy(device_copy, va, SIZE)); CHECK(cuMemcpyDtoH(seen, device_copy, sizeof seen));
    REQUIRE(!live || (seen[5] == 7 && seen[6] == 9));
    CHECK(cuMemsetD8(va, 0x21, 64)); CHECK(cuCtxSynchronize());
    REQUIRE(host[5] == 0x21);
    exit(0);
}

static CUcontext shared_context;

static void *call_the_driver(void *number) {
    CUevent event; CUstream stream; CUdeviceptr memory; CUdevice device; CUstreamCaptureStatus status; unsigned type; size_t spare, total;
    cuCtxSetCurrent(shared_context); cuEventCreate(&event, 0); cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING); cuMemAlloc(&memory, 1 << 20);
    for (;;)
        switch ((long)number % 5) {
        case 0: cuCtxGetDevice(&device); cuEventQuery(event); break;
        case 1: cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory); break;
        case 2: cuStreamIsCapturing(stream, &status); cuStreamQuery(stream); break;
        case 3: cuEventRecord(event, stream); cuEventSynchronize(event); break;
        case 4: cuMemGetInfo(&spare, &total); free(malloc(5000)); break;
        }
    return NULL;
}

static void remap_on_demand(void) {
    CUdeviceptr va = 0; pthread_t thread; char byte;
    shared_context = start_cuda();
    prctl(PR_SET_NAME, "control");
    CUmemGenericAllocationHandle handle = create_host_memory();
    CHECK(cuMemAddressReserve(&va, SIZE, 0, 0, 0));
    map(va, handle);
    prctl(PR_SET_NAME, "worker");
    for (long i = 0; i < THREADS; i++) REQUIRE(!pthread_create(&thread, NULL, call_the_driver, (void *)i));
    prctl(PR_SET_NAME, "control");
    sleep(1);
    if (write(to_parent, "r", 1) != 1) exit(1);
    while (read(from_parent, &byte, 1) == 1) {
        CHECK(cuMemUnmap(va, SIZE)); map(va, handle);
        if (write(to_parent, "k", 1) != 1) exit(1);
    }
    exit(0);
}

static int answer(int fd, int timeout_ms) {
    struct pollfd wait = {.fd = fd, .events = POLLIN}; char byte;
    return poll(&wait, 1, timeout_ms) == 1 && read(fd, &byte, 1) == 1 ? byte : 0;
}

static int stop_workers(int pid, int *tids) {
    char path[64], name[32]; int n = 0, status; struct dirent *entry;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    while ((entry = readdir(tasks))) {
        int tid = atoi(entry->d_name); char comm[400];
        snprintf(comm, sizeof comm, "%s/%s/comm", path, entry->d_name);
        FILE *file = tid ? fopen(comm, "re") : NULL;
        int ours = file && fgets(name, sizeof name, file) && !strcmp(name, "worker\n");
        if (file) fclose(file);
        if (ours && !ptrace(PTRACE_SEIZE, tid, 0, 0)) { ptrace(PTRACE_INTERRUPT, tid, 0, 0); tids[n++] = tid; }
    }
    closedir(tasks);
    for (int i = 0; i < n; i++) waitpid(tids[i], &status, __WALL);
    return n;
}

static int stop_many_times(int pid, int to_child, int from_child) {
    int tids[64], answered = 0;
    for (int i = 0; i < STOPS; i++) {
        int stopped = stop_workers(pid, tids);
        if (stopped != THREADS || write(to_child, "g", 1) != 1) break;
        int in_time = answer(from_child, 1000) == 'k';
        for (int t = 0; t < stopped; t++) ptrace(PTRACE_DETACH, tids[t], 0, 0);
        if (!in_time) break;
        answered++;
        usleep(2000);
    }
    printf("driver calls beside stopped threads: %d of %d answered\n", answered, STOPS);
    return answered == STOPS ? 0 : 1;
}

static int checkpoint_and_restore(int pid, int to_child) {
    CUcheckpointLockArgs lock = {.timeoutMs = 5000}; int status;
    CHECK(cuInit(0));
    CHECK(cuCheckpointProcessLock(pid, &lock)); CHECK(cuCheckpointProcessCheckpoint(pid, NULL));
    CHECK(cuCheckpointProcessRestore(pid, NULL)); CHECK(cuCheckpointProcessUnlock(pid, NULL));
    if (write(to_child, "x", 1) != 1 || waitpid(pid, &status, 0) != pid) return 1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv) {
    int down[2], up[2];
    if (argc != 2 || pipe(down) || pipe(up)) return 2;
    int pid = fork();
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        from_parent = down[0]; to_parent = up[1]; close(down[1]); close(up[0]);
        strcmp(argv[1], "frozen") ? cycle(argv[1]) : remap_on_demand();
    }
    close(down[0]); close(up[1]);
    int result = 1;
    if (answer(up[0], 30000)) result = strcmp(argv[1], "frozen") ? checkpoint_and_restore(pid, down[1]) : stop_many_times(pid, down[1], up[0]);
    kill(pid, SIGKILL);
    printf("%s: %s\n", argv[1], result ? "FAILED" : "as expected");
    return result;
}
