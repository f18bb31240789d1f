/* One thing that a stream or a graph node does: where it goes, how it runs, what it owns. */
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

static CUgraphNodeType node_type(enum work_kind kind) {
    switch (kind) {
    case WORK_KERNEL: return CU_GRAPH_NODE_TYPE_KERNEL;
    case WORK_COPY: return CU_GRAPH_NODE_TYPE_MEMCPY;
    case WORK_SET: return CU_GRAPH_NODE_TYPE_MEMSET;
    case WORK_HOST: return CU_GRAPH_NODE_TYPE_HOST;
    case WORK_MEMOPS: return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    case WORK_GRAPH: return CU_GRAPH_NODE_TYPE_GRAPH;
    default: return CU_GRAPH_NODE_TYPE_EMPTY;
    }
}

static CUresult route(CUstream handle, const struct work *given, CUstream *stream, struct point *point) {
    struct work work = *given;
    CUresult result = stream_find(handle, stream);
    if (result != CUDA_SUCCESS) {
        work_dispose(&work);
        return result;
    }
    if (stream_is_capturing(*stream))
        return capture_work(*stream, &work, node_type(work.kind));
    if (*stream == (*stream)->context->legacy)
        result = capture_check_legacy((*stream)->context);
    if (result == CUDA_SUCCESS)
        result = atomic_load(&(*stream)->context->error);
    if (result != CUDA_SUCCESS) {
        work_dispose(&work);
        return result;
    }
    work.context = (*stream)->context;
    stream_enqueue(*stream, &work, point);
    return CUDA_SUCCESS;
}

/* Give the work to a stream, or to the graph that is being captured from it. What the work owns passes over. */
CUresult work_submit(CUstream handle, const struct work *work) {
    CUstream stream;
    return route(handle, work, &stream, NULL);
}

/* Give the work to a stream and wait until it is done. */
CUresult work_submit_and_wait(CUstream handle, const struct work *work) {
    CUstream stream;
    struct point point = {0};
    CUresult result = route(handle, work, &stream, &point);
    return result == CUDA_SUCCESS && point.stream ? stream_wait(point.stream) : result;
}

CUresult work_run(struct work *work) {
    if (work->kind == WORK_KERNEL || work->kind == WORK_COPY || work->kind == WORK_SET || work->kind == WORK_MEMOPS)
        turn_wait(work->context);
    switch (work->kind) {
    case WORK_KERNEL: return kernel_run(work);
    case WORK_COPY: return copy_run(work);
    case WORK_SET: return set_run(work);
    case WORK_MEMOPS: return memops_run(work);
    case WORK_GRAPH: return graph_run(work->exec);
    case WORK_FREE: return alloc_free(work->free, MAP_POOL);
    case WORK_EVENT:
        event_executed(work->record.event, work->record.number);
        return CUDA_SUCCESS;
    case WORK_HOST:
        work->host.function(work->host.data);
        return CUDA_SUCCESS;
    case WORK_CALLBACK:
        work->host.callback(work->host.stream, atomic_load(&work->context->error), work->host.data);
        return CUDA_SUCCESS;
    case WORK_NONE: break;
    }
    return CUDA_SUCCESS;
}

/* Free what the work owns. */
void work_dispose(struct work *work) {
    if (work->kind == WORK_COPY)
        free(work->copy.staged);
    if (work->kind == WORK_MEMOPS)
        free(work->memops.list);
    if (work->kind == WORK_GRAPH && work->exec)
        graph_exec_put(work->exec);
    if (work->kind == WORK_EVENT)
        event_put(work->record.event);
    work->kind = WORK_NONE;
}

/* Copy work so that both copies own what they need. */
CUresult work_clone(struct work *to, const struct work *from) {
    *to = *from;
    if (from->kind == WORK_COPY)
        to->copy.staged = NULL;
    if (from->kind == WORK_GRAPH && from->exec)
        graph_exec_get(from->exec);
    if (from->kind == WORK_MEMOPS) {
        to->memops.list = malloc(from->memops.count * sizeof *from->memops.list);
        if (!to->memops.list)
            return CUDA_ERROR_OUT_OF_MEMORY;
        memcpy(to->memops.list, from->memops.list, from->memops.count * sizeof *from->memops.list);
    }
    return CUDA_SUCCESS;
}

API_STREAM(CALL_INIT, cuLaunchHostFunc, _ptsz, (CUstream stream, CUhostFn function, void *data), (stream, function, data)) {
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    return work_submit(stream, &(struct work){.kind = WORK_HOST, .host = {.function = function, .data = data}});
}

API_STREAM(CALL_INIT, cuLaunchHostFunc_v2, _ptsz, (CUstream stream, CUhostFn function, void *data, unsigned mode), (stream, function, data, mode)) {
    if (!function || mode > 1)
        return CUDA_ERROR_INVALID_VALUE;
    return work_submit(stream, &(struct work){.kind = WORK_HOST, .host = {.function = function, .data = data}});
}

API_STREAM(CALL_INIT, cuStreamAddCallback, _ptsz, (CUstream handle, CUstreamCallback callback, void *data, unsigned flags), (handle, callback, data, flags)) {
    CUstream stream;
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream_is_capturing(stream))
        return capture_invalidate(stream);
    return work_submit(handle, &(struct work){.kind = WORK_CALLBACK, .host = {.callback = callback, .stream = handle, .data = data}});
}
