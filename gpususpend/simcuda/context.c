/* Contexts: primary and created ones, and each thread's stack of current ones.
 *
 * A context's structure is never freed, so that a handle kept too long is recognised as destroyed. */
#include <stdlib.h>

#include "simcuda.h"

enum { MAGIC = 0x43545831, STACK = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(CUcontext) all;
static CUcontext primary[MAX_DEVICES];
static unsigned primary_flags[MAX_DEVICES];
static _Atomic uint64_t next_id = 1;

static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

CUcontext context_current(void) { return depth ? stack[depth - 1] : NULL; }

bool context_valid(CUcontext context) {
    for (CUcontext c = atomic_load(&all); c; c = c->next_all)
        if (c == context)
            return atomic_load(&c->alive);
    return false;
}

void context_each(void (*visit)(CUcontext context, void *data), void *data) {
    for (CUcontext c = atomic_load(&all); c; c = c->next_all)
        if (atomic_load(&c->alive))
            visit(c, data);
}

bool context_on_device(int device) {
    for (CUcontext c = atomic_load(&all); c; c = c->next_all)
        if (atomic_load(&c->alive) && c->device == device)
            return true;
    return false;
}

/* Wait for the work of a context, and let no other thread's call into it meanwhile (measured: unregistering does). */
void context_wait_held(CUcontext context) {
    atomic_fetch_add(&context->held, 1);
    context_wait(context);
    if (atomic_fetch_sub(&context->held, 1) == 1)
        futex_wake(&context->held);
}

void context_pass(CUcontext context) {
    for (unsigned held; (held = atomic_load(&context->held));)
        futex_wait(&context->held, held);
}

static void bring_to_life(CUcontext context) {
    static const size_t limits[16] = {1024, 7864320, 8388608, 2, 2048, 128, 0};
    for (int i = 0; i < 16; i++)
        context->limits[i] = limits[i];
    atomic_store(&context->error, CUDA_SUCCESS);
    atomic_store(&context->peers, 0);
    context->legacy = stream_create(context, CU_STREAM_DEFAULT, 0);
    atomic_store(&context->alive, true);
    machine_set_context(device_physical[context->device], true);
}

static CUcontext new_context(int device, unsigned flags, bool is_primary) {
    CUcontext context = calloc(1, sizeof *context);
    if (!context)
        return NULL;
    context->magic = MAGIC;
    context->device = device;
    context->flags = flags;
    context->primary = is_primary;
    context->api_version = 3020;
    context->id = atomic_fetch_add(&next_id, 1);
    context->next_all = atomic_load(&all);
    atomic_store(&all, context);
    return context;
}

/* Wait for its work, free what was allocated in it; the handle stays recognisable. */
static void end_context(CUcontext context) {
    stream_destroy_context(context);
    atomic_store(&context->alive, false);
    alloc_free_context(context);
    if (!context_on_device(context->device))
        machine_set_context(device_physical[context->device], false);
}

/* ---- primary contexts ---- */

API(CALL_INIT, cuDevicePrimaryCtxRetain, (CUcontext * out, CUdevice device), (out, device)) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUcontext context = primary[device];
    if (!context)
        context = primary[device] = new_context(device, primary_flags[device], true);
    if (context && !atomic_load(&context->alive))
        bring_to_life(context);
    if (context)
        context->primary_refs++;
    pthread_mutex_unlock(&lock);
    *out = context;
    return context ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult primary_release(CUdevice device, bool all_at_once) {
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUcontext context = primary[device];
    CUresult result = CUDA_SUCCESS;
    if (!context || !atomic_load(&context->alive))
        result = all_at_once ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    else if (all_at_once || --context->primary_refs <= 0) {
        if (!all_at_once)
            context->primary_refs = 0;
        end_context(context);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
API(CALL_INIT, cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device)) { return primary_release(device, false); }
API(CALL_INIT, cuDevicePrimaryCtxReset_v2, (CUdevice device), (device)) { return primary_release(device, true); }

API(CALL_INIT, cuDevicePrimaryCtxSetFlags_v2, (CUdevice device, unsigned flags), (device, flags)) {
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    primary_flags[device] = flags;
    if (primary[device])
        primary[device]->flags = flags;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active), (device, flags, active)) {
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = primary_flags[device];
    *active = primary[device] && atomic_load(&primary[device]->alive);
    return CUDA_SUCCESS;
}

/* ---- the stack ---- */

static CUresult push(CUcontext context) {
    if (!context_valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == STACK)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuCtxPushCurrent_v2, (CUcontext context), (context)) { return push(context); }

API(CALL_INIT, cuCtxPopCurrent_v2, (CUcontext * out), (out)) {
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out)
        *out = stack[depth];
    return CUDA_SUCCESS;
}

API(CALL_UNLOCKED, cuCtxSetCurrent, (CUcontext context), (context)) {
    if (context && !context_valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth)
        depth--;
    if (context)
        stack[depth++] = context;
    return CUDA_SUCCESS;
}

API(CALL_UNLOCKED, cuCtxGetCurrent, (CUcontext * out), (out)) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = context_current();
    return CUDA_SUCCESS;
}

/* ---- created contexts ---- */

static CUresult create(CUcontext *out, unsigned flags, CUdevice device) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (turn_refused(device))
        return CUDA_ERROR_LAUNCH_FAILED;
    pthread_mutex_lock(&lock);
    CUcontext context = new_context(device, flags, false);
    if (context)
        bring_to_life(context);
    pthread_mutex_unlock(&lock);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = context;
    return push(context);
}
API(CALL_INIT, cuCtxCreate_v2, (CUcontext * out, unsigned flags, CUdevice device), (out, flags, device)) { return create(out, flags, device); }
API(CALL_INIT, cuCtxCreate_v3, (CUcontext * out, void *params, int count, unsigned flags, CUdevice device), (out, params, count, flags, device)) {
    return params && count ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, device);
}
API(CALL_INIT, cuCtxCreate_v4, (CUcontext * out, CUctxCreateParams *params, unsigned flags, CUdevice device), (out, params, flags, device)) {
    return params && (params->numExecAffinityParams || params->cigParams) ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, device);
}

API(CALL_INIT, cuCtxDestroy_v2, (CUcontext context), (context)) {
    if (!context_valid(context) || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    end_context(context);
    pthread_mutex_unlock(&lock);
    if (context_current() == context)
        depth--;
    return CUDA_SUCCESS;
}

/* ---- properties ---- */

static CUresult named_or_current(CUcontext *context) {
    if (!*context)
        *context = context_current();
    return *context && context_valid(*context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* Measured: that a context was reset, or is poisoned, does not matter here. */
API(CALL_INIT, cuCtxGetDevice, (CUdevice * device), (device)) {
    CUcontext context = context_current();
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = context->device;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuCtxGetDevice_v2, (CUdevice * device, CUcontext context), (device, context)) {
    CUresult result = named_or_current(&context);
    if (!device || result != CUDA_SUCCESS)
        return device ? result : CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuCtxGetFlags, (unsigned *flags), (flags)) {
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = context_current()->flags;
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuCtxSetFlags, (unsigned flags), (flags)) {
    context_current()->flags = flags;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuCtxGetId, (CUcontext context, unsigned long long *id), (context, id)) {
    CUresult result = named_or_current(&context);
    if (!id || result != CUDA_SUCCESS)
        return id ? result : CUDA_ERROR_INVALID_VALUE;
    *id = context->id;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuCtxGetApiVersion, (CUcontext context, unsigned *version), (context, version)) {
    CUresult result = named_or_current(&context);
    if (!version || result != CUDA_SUCCESS)
        return version ? result : CUDA_ERROR_INVALID_VALUE;
    *version = context->api_version;
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuCtxGetLimit, (size_t *value, CUlimit limit), (value, limit)) {
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    if (limit < 0 || limit > 9)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = context_current()->limits[limit];
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuCtxSetLimit, (CUlimit limit, size_t value), (limit, value)) {
    if (limit < 0 || limit > 9)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    context_current()->limits[limit] = value;
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest)) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuCtxGetCacheConfig, (CUfunc_cache * config), (config)) {
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    *config = 0;
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuCtxSetCacheConfig, (CUfunc_cache config), (config)) { return config < 0 || config > 3 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
API(CALL_CONTEXT, cuCtxResetPersistingL2Cache, (void), ()) { return CUDA_SUCCESS; }

/* Measured: refused while a stream of the context is being captured, whatever the mode, and the capture is broken. */
static CUresult synchronize(CUcontext context) {
    CUresult result = capture_break_all(context);
    return result == CUDA_SUCCESS ? context_wait(context) : result;
}

API(CALL_CONTEXT, cuCtxSynchronize, (void), ()) { return synchronize(context_current()); }

API(CALL_INIT, cuCtxSynchronize_v2, (CUcontext context), (context)) {
    CUresult result = named_or_current(&context);
    return result == CUDA_SUCCESS ? synchronize(context) : result;
}

/* ---- peer access: of the current context to the memory of another device's context ---- */

API(CALL_CONTEXT, cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags)) {
    CUcontext context = context_current();
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!context_valid(peer))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (peer->device == context->device)
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    uint64_t bit = (uint64_t)1 << peer->device;
    return atomic_fetch_or(&context->peers, bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

API(CALL_CONTEXT, cuCtxDisablePeerAccess, (CUcontext peer), (peer)) {
    if (!context_valid(peer))
        return CUDA_ERROR_INVALID_CONTEXT;
    uint64_t bit = (uint64_t)1 << peer->device;
    return atomic_fetch_and(&context_current()->peers, ~bit) & bit ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}
