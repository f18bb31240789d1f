/* Stream memory operations: waits for a value and writes of one, single and in batches, old and new ABI alike. */
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

static size_t width_of(CUstreamBatchMemOpType type) {
    return type == CU_STREAM_MEM_OP_WAIT_VALUE_64 || type == CU_STREAM_MEM_OP_WRITE_VALUE_64 ? 8 : 4;
}

static bool is_wait(CUstreamBatchMemOpType type) { return type == CU_STREAM_MEM_OP_WAIT_VALUE_32 || type == CU_STREAM_MEM_OP_WAIT_VALUE_64; }

static bool is_write(CUstreamBatchMemOpType type) { return type == CU_STREAM_MEM_OP_WRITE_VALUE_32 || type == CU_STREAM_MEM_OP_WRITE_VALUE_64; }

static uint64_t load(const void *at, size_t width) {
    return width == 8 ? __atomic_load_n((const uint64_t *)at, __ATOMIC_SEQ_CST) : __atomic_load_n((const uint32_t *)at, __ATOMIC_SEQ_CST);
}

static bool satisfied(uint64_t seen, uint64_t value, unsigned flags, size_t width) {
    uint64_t mask = width == 8 ? UINT64_MAX : UINT32_MAX;
    switch (flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ: return width == 8 ? (int64_t)(seen - value) >= 0 : (int32_t)((uint32_t)seen - (uint32_t)value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return seen == (value & mask);
    case CU_STREAM_WAIT_VALUE_AND: return (seen & value) != 0;
    default: return (~(seen | value) & mask) != 0;
    }
}

static CUresult run_one(CUcontext context, const CUstreamBatchMemOpParams *op) {
    struct view view;
    size_t width = width_of(op->operation);
    bool write = is_write(op->operation);
    if (!write && !is_wait(op->operation))
        return CUDA_SUCCESS; /* barriers: everything is ordered here */
    CUresult result = view_device(&view, context, op->waitValue.address, width, write, true);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t value = width == 8 ? op->waitValue.value64 : op->waitValue.value;
    if (write && width == 8)
        __atomic_store_n((uint64_t *)view.bytes, value, __ATOMIC_SEQ_CST);
    else if (write)
        __atomic_store_n((uint32_t *)view.bytes, (uint32_t)value, __ATOMIC_SEQ_CST);
    view_wrote(&view, width);
    for (unsigned spins = 0; !write && !satisfied(load(view.bytes, width), value, op->waitValue.flags, width); spins++)
        nap_us(spins < 100 ? 5 : 100);
    view_done(&view);
    return CUDA_SUCCESS;
}

CUresult memops_run(struct work *work) {
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < work->memops.count && result == CUDA_SUCCESS; i++)
        result = run_one(work->context, &work->memops.list[i]);
    return result;
}

static CUresult check(const CUstreamBatchMemOpParams *op) {
    if (op->operation == CU_STREAM_MEM_OP_BARRIER || op->operation == CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES)
        return CUDA_SUCCESS;
    if (!is_wait(op->operation) && !is_write(op->operation))
        return CUDA_ERROR_INVALID_VALUE;
    size_t width = width_of(op->operation);
    return op->waitValue.address % width || !range_is_usable(NULL, op->waitValue.address, width, false, false) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult batch(CUstream stream, unsigned count, const CUstreamBatchMemOpParams *list, unsigned flags) {
    struct work work = {.kind = WORK_MEMOPS};
    if (!count || count > 256 || !list || flags)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        if (check(&list[i]) != CUDA_SUCCESS)
            return CUDA_ERROR_INVALID_VALUE;
    work.memops.count = count;
    work.memops.list = malloc(count * sizeof *list);
    if (!work.memops.list)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(work.memops.list, list, count * sizeof *list);
    return work_submit(stream, &work);
}

static CUresult single(CUstream stream, CUstreamBatchMemOpType type, CUdeviceptr address, uint64_t value, unsigned flags) {
    CUstreamBatchMemOpParams op = {.pad = {0}};
    op.waitValue.operation = type;
    op.waitValue.address = address;
    op.waitValue.value64 = value;
    op.waitValue.flags = flags;
    return batch(stream, 1, &op, 0);
}

#define MEMOP(name, type, value_type)                                                                              \
    API_STREAM(CALL_CONTEXT, name, _ptsz, (CUstream stream, CUdeviceptr address, value_type value, unsigned flags), \
        (stream, address, value, flags)) {                                                                         \
        return single(stream, type, address, value, flags);                                                        \
    }
MEMOP(cuStreamWaitValue32, CU_STREAM_MEM_OP_WAIT_VALUE_32, cuuint32_t)
MEMOP(cuStreamWaitValue32_v2, CU_STREAM_MEM_OP_WAIT_VALUE_32, cuuint32_t)
MEMOP(cuStreamWaitValue64, CU_STREAM_MEM_OP_WAIT_VALUE_64, cuuint64_t)
MEMOP(cuStreamWaitValue64_v2, CU_STREAM_MEM_OP_WAIT_VALUE_64, cuuint64_t)
MEMOP(cuStreamWriteValue32, CU_STREAM_MEM_OP_WRITE_VALUE_32, cuuint32_t)
MEMOP(cuStreamWriteValue32_v2, CU_STREAM_MEM_OP_WRITE_VALUE_32, cuuint32_t)
MEMOP(cuStreamWriteValue64, CU_STREAM_MEM_OP_WRITE_VALUE_64, cuuint64_t)
MEMOP(cuStreamWriteValue64_v2, CU_STREAM_MEM_OP_WRITE_VALUE_64, cuuint64_t)

API_STREAM(CALL_CONTEXT, cuStreamBatchMemOp, _ptsz, (CUstream stream, unsigned count, CUstreamBatchMemOpParams *list, unsigned flags),
    (stream, count, list, flags)) {
    return batch(stream, count, list, flags);
}
API_STREAM(CALL_CONTEXT, cuStreamBatchMemOp_v2, _ptsz, (CUstream stream, unsigned count, CUstreamBatchMemOpParams *list, unsigned flags),
    (stream, count, list, flags)) {
    return batch(stream, count, list, flags);
}
