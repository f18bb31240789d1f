/* The teams of multicast objects, as all processes see them: which GPUs were added, and what memory is bound where.
 *
 * What is bound belongs to the object and keeps the memory, whoever lets go of it; it goes with an unbind, with the
 * process that bound it, and with the object. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "machine.h"

/* ---- for machine.c, which holds the lock ---- */

/* Tell whether memory is bound to any object. */
bool team_binds(const struct machine *m, uint64_t memory) {
    for (int i = 0; i < MAX_BINDS; i++)
        if (m->binds[i].team && m->binds[i].memory == memory)
            return true;
    return false;
}

static void bind_remove(struct machine *m, struct shared_bind *bind, int probe) {
    uint64_t memory = bind->memory;
    *bind = (struct shared_bind){0};
    struct shared_object *o = machine_find(m, memory);
    if (o)
        machine_collect(m, o, probe);
}

/* Take everything from a multicast object that nobody holds any more. */
void team_empty(struct machine *m, struct shared_object *o, int probe) {
    o->joined = 0;
    for (int i = 0; i < MAX_BINDS; i++)
        if (m->binds[i].team == o->object.id)
            bind_remove(m, &m->binds[i], probe);
}

/* Forget what a process has bound that is gone; the memory itself is looked at by the caller. */
void team_process_gone(struct machine *m, int process) {
    for (int i = 0; i < MAX_BINDS; i++)
        if (m->binds[i].team && m->binds[i].process == process)
            m->binds[i] = (struct shared_bind){0};
}

/* ---- for multicast.c ---- */

static unsigned joined_count(const struct shared_object *o) { return (unsigned)__builtin_popcountll(o->joined); }

/* Tell whether every GPU that the object is for was added. */
bool team_complete(uint64_t team) {
    struct shared_object *o = machine_find(machine_lock(), team);
    bool complete = !o || joined_count(o) == o->object.team;
    machine_unlock();
    return complete;
}

/* Tell whether a physical GPU was added. */
bool team_has(uint64_t team, int device) {
    struct shared_object *o = machine_find(machine_lock(), team);
    bool has = o && o->joined >> device & 1;
    machine_unlock();
    return has;
}

/* Add a physical GPU, once. */
CUresult team_join(uint64_t team, int device) {
    struct shared_object *o = machine_find(machine_lock(), team);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (o && !(o->joined >> device & 1) && joined_count(o) < o->object.team) {
        o->joined |= (uint64_t)1 << device;
        result = CUDA_SUCCESS;
    }
    machine_unlock();
    return result;
}

static bool overlaps(const struct shared_bind *bind, uint64_t team, int device, size_t offset, size_t size) {
    return bind->team == team && bind->device == device && bind->offset < offset + size && offset < bind->offset + bind->size;
}

/* Bind memory of a physical GPU to a part of the object where that GPU has none yet. */
CUresult team_bind(uint64_t team, int device, size_t offset, size_t size, uint64_t memory, size_t memory_offset) {
    struct machine *m = machine_lock();
    struct shared_bind *place = NULL;
    bool taken = false;
    for (int i = 0; i < MAX_BINDS; i++) {
        taken = taken || overlaps(&m->binds[i], team, device, offset, size);
        place = place || m->binds[i].team ? place : &m->binds[i];
    }
    if (place && !taken)
        *place = (struct shared_bind){team, memory, offset, size, memory_offset, device, machine_slot()};
    machine_unlock();
    return taken ? CUDA_ERROR_INVALID_VALUE : place ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Undo exactly one bind of this process. */
CUresult team_unbind(uint64_t team, int device, size_t offset, size_t size) {
    struct machine *m = machine_lock();
    int probe = machine_probe(), found = -1;
    for (int i = 0; i < MAX_BINDS && found < 0; i++) {
        struct shared_bind *b = &m->binds[i];
        if (b->team == team && b->device == device && b->offset == offset && b->size == size && b->process == machine_slot())
            found = i;
    }
    if (found >= 0)
        bind_remove(m, &m->binds[found], probe);
    machine_unlock();
    close(probe);
    return found >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Tell whether anything is bound that this process bound. */
bool team_bound_here(void) {
    const struct machine *m = machine_lock();
    bool found = false;
    for (int i = 0; i < MAX_BINDS && !found; i++)
        found = m->binds[i].team && m->binds[i].process == machine_slot();
    machine_unlock();
    return found;
}

/* Find the memory behind an offset, one place for each GPU; *length is cut to what lies together on all of them.
 * Returns how many, 0 where not every GPU has memory there. */
unsigned team_places(uint64_t team, size_t offset, struct team_place *places, size_t *length) {
    struct machine *m = machine_lock();
    struct shared_object *o = machine_find(m, team);
    unsigned count = 0;
    for (int i = 0; i < MAX_BINDS && count < MAX_DEVICES; i++) {
        const struct shared_bind *b = &m->binds[i];
        if (b->team != team || offset < b->offset || offset >= b->offset + b->size)
            continue;
        size_t there = b->offset + b->size - offset;
        *length = there < *length ? there : *length;
        places[count++] = (struct team_place){b->memory, b->memory_offset + (offset - b->offset)};
    }
    bool whole = o && count == o->object.team;
    machine_unlock();
    return whole ? count : 0;
}
