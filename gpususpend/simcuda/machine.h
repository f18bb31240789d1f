/* What the files that keep the shared table know of it: machine.c, team.c and interprocess.c. */
#ifndef SIMCUDA_MACHINE_H
#define SIMCUDA_MACHINE_H

#include "simcuda.h"

enum { MAX_PROCESSES = 256, MAX_OBJECTS = 32768, MAX_EXPORTS = 32768, MAX_BINDS = 4096, MAX_EVENTS = 4096, LAYOUT = 7 };
#define PROCESS_BYTE ((off_t)1 << 40)
#define EXPORT_BYTE ((off_t)1 << 41)
#define CONTEXT_COST ((size_t)16 << 20) /* what a context takes of its GPU */

struct shared_turn { /* at one physical GPU; written by its process, read by all */
    _Atomic uint32_t keeps, wants; /* kernels that keep others away; work that waits */
    atomic_bool thrown_out;
};
struct shared_process {
    uint32_t used, pid;
    uint64_t nonce;
    uint8_t context_on[MAX_DEVICES];
    struct shared_turn turns[MAX_DEVICES];
};
struct shared_object {
    struct machine_object object; /* id 0: free */
    uint64_t holders[MAX_PROCESSES / 64];
    uint64_t joined; /* of a multicast object: a bit for each physical GPU that was added */
};
struct shared_bind { /* memory that a process has bound to a multicast object */
    uint64_t team, memory; /* objects; team 0: free */
    uint64_t offset, size, memory_offset;
    int device, process; /* physical; slot */
};
struct shared_export {
    uint64_t number, object; /* number 0: free */
};
struct shared_event { /* an interprocess event, as long as any process has it */
    uint64_t id;      /* 0: free */
    uint64_t holders[MAX_PROCESSES / 64];
    struct records records;
};
struct machine {
    uint32_t layout, devices;
    uint64_t device_memory, next_object, next_export;
    pthread_mutex_t lock;
    uint32_t objects_used, exports_used; /* high-water marks */
    struct shared_process processes[MAX_PROCESSES];
    struct shared_object objects[MAX_OBJECTS];
    struct shared_export exports[MAX_EXPORTS];
    struct shared_bind binds[MAX_BINDS];
    struct shared_event events[MAX_EVENTS];
};

/* ---- machine.c ---- */
struct machine *machine_lock(void); /* the table of this process's machine, locked */
void machine_unlock(void);
struct machine *machine_here(void); /* the same unlocked, NULL without one */
int machine_slot(void); /* of this process */
static inline bool machine_any(const uint64_t *holders) {
    uint64_t found = 0;
    for (int i = 0; i < MAX_PROCESSES / 64; i++)
        found |= holders[i];
    return found;
}
/* The rest with the lock held. */
void machine_reap(struct machine *m);
struct shared_object *machine_find(struct machine *m, uint64_t id);
void machine_collect(struct machine *m, struct shared_object *o, int probe);
int machine_probe(void); /* a descriptor to look at locks with, to be closed */

/* ---- interprocess.c ---- */
void interprocess_process_gone(struct machine *m, int process);

/* ---- team.c ---- */
bool team_binds(const struct machine *m, uint64_t memory);
void team_empty(struct machine *m, struct shared_object *o, int probe);
void team_process_gone(struct machine *m, int process);

#endif
