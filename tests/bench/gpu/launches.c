/* Measures what a driver call costs the caller: for each line on stdin a line of JSON, nanoseconds a call.
 *
 * Each number is the median over batches that are short enough for the GPU's queue, so that only the caller's side
 * is timed; the GPU is waited for between the batches. Usage: launches PTX BATCHES
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CALLS 200
#define MOST 4096
#define KINDS 3 /* of calls */

typedef int (*Function)();
static void *library;

static Function find(const char *name) {
    Function found = (Function)dlsym(library, name);
    if (!found) {
        fprintf(stderr, "no %s\n", name);
        exit(2);
    }
    return found;
}

static void need(int code, const char *what) {
    if (code) {
        fprintf(stderr, "%s answers %d\n", what, code);
        exit(2);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = calloc(1, 1 << 20);
    if (!file || !text || !fread(text, 1, (1 << 20) - 1, file)) {
        perror(path);
        exit(2);
    }
    return text;
}

/* Memory as the shim makes it for cuMemAlloc, of the program's own: what the driver takes for such addresses. */
static uint64_t mapped(int device) {
    struct { int type, handles, location, id; void *security; uint64_t flags[2]; } properties = {1, 0, 1, device};
    struct { int location, id, flags; } access = {1, device, 3};
    size_t size = 2 << 20;
    uint64_t handle, address;
    need(find("cuMemCreate")(&handle, size, &properties, 0ULL), "cuMemCreate");
    need(find("cuMemAddressReserve")(&address, size, (size_t)0, 0ULL, 0ULL), "cuMemAddressReserve");
    need(find("cuMemMap")(address, size, (size_t)0, handle, 0ULL), "cuMemMap");
    need(find("cuMemSetAccess")(address, size, &access, (size_t)1), "cuMemSetAccess");
    return address;
}

int main(int argc, char **argv) {
    static double taken[KINDS][MOST];
    char line[64];
    int device, batches = argc > 2 ? atoi(argv[2]) : 0;
    void *context, *module, *kernel, *stream;
    uint64_t memory, own, words = 1, start = 0;
    void *arguments[] = {&memory, &words, &start};
    if (batches < 1 || batches > MOST) return 2;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    need(find("cuInit")(0), "cuInit");
    need(find("cuDeviceGet")(&device, 0), "cuDeviceGet");
    need(find("cuDevicePrimaryCtxRetain")(&context, device), "cuDevicePrimaryCtxRetain");
    need(find("cuCtxSetCurrent")(context), "cuCtxSetCurrent");
    need(find("cuModuleLoadData")(&module, read_file(argv[1])), "cuModuleLoadData");
    need(find("cuModuleGetFunction")(&kernel, module, "gs_iota"), "cuModuleGetFunction");
    need(find("cuStreamCreate")(&stream, 1), "cuStreamCreate");
    need(find("cuMemAlloc_v2")(&memory, (size_t)4096), "cuMemAlloc");
    own = mapped(device);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **) = (void *)find("cuLaunchKernel");
    int (*copy)(uint64_t, uint64_t, size_t, void *) = (void *)find("cuMemcpyDtoDAsync_v2");
    int (*wait)(void *) = (void *)find("cuStreamSynchronize");
    while (fgets(line, sizeof line, stdin)) {
        for (int batch = -1; batch < batches; batch++) { /* the first one warms up */
            int at = batch < 0 ? 0 : batch;
            double begun = now();
            for (int i = 0; i < CALLS; i++)
                need(launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL), "cuLaunchKernel");
            taken[0][at] = (now() - begun) / CALLS;
            need(wait(stream), "cuStreamSynchronize");
            for (int kind = 1; kind < KINDS; kind++) {
                uint64_t place = kind == 1 ? memory : own;
                begun = now();
                for (int i = 0; i < CALLS; i++) need(copy(place, place + 64, 8, stream), "cuMemcpyDtoDAsync");
                taken[kind][at] = (now() - begun) / CALLS;
                need(wait(stream), "cuStreamSynchronize");
            }
        }
        for (int i = 0; i < KINDS; i++) qsort(taken[i], batches, sizeof(double), by_size);
        printf("{\"launch\": %.3f, \"copy\": %.3f, \"copy_mapped\": %.3f}\n", taken[0][batches / 2],
               taken[1][batches / 2], taken[2][batches / 2]);
        fflush(stdout);
    }
    return 0;
}
