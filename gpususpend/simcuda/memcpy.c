/* The copy calls. A copy whose arguments are wrong fails here; one that faults while it runs poisons the context. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

/* Any address that the driver knows as its memory is used as such, whatever name the call has (unified addressing). */
static struct copy_end end_at(CUdeviceptr address) {
    return (struct copy_end){.address = address, .device = address_is_device(address), .registration = registration_at(address)};
}

/* The context that a copy in a stream uses where the call names none. */
static CUcontext context_of(CUstream handle) {
    CUstream stream;
    return stream_find(handle, &stream) == CUDA_SUCCESS ? stream->context : context_current();
}

static bool end_usable(const struct copy_end *end, CUcontext context, size_t size, bool write) {
    return !end->device || range_is_usable(end->context ? end->context : context, end->address, size, write, true);
}

static bool is_pageable(const struct copy_end *end) { return !end->device; }

/* Copies from pageable memory are staged before the call returns, copies to it are done by then. */
static CUresult submit(CUstream handle, struct work *work, bool wait) {
    CUstream stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    size_t size = work->copy.width;
    bool capturing = stream_is_capturing(stream);
    if (wait && capturing)
        return capture_invalidate(stream);
    if (!wait && !capturing && work->copy.height * work->copy.depth == 1) {
        if (is_pageable(&work->copy.to))
            wait = true;
        else if (is_pageable(&work->copy.from)) {
            work->copy.staged = malloc(size);
            if (!work->copy.staged)
                return CUDA_ERROR_OUT_OF_MEMORY;
            memcpy(work->copy.staged, (void *)(uintptr_t)work->copy.from.address, size);
        }
    }
    return wait ? work_submit_and_wait(handle, work) : work_submit(handle, work);
}

enum need { DEVICE_TARGET = 1, DEVICE_SOURCE = 2 };
static CUresult linear(CUdeviceptr to, CUdeviceptr from, size_t size, int needs, CUstream handle, bool wait) {
    struct work work = {.kind = WORK_COPY, .copy = {.from = end_at(from), .to = end_at(to), .width = size, .height = 1, .depth = 1}};
    if (!size)
        return CUDA_SUCCESS;
    if ((needs & DEVICE_TARGET && !work.copy.to.device) || (needs & DEVICE_SOURCE && !work.copy.from.device))
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext context = context_of(handle);
    if (!to || !from || !end_usable(&work.copy.from, context, size, false) || !end_usable(&work.copy.to, context, size, true))
        return CUDA_ERROR_INVALID_VALUE;
    return submit(handle, &work, wait);
}

#define ADDRESS(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpy, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t size), (to, from, size)) {
    return linear(to, from, size, 0, NULL, true);
}
API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpyHtoD_v2, _ptds, (CUdeviceptr to, const void *from, size_t size), (to, from, size)) {
    return linear(to, ADDRESS(from), size, DEVICE_TARGET, NULL, true);
}
API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpyDtoH_v2, _ptds, (void *to, CUdeviceptr from, size_t size), (to, from, size)) {
    return linear(ADDRESS(to), from, size, DEVICE_SOURCE, NULL, true);
}
API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpyDtoD_v2, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t size), (to, from, size)) {
    return linear(to, from, size, DEVICE_TARGET | DEVICE_SOURCE, NULL, true);
}
API_STREAM(CALL_CONTEXT, cuMemcpyAsync, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), (to, from, size, stream)) {
    return linear(to, from, size, 0, stream, false);
}
API_STREAM(CALL_CONTEXT, cuMemcpyHtoDAsync_v2, _ptsz, (CUdeviceptr to, const void *from, size_t size, CUstream stream), (to, from, size, stream)) {
    return linear(to, ADDRESS(from), size, DEVICE_TARGET, stream, false);
}
API_STREAM(CALL_CONTEXT, cuMemcpyDtoHAsync_v2, _ptsz, (void *to, CUdeviceptr from, size_t size, CUstream stream), (to, from, size, stream)) {
    return linear(ADDRESS(to), from, size, DEVICE_SOURCE, stream, false);
}
API_STREAM(CALL_CONTEXT, cuMemcpyDtoDAsync_v2, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), (to, from, size, stream)) {
    return linear(to, from, size, DEVICE_TARGET | DEVICE_SOURCE, stream, false);
}

static CUresult peer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size, CUstream stream, bool wait) {
    struct work work = {.kind = WORK_COPY, .copy = {.from = end_at(from), .to = end_at(to), .width = size, .height = 1, .depth = 1}};
    if (!context_valid(to_context) || !context_valid(from_context))
        return CUDA_ERROR_INVALID_CONTEXT;
    work.copy.from.context = from_context;
    work.copy.to.context = to_context;
    if (!work.copy.from.device || !work.copy.to.device || !end_usable(&work.copy.from, NULL, size, false) || !end_usable(&work.copy.to, NULL, size, true))
        return CUDA_ERROR_INVALID_VALUE;
    return size ? submit(stream, &work, wait) : CUDA_SUCCESS;
}
API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpyPeer, _ptds, (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size),
    (to, to_context, from, from_context, size)) {
    return peer(to, to_context, from, from_context, size, NULL, true);
}
API_STREAM(CALL_CONTEXT, cuMemcpyPeerAsync, _ptsz,
    (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size, CUstream stream),
    (to, to_context, from, from_context, size, stream)) {
    return peer(to, to_context, from, from_context, size, stream, false);
}

/* ---- two and three dimensions ---- */

static bool place(struct copy_end *end, CUmemorytype type, const void *host, CUdeviceptr device) {
    if (type == CU_MEMORYTYPE_HOST)
        *end = end_at(ADDRESS(host));
    else if (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED)
        *end = end_at(device);
    else
        return false; /* arrays come with a later stage */
    return type != CU_MEMORYTYPE_DEVICE || end->device;
}

/* Turn a caller's description into work; a copy of nothing leaves work->kind NONE. */
static CUresult describe_3d(struct work *work, const CUDA_MEMCPY3D_PEER *p, CUcontext context) {
    *work = (struct work){.kind = WORK_COPY, .copy = {.width = p->WidthInBytes, .height = p->Height, .depth = p->Depth}};
    struct copy_end *from = &work->copy.from, *to = &work->copy.to;
    if (p->srcMemoryType == CU_MEMORYTYPE_ARRAY || p->dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!place(from, p->srcMemoryType, p->srcHost, p->srcDevice) || !place(to, p->dstMemoryType, p->dstHost, p->dstDevice))
        return CUDA_ERROR_INVALID_VALUE;
    from->pitch = p->srcPitch ? p->srcPitch : p->WidthInBytes;
    to->pitch = p->dstPitch ? p->dstPitch : p->WidthInBytes;
    from->slice = from->pitch * (p->srcHeight ? p->srcHeight : p->Height);
    to->slice = to->pitch * (p->dstHeight ? p->dstHeight : p->Height);
    if (p->srcXInBytes + p->WidthInBytes > from->pitch || p->dstXInBytes + p->WidthInBytes > to->pitch || p->srcLOD || p->dstLOD)
        return CUDA_ERROR_INVALID_VALUE;
    if (!p->WidthInBytes || !p->Height || !p->Depth) {
        work->kind = WORK_NONE;
        return CUDA_SUCCESS;
    }
    from->address += p->srcZ * from->slice + p->srcY * from->pitch + p->srcXInBytes;
    to->address += p->dstZ * to->slice + p->dstY * to->pitch + p->dstXInBytes;
    size_t from_span = (p->Depth - 1) * from->slice + (p->Height - 1) * from->pitch + p->WidthInBytes;
    size_t to_span = (p->Depth - 1) * to->slice + (p->Height - 1) * to->pitch + p->WidthInBytes;
    from->context = p->srcContext;
    to->context = p->dstContext;
    return end_usable(from, context, from_span, false) && end_usable(to, context, to_span, true) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy_3d(const CUDA_MEMCPY3D_PEER *p, CUstream stream, bool wait) {
    struct work work;
    CUresult result = describe_3d(&work, p, context_of(stream));
    return result == CUDA_SUCCESS && work.kind == WORK_COPY ? submit(stream, &work, wait) : result;
}

static CUDA_MEMCPY3D_PEER without_contexts(const CUDA_MEMCPY3D *p) {
    CUDA_MEMCPY3D_PEER form;
    memcpy(&form, p, sizeof form);
    form.srcContext = form.dstContext = NULL;
    return form;
}

/* The work of a graph's copy node. */
CUresult copy_work(struct work *work, const CUDA_MEMCPY3D *p, CUcontext context) {
    CUDA_MEMCPY3D_PEER form = without_contexts(p);
    CUresult result = describe_3d(work, &form, context);
    work->context = context;
    return result;
}

static CUresult plain_3d(const CUDA_MEMCPY3D *p, CUstream stream, bool wait) {
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D_PEER form = without_contexts(p);
    return copy_3d(&form, stream, wait);
}

static CUresult peer_3d(const CUDA_MEMCPY3D_PEER *p, CUstream stream, bool wait) {
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    if ((p->srcContext && !context_valid(p->srcContext)) || (p->dstContext && !context_valid(p->dstContext)))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy_3d(p, stream, wait);
}

static CUresult plain_2d(const CUDA_MEMCPY2D *p, CUstream stream, bool wait) {
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D_PEER form = {
        .srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcMemoryType = p->srcMemoryType, .srcHost = p->srcHost,
        .srcDevice = p->srcDevice, .srcPitch = p->srcPitch, .dstXInBytes = p->dstXInBytes, .dstY = p->dstY,
        .dstMemoryType = p->dstMemoryType, .dstHost = p->dstHost, .dstDevice = p->dstDevice, .dstPitch = p->dstPitch,
        .WidthInBytes = p->WidthInBytes, .Height = p->Height, .Depth = 1,
    };
    return copy_3d(&form, stream, wait);
}

API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpy2D_v2, _ptds, (const CUDA_MEMCPY2D *p), (p)) { return plain_2d(p, NULL, true); }
API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpy2DUnaligned_v2, _ptds, (const CUDA_MEMCPY2D *p), (p)) { return plain_2d(p, NULL, true); }
API_STREAM(CALL_CONTEXT, cuMemcpy2DAsync_v2, _ptsz, (const CUDA_MEMCPY2D *p, CUstream stream), (p, stream)) { return plain_2d(p, stream, false); }
API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpy3D_v2, _ptds, (const CUDA_MEMCPY3D *p), (p)) { return plain_3d(p, NULL, true); }
API_STREAM(CALL_CONTEXT, cuMemcpy3DAsync_v2, _ptsz, (const CUDA_MEMCPY3D *p, CUstream stream), (p, stream)) { return plain_3d(p, stream, false); }
API_STREAM(CALL_CONTEXT | CALL_UNSAFE, cuMemcpy3DPeer, _ptds, (const CUDA_MEMCPY3D_PEER *p), (p)) { return peer_3d(p, NULL, true); }
API_STREAM(CALL_CONTEXT, cuMemcpy3DPeerAsync, _ptsz, (const CUDA_MEMCPY3D_PEER *p, CUstream stream), (p, stream)) { return peer_3d(p, stream, false); }
