/* cuGetProcAddress in both forms, from the table of entry points. */
#include <stdlib.h>
#include <string.h>

#include "entry_points.h"
#include "simcuda.h"

/* Only addresses are needed here; the functions themselves are declared where they are defined. */
#define DECLARE_PLAIN(name, since, symbol) extern char address_of_##symbol[] __asm__(#symbol);
#define DECLARE_STREAM(name, since, symbol, own_since, own) DECLARE_PLAIN(name, since, symbol) DECLARE_PLAIN(name, own_since, own)
ENTRY_POINTS(DECLARE_PLAIN, DECLARE_STREAM)

struct entry_point {
    const char *name;
    int since;
    void *function;
    int per_thread_since;
    void *per_thread; /* NULL: the name has no default stream */
};
#define ROW_PLAIN(name, since, symbol) {#name, since, address_of_##symbol, 0, NULL},
#define ROW_STREAM(name, since, symbol, own_since, own) {#name, since, address_of_##symbol, own_since, address_of_##own},
static const struct entry_point entry_points[] = {ENTRY_POINTS(ROW_PLAIN, ROW_STREAM)};

/* Stands for every function of an ABI that nobody knows yet. */
static CUresult of_a_later_abi(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* SIMCUDA_LATER_ABI names a function that changes with LATER_VERSION, for tests of what is made of an unknown ABI. */
static bool has_later_abi(const char *name, int version) {
    const char *named = getenv("SIMCUDA_LATER_ABI");
    return version >= LATER_VERSION && named && !strcmp(named, name);
}

static CUresult resolve(const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status, bool per_thread) {
    if (!name || !out || flags > 2)
        return CUDA_ERROR_INVALID_VALUE;
    per_thread = flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM || (per_thread && flags == CU_GET_PROC_ADDRESS_DEFAULT);
    const struct entry_point *best = NULL;
    bool known = false;
    for (size_t i = 0; i < sizeof entry_points / sizeof entry_points[0]; i++) {
        const struct entry_point *e = &entry_points[i];
        if (strcmp(e->name, name))
            continue;
        known = true;
        if (e->since <= version && (!best || e->since > best->since))
            best = e;
    }
    *out = NULL;
    if (best)
        *out = per_thread && best->per_thread && best->per_thread_since <= version ? best->per_thread : best->function;
    if (best && has_later_abi(name, version))
        *out = (void *)of_a_later_abi;
    if (status)
        *status = best ? CU_GET_PROC_ADDRESS_SUCCESS : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return best ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API(CALL_ANY, cuGetProcAddress, (const char *name, void **out, int version, cuuint64_t flags), (name, out, version, flags)) {
    return resolve(name, out, version, flags, NULL, false);
}
API(CALL_ANY, cuGetProcAddress_v2, (const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status),
    (name, out, version, flags, status)) {
    return resolve(name, out, version, flags, status, false);
}
API(CALL_ANY, cuGetProcAddress_v2_ptsz, (const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status),
    (name, out, version, flags, status)) {
    return resolve(name, out, version, flags, status, true);
}

/* The private tables of the real driver are not imitated. */
API(CALL_ANY, cuGetExportTable, (const void **out, const CUuuid *id), (out, id)) { return out && id ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_VALUE; }

API(CALL_INIT, cuProfilerStart, (void), ()) { return CUDA_SUCCESS; }
API(CALL_INIT, cuProfilerStop, (void), ()) { return CUDA_SUCCESS; }
