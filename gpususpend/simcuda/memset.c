/* The set calls. Measured: beside a recording they are as legal as their Async forms. */
#include "simcuda.h"

/* Seen: the set of device memory is not waited for, and streams apart from the default one do not wait for it. */
static bool is_waited_for(CUdeviceptr to) {
    struct mapping m;
    if (!mapping_find(to, &m))
        return false;
    bool wait = !m.memory || is_host_memory(m.memory) || m.kind == MAP_MANAGED;
    mapping_done(&m);
    return wait;
}

static CUresult set(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height, CUstream handle, bool wait) {
    struct work work = {.kind = WORK_SET, .set = {to, pitch, width, height, value, element}};
    CUstream stream;
    if (!width || !height)
        return CUDA_SUCCESS;
    if (to % element || pitch % element || (height > 1 && pitch < width * element))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && !range_is_usable(stream->context, to, (height - 1) * pitch + width * element, true, false))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && wait && stream_is_capturing(stream))
        result = capture_invalidate(stream);
    if (result != CUDA_SUCCESS)
        return result;
    return wait && is_waited_for(to) ? work_submit_and_wait(handle, &work) : work_submit(handle, &work);
}

#define SETS(bits, type)                                                                                             \
    API_STREAM(CALL_CONTEXT, cuMemsetD##bits##_v2, _ptds, (CUdeviceptr to, type value, size_t n), (to, value, n)) {   \
        return set(to, 0, value, bits / 8, n, 1, NULL, true);                                                        \
    }                                                                                                                \
    API_STREAM(CALL_CONTEXT, cuMemsetD##bits##Async, _ptsz, (CUdeviceptr to, type value, size_t n, CUstream stream), (to, value, n, stream)) { \
        return set(to, 0, value, bits / 8, n, 1, stream, false);                                                     \
    }                                                                                                                \
    API_STREAM(CALL_CONTEXT, cuMemsetD2D##bits##_v2, _ptds,                                                          \
        (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height), (to, pitch, value, width, height)) { \
        return set(to, pitch, value, bits / 8, width, height, NULL, true);                                           \
    }                                                                                                                \
    API_STREAM(CALL_CONTEXT, cuMemsetD2D##bits##Async, _ptsz,                                                        \
        (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream),                    \
        (to, pitch, value, width, height, stream)) {                                                                 \
        return set(to, pitch, value, bits / 8, width, height, stream, false);                                        \
    }
SETS(8, unsigned char)
SETS(16, unsigned short)
SETS(32, unsigned)
