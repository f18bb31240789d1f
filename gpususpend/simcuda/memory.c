/* Memory as this process knows it: physical allocations that it holds, and the table of mapped address ranges.
 *
 * Device memory is never visible at its own address: there lies an inaccessible reservation, so a CPU that touches a
 * device pointer dies as it does on a GPU machine. GPU threads and copies see the same shared bytes through a private
 * view of the allocation, found by looking the address up in the table.
 *
 * Look-ups take no lock. The table is a sorted array that editors copy and publish; old ones are freed when no reader
 * is inside. A look-up pins what it found, so an unmap beside running work never takes the bytes away from it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simcuda.h"

struct table {
    struct table *next_old;
    size_t bytes;
    int count, room;
    struct mapping rows[];
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct table *) current;
static struct table *draft, *old_tables;
static atomic_int readers;
static struct memory *memories, *spare;
static struct memory **handles; /* by handle number */
static size_t handle_count, handle_room;
static _Atomic uint64_t next_buffer_id = 1;
#define HANDLE_BASE 0x51000000ull /* handle values start here, to be no small number by accident */

void memory_lock(void) { pthread_mutex_lock(&lock); }
void memory_unlock(void) { pthread_mutex_unlock(&lock); }
uint64_t mapping_new_buffer_id(void) { return atomic_fetch_add(&next_buffer_id, 1); }

/* ---- physical allocations ---- */

struct memory *memory_all(void) { return memories; }

/* Account for an allocation that this process has just come to hold: one reference and a handle of its own. */
struct memory *memory_new(const struct machine_object *object, enum memory_kind kind, bool foreign) {
    memory_lock();
    /* Structures are reused, never freed: a look-up may still try to pin one whose last reference has gone. */
    struct memory *memory = spare;
    if (memory)
        spare = memory->next;
    else
        memory = pages_alloc(sizeof *memory);
    if (handle_count == handle_room) {
        size_t room = handle_room ? handle_room * 2 : 4096;
        struct memory **grown = pages_alloc(room * sizeof *grown);
        if (grown && handles)
            memcpy(grown, handles, handle_count * sizeof *grown);
        pages_free(handles, handle_room * sizeof *grown);
        handles = grown;
        handle_room = room;
    }
    memory->object = *object;
    memory->kind = kind;
    memory->foreign = foreign;
    memory->device = object->device < 0 ? -1 : device_ordinal(object->device);
    memory->handle_refs = 0;
    memory->saved = NULL;
    atomic_store(&memory->view, NULL);
    memory->handle = HANDLE_BASE + handle_count * 16;
    handles[handle_count++] = memory;
    memory->next = memories;
    memories = memory;
    atomic_store(&memory->refs, 1);
    memory_unlock();
    return memory;
}

/* Return what a handle stands for while the application holds it; memory lock held. */
struct memory *memory_by_handle(CUmemGenericAllocationHandle handle) {
    size_t index = (size_t)(handle - HANDLE_BASE) / 16;
    if (handle < HANDLE_BASE || handle % 16 || index >= handle_count)
        return NULL;
    struct memory *memory = handles[index];
    return memory && memory->handle_refs > 0 ? memory : NULL;
}

void memory_get(struct memory *memory) { atomic_fetch_add(&memory->refs, 1); }

static bool try_get(struct memory *memory) {
    int refs = atomic_load(&memory->refs);
    while (refs > 0 && !atomic_compare_exchange_weak(&memory->refs, &refs, refs + 1))
        ;
    return refs > 0;
}

static bool held_twice(const struct memory *memory) {
    for (struct memory *m = memories; m; m = m->next)
        if (m != memory && m->object.id == memory->object.id)
            return true;
    return false;
}

/* Drop one reference (handle, mapping or running work); the last one lets the allocation go. No lock may be held. */
void memory_put(struct memory *memory) {
    if (atomic_fetch_sub(&memory->refs, 1) != 1)
        return;
    memory_lock();
    for (struct memory **at = &memories; *at; at = &(*at)->next)
        if (*at == memory) {
            *at = memory->next;
            break;
        }
    handles[(memory->handle - HANDLE_BASE) / 16] = NULL;
    bool last = memory->object.id && !held_twice(memory);
    memory_unlock();
    void *view = atomic_load(&memory->view);
    if (view)
        munmap(view, memory->object.size);
    if (last)
        machine_object_drop(memory->object.id);
    memory_lock();
    memory->next = spare;
    spare = memory;
    memory_unlock();
}

/* Return where this process sees the bytes of an allocation, or NULL. */
void *memory_view(struct memory *memory) {
    void *view = atomic_load(&memory->view), *other = NULL;
    if (view)
        return view;
    int fd = machine_object_open(memory->object.id);
    if (fd < 0)
        return NULL;
    view = mmap(NULL, memory->object.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (view == MAP_FAILED)
        return NULL;
    madvise(view, memory->object.size, MADV_DONTFORK);
    if (atomic_compare_exchange_strong(&memory->view, &other, view))
        return view;
    munmap(view, memory->object.size);
    return other;
}

/* ---- the table of mapped ranges ---- */

static int first_above(const struct table *table, CUdeviceptr address) {
    int low = 0, high = table ? table->count : 0;
    while (low < high) {
        int middle = (low + high) / 2;
        if (table->rows[middle].va <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Find the mapping that holds an address and pin its memory; pair with mapping_done. */
bool mapping_find(CUdeviceptr address, struct mapping *out) {
    bool found, stable;
    atomic_fetch_add(&readers, 1);
    do {
        const struct table *table = atomic_load(&current);
        int at = first_above(table, address) - 1;
        found = at >= 0 && address - table->rows[at].va < table->rows[at].size;
        if (found)
            *out = table->rows[at];
        bool pinned = found && out->memory && try_get(out->memory);
        /* An unmap in between may have let the memory go: then what was pinned is another one. */
        stable = (!found || !out->memory || pinned) && atomic_load(&current) == table;
        if (!stable && pinned)
            memory_put(out->memory);
    } while (!stable);
    atomic_fetch_sub(&readers, 1);
    return found;
}

void mapping_done(struct mapping *mapping) {
    if (mapping->memory)
        memory_put(mapping->memory);
    mapping->memory = NULL;
}

const struct mapping *mapping_table(int *count) {
    struct table *table = atomic_load(&current);
    *count = table ? table->count : 0;
    return table ? table->rows : NULL;
}

static struct table *copy_table(int extra) {
    struct table *from = atomic_load(&current);
    int count = from ? from->count : 0;
    size_t bytes = sizeof *from + (size_t)(count + extra) * sizeof(struct mapping);
    struct table *to = pages_alloc(bytes);
    if (!to)
        return NULL;
    to->bytes = bytes;
    to->count = count;
    to->room = count + extra;
    if (count)
        memcpy(to->rows, from->rows, (size_t)count * sizeof(struct mapping));
    return to;
}

struct mapping *mapping_edit(int *count) {
    draft = copy_table(0);
    *count = draft ? draft->count : 0;
    return draft ? draft->rows : NULL;
}

/* Make the edited copy the table, and free old ones when no look-up is under way. */
void mapping_publish(void) {
    if (!draft)
        return;
    struct table *old = atomic_exchange(&current, draft);
    draft = NULL;
    if (old) {
        old->next_old = old_tables;
        old_tables = old;
    }
    if (atomic_load(&readers) != 0)
        return;
    while (old_tables) {
        struct table *dead = old_tables;
        old_tables = dead->next_old;
        pages_free(dead, dead->bytes);
    }
}

/* Tell whether any mapping touches the range; memory lock held. */
bool mapping_overlaps(CUdeviceptr va, size_t size) {
    struct table *table = atomic_load(&current);
    int at = first_above(table, va) - 1;
    if (at >= 0 && table->rows[at].va + table->rows[at].span > va)
        return true;
    return table && at + 1 < table->count && table->rows[at + 1].va < va + size;
}

/* Add a mapping; memory lock held. The memory's reference passes to the table. */
bool mapping_insert(const struct mapping *mapping) {
    draft = copy_table(1);
    if (!draft)
        return false;
    int at = first_above(draft, mapping->va);
    memmove(&draft->rows[at + 1], &draft->rows[at], (size_t)(draft->count - at) * sizeof *mapping);
    draft->rows[at] = *mapping;
    draft->count++;
    mapping_publish();
    return true;
}

/* Take out the mapping that starts at va; memory lock held. Its memory's reference passes to the caller. */
bool mapping_remove(CUdeviceptr va, struct mapping *out) {
    draft = copy_table(0);
    int at = draft ? first_above(draft, va) - 1 : -1;
    if (at < 0 || draft->rows[at].va != va) {
        if (draft)
            pages_free(draft, draft->bytes);
        draft = NULL;
        return false;
    }
    *out = draft->rows[at];
    memmove(&draft->rows[at], &draft->rows[at + 1], (size_t)(draft->count - at - 1) * sizeof *out);
    draft->count--;
    mapping_publish();
    return true;
}

/* ---- what a GPU may touch ---- */

static bool may_access(const struct mapping *m, CUcontext context, bool write, bool copy) {
    int device = context->device;
    /* Only instructions made for it may read there: each GPU holds another value. */
    if (m->memory && m->memory->kind == MEM_MULTICAST && !write)
        return false;
    switch (m->kind) {
    case MAP_VMM:
        if (write)
            return m->access[device] == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        return m->access[device] != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    case MAP_ALLOC:
    case MAP_POOL:
        /* The copy engines reach memory of any context of the process; a kernel needs peer access. */
        return copy || m->device == device || (atomic_load(&context->peers) >> m->device & 1);
    case MAP_IPC:
        return copy || m->device == device || m->access[device];
    case MAP_REGISTERED:
        return !(write && m->flags & CU_MEMHOSTREGISTER_READ_ONLY);
    default:
        return true;
    }
}

/* Give the bytes behind a device address as far as they lie together (view->length, at most size), pinned. */
CUresult view_device(struct view *view, CUcontext context, CUdeviceptr address, size_t size, bool write, bool copy) {
    struct mapping m;
    *view = (struct view){0};
    if (!mapping_find(address, &m))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    size_t inside = (size_t)(address - m.va);
    view->pinned = m.memory;
    view->length = m.size - inside < size ? m.size - inside : size;
    if (!may_access(&m, context, write, copy)) {
        view_done(view);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (!m.memory) {
        view->bytes = (void *)(uintptr_t)address;
        return CUDA_SUCCESS;
    }
    if (m.memory->kind == MEM_MULTICAST) {
        CUresult result = multicast_view(view, m.memory->object.id, inside, view->length);
        if (result != CUDA_SUCCESS)
            view_done(view);
        return result;
    }
    char *bytes = memory_view(m.memory);
    if (!bytes) {
        view_done(view);
        return CUDA_ERROR_UNKNOWN;
    }
    view->bytes = bytes + inside;
    return CUDA_SUCCESS;
}

/* What was written to the first bytes of a view reaches every GPU that it stands for. */
void view_wrote(struct view *view, size_t size) {
    for (unsigned i = 1; i < view->replica_count; i++)
        memcpy(view->replicas[i].bytes, view->bytes, size);
}

void view_done(struct view *view) {
    for (unsigned i = 0; i < view->replica_count; i++)
        munmap(view->replicas[i].mapped, view->replicas[i].mapped_size);
    view->replica_count = 0;
    if (view->pinned)
        memory_put(view->pinned);
    view->pinned = NULL;
}

/* Tell whether the driver knows the address as memory of a GPU, or as its own or registered host memory. */
bool address_is_device(CUdeviceptr address) {
    struct mapping m;
    if (!mapping_find(address, &m))
        return false;
    mapping_done(&m);
    return true;
}

/* Tell whether every byte of the range lies in some mapping that a copy or a set of the context may use: measured, one
 * that may not is refused at once, and the context goes on. NULL: whether it lies in a mapping at all. */
bool range_is_usable(CUcontext context, CUdeviceptr address, size_t size, bool write, bool copy) {
    while (size) {
        struct mapping m;
        if (!mapping_find(address, &m))
            return false;
        size_t there = m.size - (size_t)(address - m.va);
        bool usable = !context || may_access(&m, context, write, copy);
        mapping_done(&m);
        if (!usable || there >= size)
            return usable;
        address += there;
        size -= there;
    }
    return true;
}
