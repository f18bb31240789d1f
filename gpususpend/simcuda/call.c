/* What every entry point does first and last: initialisation, the lock of a checkpoint, errors, injection, trace. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "simcuda.h"

static atomic_uint gate_closed, in_flight;
static atomic_bool initialised, forked;
_Thread_local bool thread_default_stream, thread_is_gpu;

/* Hold every later call that CALL_INIT describes; those inside are counted by call_in_flight. */
void call_gate_close(void) { atomic_store(&gate_closed, 1); }

void call_gate_open(void) {
    atomic_store(&gate_closed, 0);
    futex_wake(&gate_closed);
}

unsigned call_in_flight(void) { return atomic_load(&in_flight); }

void call_hang(void) {
    for (;;)
        pause();
}

static void enter_gate(void) {
    for (;;) {
        atomic_fetch_add(&in_flight, 1);
        if (!atomic_load(&gate_closed))
            return;
        atomic_fetch_sub(&in_flight, 1);
        futex_wait(&gate_closed, 1);
    }
}

static CUresult check_context(void) {
    CUcontext context = context_current();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!atomic_load(&context->alive))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    context_pass(context);
    return atomic_load(&context->error);
}

/* Tell whether the call may be made now; waits while the process is locked. */
CUresult call_enter(struct call *call, const char *name, int flags, bool per_thread) {
    *call = (struct call){.name = name, .flags = flags, .per_thread_before = thread_default_stream};
    thread_default_stream = per_thread;
    if (flags != CALL_ANY) {
        if (atomic_load(&forked) || !atomic_load(&initialised))
            return CUDA_ERROR_NOT_INITIALIZED;
        /* A host function runs while the engine waits for it: the driver permits it no call. */
        if (thread_is_gpu)
            return CUDA_ERROR_NOT_PERMITTED;
    }
    CUresult injected = inject_check(name);
    if (injected != CUDA_SUCCESS)
        return injected;
    if (flags & CALL_INIT) {
        enter_gate();
        call->counted = true;
    }
    CUresult result = (flags & CALL_CONTEXT) == CALL_CONTEXT ? check_context() : CUDA_SUCCESS;
    return result == CUDA_SUCCESS && flags & CALL_UNSAFE ? capture_refuse_unsafe() : result;
}

CUresult call_leave(struct call *call, CUresult result) {
    if (call->counted)
        atomic_fetch_sub(&in_flight, 1);
    thread_default_stream = call->per_thread_before;
    trace_call(call->name, result);
    return result;
}

/* A fork's child keeps nothing: as with the real driver every call answers "not initialized" from here on. */
static void forked_child(void) {
    if (!atomic_load(&initialised))
        return;
    atomic_store(&forked, true);
    machine_forked_child();
    service_forked_child();
}

API(CALL_ANY, cuInit, (unsigned flags), (flags)) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&forked))
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_SUCCESS;
    if (!atomic_load(&initialised)) {
        result = machine_attach();
        if (result == CUDA_SUCCESS)
            result = machine_device_count() ? service_start() : CUDA_ERROR_NO_DEVICE;
        if (result == CUDA_SUCCESS) {
            device_count = machine_device_count();
            pthread_atfork(NULL, NULL, forked_child);
            atomic_store(&initialised, true);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

API(CALL_ANY, cuDriverGetVersion, (int *version), (version)) {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = getenv("SIMCUDA_LATER_ABI") ? LATER_VERSION : DRIVER_VERSION;
    return CUDA_SUCCESS;
}

/* Symbols of the simulation: that it is one, and what /proc/driver/nvidia/version says of a real driver. */
EXPORT int simcudaVersion(void);
EXPORT int simcudaVersion(void) { return DRIVER_VERSION; }

EXPORT const char *simcudaDriverVersionString(void);
EXPORT const char *simcudaDriverVersionString(void) {
    const char *set = getenv("SIMCUDA_DRIVER_VERSION");
    return set ? set : "580.159.04";
}

/* The branch that the version begins with; what drivers can do differs by it. */
int driver_branch(void) { return atoi(simcudaDriverVersionString()); }
