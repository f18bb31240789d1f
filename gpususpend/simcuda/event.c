/* Events: a place in a stream, and the time when it was passed. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "simcuda.h"

static struct pool events = POOL(struct CUevent_st, 0x45564e54);

API(CALL_CONTEXT, cuEventCreate, (CUevent * out, unsigned flags), (out, flags)) {
    if (!out || flags > 7 || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    CUevent event = pool_new(&events);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->flags = flags;
    event->context = context_current();
    *out = event;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuEventDestroy_v2, (CUevent event), (event)) {
    if (!pool_holds(&events, event))
        return CUDA_ERROR_INVALID_HANDLE;
    CUstream stream = atomic_load(&event->stream);
    if (stream) {
        /* A record that is still queued writes its time into the event: it must be passed first. */
        struct point point = {stream, atomic_load(&event->seq)};
        while (!point_reached(&point))
            nap_us(50);
        stream_put(stream);
    }
    free(event->capture_at);
    pool_delete(&events, event);
    return CUDA_SUCCESS;
}

void event_executed(CUevent event) { atomic_store(&event->time_ns, now_ns()); }

static CUresult record(CUevent event, CUstream handle, unsigned flags) {
    CUstream stream;
    if (!pool_holds(&events, event) || flags > CU_EVENT_RECORD_EXTERNAL)
        return flags > CU_EVENT_RECORD_EXTERNAL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream_is_capturing(stream))
        return capture_event_record(stream, event);
    if (stream == stream->context->legacy && (result = capture_check_legacy(stream->context)) != CUDA_SUCCESS)
        return result;
    struct point point;
    event->capture = NULL;
    stream_get(stream);
    stream_enqueue(stream, &(struct work){.kind = WORK_EVENT, .context = stream->context, .event = event}, &point);
    atomic_store(&event->seq, point.seq);
    CUstream before = atomic_exchange(&event->stream, stream);
    atomic_store(&event->recorded, true);
    if (before)
        stream_put(before);
    return atomic_load(&stream->context->error);
}
API_STREAM(CALL_INIT, cuEventRecord, _ptsz, (CUevent event, CUstream stream), (event, stream)) { return record(event, stream, 0); }
API_STREAM(CALL_INIT, cuEventRecordWithFlags, _ptsz, (CUevent event, CUstream stream, unsigned flags), (event, stream, flags)) {
    return record(event, stream, flags);
}

static bool passed(CUevent event) {
    struct point point = {atomic_load(&event->stream), atomic_load(&event->seq)};
    return point_reached(&point);
}

API(CALL_INIT, cuEventQuery, (CUevent event), (event)) {
    if (!pool_holds(&events, event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    CUresult error = atomic_load(&event->context->error);
    if (error != CUDA_SUCCESS)
        return error;
    return !atomic_load(&event->recorded) || passed(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API(CALL_INIT, cuEventSynchronize, (CUevent event), (event)) {
    if (!pool_holds(&events, event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    while (atomic_load(&event->recorded) && !passed(event))
        nap_us(20);
    return atomic_load(&event->context->error);
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool_holds(&events, start) || !pool_holds(&events, end) || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING
        || !atomic_load(&start->recorded) || !atomic_load(&end->recorded))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!passed(start) || !passed(end))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(atomic_load(&end->time_ns) - atomic_load(&start->time_ns)) / 1e6);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end), (milliseconds, start, end)) {
    return elapsed(milliseconds, start, end);
}
API(CALL_INIT, cuEventElapsedTime_v2, (float *milliseconds, CUevent start, CUevent end), (milliseconds, start, end)) {
    return elapsed(milliseconds, start, end);
}

API_STREAM(CALL_INIT, cuStreamWaitEvent, _ptsz, (CUstream handle, CUevent event, unsigned flags), (handle, event, flags)) {
    CUstream stream;
    if (flags > CU_EVENT_WAIT_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool_holds(&events, event))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->capture || stream_is_capturing(stream))
        return capture_event_wait(stream, event);
    if (atomic_load(&event->recorded))
        stream_add_wait(stream, (struct point){atomic_load(&event->stream), atomic_load(&event->seq)});
    return CUDA_SUCCESS;
}

/* Interprocess events come with a later stage. The handle is given out, so that the shim's refusal can be tested. */
API(CALL_CONTEXT, cuIpcGetEventHandle, (CUipcEventHandle * out, CUevent event), (out, event)) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool_holds(&events, event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!(event->flags & CU_EVENT_INTERPROCESS))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUipcEventHandle){"simcuda-ipc-event"};
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuIpcOpenEventHandle, (CUevent * out, CUipcEventHandle handle), (out, handle)) {
    (void)out, (void)handle;
    return CUDA_ERROR_NOT_SUPPORTED;
}
