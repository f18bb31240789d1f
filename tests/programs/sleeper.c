/* Memory that can sleep, as vLLM's allocator for its sleep mode makes it: the address stays, what is behind it goes.
 *
 * What matters is that this is a library which needs libcuda.so.1 by itself and calls it without asking anybody for an
 * address: the loader binds these calls. */
#include <stddef.h>
#include <stdint.h>

typedef struct {
    int type, id;
} location;
typedef struct {
    int type, handle_types;
    location where;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} properties;
typedef struct {
    location where;
    int flags;
} access;

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t hint, unsigned long long flags);
int cuMemCreate(uint64_t *handle, size_t size, const properties *wanted, unsigned long long flags);
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags);
int cuMemSetAccess(uint64_t address, size_t size, const access *wanted, size_t count);
int cuMemUnmap(uint64_t address, size_t size);
int cuMemRelease(uint64_t handle);

enum { PINNED = 1, DEVICE = 1, READ_WRITE = 3, MOST = 16 };
static struct {
    uint64_t address, handle;
    size_t size;
    int device;
} blocks[MOST];

static int find(uint64_t address) {
    for (int at = 0; at < MOST; at++)
        if (blocks[at].address == address)
            return at;
    return -1;
}

/* Put memory behind the address of a block; return the driver's code. */
uint64_t sleeper_wake(uint64_t address) {
    int at = find(address), code;
    if (at < 0)
        return 1;
    properties wanted = {.type = PINNED, .where = {DEVICE, blocks[at].device}};
    access open = {.where = {DEVICE, blocks[at].device}, .flags = READ_WRITE};
    if ((code = cuMemCreate(&blocks[at].handle, blocks[at].size, &wanted, 0)) != 0)
        return code;
    if ((code = cuMemMap(address, blocks[at].size, 0, blocks[at].handle, 0)) != 0)
        return code;
    return cuMemSetAccess(address, blocks[at].size, &open, 1);
}

/* Take the memory away; return the driver's code. */
uint64_t sleeper_sleep(uint64_t address) {
    int at = find(address), code;
    if (at < 0)
        return 1;
    if ((code = cuMemUnmap(address, blocks[at].size)) != 0)
        return code;
    return cuMemRelease(blocks[at].handle);
}

/* Return the address of a new block that is awake, or 0. */
uint64_t sleeper_make(uint64_t size, uint64_t device) {
    int at = find(0);
    if (at < 0 || cuMemAddressReserve(&blocks[at].address, size, 0, 0, 0) != 0)
        return 0;
    blocks[at].size = size;
    blocks[at].device = (int)device;
    return sleeper_wake(blocks[at].address) == 0 ? blocks[at].address : 0;
}
