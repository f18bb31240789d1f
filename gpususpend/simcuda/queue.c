/* The engine: streams, each a queue that one thread named simcuda-gpu works off in order.
 *
 * An operation may wait for points of other streams: an event's, or those by which the legacy default stream and the
 * blocking streams of a context order each other. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

struct op {
    struct op *next;
    uint64_t seq;    /* its place in its stream */
    uint64_t number; /* its place among the operations of all streams */
    struct work work;
    size_t wait_count;
    struct point waits[];
};

static struct pool streams = POOL(struct CUstream_st, 0x5354524d);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static CUstream all;
static _Atomic uint64_t next_id = 1;
static uint64_t submissions; /* operations of all streams so far */

struct pending { /* what the next operation of a stream must wait for, from cuStreamWaitEvent */
    struct pending *next;
    CUstream stream;
    struct point point;
};
static struct pending *pendings;

CUstream stream_create(CUcontext context, unsigned flags, int priority) {
    CUstream stream = pool_new(&streams);
    if (!stream)
        return NULL;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    stream->id = atomic_fetch_add(&next_id, 1);
    atomic_store(&stream->refs, 1);
    pthread_cond_init(&stream->wake, NULL);
    pthread_mutex_lock(&lock);
    stream->next_all = all;
    all = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

void stream_get(CUstream stream) { atomic_fetch_add(&stream->refs, 1); }

void stream_put(CUstream stream) {
    if (atomic_fetch_sub(&stream->refs, 1) == 1) {
        pthread_cond_destroy(&stream->wake);
        pool_delete(&streams, stream);
    }
}

bool point_reached(const struct point *point) {
    if (point->event)
        return records_have(point->event->records, point->seq);
    return !point->stream || atomic_load(&point->stream->completed) >= point->seq;
}

static void point_get(const struct point *point) { point->event ? event_get(point->event) : stream_get(point->stream); }
static void point_put(const struct point *point) { point->event ? event_put(point->event) : stream_put(point->stream); }

static bool waits_over(const struct op *op) {
    for (size_t i = 0; i < op->wait_count; i++)
        if (!point_reached(&op->waits[i]))
            return false;
    return true;
}

/* Wait for another stream, with the lock held. */
static void await_progress(const struct op *op) {
    bool elsewhere = false;
    for (size_t i = 0; i < op->wait_count; i++)
        elsewhere = elsewhere || (op->waits[i].event && op->waits[i].event->shared);
    if (!elsewhere) {
        pthread_cond_wait(&progress, &lock);
        return;
    }
    pthread_mutex_unlock(&lock); /* nobody signals what another process has done */
    nap_us(100);
    pthread_mutex_lock(&lock);
}

static void op_free(struct op *op) {
    for (size_t i = 0; i < op->wait_count; i++)
        point_put(&op->waits[i]);
    work_dispose(&op->work);
    free(op);
}

static CUresult run(CUstream stream, struct op *op) {
    CUcontext context = stream->context;
    CUresult error = atomic_load(&context->error);
    if (error == CUDA_SUCCESS)
        error = work_run(&op->work);
    else if (op->work.kind == WORK_EVENT || op->work.kind == WORK_CALLBACK)
        work_run(&op->work); /* what waits for them must not wait for ever */
    if (error != CUDA_SUCCESS)
        atomic_store(&context->error, error); /* sticky, as on the device */
    return error;
}

static void unlist(CUstream stream) {
    for (CUstream *at = &all; *at; at = &(*at)->next_all)
        if (*at == stream) {
            *at = stream->next_all;
            return;
        }
}

static void *stream_thread(void *argument) {
    CUstream stream = argument;
    thread_is_gpu = true;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct op *op = stream->head;
        if (!op && stream->destroyed)
            break;
        if (!op) {
            pthread_cond_wait(&stream->wake, &lock);
            continue;
        }
        if (!waits_over(op)) {
            await_progress(op);
            continue;
        }
        pthread_mutex_unlock(&lock);
        run(stream, op);
        pthread_mutex_lock(&lock);
        stream->head = op->next;
        if (!stream->head)
            stream->tail = NULL;
        atomic_store(&stream->completed, op->seq);
        pthread_cond_broadcast(&progress);
        pthread_mutex_unlock(&lock);
        op_free(op);
        pthread_mutex_lock(&lock);
    }
    unlist(stream);
    pthread_mutex_unlock(&lock);
    stream_put(stream);
    return NULL;
}

/* ---- submitting ---- */

static bool is_busy(CUstream stream) { return atomic_load(&stream->submitted) != atomic_load(&stream->completed); }

/* Tell whether an operation of `stream` must come after what `other` was given before. */
static bool orders(CUstream stream, CUstream other) {
    if (other == stream || other->context != stream->context || !is_busy(other))
        return false;
    CUstream legacy = stream->context->legacy;
    return (stream == legacy && other->blocking) || (stream->blocking && other == legacy);
}

static struct op *new_op(CUstream stream, const struct work *work) {
    size_t count = 0, at = 0;
    for (CUstream other = all; other; other = other->next_all)
        count += orders(stream, other);
    for (struct pending *p = pendings; p; p = p->next)
        count += p->stream == stream;
    struct op *op = calloc(1, sizeof *op + count * sizeof(struct point));
    if (!op)
        return NULL;
    op->work = *work;
    op->wait_count = count;
    for (CUstream other = all; other; other = other->next_all)
        if (orders(stream, other)) {
            stream_get(other);
            op->waits[at++] = (struct point){.stream = other, .seq = atomic_load(&other->submitted)};
        }
    for (struct pending **p = &pendings; *p && at < count;) {
        struct pending *found = *p;
        if (found->stream != stream) {
            p = &found->next;
            continue;
        }
        op->waits[at++] = found->point;
        *p = found->next;
        free(found);
    }
    return op;
}

/* Append work to a stream, which takes over what the work owns; *out (if wanted) is the place behind it. */
void stream_enqueue(CUstream stream, const struct work *work, struct point *out) {
    pthread_mutex_lock(&lock);
    struct op *op = new_op(stream, work);
    if (op) {
        op->seq = atomic_load(&stream->submitted) + 1;
        op->number = ++submissions;
        atomic_store(&stream->submitted, op->seq);
        if (stream->tail)
            stream->tail->next = op;
        else
            stream->head = op;
        stream->tail = op;
        if (!stream->thread_started) {
            stream_get(stream);
            stream->thread_started = start_thread(stream_thread, stream, "simcuda-gpu", NULL);
        }
        pthread_cond_broadcast(&stream->wake);
    }
    if (out)
        *out = (struct point){.stream = stream, .seq = atomic_load(&stream->submitted)};
    pthread_mutex_unlock(&lock);
}

/* Make the next operation of the stream, and with it all later ones, wait for a point. */
void stream_add_wait(CUstream stream, struct point point) {
    if (point_reached(&point))
        return;
    struct pending *pending = calloc(1, sizeof *pending);
    if (!pending)
        return;
    point_get(&point);
    *pending = (struct pending){.stream = stream, .point = point};
    pthread_mutex_lock(&lock);
    pending->next = pendings;
    pendings = pending;
    pthread_mutex_unlock(&lock);
    /* An empty operation carries it, so that a query or a wait of the stream sees it, too. */
    stream_enqueue(stream, &(struct work){.kind = WORK_NONE, .context = stream->context}, NULL);
}

/* ---- waiting ---- */

static CUresult wait_for(struct point point) {
    pthread_mutex_lock(&lock);
    while (!point_reached(&point))
        pthread_cond_wait(&progress, &lock);
    pthread_mutex_unlock(&lock);
    return atomic_load(&point.stream->context->error);
}

CUresult stream_wait(CUstream stream) {
    stream_get(stream);
    /* The legacy stream is done when what it is ordered after is done: an empty operation collects that. */
    struct point point = {.stream = stream, .seq = atomic_load(&stream->submitted)};
    if (stream == stream->context->legacy)
        stream_enqueue(stream, &(struct work){.kind = WORK_NONE, .context = stream->context}, &point);
    CUresult result = wait_for(point);
    stream_put(stream);
    return result;
}

static bool context_busy(CUcontext context, uint64_t number) {
    for (CUstream stream = all; stream; stream = stream->next_all)
        if (stream->context == context && stream->head && stream->head->number <= number)
            return true;
    return false;
}

/* Wait for what was submitted before: other threads may go on submitting for ever. */
CUresult context_wait(CUcontext context) {
    pthread_mutex_lock(&lock);
    const uint64_t before = submissions;
    while (context_busy(context, before))
        pthread_cond_wait(&progress, &lock);
    pthread_mutex_unlock(&lock);
    return atomic_load(&context->error);
}

/* Tell whether no stream of the process has anything left to do. */
bool engine_idle(void) {
    bool busy = false;
    pthread_mutex_lock(&lock);
    for (CUstream stream = all; stream; stream = stream->next_all)
        busy = busy || is_busy(stream);
    pthread_mutex_unlock(&lock);
    return !busy;
}

/* ---- ending ---- */

/* Give the handle back at once; what was submitted is still done. */
void stream_destroy(CUstream stream) {
    pthread_mutex_lock(&lock);
    stream->magic = 0; /* the handle is invalid from now on */
    stream->destroyed = true;
    bool thread = stream->thread_started;
    if (!thread)
        unlist(stream);
    pthread_cond_broadcast(&stream->wake);
    pthread_mutex_unlock(&lock);
    stream_put(stream);
}

static CUstream any_stream_of(CUcontext context) {
    CUstream found = NULL;
    pthread_mutex_lock(&lock);
    for (CUstream stream = all; stream; stream = stream->next_all)
        if (stream->context == context && !stream->destroyed)
            found = stream;
    pthread_mutex_unlock(&lock);
    return found;
}

/* End every stream of a context, when its work is done. */
void stream_destroy_context(CUcontext context) {
    context_wait(context);
    for (CUstream stream; (stream = any_stream_of(context));) {
        capture_forget(stream);
        stream_destroy(stream);
    }
    context->legacy = NULL;
}

/* ---- handles ---- */

enum { OWN_STREAMS = 16 };
struct own_streams { /* a thread's default streams */
    CUcontext context[OWN_STREAMS];
    CUstream stream[OWN_STREAMS];
    uint64_t id[OWN_STREAMS]; /* a handle may have been given out anew */
};

static bool still_own(const struct own_streams *own, int i) {
    return own->context[i] && pool_holds(&streams, own->stream[i]) && own->stream[i]->id == own->id[i];
}

static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static void end_own_streams(void *data) {
    struct own_streams *own = data;
    for (int i = 0; i < OWN_STREAMS; i++)
        if (still_own(own, i) && !stream_is_capturing(own->stream[i])) /* else the graph is recorded for ever: assumed */
            stream_destroy(own->stream[i]);
    free(own);
}

static void make_own_key(void) { pthread_key_create(&own_key, end_own_streams); }

/* The default stream of the calling thread in a context; a thread that uses more contexts gets the legacy one. */
static CUstream per_thread_stream(CUcontext context) {
    pthread_once(&own_once, make_own_key);
    struct own_streams *own = pthread_getspecific(own_key);
    if (!own) {
        own = calloc(1, sizeof *own);
        pthread_setspecific(own_key, own);
    }
    for (int i = 0; own && i < OWN_STREAMS; i++) {
        if (own->context[i] == context && still_own(own, i))
            return own->stream[i];
        if (still_own(own, i))
            continue;
        CUstream stream = stream_create(context, CU_STREAM_DEFAULT, 0);
        own->context[i] = context;
        own->stream[i] = stream;
        own->id[i] = stream ? stream->id : 0;
        return stream;
    }
    return context->legacy;
}

/* Resolve a stream argument: a created stream, or one of the default ones of the current context. */
CUresult stream_find(CUstream handle, CUstream *out) {
    CUcontext context = context_current();
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        if (!context || !atomic_load(&context->alive))
            return CUDA_ERROR_INVALID_CONTEXT;
        bool per_thread = handle == CU_STREAM_PER_THREAD || (!handle && thread_default_stream);
        *out = per_thread ? per_thread_stream(context) : context->legacy;
        return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!pool_holds(&streams, handle))
        return CUDA_ERROR_INVALID_HANDLE;
    *out = handle;
    return CUDA_SUCCESS;
}
