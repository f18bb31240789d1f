# Hooks of kinds that are not carried: each counts what it makes, and stops counting when that is destroyed.  Calls that
# take a handle translate it.

cdef Object *pin_translated(CUmemGenericAllocationHandle *handle) noexcept nogil:
    """Replace a virtual handle by the real one; the object is pinned, or NULL where the value is not ours."""
    cdef Object *o = object_pin(handle[0]) if is_virtual(handle[0]) else NULL
    if o != NULL:
        handle[0] = o.real
    return o


cdef void unpin_translated(Object *o) noexcept nogil:
    """Drop what `pin_translated` took."""
    if o != NULL:
        object_unpin(o)


cdef public CUresult cuLogicalEndpointBindMem(cuuint32_t leId, CUdevice dev, cuuint64_t offset,
                                              CUmemGenericAllocationHandle memHandle, cuuint64_t memOffset,
                                              cuuint64_t size, unsigned long long flags) noexcept nogil:
    """Bind memory to an endpoint."""
    cdef CUresult rc
    cdef Object *mem
    if gs_real.cuLogicalEndpointBindMem == NULL and not gs_find(<void *>&gs_real.cuLogicalEndpointBindMem):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    mem = pin_translated(&memHandle)
    rc = gs_real.cuLogicalEndpointBindMem(leId, dev, offset, memHandle, memOffset, size, flags)
    unpin_translated(mem)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps) noexcept nogil:
    """Make a pool; its memory is the driver's own."""
    cdef CUresult rc = CUDA_ERROR_NOT_PERMITTED
    if gs_real.cuMemPoolCreate == NULL and not gs_find(<void *>&gs_real.cuMemPoolCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if poolProps == NULL or not asks_for_hidden_fabric(poolProps.handleTypes):
        rc = gs_real.cuMemPoolCreate(pool, poolProps)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool,
                                                      CUmemAllocationHandleType handleType,
                                                      unsigned long long flags) noexcept nogil:
    """Export a pool."""
    cdef CUresult rc
    if (gs_real.cuMemPoolExportToShareableHandle == NULL
            and not gs_find(<void *>&gs_real.cuMemPoolExportToShareableHandle)):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemPoolExportToShareableHandle(handle_out, pool, handleType, flags)
    if rc == 0:
        uncarried_add(KIND_POOL, <uint64_t>pool)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle,
                                                        CUmemAllocationHandleType handleType,
                                                        unsigned long long flags) noexcept nogil:
    """Import a pool."""
    cdef CUresult rc
    if (gs_real.cuMemPoolImportFromShareableHandle == NULL
            and not gs_find(<void *>&gs_real.cuMemPoolImportFromShareableHandle)):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemPoolImportFromShareableHandle(pool_out, handle, handleType, flags)
    if rc == 0:
        uncarried_add(KIND_POOL, <uint64_t>pool_out[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr) noexcept nogil:
    """Export an allocation of a pool; the pool itself was exported and is counted."""
    cdef CUresult rc
    if gs_real.cuMemPoolExportPointer == NULL and not gs_find(<void *>&gs_real.cuMemPoolExportPointer):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemPoolExportPointer(shareData_out, ptr)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool,
                                            CUmemPoolPtrExportData *shareData) noexcept nogil:
    """Import an allocation of a pool."""
    cdef CUresult rc
    if gs_real.cuMemPoolImportPointer == NULL and not gs_find(<void *>&gs_real.cuMemPoolImportPointer):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemPoolImportPointer(ptr_out, pool, shareData)
    if rc == 0:
        uncarried_add(KIND_POOL_POINTER, ptr_out[0])
    gs_leave(GS_MEMORY)
    return rc


cdef CUresult pool_memory_freed(uint64_t va, CUstream stream, int how, CUresult rc) noexcept nogil:
    """Stop counting memory of a pool that was given back; a free that is only recorded gives nothing back."""
    cdef uint32_t counted = gs_load(&uncarried_counts[KIND_POOL_POINTER]) + gs_load(&uncarried_counts[KIND_DMABUF])
    if rc == 0 and counted != 0 and not is_captured(stream, how):
        uncarried_remove(KIND_POOL_POINTER, va)
        uncarried_remove(KIND_DMABUF, va)
    return rc


cdef public CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) noexcept nogil:
    """Free memory of a pool."""
    cdef CUresult rc
    if gs_real.cuMemFreeAsync == NULL and not gs_find(<void *>&gs_real.cuMemFreeAsync):
        return gs_absent()
    gs_enter(GS_MEMORY, hStream, GS_STREAM_PLAIN)
    rc = gs_real.cuMemFreeAsync(dptr, hStream)
    rc = pool_memory_freed(dptr, hStream, GS_STREAM_PLAIN, rc)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) noexcept nogil:
    """Free memory of a pool; NULL is the thread's own stream."""
    cdef CUresult rc
    if gs_real.cuMemFreeAsync_ptsz == NULL and not gs_find(<void *>&gs_real.cuMemFreeAsync_ptsz):
        return gs_absent()
    gs_enter(GS_MEMORY, hStream, GS_STREAM_PTSZ)
    rc = gs_real.cuMemFreeAsync_ptsz(dptr, hStream)
    rc = pool_memory_freed(dptr, hStream, GS_STREAM_PTSZ, rc)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemPoolDestroy(CUmemoryPool pool) noexcept nogil:
    """Destroy a pool."""
    cdef CUresult rc
    if gs_real.cuMemPoolDestroy == NULL and not gs_find(<void *>&gs_real.cuMemPoolDestroy):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemPoolDestroy(pool)
    if rc == 0:
        uncarried_remove(KIND_POOL, <uint64_t>pool)
    gs_leave(GS_MEMORY)
    return rc


cdef void count_dmabuf(uint64_t va, size_t size) noexcept nogil:
    """Count memory that a device beside the GPUs may have mapped: until it is freed, as nobody says when that ends."""
    cdef uint32_t position
    cdef Mapping *m
    cdef bint ours = False
    gs_lock(&tables_mutex)
    position = first_overlap(va)
    while True:
        m = mapping_in_order(position, va + size)
        if m == NULL:
            break
        ours = True
        if m.object.kind == KIND_CARRIED:
            m.object.kind = KIND_DMABUF
        position += 1
    gs_unlock(&tables_mutex)
    if not ours:
        uncarried_add(KIND_DMABUF, va)


cdef public CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size,
                                                   CUmemRangeHandleType handleType,
                                                   unsigned long long flags) noexcept nogil:
    """Give memory to a network card or another API, as a descriptor."""
    cdef CUresult rc
    if gs_real.cuMemGetHandleForAddressRange == NULL and not gs_find(<void *>&gs_real.cuMemGetHandleForAddressRange):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemGetHandleForAddressRange(handle, dptr, size, handleType, flags)
    if rc == 0:
        count_dmabuf(dptr, size)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev,
                                      unsigned int flags) noexcept nogil:
    """Create a green context; nobody has seen yet that the driver restores one, nor that a drain waits for its work."""
    cdef CUresult rc
    if gs_real.cuGreenCtxCreate == NULL and not gs_find(<void *>&gs_real.cuGreenCtxCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGreenCtxCreate(phCtx, desc, dev, flags)
    if rc == 0:
        uncarried_add(KIND_GREEN_CONTEXT, <uint64_t>phCtx[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGreenCtxDestroy(CUgreenCtx hCtx) noexcept nogil:
    """Destroy a green context."""
    cdef CUresult rc
    if gs_real.cuGreenCtxDestroy == NULL and not gs_find(<void *>&gs_real.cuGreenCtxDestroy):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGreenCtxDestroy(hCtx)
    if rc == 0:
        uncarried_remove(KIND_GREEN_CONTEXT, <uint64_t>hCtx)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuImportExternalMemory(CUexternalMemory *extMem_out,
                                            const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc) noexcept nogil:
    """Import memory of another API."""
    cdef CUresult rc
    if gs_real.cuImportExternalMemory == NULL and not gs_find(<void *>&gs_real.cuImportExternalMemory):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuImportExternalMemory(extMem_out, memHandleDesc)
    if rc == 0:
        uncarried_add(KIND_EXTERNAL_MEMORY, <uint64_t>extMem_out[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuDestroyExternalMemory(CUexternalMemory extMem) noexcept nogil:
    """Let memory of another API go."""
    cdef CUresult rc
    if gs_real.cuDestroyExternalMemory == NULL and not gs_find(<void *>&gs_real.cuDestroyExternalMemory):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuDestroyExternalMemory(extMem)
    if rc == 0:
        uncarried_remove(KIND_EXTERNAL_MEMORY, <uint64_t>extMem)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuImportExternalSemaphore(CUexternalSemaphore *extSem_out,
                                               const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *semHandleDesc) noexcept nogil:
    """Import a semaphore of another API."""
    cdef CUresult rc
    if gs_real.cuImportExternalSemaphore == NULL and not gs_find(<void *>&gs_real.cuImportExternalSemaphore):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuImportExternalSemaphore(extSem_out, semHandleDesc)
    if rc == 0:
        uncarried_add(KIND_EXTERNAL_SEMAPHORE, <uint64_t>extSem_out[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuDestroyExternalSemaphore(CUexternalSemaphore extSem) noexcept nogil:
    """Let a semaphore of another API go."""
    cdef CUresult rc
    if gs_real.cuDestroyExternalSemaphore == NULL and not gs_find(<void *>&gs_real.cuDestroyExternalSemaphore):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuDestroyExternalSemaphore(extSem)
    if rc == 0:
        uncarried_remove(KIND_EXTERNAL_SEMAPHORE, <uint64_t>extSem)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                         unsigned long long flags) noexcept nogil:
    """Reserve addresses; waits while memory is away, since the addresses in use then look free to nobody but us."""
    cdef CUresult rc
    if gs_real.cuMemAddressReserve == NULL and not gs_find(<void *>&gs_real.cuMemAddressReserve):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemAddressReserve(ptr, size, alignment, addr, flags)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) noexcept nogil:
    """Give addresses back; a suspend never does, so they need no record."""
    cdef CUresult rc
    if gs_real.cuMemAddressFree == NULL and not gs_find(<void *>&gs_real.cuMemAddressFree):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemAddressFree(ptr, size)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count,
                                        CUstream hStream) noexcept nogil:
    """Map memory into sparse arrays, which are not carried."""
    cdef CUresult rc
    cdef CUarrayMapInfo info
    cdef Object *o
    cdef unsigned int i
    if gs_real.cuMemMapArrayAsync == NULL and not gs_find(<void *>&gs_real.cuMemMapArrayAsync):
        return gs_absent()
    gs_enter(GS_MEMORY, hStream, GS_STREAM_PLAIN)
    rc = gs_real.cuMemMapArrayAsync(mapInfoList, count, hStream) if mapInfoList == NULL or count == 0 else 0
    for i in range(count if mapInfoList != NULL else 0):
        info = mapInfoList[i]
        o = pin_translated(array_map_handle(&info))
        rc = gs_real.cuMemMapArrayAsync(&info, 1, hStream)
        unpin_translated(o)
        if rc != 0:
            break
        uncarried_add(KIND_MAPPED_ARRAY, array_of(&info))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *mapInfoList, unsigned int count,
                                             CUstream hStream) noexcept nogil:
    """Map memory into sparse arrays, which are not carried."""
    cdef CUresult rc
    cdef CUarrayMapInfo info
    cdef Object *o
    cdef unsigned int i
    if gs_real.cuMemMapArrayAsync_ptsz == NULL and not gs_find(<void *>&gs_real.cuMemMapArrayAsync_ptsz):
        return gs_absent()
    gs_enter(GS_MEMORY, hStream, GS_STREAM_PTSZ)
    rc = gs_real.cuMemMapArrayAsync_ptsz(mapInfoList, count, hStream) if mapInfoList == NULL or count == 0 else 0
    for i in range(count if mapInfoList != NULL else 0):
        info = mapInfoList[i]
        o = pin_translated(array_map_handle(&info))
        rc = gs_real.cuMemMapArrayAsync_ptsz(&info, 1, hStream)
        unpin_translated(o)
        if rc != 0:
            break
        uncarried_add(KIND_MAPPED_ARRAY, array_of(&info))
    gs_leave(GS_MEMORY)
    return rc


cdef CUmemGenericAllocationHandle *array_map_handle(CUarrayMapInfo *info) noexcept nogil:
    """Return where the handle stands in the description of a sparse mapping."""
    return <CUmemGenericAllocationHandle *>(<char *>info + 64)


cdef uint64_t array_of(CUarrayMapInfo *info) noexcept nogil:
    """Return the array in the description of a sparse mapping.

    Its tiles come and go one by one and are not followed: an array that was ever mapped is counted until it goes.
    """
    return (<uint64_t *>(<char *>info + 8))[0]


cdef public CUresult cuArrayDestroy(CUarray hArray) noexcept nogil:
    """Destroy an array."""
    cdef CUresult rc
    if gs_real.cuArrayDestroy == NULL and not gs_find(<void *>&gs_real.cuArrayDestroy):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuArrayDestroy(hArray)
    if rc == 0:
        uncarried_remove(KIND_MAPPED_ARRAY, <uint64_t>hArray)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray) noexcept nogil:
    """Destroy an array of several levels."""
    cdef CUresult rc
    if gs_real.cuMipmappedArrayDestroy == NULL and not gs_find(<void *>&gs_real.cuMipmappedArrayDestroy):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMipmappedArrayDestroy(hMipmappedArray)
    if rc == 0:
        uncarried_remove(KIND_MAPPED_ARRAY, <uint64_t>hMipmappedArray)
    gs_leave(GS_MEMORY)
    return rc
