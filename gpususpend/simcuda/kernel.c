/* Launches, and what the kernels that the simulated GPU knows by name do: those of gpususpend/demo/kernels.ptx. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

struct args {
    CUcontext context;
    const unsigned char *bytes;
    const struct param_layout *layout;
};

static uint64_t arg(const struct args *args, unsigned index) {
    uint64_t value = 0;
    if (index < args->layout->count)
        memcpy(&value, args->bytes + args->layout->offset[index], args->layout->size[index] < 8 ? args->layout->size[index] : 8);
    return value;
}

/* ---- walking memory: a kernel sees up to three arrays of words, in pieces that lie together ---- */

struct walk {
    CUdeviceptr at;
    bool write;
    struct view view;
};
typedef void (*piece_fn)(struct walk *walks, size_t count, uint64_t *state);

static CUresult walk_pieces(CUcontext context, struct walk *walks, unsigned arrays, size_t count, size_t width, piece_fn body, uint64_t *state) {
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < arrays; i++)
        if (walks[i].at % width)
            return CUDA_ERROR_ILLEGAL_ADDRESS;
    while (count && result == CUDA_SUCCESS) {
        size_t piece = count;
        for (unsigned i = 0; i < arrays; i++) {
            if (result == CUDA_SUCCESS)
                result = view_device(&walks[i].view, context, walks[i].at, count * width, walks[i].write, false);
            size_t there = result == CUDA_SUCCESS ? walks[i].view.length / width : 0;
            piece = there < piece ? there : piece;
        }
        if (result == CUDA_SUCCESS && !piece)
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
        if (result == CUDA_SUCCESS)
            body(walks, piece, state);
        for (unsigned i = 0; i < arrays; i++) {
            if (result == CUDA_SUCCESS)
                view_wrote(&walks[i].view, piece * width);
            view_done(&walks[i].view);
            walks[i].at += piece * width;
        }
        count -= piece;
    }
    return result;
}

static uint32_t *words(struct walk *walk) { return walk->view.bytes; }

static void fill_piece(struct walk *walks, size_t count, uint64_t *state) {
    for (size_t i = 0; i < count; i++)
        words(&walks[0])[i] = (uint32_t)state[0];
}

static void iota_piece(struct walk *walks, size_t count, uint64_t *state) {
    for (size_t i = 0; i < count; i++)
        words(&walks[0])[i] = (uint32_t)state[0]++;
}

static void add_piece(struct walk *walks, size_t count, uint64_t *state) {
    (void)state;
    for (size_t i = 0; i < count; i++)
        words(&walks[0])[i] += words(&walks[1])[i];
}

static void sum_piece(struct walk *walks, size_t count, uint64_t *state) {
    (void)state;
    for (size_t i = 0; i < count; i++)
        words(&walks[0])[i] = words(&walks[1])[i] + words(&walks[2])[i];
}

static void checksum_piece(struct walk *walks, size_t count, uint64_t *state) {
    for (size_t i = 0; i < count; i++)
        state[0] += words(&walks[0])[i];
}

static void store_piece(struct walk *walks, size_t count, uint64_t *state) {
    (void)count;
    __atomic_fetch_add((uint64_t *)walks[0].view.bytes, state[0], __ATOMIC_SEQ_CST);
}

static CUresult run_fill(const struct args *a) {
    struct walk walk[] = {{.at = arg(a, 0), .write = true}};
    uint64_t value = arg(a, 2);
    return walk_pieces(a->context, walk, 1, arg(a, 1), 4, fill_piece, &value);
}

static CUresult run_iota(const struct args *a) {
    struct walk walk[] = {{.at = arg(a, 0), .write = true}};
    uint64_t next = arg(a, 2);
    return walk_pieces(a->context, walk, 1, arg(a, 1), 4, iota_piece, &next);
}

static CUresult run_add(const struct args *a) {
    struct walk walk[] = {{.at = arg(a, 0), .write = true}, {.at = arg(a, 1)}};
    return walk_pieces(a->context, walk, 2, arg(a, 2), 4, add_piece, NULL);
}

static CUresult run_allreduce_step(const struct args *a) {
    struct walk walk[] = {{.at = arg(a, 0), .write = true}, {.at = arg(a, 1)}, {.at = arg(a, 2)}};
    return walk_pieces(a->context, walk, 3, arg(a, 3), 4, sum_piece, NULL);
}

static CUresult run_checksum(const struct args *a) {
    struct walk in[] = {{.at = arg(a, 0)}}, out[] = {{.at = arg(a, 2), .write = true}};
    uint64_t sum = 0;
    CUresult result = walk_pieces(a->context, in, 1, arg(a, 1), 4, checksum_piece, &sum);
    return result == CUDA_SUCCESS ? walk_pieces(a->context, out, 1, 1, 8, store_piece, &sum) : result;
}

/* Spin until the word is at least the value, as a collective's kernel does for its peer. */
static CUresult run_wait_flag(const struct args *a) {
    struct view view;
    CUresult result = view_device(&view, a->context, arg(a, 0), 4, false, false);
    if (result != CUDA_SUCCESS)
        return result;
    uint32_t value = (uint32_t)arg(a, 1);
    turn_keep(a->context);
    for (unsigned spins = 0; !turn_lost(a->context) && __atomic_load_n((uint32_t *)view.bytes, __ATOMIC_SEQ_CST) < value; spins++)
        nap_us(spins < 100 ? 5 : 100);
    if (turn_lost(a->context))
        result = CUDA_ERROR_LAUNCH_FAILED;
    turn_give(a->context);
    view_done(&view);
    return result;
}

static const struct {
    const char *name;
    CUresult (*run)(const struct args *args);
} kernels[] = {
    {"gs_fill", run_fill},         {"gs_iota", run_iota},           {"gs_add", run_add},
    {"gs_checksum", run_checksum}, {"gs_wait_flag", run_wait_flag}, {"gs_allreduce_step", run_allreduce_step},
};

CUresult kernel_run(struct work *work) {
    struct args args = {work->context, work->kernel.params, &work->kernel.function->params};
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (!strcmp(kernels[i].name, work->kernel.function->name))
            return kernels[i].run(&args);
    return CUDA_ERROR_LAUNCH_FAILED; /* an entry that nobody taught the simulated GPU */
}

/* ---- launches ---- */

static CUresult from_buffer(void **extra, unsigned char *out, size_t *size) {
    const void *buffer = NULL;
    size_t bytes = 0;
    for (; extra[0] != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            bytes = *(const size_t *)extra[1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (!buffer || bytes > KERNEL_PARAM_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(out, buffer, bytes);
    *size = bytes;
    return CUDA_SUCCESS;
}

/* Copy a launch's parameters, which the caller may reuse at once. */
CUresult kernel_pack(CUfunction function, void **params, void **extra, unsigned char *out, size_t *size) {
    const struct param_layout *layout = &function->params;
    if (extra && !params)
        return from_buffer(extra, out, size);
    if (extra || (layout->count && !params) || layout->total > KERNEL_PARAM_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < layout->count; i++)
        memcpy(out + layout->offset[i], params[i], layout->size[i]);
    *size = layout->total;
    return CUDA_SUCCESS;
}

static CUresult launch(void *callee, const unsigned *grid, const unsigned *block, unsigned shared, CUstream stream, void **params, void **extra) {
    struct work work = {.kind = WORK_KERNEL};
    CUfunction function = function_of(callee);
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2] || block[0] * block[1] * block[2] > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    work.kernel.function = function;
    memcpy(work.kernel.grid, grid, sizeof work.kernel.grid);
    memcpy(work.kernel.block, block, sizeof work.kernel.block);
    work.kernel.shared = shared;
    CUresult result = kernel_pack(function, params, extra, work.kernel.params, &work.kernel.size);
    return result == CUDA_SUCCESS ? work_submit(stream, &work) : result;
}

API_STREAM(CALL_CONTEXT, cuLaunchKernel, _ptsz,
    (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params,
        void **extra),
    (function, gx, gy, gz, bx, by, bz, shared, stream, params, extra)) {
    return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream, params, extra);
}

API_STREAM(CALL_CONTEXT, cuLaunchCooperativeKernel, _ptsz,
    (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params),
    (function, gx, gy, gz, bx, by, bz, shared, stream, params)) {
    return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream, params, NULL);
}

API_STREAM(CALL_CONTEXT, cuLaunchKernelEx, _ptsz, (const CUlaunchConfig *c, CUfunction function, void **params, void **extra), (c, function, params, extra)) {
    if (!c || (c->numAttrs && !c->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, (unsigned[]){c->gridDimX, c->gridDimY, c->gridDimZ}, (unsigned[]){c->blockDimX, c->blockDimY, c->blockDimZ},
        c->sharedMemBytes, c->hStream, params, extra);
}
