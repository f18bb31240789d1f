/* The stream calls. */
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

static CUresult create(CUstream *out, unsigned flags, int priority) {
    if (!out || flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    *out = stream_create(context_current(), flags, priority);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API(CALL_CONTEXT, cuStreamCreate, (CUstream * out, unsigned flags), (out, flags)) { return create(out, flags, 0); }
API(CALL_CONTEXT, cuStreamCreateWithPriority, (CUstream * out, unsigned flags, int priority), (out, flags, priority)) {
    return create(out, flags, priority);
}

static bool is_default(CUstream handle) { return !handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD; }

API(CALL_INIT, cuStreamDestroy_v2, (CUstream handle), (handle)) {
    CUstream stream;
    CUresult result = is_default(handle) ? CUDA_ERROR_INVALID_HANDLE : stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    capture_forget(stream);
    stream_destroy(stream);
    return CUDA_SUCCESS;
}

/* Find a stream whose work is asked after, which breaks a capture. */
static CUresult find_working(CUstream handle, CUstream *out) {
    CUresult result = stream_find(handle, out);
    return result == CUDA_SUCCESS && stream_is_capturing(*out) ? capture_invalidate(*out) : result;
}

API_STREAM(CALL_INIT, cuStreamSynchronize, _ptsz, (CUstream handle), (handle)) {
    CUstream stream;
    CUresult result = find_working(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == stream->context->legacy && (result = capture_check_legacy(stream->context)) != CUDA_SUCCESS)
        return result;
    return stream_wait(stream);
}

API_STREAM(CALL_INIT, cuStreamQuery, _ptsz, (CUstream handle), (handle)) {
    CUstream stream;
    CUresult result = find_working(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if ((result = atomic_load(&stream->context->error)) != CUDA_SUCCESS)
        return result;
    uint64_t submitted = atomic_load(&stream->submitted);
    return atomic_load(&stream->completed) >= submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* ---- properties ---- */

#define STREAM_PROPERTY(name, type, value)                                        \
    API_STREAM(CALL_INIT, name, _ptsz, (CUstream handle, type *out), (handle, out)) { \
        CUstream stream;                                                          \
        CUresult result = out ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE; \
        if (result == CUDA_SUCCESS)                                               \
            *out = (value);                                                       \
        return result;                                                            \
    }
STREAM_PROPERTY(cuStreamGetPriority, int, stream->priority)
STREAM_PROPERTY(cuStreamGetFlags, unsigned, stream->flags)
STREAM_PROPERTY(cuStreamGetId, unsigned long long, stream->id)
STREAM_PROPERTY(cuStreamGetCtx, CUcontext, stream->context)
STREAM_PROPERTY(cuStreamGetDevice, CUdevice, stream->context->device)

API_STREAM(CALL_INIT, cuStreamGetCtx_v2, _ptsz, (CUstream handle, CUcontext *context, CUgreenCtx *green), (handle, context, green)) {
    CUstream stream;
    CUresult result = context ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    *context = stream->context;
    if (green)
        *green = NULL;
    return CUDA_SUCCESS;
}

API_STREAM(CALL_INIT, cuStreamGetAttribute, _ptsz, (CUstream handle, CUlaunchAttributeID name, CUlaunchAttributeValue *out), (handle, name, out)) {
    CUstream stream;
    CUresult result = out ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    memset(out, 0, sizeof *out);
    if (name == 8)
        out->priority = stream->priority;
    return CUDA_SUCCESS;
}

API_STREAM(CALL_INIT, cuStreamSetAttribute, _ptsz, (CUstream handle, CUlaunchAttributeID name, const CUlaunchAttributeValue *value), (handle, name, value)) {
    CUstream stream;
    (void)name;
    return value ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
}

API_STREAM(CALL_INIT, cuStreamCopyAttributes, _ptsz, (CUstream to, CUstream from), (to, from)) {
    CUstream stream;
    CUresult result = stream_find(to, &stream);
    return result == CUDA_SUCCESS ? stream_find(from, &stream) : result;
}

API_STREAM(CALL_INIT, cuStreamAttachMemAsync, _ptsz, (CUstream handle, CUdeviceptr address, size_t length, unsigned flags), (handle, address, length, flags)) {
    CUstream stream;
    (void)length;
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE)
        return CUDA_ERROR_INVALID_VALUE;
    return address_is_device(address) ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
}
