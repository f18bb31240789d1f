/* Events: a place in a stream, and the time when it was passed. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "simcuda.h"

static struct pool events = POOL(struct CUevent_st, 0x45564e54);

bool event_valid(CUevent event) { return pool_holds(&events, event); }

void event_get(CUevent event) { atomic_fetch_add(&event->refs, 1); }

void event_put(CUevent event) {
    if (atomic_fetch_sub(&event->refs, 1) != 1)
        return;
    if (event->shared)
        interprocess_drop(event);
    free(event->capture_at);
    pool_delete(&events, event);
}

/* Return an event that only this process knows, or NULL. */
CUevent event_new(unsigned flags) {
    CUevent event = pool_new(&events);
    if (!event)
        return NULL;
    atomic_store(&event->refs, 1);
    event->flags = flags;
    event->context = context_current();
    event->records = &event->own;
    return event;
}

/* Give the handle back at once; what was submitted still records, and is still waited for. */
void event_delete(CUevent event) {
    event->magic = 0;
    event_put(event);
}

API(CALL_CONTEXT, cuEventCreate, (CUevent * out, unsigned flags), (out, flags)) {
    if (!out || flags > 7 || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    CUevent event = event_new(flags);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (flags & CU_EVENT_INTERPROCESS) {
        event->shared = random_u64();
        if (!interprocess_hold(event, true)) {
            event_delete(event);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    *out = event;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuEventDestroy_v2, (CUevent event), (event)) {
    if (!event_valid(event))
        return CUDA_ERROR_INVALID_HANDLE;
    event_delete(event);
    return CUDA_SUCCESS;
}

bool records_have(const struct records *records, uint64_t number) { return atomic_load(&records->done[number % RECORDS]) >= number; }

void event_executed(CUevent event, uint64_t number) {
    _Atomic uint64_t *done = &event->records->done[number % RECORDS];
    uint64_t before = atomic_load(done);
    atomic_store(&event->time_ns, now_ns());
    while (before < number && !atomic_compare_exchange_weak(done, &before, number))
        ;
}

/* The newest record; 0, which has happened always, of an event without any. */
static struct point newest(CUevent event) { return (struct point){.event = event, .seq = atomic_load(&event->records->begun)}; }

static bool passed(CUevent event) {
    struct point point = newest(event);
    return point_reached(&point);
}

static CUresult record(CUevent event, CUstream handle, unsigned flags) {
    CUstream stream;
    if (!event_valid(event) || flags > CU_EVENT_RECORD_EXTERNAL)
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
    event->capture = NULL;
    event_get(event);
    uint64_t number = atomic_fetch_add(&event->records->begun, 1) + 1;
    stream_enqueue(stream, &(struct work){.kind = WORK_EVENT, .context = stream->context, .record = {event, number}}, NULL);
    return atomic_load(&stream->context->error);
}
API_STREAM(CALL_INIT, cuEventRecord, _ptsz, (CUevent event, CUstream stream), (event, stream)) { return record(event, stream, 0); }
API_STREAM(CALL_INIT, cuEventRecordWithFlags, _ptsz, (CUevent event, CUstream stream, unsigned flags), (event, stream, flags)) {
    return record(event, stream, flags);
}

API(CALL_INIT, cuEventQuery, (CUevent event), (event)) {
    if (!event_valid(event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    CUresult error = atomic_load(&event->context->error);
    if (error != CUDA_SUCCESS)
        return error;
    return passed(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API(CALL_INIT, cuEventSynchronize, (CUevent event), (event)) {
    if (!event_valid(event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    struct point point = newest(event);
    while (!point_reached(&point))
        nap_us(20);
    return atomic_load(&event->context->error);
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!event_valid(start) || !event_valid(end) || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING
        || !newest(start).seq || !newest(end).seq)
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
    if (!event_valid(event))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->capture || stream_is_capturing(stream))
        return capture_event_wait(stream, event);
    stream_add_wait(stream, newest(event));
    return CUDA_SUCCESS;
}
