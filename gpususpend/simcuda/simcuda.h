/* simcuda: what its parts know of each other.
 *
 * One process's view of the simulated machine lives in private memory (contexts, streams, handles, mappings); what
 * processes share (which physical memory exists, who holds it, who lives) is the business of machine.c alone.
 *
 * Lock order: the memory lock (memory.c), then the machine's lock (machine.c). The engine lock (queue.c) is taken with
 * neither held. Look-ups of memory and queries of streams and events take no lock, so that a thread that is stopped by
 * ptrace inside one never holds up a driver call of another thread, as was measured on the real driver. */
#ifndef SIMCUDA_H
#define SIMCUDA_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define GRANULE ((size_t)2 << 20)
#define PAGE ((size_t)4096)
#define DRIVER_VERSION 13000
#define LATER_VERSION 14000 /* with SIMCUDA_LATER_ABI */

/* ---- call.c: what every entry point does before and after its work ---- */
enum call_flags {
    CALL_ANY = 0,      /* before cuInit, in a locked process and on a GPU thread, too */
    CALL_INIT = 1,     /* needs cuInit; waits while the process is locked */
    CALL_CONTEXT = 3,  /* and a current context without an error */
    CALL_UNSAFE = 4,   /* refused while a stream of the thread is captured */
    CALL_UNLOCKED = 8, /* needs cuInit, does not wait for an unlock */
};
struct call {
    const char *name;
    int flags;
    bool counted, per_thread_before;
};
CUresult call_enter(struct call *call, const char *name, int flags, bool per_thread);
CUresult call_leave(struct call *call, CUresult result);
void call_gate_close(void);
void call_gate_open(void);
unsigned call_in_flight(void);
void call_hang(void) __attribute__((noreturn));
void call_forked_child(void);
int driver_branch(void);

#define API_AS(symbol, flags, per_thread, name, params, args)                     \
    EXPORT CUresult symbol params;                                                \
    EXPORT CUresult symbol params {                                               \
        struct call call_;                                                        \
        CUresult result_ = call_enter(&call_, #symbol, flags, per_thread);        \
        return call_leave(&call_, result_ != CUDA_SUCCESS ? result_ : do_##name args); \
    }
/* An entry point: API(flags, cuName, (parameters), (their names)) { body }. */
#define API(flags, name, params, args)         \
    static CUresult do_##name params;          \
    API_AS(name, flags, false, name, params, args) \
    static CUresult do_##name params
/* The same with a second symbol whose default stream is the thread's own; suffix is _ptds or _ptsz. */
#define API_STREAM(flags, name, suffix, params, args) \
    static CUresult do_##name params;                 \
    API_AS(name, flags, false, name, params, args)    \
    API_AS(name##suffix, flags, true, name, params, args) \
    static CUresult do_##name params

/* ---- inject.c ---- */
CUresult inject_check(const char *symbol);
void trace_call(const char *symbol, CUresult result);

/* ---- util.c ---- */
void *pages_alloc(size_t size);
void pages_free(void *memory, size_t size);
void futex_wait(atomic_uint *word, unsigned value);
void futex_wake(atomic_uint *word);
uint64_t now_ns(void);
void nap_us(unsigned us);
uint64_t random_u64(void);
const char *state_folder(void);
bool start_thread(void *(*body)(void *), void *argument, const char *name, pthread_t *out);
static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Handles are objects of a pool whose memory is never given back, so that a stale handle can be looked at. */
struct pool {
    size_t size;
    uint32_t magic;
    pthread_mutex_t lock;
    struct pooled *free;
};
struct pooled {
    uint32_t magic;
    struct pooled *next_free;
};
#define POOL(type, mark) {.size = sizeof(type), .magic = (mark), .lock = PTHREAD_MUTEX_INITIALIZER}
void *pool_new(struct pool *pool);
void pool_delete(struct pool *pool, void *object);
bool pool_holds(const struct pool *pool, const void *object);

/* ---- machine.c: the state that processes share ---- */
struct machine_object {
    uint64_t id, size, charged;
    int device; /* physical; -1 for host memory */
    uint64_t creator;
    unsigned team; /* of a multicast object: how many GPUs it is for; else 0 */
    bool restored, ipc_capable; /* restored: went through a restore of its process */
    CUmemAllocationProp prop;
};
CUresult machine_attach(void);
void machine_detach(void);
int machine_device_count(void);
size_t machine_device_memory(void);
size_t machine_device_free(int physical);
uint64_t machine_nonce(void);
void machine_set_context(int physical, bool active);
CUresult machine_object_create(struct machine_object *object);
CUresult machine_object_hold(uint64_t id, struct machine_object *out);
void machine_object_drop(uint64_t id);
int machine_object_open(uint64_t id);
CUresult machine_export(uint64_t id, int *fd);
CUresult machine_import(int fd, struct machine_object *out);
bool machine_has_room(const size_t *needed);
void machine_forked_child(void);

/* ---- team.c: which GPUs a multicast object is for, and what memory is bound to it ---- */
struct team_place {
    uint64_t memory;
    size_t offset;
};
bool team_complete(uint64_t team);
bool team_has(uint64_t team, int device);
CUresult team_join(uint64_t team, int device);
CUresult team_bind(uint64_t team, int device, size_t offset, size_t size, uint64_t memory, size_t memory_offset);
CUresult team_unbind(uint64_t team, int device, size_t offset, size_t size);
bool team_bound_here(void);
unsigned team_places(uint64_t team, size_t offset, struct team_place *places, size_t *length);

/* ---- device.c ---- */
extern int device_count;
extern int device_physical[MAX_DEVICES]; /* ordinal -> physical; a restore onto other GPUs changes it */
bool device_valid(CUdevice device);
bool fabric_on(void);
int device_ordinal(int physical);
CUuuid device_uuid(int physical);

/* ---- context.c ---- */
struct CUctx_st {
    uint32_t magic;
    struct CUctx_st *next_all;
    int device;
    bool primary;
    bool restored; /* it was there at a restore */
    atomic_bool alive;
    atomic_uint held; /* by calls that wait for its work; others wait for them */
    int primary_refs;
    unsigned flags, api_version;
    uint64_t id;
    _Atomic CUresult error;
    _Atomic uint64_t peers; /* bit per device whose contexts this one may reach */
    struct CUstream_st *legacy;
    size_t limits[16];
};
CUcontext context_current(void);
bool context_valid(CUcontext context);
void context_each(void (*visit)(CUcontext context, void *data), void *data);
bool context_on_device(int device);
void context_wait_held(CUcontext context);
void context_pass(CUcontext context);

/* ---- memory.c ---- */
enum memory_kind { MEM_VMM, MEM_ALLOC, MEM_IPC, MEM_POOL, MEM_MULTICAST };
struct memory {
    struct memory *next;
    struct machine_object object;
    enum memory_kind kind;
    bool foreign; /* made by another process */
    int device;   /* ordinal, -1 for host memory */
    atomic_int refs;
    int handle_refs;
    CUmemGenericAllocationHandle handle;
    _Atomic(void *) view; /* where this process's GPU threads and copies see the bytes */
    void *saved;          /* the bytes while checkpointed ... */
    uint64_t old_id;      /* ... of this object */
};
enum mapping_kind { MAP_VMM, MAP_ALLOC, MAP_IPC, MAP_POOL, MAP_HOST, MAP_REGISTERED, MAP_MANAGED };
struct mapping {
    CUdeviceptr va;
    size_t size, span; /* as asked for, and as address space is taken */
    struct memory *memory; /* NULL: CPU memory at va */
    enum mapping_kind kind;
    CUcontext context;
    CUmemoryPool pool;
    uint64_t buffer_id;
    unsigned flags;
    CUdeviceptr range; /* of cuMem memory: its reservation */
    size_t range_size;
    int opens, device;
    unsigned char access[MAX_DEVICES], host_access;
};
struct replica {
    char *bytes;
    void *mapped;
    size_t mapped_size;
};
struct view {
    void *bytes;
    size_t length;
    struct memory *pinned;
    unsigned replica_count; /* of a multicast address: the memory of each GPU; bytes is that of the first */
    struct replica replicas[MAX_DEVICES];
};
void memory_lock(void);
void memory_unlock(void);
void *memory_pool_alloc(size_t size);
void memory_pool_free(void *block, size_t size);
struct memory *memory_new(const struct machine_object *object, enum memory_kind kind, bool foreign);
struct memory *memory_all(void);
struct memory *memory_by_handle(CUmemGenericAllocationHandle handle);
void memory_get(struct memory *memory);
void memory_put(struct memory *memory);
void *memory_view(struct memory *memory);
bool mapping_find(CUdeviceptr address, struct mapping *out);
void mapping_done(struct mapping *mapping);
const struct mapping *mapping_table(int *count); /* memory lock held */
struct mapping *mapping_edit(int *count);        /* memory lock held: a copy of the table, to be published */
void mapping_publish(void);
bool mapping_insert(const struct mapping *mapping);
bool mapping_remove(CUdeviceptr va, struct mapping *out);
bool mapping_overlaps(CUdeviceptr va, size_t size);
uint64_t mapping_new_buffer_id(void);
CUresult view_device(struct view *view, CUcontext context, CUdeviceptr address, size_t size, bool write, bool copy);
void view_wrote(struct view *view, size_t size);
void view_done(struct view *view);
uint64_t registration_at(CUdeviceptr address);
static inline bool is_host_memory(const struct memory *memory) { return memory->device < 0 && memory->kind != MEM_MULTICAST; }
bool address_is_device(CUdeviceptr address);
bool range_is_usable(CUcontext context, CUdeviceptr address, size_t size, bool write, bool copy);

/* ---- vmm.c ---- */
CUdeviceptr reserve_range(size_t size, size_t alignment, CUdeviceptr hint);
void release_range(CUdeviceptr va, size_t size);
void host_mapping_set(const struct mapping *mapping);
void host_mapping_clear(const struct mapping *mapping);

/* ---- multicast.c ---- */
bool multicast_await(CUmemGenericAllocationHandle handle);
CUresult multicast_view(struct view *view, uint64_t team, size_t offset, size_t size);

/* ---- alloc.c ---- */
CUresult alloc_device(CUcontext context, size_t size, enum mapping_kind kind, CUmemoryPool pool, CUdeviceptr *out);
CUresult alloc_free(CUdeviceptr va, enum mapping_kind kind);
void alloc_free_context(CUcontext context);
CUresult managed_alloc(CUdeviceptr *out, size_t size, unsigned flags);

/* ---- queue.c ---- */
struct work;
struct CUstream_st {
    uint32_t magic;
    struct CUstream_st *next_free, *next_all;
    CUcontext context;
    unsigned flags;
    int priority;
    uint64_t id;
    atomic_int refs;
    bool blocking, destroyed, thread_started;
    _Atomic uint64_t submitted, completed;
    struct op *head, *tail;
    struct capture *capture;
    pthread_cond_t wake;
};
struct point { /* a place in a stream, reached when the stream has completed as much, or a record of an event */
    CUstream stream;
    uint64_t seq;
    CUevent event;
};
CUstream stream_create(CUcontext context, unsigned flags, int priority);
void stream_destroy(CUstream stream);
void stream_get(CUstream stream);
void stream_put(CUstream stream);
CUresult stream_find(CUstream handle, CUstream *out);
void stream_enqueue(CUstream stream, const struct work *work, struct point *out);
void stream_add_wait(CUstream stream, struct point point);
bool point_reached(const struct point *point);
CUresult stream_wait(CUstream stream);
CUresult context_wait(CUcontext context);
bool engine_idle(void);
void stream_destroy_context(CUcontext context);
extern _Thread_local bool thread_is_gpu, thread_default_stream;

/* ---- work.c: one thing a stream or a graph node does ---- */
enum work_kind { WORK_NONE, WORK_KERNEL, WORK_COPY, WORK_SET, WORK_HOST, WORK_CALLBACK, WORK_MEMOPS, WORK_GRAPH, WORK_EVENT, WORK_FREE };
struct copy_end {
    CUdeviceptr address;
    size_t pitch, slice;
    bool device;
    uint64_t registration; /* that the address lies in, 0: none */
    CUcontext context;     /* of a peer copy */
};
#define KERNEL_PARAM_BYTES 256
struct work {
    enum work_kind kind;
    CUcontext context;
    union {
        struct {
            CUfunction function;
            size_t size;
            unsigned grid[3], block[3], shared;
            unsigned char params[KERNEL_PARAM_BYTES];
        } kernel;
        struct {
            struct copy_end from, to;
            size_t width, height, depth;
            void *staged; /* owned copy of a pageable source */
        } copy;
        struct {
            CUdeviceptr to;
            size_t pitch, width, height;
            unsigned value, element;
        } set;
        struct {
            CUhostFn function;
            CUstreamCallback callback;
            CUstream stream;
            void *data;
        } host;
        struct {
            unsigned count;
            CUstreamBatchMemOpParams *list; /* owned */
        } memops;
        CUgraphExec exec; /* one reference owned */
        struct {
            CUevent event; /* one reference owned */
            uint64_t number;
        } record;
        CUdeviceptr free;
    };
};
CUresult work_submit(CUstream handle, const struct work *work);
CUresult work_submit_and_wait(CUstream handle, const struct work *work);
CUresult work_run(struct work *work);
void work_dispose(struct work *work);
CUresult copy_work(struct work *work, const CUDA_MEMCPY3D *params, CUcontext context);
CUresult copy_run(struct work *work);
CUresult set_run(struct work *work);
CUresult kernel_run(struct work *work);

/* ---- turn.c ---- */
void turn_wait(CUcontext context);
void turn_keep(CUcontext context);
bool turn_lost(CUcontext context);
bool turn_refused(int device);
void turn_give(CUcontext context);
CUresult memops_run(struct work *work);
CUresult graph_run(CUgraphExec exec);
void graph_exec_get(CUgraphExec exec);
void graph_exec_put(CUgraphExec exec);

/* ---- event.c, interprocess.c ---- */
enum { RECORDS = 32 };
struct records { /* of one event, whoever makes them */
    _Atomic uint64_t begun, done[RECORDS]; /* number n has happened once done[n % RECORDS] is n or more */
};
struct CUevent_st {
    uint32_t magic;
    struct CUevent_st *next_free, *next_shared;
    atomic_int refs;
    unsigned flags;
    CUcontext context;
    uint64_t shared; /* of an interprocess event: its name on the machine */
    bool opened;     /* it is another process's */
    struct records *records, own; /* own: of an event of this process alone, or while checkpointed */
    _Atomic uint64_t time_ns;
    struct capture *capture; /* recorded inside this capture ... */
    CUgraphNode *capture_at; /* ... after these nodes */
    size_t capture_count;
};
CUevent event_new(unsigned flags);
void event_delete(CUevent event);
bool event_valid(CUevent event);
void event_get(CUevent event);
void event_put(CUevent event);
void event_executed(CUevent event, uint64_t number);
bool records_have(const struct records *records, uint64_t number);
bool interprocess_hold(CUevent event, bool make);
void interprocess_drop(CUevent event);
void interprocess_leave(void);
bool interprocess_return(void);

/* ---- module.c ---- */
struct param_layout {
    unsigned count, offset[32], size[32], total;
};
struct CUfunc_st {
    uint32_t magic;
    struct CUfunc_st *next_free;
    char name[128];
    CUmodule module;
    struct param_layout params;
    int max_dynamic_shared;
};
bool function_valid(CUfunction function);
CUfunction function_of(void *function_or_kernel);
CUresult kernel_pack(CUfunction function, void **params, void **extra, unsigned char *out, size_t *size);

/* ---- graph.c, capture.c ---- */
struct CUgraphNode_st {
    uint32_t magic;
    struct CUgraphNode_st *next_free;
    CUgraph graph;
    CUgraphNodeType type;
    bool enabled;
    struct work work;
    CUgraph child;
    CUgraphNode *deps;
    size_t dep_count;
};
struct CUgraph_st {
    uint32_t magic;
    struct CUgraph_st *next_free;
    CUgraphNode *nodes; /* every node stands after those it depends on unless edges were added later */
    size_t count;
    uint64_t id;
};
CUgraph graph_new(void);
CUgraphNode graph_add(CUgraph graph, CUgraphNodeType type, const struct work *work, const CUgraphNode *deps, size_t count);
CUresult work_clone(struct work *to, const struct work *from);
void graph_delete(CUgraph graph);
bool stream_is_capturing(CUstream stream);
CUresult capture_work(CUstream stream, const struct work *work, CUgraphNodeType type);
CUresult capture_event_record(CUstream stream, CUevent event);
CUresult capture_event_wait(CUstream stream, CUevent event);
CUresult capture_check_legacy(CUcontext context);
CUresult capture_refuse_unsafe(void);
CUresult capture_break_all(CUcontext context);
void capture_forget(CUstream stream);
CUresult capture_invalidate(CUstream stream);

/* ---- checkpoint.c, service.c ---- */
enum process_state { STATE_RUNNING = 0, STATE_LOCKED = 1, STATE_CHECKPOINTED = 2, STATE_FAILED = 3 };
CUresult service_start(void);
void service_forked_child(void);
size_t service_socket_name(pid_t pid, char *out, size_t size);
struct request {
    uint32_t verb, timeout_ms, pair_count, reserved;
    CUcheckpointGpuPair pairs[MAX_DEVICES];
};
struct reply {
    int32_t result, value;
};
enum verb { VERB_STATE = 1, VERB_THREAD, VERB_LOCK, VERB_CHECKPOINT, VERB_RESTORE, VERB_UNLOCK };
int checkpoint_state(void);
bool checkpoint_restored(void);
CUresult checkpoint_lock(unsigned timeout_ms, int client);
CUresult checkpoint_checkpoint(int client);
CUresult checkpoint_restore(const struct request *request);
CUresult checkpoint_unlock(void);

/* ---- host.c, objects counted for a refusal ---- */
bool managed_memory_exists(void);
void managed_memory_freed(void);

#endif
