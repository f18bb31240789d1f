/* How copies and sets are done: row by row, through views of whatever memory the addresses name. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

/* Move one row; either end may stretch over several mappings. */
static CUresult copy_row(const struct work *work, CUdeviceptr from, CUdeviceptr to, size_t size) {
    while (size) {
        struct view source = {.bytes = (void *)(uintptr_t)from, .length = size};
        struct view target = {.bytes = (void *)(uintptr_t)to, .length = size};
        CUcontext at_source = work->copy.from.context ? work->copy.from.context : work->context;
        CUcontext at_target = work->copy.to.context ? work->copy.to.context : work->context;
        CUresult result = CUDA_SUCCESS;
        if (work->copy.from.device)
            result = view_device(&source, at_source, from, size, false, true);
        if (result == CUDA_SUCCESS && work->copy.to.device)
            result = view_device(&target, at_target, to, size, true, true);
        size_t piece = source.length < target.length ? source.length : target.length;
        if (result == CUDA_SUCCESS) {
            memmove(target.bytes, source.bytes, piece);
            view_wrote(&target, piece);
        }
        view_done(&source);
        view_done(&target);
        if (result != CUDA_SUCCESS)
            return result;
        from += piece;
        to += piece;
        size -= piece;
    }
    return CUDA_SUCCESS;
}

static CUdeviceptr row_address(const struct copy_end *end, size_t y, size_t z) { return end->address + z * end->slice + y * end->pitch; }

/* Measured: a graph's copy keeps the registration itself, not the address. Registered again is another registration. */
static bool registration_is_there(const struct copy_end *end) {
    return !end->registration || registration_at(end->address) == end->registration;
}

CUresult copy_run(struct work *work) {
    struct copy_end from = work->copy.from;
    if (!registration_is_there(&work->copy.from) || !registration_is_there(&work->copy.to))
        return CUDA_ERROR_LAUNCH_FAILED;
    if (work->copy.staged)
        from.address = (CUdeviceptr)(uintptr_t)work->copy.staged;
    for (size_t z = 0; z < work->copy.depth; z++)
        for (size_t y = 0; y < work->copy.height; y++) {
            CUresult result = copy_row(work, row_address(&from, y, z), row_address(&work->copy.to, y, z), work->copy.width);
            if (result != CUDA_SUCCESS)
                return result;
        }
    return CUDA_SUCCESS;
}

static void set_elements(void *bytes, size_t size, unsigned value, unsigned element) {
    if (element == 1)
        memset(bytes, (int)value, size);
    for (size_t i = 0; element == 2 && i < size / 2; i++)
        ((uint16_t *)bytes)[i] = (uint16_t)value;
    for (size_t i = 0; element == 4 && i < size / 4; i++)
        ((uint32_t *)bytes)[i] = value;
}

static CUresult set_row(const struct work *work, CUdeviceptr to, size_t size) {
    while (size) {
        struct view target;
        CUresult result = view_device(&target, work->context, to, size, true, true);
        if (result != CUDA_SUCCESS)
            return result;
        set_elements(target.bytes, target.length, work->set.value, work->set.element);
        view_wrote(&target, target.length);
        to += target.length;
        size -= target.length;
        view_done(&target);
    }
    return CUDA_SUCCESS;
}

CUresult set_run(struct work *work) {
    for (size_t y = 0; y < work->set.height; y++) {
        CUresult result = set_row(work, work->set.to + y * work->set.pitch, work->set.width * work->set.element);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}
