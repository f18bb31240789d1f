/* Interprocess events: what the processes that have one see of its records.
 *
 * An event's row on the machine goes with the last process that has the event, which need not be the one that made it:
 * who destroys an event, or ends, takes it from nobody else. When all have left for a checkpoint, whoever comes back first
 * makes it again. */
#include <string.h>

#include "machine.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken before the table's */
static CUevent here;                                     /* the interprocess events of this process */

/* Let a process go from every event; for machine.c, which holds the table's lock. */
void interprocess_process_gone(struct machine *m, int process) {
    for (int i = 0; i < MAX_EVENTS; i++) {
        m->events[i].holders[process / 64] &= ~((uint64_t)1 << process % 64);
        if (m->events[i].id && !machine_any(m->events[i].holders))
            memset(&m->events[i], 0, sizeof m->events[i]);
    }
}

/* Find the row of an event, or with 0 a free one. */
static struct shared_event *row_of(struct machine *m, uint64_t id) {
    for (int i = 0; i < MAX_EVENTS; i++)
        if (m->events[i].id == id)
            return &m->events[i];
    return NULL;
}

static bool hold(CUevent event, bool make) {
    struct machine *m = machine_lock();
    machine_reap(m);
    struct shared_event *row = row_of(m, event->shared);
    if (!row && make && (row = row_of(m, 0)))
        row->id = event->shared;
    if (row) {
        row->holders[machine_slot() / 64] |= (uint64_t)1 << machine_slot() % 64;
        event->records = &row->records;
    }
    machine_unlock();
    return row;
}

/* Join those who have the event of this name; false where nobody has it and it is not to be made, or cannot. */
bool interprocess_hold(CUevent event, bool make) {
    pthread_mutex_lock(&lock);
    bool held = hold(event, make);
    if (held) {
        event->next_shared = here;
        here = event;
    }
    pthread_mutex_unlock(&lock);
    return held;
}

static bool has_another(CUevent event) {
    for (CUevent other = here; other; other = other->next_shared)
        if (other->shared == event->shared)
            return true;
    return false;
}

void interprocess_drop(CUevent event) {
    pthread_mutex_lock(&lock);
    CUevent *at = &here;
    while (*at && *at != event)
        at = &(*at)->next_shared;
    if (*at) {
        *at = event->next_shared;
        struct machine *m = machine_lock();
        struct shared_event *row = row_of(m, event->shared);
        if (row && !has_another(event)) {
            row->holders[machine_slot() / 64] &= ~((uint64_t)1 << machine_slot() % 64);
            if (!machine_any(row->holders))
                memset(row, 0, sizeof *row);
        }
        machine_unlock();
    }
    pthread_mutex_unlock(&lock);
}

/* ---- checkpoint and restore: no work is under way, so that counts of records have nothing to say ---- */

void interprocess_leave(void) {
    for (CUevent event = here; event; event = event->next_shared)
        event->records = &event->own;
}

/* Join again; false if the machine has no room for an event. */
bool interprocess_return(void) {
    for (CUevent event = here; event; event = event->next_shared)
        if (!hold(event, true))
            return false;
    return true;
}

/* ---- handles ---- */

struct event_bytes {
    char magic[16];
    uint64_t event, creator;
    char unused[32];
};
_Static_assert(sizeof(struct event_bytes) == sizeof(CUipcEventHandle), "64 bytes");
static const char event_magic[16] = "simIPCevent";

API(CALL_CONTEXT, cuIpcGetEventHandle, (CUipcEventHandle * out, CUevent event), (out, event)) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!event_valid(event) || !event->shared || event->opened)
        return CUDA_ERROR_INVALID_HANDLE;
    struct event_bytes bytes = {.event = event->shared, .creator = machine_nonce()};
    memcpy(bytes.magic, event_magic, sizeof event_magic);
    memcpy(out, &bytes, sizeof bytes);
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuIpcOpenEventHandle, (CUevent * out, CUipcEventHandle handle), (out, handle)) {
    struct event_bytes bytes;
    memcpy(&bytes, &handle, sizeof bytes);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (memcmp(bytes.magic, event_magic, sizeof event_magic) || !bytes.event)
        return CUDA_ERROR_MAP_FAILED;
    if (bytes.creator == machine_nonce())
        return CUDA_ERROR_INVALID_CONTEXT; /* a process cannot open its own */
    CUevent event = event_new(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->shared = bytes.event;
    event->opened = true;
    if (interprocess_hold(event, false)) {
        *out = event;
        return CUDA_SUCCESS;
    }
    event_delete(event);
    return CUDA_ERROR_MAP_FAILED; /* nobody has it any more */
}
