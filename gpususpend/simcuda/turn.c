/* Whose turn a GPU has. Processes share it freely, but for what was measured: after a restore, a running kernel of a
 * context that was restored is no longer interrupted for the work of another process. While it waits it keeps all others
 * away; and when one of them wants the GPU, nothing more of its own process starts there either. Whoever stays away for
 * too long has it thrown out with CUDA_ERROR_LAUNCH_FAILED (Xid 109). So has a new context of its own process, for which
 * the driver holds up the calls that the kernel may wait for. */
#include <stdlib.h>

#include "machine.h"

enum { STEP_US = 200, STEPS_TO_REAP = 500 };

static uint64_t patience_ns(void) {
    const char *text = getenv("SIMCUDA_SWITCH_TIMEOUT_MS");
    return (text && text[0] ? strtoull(text, NULL, 10) : 5000) * 1000000;
}

static struct shared_turn *turn_of(struct machine *m, int process, int device) { return &m->processes[process].turns[device]; }

/* Tell whether this process has to stay away from a GPU. */
static bool is_away(struct machine *m, int own, int device) {
    bool kept = atomic_load(&turn_of(m, own, device)->keeps) != 0;
    for (int p = 0; p < MAX_PROCESSES; p++) {
        struct shared_turn *other = turn_of(m, p, device);
        if (p != own && m->processes[p].used && (atomic_load(&other->keeps) || (kept && atomic_load(&other->wants))))
            return true;
    }
    return false;
}

static void throw_out(struct machine *m, int own, int device) {
    for (int p = 0; p < MAX_PROCESSES; p++)
        if (p != own && atomic_load(&turn_of(m, p, device)->keeps))
            atomic_store(&turn_of(m, p, device)->thrown_out, true);
}

/* Wait until a piece of work may start. */
void turn_wait(CUcontext context) {
    struct machine *m = machine_here();
    int own = machine_slot(), device = device_physical[context->device];
    if (!m || own < 0 || !is_away(m, own, device))
        return;
    const uint64_t until = now_ns() + patience_ns();
    atomic_fetch_add(&turn_of(m, own, device)->wants, 1);
    for (unsigned step = 1; is_away(m, own, device); step++) {
        nap_us(STEP_US);
        if (step % STEPS_TO_REAP == 0) { /* the one that keeps it may have been killed */
            machine_reap(machine_lock());
            machine_unlock();
        }
        if (now_ns() > until)
            throw_out(m, own, device);
    }
    atomic_fetch_sub(&turn_of(m, own, device)->wants, 1);
}

/* Tell whether a new context cannot have the GPU: a waiting kernel of this process, if there is one, is thrown out for it. */
bool turn_refused(int device) {
    struct machine *m = machine_here();
    struct shared_turn *turn = m ? turn_of(m, machine_slot(), device_physical[device]) : NULL;
    if (!turn || !atomic_load(&turn->keeps))
        return false;
    atomic_store(&turn->thrown_out, true);
    return true;
}

/* A kernel begins to wait: it keeps others away if its context was restored. */
void turn_keep(CUcontext context) {
    if (machine_here() && context->restored)
        atomic_fetch_add(&turn_of(machine_here(), machine_slot(), device_physical[context->device])->keeps, 1);
}

/* Tell whether the waiting kernel has been thrown out. */
bool turn_lost(CUcontext context) {
    return context->restored && atomic_load(&turn_of(machine_here(), machine_slot(), device_physical[context->device])->thrown_out);
}

/* The kernel has ended, or has seen what it waited for and needs a turn to go on. */
void turn_give(CUcontext context) {
    if (!context->restored) {
        turn_wait(context);
        return;
    }
    struct shared_turn *turn = turn_of(machine_here(), machine_slot(), device_physical[context->device]);
    if (atomic_fetch_sub(&turn->keeps, 1) == 1)
        atomic_store(&turn->thrown_out, false);
}
