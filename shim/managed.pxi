# Managed memory, which the driver's checkpoint refuses: counted by address.  It comes from an allocation, or with a
# module that has a __managed__ variable; that one is met when somebody asks for its address, as libcudart does when it
# registers the variable.  It goes with its module or context; then the driver is asked what is left.

cdef bint is_managed(uint64_t va) noexcept nogil:
    """Ask the driver whether an address is in managed memory."""
    cdef unsigned int managed = 0
    return gs_real.cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, va) == 0 and managed != 0


cdef CUresult variable_found(const CUdeviceptr *dptr, const char *name, CUresult rc) noexcept nogil:
    """Count a variable that was just looked up, if it is a managed one."""
    if rc == 0 and dptr != NULL and is_managed(dptr[0]):
        uncarried_add(KIND_MANAGED, dptr[0], name)
    return rc


cdef void managed_recheck() noexcept nogil:
    """Stop counting what the driver no longer knows as managed."""
    cdef uint32_t cursor = 0
    cdef uint64_t va
    cdef Uncarried *u
    if gs_load(&uncarried_counts[KIND_MANAGED]) == 0:
        return
    while True:
        gs_lock(&tables_mutex)
        while True:
            u = <Uncarried *>table_next(&uncarried, sizeof(Uncarried), &cursor)
            if u == NULL or u.kind == KIND_MANAGED:
                break
        va = u.value if u != NULL else 0
        gs_unlock(&tables_mutex)
        if u == NULL:
            return
        if not is_managed(va):
            uncarried_remove(KIND_MANAGED, va)


cdef public CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags) noexcept nogil:
    """Allocate managed memory, which is counted and not carried."""
    cdef CUresult rc
    if gs_real.cuMemAllocManaged == NULL and not gs_find(<void *>&gs_real.cuMemAllocManaged):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuMemAllocManaged(dptr, bytesize, flags)
    if rc == 0:
        uncarried_add(KIND_MANAGED, dptr[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod,
                                          const char *name) noexcept nogil:
    """Return where a variable of a module is."""
    cdef CUresult rc
    if gs_real.cuModuleGetGlobal_v2 == NULL and not gs_find(<void *>&gs_real.cuModuleGetGlobal_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = variable_found(dptr, name, gs_real.cuModuleGetGlobal_v2(dptr, bytes, hmod, name))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                        const char *name) noexcept nogil:
    """Return where a variable of a library is."""
    cdef CUresult rc
    if gs_real.cuLibraryGetGlobal == NULL and not gs_find(<void *>&gs_real.cuLibraryGetGlobal):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = variable_found(dptr, name, gs_real.cuLibraryGetGlobal(dptr, bytes, library, name))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                         const char *name) noexcept nogil:
    """Return where a managed variable of a library is."""
    cdef CUresult rc
    if gs_real.cuLibraryGetManaged == NULL and not gs_find(<void *>&gs_real.cuLibraryGetManaged):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = variable_found(dptr, name, gs_real.cuLibraryGetManaged(dptr, bytes, library, name))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuModuleUnload(CUmodule hmod) noexcept nogil:
    """Unload a module, and its variables with it."""
    cdef CUresult rc
    if gs_real.cuModuleUnload == NULL and not gs_find(<void *>&gs_real.cuModuleUnload):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuModuleUnload(hmod)
    managed_recheck()
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuLibraryUnload(CUlibrary library) noexcept nogil:
    """Unload a library, and its variables with it."""
    cdef CUresult rc
    if gs_real.cuLibraryUnload == NULL and not gs_find(<void *>&gs_real.cuLibraryUnload):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuLibraryUnload(library)
    managed_recheck()
    gs_leave(GS_MEMORY)
    return rc
