/* Stream capture: work of a capturing stream becomes nodes of a graph instead of running.
 *
 * A capture has one origin stream; others join by waiting for an event recorded inside it and must be joined back
 * before the end. What a stream's next node depends on is kept for each stream. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

struct member { /* a stream inside a capture */
    struct member *next;
    CUstream stream;
    CUgraphNode *at; /* what its next node depends on */
    size_t count;
    bool joined; /* nothing of it hangs loose */
};
struct capture {
    struct capture *next;
    CUstream origin;
    CUgraph graph;
    bool into_given; /* cuStreamBeginCaptureToGraph: the graph is the caller's */
    uint64_t id;
    CUstreamCaptureMode mode;
    pthread_t owner;
    bool invalid, ended;
    struct member *members;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static atomic_int capture_count;
static uint64_t next_id = 1;
static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool stream_is_capturing(CUstream stream) { return stream->capture != NULL; }

static struct member *member_of(struct capture *capture, CUstream stream) {
    struct member *m = capture->members;
    while (m && m->stream != stream)
        m = m->next;
    return m;
}

static struct member *join(struct capture *capture, CUstream stream) {
    struct member *m = calloc(1, sizeof *m);
    m->stream = stream;
    m->next = capture->members;
    m->joined = true;
    capture->members = m;
    stream->capture = capture;
    return m;
}

static void depend_on(struct member *m, const CUgraphNode *nodes, size_t count) {
    m->at = realloc(m->at, (m->count + count + 1) * sizeof *nodes);
    for (size_t i = 0; i < count; i++) {
        bool known = false;
        for (size_t k = 0; k < m->count; k++)
            known = known || m->at[k] == nodes[i];
        if (!known)
            m->at[m->count++] = nodes[i];
    }
}

/* Mark the stream's capture as broken; returns what the offending call must return. */
CUresult capture_invalidate(CUstream stream) {
    pthread_mutex_lock(&lock);
    if (stream->capture)
        stream->capture->invalid = true;
    pthread_mutex_unlock(&lock);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* ---- what work does ---- */

/* Find the stream's part in its capture; what is added to a broken one is refused. Lock held. */
static CUresult find_member(CUstream stream, struct member **out) {
    *out = stream->capture ? member_of(stream->capture, stream) : NULL;
    if (!*out)
        return CUDA_ERROR_INVALID_VALUE;
    return stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

/* Add the work of a capturing stream as a node. */
CUresult capture_work(CUstream stream, const struct work *given, CUgraphNodeType type) {
    struct work work = *given;
    struct member *m;
    pthread_mutex_lock(&lock);
    CUresult result = find_member(stream, &m);
    if (result == CUDA_SUCCESS) {
        struct capture *capture = stream->capture;
        work.context = stream->context;
        CUgraphNode node = graph_add(capture->graph, type, &work, m->at, m->count);
        m->count = 0;
        depend_on(m, &node, 1);
        m->joined = stream == capture->origin;
    }
    pthread_mutex_unlock(&lock);
    if (result != CUDA_SUCCESS)
        work_dispose(&work);
    return result;
}

CUresult capture_event_record(CUstream stream, CUevent event) {
    struct member *m;
    pthread_mutex_lock(&lock);
    CUresult result = find_member(stream, &m);
    if (result == CUDA_SUCCESS) {
        event->capture_at = realloc(event->capture_at, (m->count + 1) * sizeof *m->at);
        if (m->count)
            memcpy(event->capture_at, m->at, m->count * sizeof *m->at);
        event->capture_count = m->count;
        event->capture = stream->capture;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static bool covers(const CUevent event, const struct member *m) {
    for (size_t i = 0; i < m->count; i++) {
        bool found = false;
        for (size_t k = 0; k < event->capture_count; k++)
            found = found || event->capture_at[k] == m->at[i];
        if (!found)
            return false;
    }
    return true;
}

static CUresult wait_inside(struct capture *capture, CUstream stream, CUevent event) {
    if (capture->ended)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture && stream->capture != capture)
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    struct member *m = stream->capture ? member_of(capture, stream) : join(capture, stream);
    depend_on(m, event->capture_at, event->capture_count);
    for (struct member *other = capture->members; other; other = other->next)
        if (other != m && covers(event, other))
            other->joined = true; /* what the other one did so far now hangs on this stream */
    if (stream != capture->origin && m->count)
        m->joined = false;
    return CUDA_SUCCESS;
}

CUresult capture_event_wait(CUstream stream, CUevent event) {
    CUresult result;
    pthread_mutex_lock(&lock);
    if (!event->capture) {
        /* The work behind an event from outside is not part of the graph. */
        stream->capture->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    } else {
        result = wait_inside(event->capture, stream, event);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* What a call must return that waits for streams of a context of which some are captured: `answer`; it may break them. */
static CUresult beside(CUcontext context, bool blocking_only, bool breaks, CUresult answer) {
    if (atomic_load(&capture_count) == 0)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *c = captures; c; c = c->next)
        for (struct member *m = c->members; m; m = m->next)
            if (m->stream->context == context && (m->stream->blocking || !blocking_only)) {
                c->invalid = c->invalid || breaks;
                result = answer;
            }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The legacy stream waits for blocking streams of its context. */
CUresult capture_check_legacy(CUcontext context) { return beside(context, true, true, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT); }

CUresult capture_break_all(CUcontext context) { return beside(context, false, true, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); }

/* A call that might wait for captured work: refused as the thread's mode and the captures under way demand. */
CUresult capture_refuse_unsafe(void) {
    if (atomic_load(&capture_count) == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *c = captures; c; c = c->next) {
        bool own = pthread_equal(c->owner, pthread_self());
        bool forbidden = (own && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED)
            || (!own && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
        if (forbidden) {
            c->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- beginning and ending ---- */

static CUresult begin(CUstream handle, CUgraph into, const CUgraphNode *deps, size_t count, CUstreamCaptureMode mode) {
    CUstream stream;
    if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == stream->context->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream_is_capturing(stream))
        return CUDA_ERROR_ILLEGAL_STATE;
    struct capture *capture = calloc(1, sizeof *capture);
    capture->graph = into ? into : graph_new();
    capture->into_given = into != NULL;
    capture->origin = stream;
    capture->mode = mode;
    capture->owner = pthread_self();
    pthread_mutex_lock(&lock);
    capture->id = next_id++;
    struct member *m = join(capture, stream);
    depend_on(m, deps, count);
    capture->next = captures;
    captures = capture;
    atomic_fetch_add(&capture_count, 1);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API_STREAM(CALL_INIT, cuStreamBeginCapture, _ptsz, (CUstream stream), (stream)) { return begin(stream, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL); }
API_STREAM(CALL_INIT, cuStreamBeginCapture_v2, _ptsz, (CUstream stream, CUstreamCaptureMode mode), (stream, mode)) { return begin(stream, NULL, NULL, 0, mode); }
API_STREAM(CALL_INIT, cuStreamBeginCaptureToGraph, _ptsz,
    (CUstream stream, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *data, size_t count, CUstreamCaptureMode mode),
    (stream, graph, deps, data, count, mode)) {
    (void)data;
    return graph && (deps || !count) ? begin(stream, graph, deps, count, mode) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult how_it_ends(const struct capture *capture, CUstream stream) {
    if (capture->origin != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->owner, pthread_self()))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (struct member *m = capture->members; m; m = m->next)
        if (!m->joined && m->stream != stream)
            return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    return CUDA_SUCCESS;
}

static void unlink_capture(struct capture *capture) {
    for (struct capture **at = &captures; *at; at = &(*at)->next)
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    while (capture->members) {
        struct member *m = capture->members;
        capture->members = m->next;
        m->stream->capture = NULL;
        free(m->at);
        free(m);
    }
    capture->ended = true;
    atomic_fetch_sub(&capture_count, 1);
}

/* A stream that goes: with the origin its capture ends; without another member the capture is broken. */
void capture_forget(CUstream stream) {
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    if (capture && capture->origin == stream) {
        unlink_capture(capture);
        if (!capture->into_given)
            graph_delete(capture->graph);
    } else if (capture) {
        capture->invalid = true;
        struct member **at = &capture->members;
        while (*at && (*at)->stream != stream)
            at = &(*at)->next;
        struct member *gone = *at;
        if (gone) {
            *at = gone->next;
            free(gone->at);
            free(gone);
        }
        stream->capture = NULL;
    }
    pthread_mutex_unlock(&lock);
}

API_STREAM(CALL_INIT, cuStreamEndCapture, _ptsz, (CUstream handle, CUgraph *out), (handle, out)) {
    CUstream stream;
    CUresult result = out ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    result = capture ? how_it_ends(capture, stream) : CUDA_ERROR_ILLEGAL_STATE;
    bool over = capture && result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED && result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (over)
        unlink_capture(capture);
    pthread_mutex_unlock(&lock);
    *out = NULL;
    if (!over)
        return result;
    if (result == CUDA_SUCCESS)
        *out = capture->graph;
    else if (!capture->into_given)
        graph_delete(capture->graph);
    /* Events recorded inside still name the capture; it stays as it is, a few bytes for each capture. */
    return result;
}

/* ---- questions ---- */

static CUstreamCaptureStatus status_of(CUstream stream) {
    if (!stream->capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

API_STREAM(CALL_INIT, cuStreamIsCapturing, _ptsz, (CUstream handle, CUstreamCaptureStatus *out), (handle, out)) {
    CUstream stream;
    CUresult result = out ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == stream->context->legacy) {
        *out = CU_STREAM_CAPTURE_STATUS_NONE;
        return beside(stream->context, true, false, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    pthread_mutex_lock(&lock);
    *out = status_of(stream);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **deps, size_t *count) {
    CUstream stream;
    CUresult result = status ? stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    *status = status_of(stream);
    if (stream->capture) {
        struct member *m = member_of(stream->capture, stream);
        if (id)
            *id = stream->capture->id;
        if (graph)
            *graph = stream->capture->graph;
        if (deps)
            *deps = m->at;
        if (count)
            *count = m->count;
    }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API_STREAM(CALL_INIT, cuStreamGetCaptureInfo, _ptsz, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id), (stream, status, id)) {
    return info(stream, status, id, NULL, NULL, NULL);
}
API_STREAM(CALL_INIT, cuStreamGetCaptureInfo_v2, _ptsz,
    (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **deps, size_t *count),
    (stream, status, id, graph, deps, count)) {
    return info(stream, status, id, graph, deps, count);
}
API_STREAM(CALL_INIT, cuStreamGetCaptureInfo_v3, _ptsz,
    (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *count),
    (stream, status, id, graph, deps, edges, count)) {
    if (edges)
        *edges = NULL;
    return info(stream, status, id, graph, deps, count);
}

static CUresult update(CUstream handle, CUgraphNode *deps, size_t count, unsigned flags) {
    CUstream stream;
    CUresult result = flags > 1 || (count && !deps) ? CUDA_ERROR_INVALID_VALUE : stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    struct member *m = stream->capture ? member_of(stream->capture, stream) : NULL;
    if (m && flags == 1)
        m->count = 0; /* set instead of add */
    if (m)
        depend_on(m, deps, count);
    pthread_mutex_unlock(&lock);
    return m ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}
API_STREAM(CALL_INIT, cuStreamUpdateCaptureDependencies, _ptsz, (CUstream stream, CUgraphNode *deps, size_t count, unsigned flags),
    (stream, deps, count, flags)) {
    return update(stream, deps, count, flags);
}
API_STREAM(CALL_INIT, cuStreamUpdateCaptureDependencies_v2, _ptsz,
    (CUstream stream, CUgraphNode *deps, const CUgraphEdgeData *data, size_t count, unsigned flags), (stream, deps, data, count, flags)) {
    (void)data;
    return update(stream, deps, count, flags);
}

API(CALL_INIT, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode), (mode)) {
    if (!mode || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
