# What libraries are kept from using, since no suspend can carry it: multicast below driver 610, which cannot add a
# device again in a process that was restored, and handles of a fabric.  They ask for an attribute first and fall back
# by themselves.  It must not know what becomes of objects that are made all the same.
#
#   GPUSHARE_MULTICAST=auto|keep|hide   auto hides it below 610
#   GPUSHARE_FABRIC=keep, NVSNAP_GPUSHARE_FABRIC=1   else fabric is hidden
#
# Decided once, when the driver's functions are found: the first CUDA call of the process.

cdef enum:
    HIDE_MULTICAST = 1
    HIDE_FABRIC = 2
    CARRY_MULTICAST = 4     # the driver can make an object again
    FIRST_TO_CARRY = 610
    # Device attributes of CUDA 13.3: whether there are endpoints, for one device and for several.
    ENDPOINT_UNICAST_SUPPORTED = 153
    ENDPOINT_MULTICAST_SUPPORTED = 154

cdef uint32_t hidden_features


cdef bint setting_is(const char *name, const char *value) noexcept nogil:
    """Tell whether a variable of the environment has that value."""
    cdef const char *found = getenv(name)
    return found != NULL and strcmp(found, value) == 0


cdef uint64_t branch_in(const char *text) noexcept nogil:
    """Return the number that a driver's version begins with: the first one that ends at a dot or with the text."""
    cdef uint64_t branch = 0
    cdef const char *end
    while text[0] != 0:
        end = read_digits(text, 10, &branch)
        if end != NULL and (end[0] == c'.' or end[0] == 0):
            return branch
        text = end if end != NULL else text + 1
    return 0


cdef uint64_t driver_branch() noexcept nogil:
    """Return the driver's branch.  This is the one rule by version, since to try it is unsafe; unreadable is old."""
    cdef char[1024] text
    cdef ssize_t n = -1
    cdef int fd
    if gs_real.simcudaDriverVersionString != NULL:
        return branch_in(gs_real.simcudaDriverVersionString())
    fd = open(b"/proc/driver/nvidia/version", O_RDONLY | O_CLOEXEC)
    if fd >= 0:
        n = read(fd, text, sizeof(text) - 1)
        close(fd)
    if n <= 0:
        return 0
    text[n] = 0
    return branch_in(text)


cdef void decide_what_is_hidden() noexcept nogil:
    """Read the settings and the driver's version."""
    cdef uint32_t bits = CARRY_MULTICAST if driver_branch() >= FIRST_TO_CARRY else 0
    if not setting_is(b"GPUSHARE_FABRIC", b"keep") and not setting_is(b"NVSNAP_GPUSHARE_FABRIC", b"1"):
        bits |= HIDE_FABRIC
    if not setting_is(b"GPUSHARE_MULTICAST", b"keep"):
        if bits & CARRY_MULTICAST == 0 or setting_is(b"GPUSHARE_MULTICAST", b"hide"):
            bits |= HIDE_MULTICAST
    gs_store(&hidden_features, bits)


cdef bint is_hidden(uint32_t feature) noexcept nogil:
    """Tell whether a feature is hidden."""
    return gs_load(&hidden_features) & feature != 0


cdef uint8_t multicast_kind() noexcept nogil:
    """Return what a multicast object is counted as: CARRIED, or the kind that a suspend refuses."""
    return KIND_CARRIED if gs_load(&hidden_features) & CARRY_MULTICAST else KIND_MULTICAST


cdef bint asks_for_hidden_fabric(int handle_types) noexcept nogil:
    """Tell whether handles are asked for that are hidden; the call gets NOT_PERMITTED, as where no channel is there."""
    return handle_types & CU_MEM_HANDLE_TYPE_FABRIC != 0 and is_hidden(HIDE_FABRIC)


cdef int shown_attribute(CUdevice_attribute attribute, int value) noexcept nogil:
    """Return what the application sees of a device's attribute."""
    if is_hidden(HIDE_MULTICAST) and attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        return 0
    if is_hidden(HIDE_FABRIC):
        if attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
            return 0
        if attribute == CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
            return value & ~CU_MEM_HANDLE_TYPE_FABRIC
        if attribute == ENDPOINT_UNICAST_SUPPORTED or attribute == ENDPOINT_MULTICAST_SUPPORTED:
            return 0
    return value


cdef public CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) noexcept nogil:
    """Answer as the driver does, but for what is hidden."""
    cdef CUresult rc
    if gs_real.cuDeviceGetAttribute == NULL and not gs_find(<void *>&gs_real.cuDeviceGetAttribute):
        return gs_absent()
    rc = gs_real.cuDeviceGetAttribute(pi, attrib, dev)
    if rc == 0 and pi != NULL:
        pi[0] = shown_attribute(attrib, pi[0])
    return rc


cdef public CUresult cuLogicalEndpointCreate(cuuint32_t leId, const CUlogicalEndpointProp *prop) noexcept nogil:
    """Make an endpoint of a fabric; hidden with it, else counted."""
    cdef CUresult rc = CUDA_ERROR_NOT_SUPPORTED
    if gs_real.cuLogicalEndpointCreate == NULL and not gs_find(<void *>&gs_real.cuLogicalEndpointCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if not is_hidden(HIDE_FABRIC):
        rc = gs_real.cuLogicalEndpointCreate(leId, prop)
    if rc == 0:
        uncarried_add(KIND_FABRIC, leId)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuLogicalEndpointImport(cuuint32_t leId, const void *handle,
                                             CUlogicalEndpointIpcHandleType handleType) noexcept nogil:
    """Import an endpoint of another process; hidden with the fabric, else counted."""
    cdef CUresult rc = CUDA_ERROR_NOT_SUPPORTED
    if gs_real.cuLogicalEndpointImport == NULL and not gs_find(<void *>&gs_real.cuLogicalEndpointImport):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    if not is_hidden(HIDE_FABRIC):
        rc = gs_real.cuLogicalEndpointImport(leId, handle, handleType)
    if rc == 0:
        uncarried_add(KIND_FABRIC, leId)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuLogicalEndpointDestroy(cuuint32_t leId) noexcept nogil:
    """Destroy an endpoint."""
    cdef CUresult rc
    if gs_real.cuLogicalEndpointDestroy == NULL and not gs_find(<void *>&gs_real.cuLogicalEndpointDestroy):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuLogicalEndpointDestroy(leId)
    if rc == 0:
        uncarried_remove(KIND_FABRIC, leId)
    gs_leave(GS_MEMORY)
    return rc
