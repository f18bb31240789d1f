/* What a process does when it is locked, checkpointed, restored, unlocked; measured outcomes in cuda-facts.
 *
 * A checkpoint copies device memory into private memory of the process and leaves the machine: no descriptor and no
 * mapping of it is left but the exported descriptors that the application itself keeps, and those keep their memory.
 * The restore joins it again. What the real driver cannot restore loses the process: every later call hangs. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "simcuda.h"

static _Atomic int state;
static bool was_restored;
static bool lost, answered_once; /* a failed restore is answered 304 once more, then 401 */
static CUresult restore_outcome; /* what the restore of what was checkpointed will say */

int checkpoint_state(void) { return atomic_load(&state); }
bool checkpoint_restored(void) { return was_restored; }

static bool gone(int client) {
    struct pollfd waiting = {.fd = client, .events = 0};
    return poll(&waiting, 1, 0) > 0 && waiting.revents & (POLLHUP | POLLERR);
}

/* Hold new calls, wait for those inside and for submitted work; NOT_READY (and running on) at the deadline. */
CUresult checkpoint_lock(unsigned timeout_ms, int client) {
    if (atomic_load(&state) != STATE_RUNNING)
        return CUDA_ERROR_ILLEGAL_STATE;
    uint64_t deadline = now_ns() + (uint64_t)timeout_ms * 1000000u;
    call_gate_close();
    while (call_in_flight() || !engine_idle()) {
        if ((timeout_ms && now_ns() > deadline) || gone(client)) {
            call_gate_open();
            return CUDA_ERROR_NOT_READY;
        }
        nap_us(200);
    }
    if (gone(client)) { /* nobody would ever unlock it */
        call_gate_open();
        return CUDA_ERROR_NOT_READY;
    }
    atomic_store(&state, STATE_LOCKED);
    return CUDA_SUCCESS;
}

CUresult checkpoint_unlock(void) {
    if (atomic_load(&state) != STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    atomic_store(&state, STATE_RUNNING);
    call_gate_open();
    return CUDA_SUCCESS;
}

/* ---- checkpoint ---- */

/* What the driver was seen to answer when it restores a process that held this. */
static CUresult outcome_of(const struct memory *memory) {
    if (memory->kind == MEM_IPC)
        return CUDA_ERROR_INVALID_VALUE;
    if (memory->foreign)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (is_host_memory(memory))
        return CUDA_ERROR_UNKNOWN;
    return CUDA_SUCCESS;
}

static void drop_view(struct memory *memory) {
    void *view = atomic_exchange(&memory->view, NULL);
    if (view)
        munmap(view, memory->object.size);
}

static bool save(struct memory *memory) {
    void *bytes = memory_view(memory);
    memory->old_id = memory->object.id;
    memory->saved = pages_alloc(memory->object.size);
    if (!bytes || !memory->saved)
        return false;
    static const char zeros[4096];
    for (size_t at = 0; at < memory->object.size; at += sizeof zeros) /* zero pages stay unpopulated */
        if (memcmp((char *)bytes + at, zeros, sizeof zeros))
            memcpy((char *)memory->saved + at, (char *)bytes + at, sizeof zeros);
    return true;
}

static void unsave_all(void) {
    for (struct memory *m = memory_all(); m; m = m->next) {
        pages_free(m->saved, m->object.size);
        m->saved = NULL;
    }
}

/* Host memory goes from its address with the rest. */
static void hide_host_mappings(void) {
    int count;
    const struct mapping *rows = mapping_table(&count);
    for (int i = 0; i < count; i++)
        if (rows[i].kind == MAP_VMM && is_host_memory(rows[i].memory) && rows[i].host_access)
            host_mapping_clear(&rows[i]);
}

static bool multicast_lives(void) {
    bool found = team_bound_here();
    memory_lock();
    for (struct memory *m = memory_all(); m && !found; m = m->next)
        found = m->kind == MEM_MULTICAST;
    memory_unlock();
    return found;
}

CUresult checkpoint_checkpoint(int client) {
    if (atomic_load(&state) != STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    /* Reported: hangs while a multicast object lives, bound or not. Until the caller is gone: a test wants to go on. */
    while (multicast_lives() && !gone(client))
        nap_us(1000);
    if (multicast_lives())
        return CUDA_ERROR_NOT_READY;
    if (managed_memory_exists())
        return CUDA_ERROR_NOT_SUPPORTED;
    bool saved = true;
    restore_outcome = CUDA_SUCCESS;
    memory_lock();
    for (struct memory *m = memory_all(); m && saved; m = m->next) {
        CUresult outcome = outcome_of(m);
        restore_outcome = restore_outcome == CUDA_SUCCESS ? outcome : restore_outcome;
        if (!m->foreign)
            saved = save(m);
    }
    if (saved) {
        hide_host_mappings();
        for (struct memory *m = memory_all(); m; m = m->next)
            drop_view(m);
    } else {
        unsave_all();
    }
    memory_unlock();
    if (!saved)
        return CUDA_ERROR_OUT_OF_MEMORY;
    interprocess_leave();
    machine_detach();
    atomic_store(&state, STATE_CHECKPOINTED);
    return CUDA_SUCCESS;
}

/* ---- restore ---- */

/* Read where each GPU of the process goes; every one must be listed when any is. */
static CUresult plan_devices(const struct request *request, int *physical) {
    memcpy(physical, device_physical, sizeof device_physical);
    if (request->pair_count == 0)
        return CUDA_SUCCESS;
    uint64_t taken = 0;
    if (request->pair_count > MAX_DEVICES)
        return CUDA_ERROR_INVALID_VALUE;
    for (int d = 0; d < device_count; d++) {
        CUuuid old = device_uuid(device_physical[d]);
        int to = -1;
        for (unsigned i = 0; i < request->pair_count; i++)
            for (int p = 0; p < device_count && !memcmp(&request->pairs[i].oldUuid, &old, sizeof old); p++) {
                CUuuid fresh = device_uuid(p);
                to = memcmp(&request->pairs[i].newUuid, &fresh, sizeof fresh) ? to : p;
            }
        if (to < 0 || taken >> to & 1)
            return CUDA_ERROR_INVALID_VALUE;
        taken |= (uint64_t)1 << to;
        physical[d] = to;
    }
    return CUDA_SUCCESS;
}

static CUresult lose(CUresult result) {
    lost = true;
    atomic_store(&state, STATE_FAILED); /* the gate stays closed: every call of the process hangs */
    return result;
}

static CUresult room(const int *physical) {
    size_t needed[MAX_DEVICES] = {0};
    for (struct memory *m = memory_all(); m; m = m->next)
        if (m->device >= 0)
            needed[physical[m->device]] += m->object.charged;
    return machine_has_room(needed) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* An own export that the process imported again is the same memory under a second handle. */
static void share_with_own_imports(const struct memory *memory) {
    for (struct memory *other = memory_all(); other; other = other->next)
        if (other->saved && other->old_id == memory->old_id) {
            CUmemAllocationProp own = other->object.prop; /* an import's differs */
            other->object = memory->object;
            other->object.prop = own;
            pages_free(other->saved, other->object.size);
            other->saved = NULL;
        }
}

/* Give an allocation new physical memory with its old content; handles and addresses stay. */
static CUresult bring_back(struct memory *memory) {
    if (memory->device >= 0)
        memory->object.device = device_physical[memory->device];
    memory->object.restored = true;
    CUresult result = machine_object_create(&memory->object);
    if (result != CUDA_SUCCESS)
        return result;
    static const char zeros[4096];
    char *bytes = memory_view(memory);
    for (size_t at = 0; bytes && at < memory->object.size; at += sizeof zeros)
        if (memcmp((char *)memory->saved + at, zeros, sizeof zeros))
            memcpy(bytes + at, (char *)memory->saved + at, sizeof zeros);
    pages_free(memory->saved, memory->object.size);
    memory->saved = NULL;
    share_with_own_imports(memory);
    return bytes ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

static void reopen_device(CUcontext context, void *unused) {
    (void)unused;
    machine_set_context(device_physical[context->device], true);
    context->restored = true;
}

static CUresult rebuild(void) {
    CUresult result = CUDA_SUCCESS;
    memory_lock();
    for (struct memory *m = memory_all(); m && result == CUDA_SUCCESS; m = m->next)
        if (m->saved)
            result = bring_back(m);
    memory_unlock();
    context_each(reopen_device, NULL);
    return result == CUDA_SUCCESS && !interprocess_return() ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

CUresult checkpoint_restore(const struct request *request) {
    int physical[MAX_DEVICES];
    if (lost) {
        CUresult result = answered_once ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_OPERATING_SYSTEM;
        answered_once = true;
        return result;
    }
    if (atomic_load(&state) != STATE_CHECKPOINTED)
        return CUDA_ERROR_ILLEGAL_STATE;
    CUresult result = plan_devices(request, physical);
    if (result != CUDA_SUCCESS)
        return result;
    if (restore_outcome != CUDA_SUCCESS)
        return lose(restore_outcome);
    if (machine_attach() != CUDA_SUCCESS)
        return lose(CUDA_ERROR_OPERATING_SYSTEM);
    result = room(physical);
    if (result == CUDA_SUCCESS) {
        memcpy(device_physical, physical, sizeof device_physical);
        result = rebuild();
    }
    if (result != CUDA_SUCCESS) {
        machine_detach();
        return lose(result);
    }
    was_restored = true;
    atomic_store(&state, STATE_LOCKED);
    return CUDA_SUCCESS;
}
