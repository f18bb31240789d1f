# Where function pointers come from: the genuine dlsym, the driver's own functions, and what others get when they look
# up a hooked name. It must not know what a hook does.
#
#   gs_ready()   -> bint; at the start of a custom hook. False: there is no driver, return gs_absent()
#   gs_real.X    the driver's function; NULL if this driver has none. if gs_real.X == NULL: return gs_absent()
#   gs_absent()  the error for both: NO_DEVICE without a driver, NOT_SUPPORTED for a function that it lacks
#   driver_version()   what cuDriverGetVersion said, 0 if unknown
#   unknown_abi_count()   hooked names that somebody got at an ABI that the table does not know, so without a wrapper
#
# Rules, each from a defect that somebody had:
# - Names are compared whole, with the table; never by prefix.
# - The genuine dlsym is read from libc's own symbol table: libc is asked by no call that could end here again.
# - The driver is the library whose SONAME is libcuda.so.1, wherever it came from and whatever its file is called. It is
#   looked for when needed, never loaded by us, and kept once found, since its functions are.
# - A real pointer that lies in this library is refused: calling it would never end.
# - Somebody else's look-up is answered with a wrapper only where it found a function of the driver, or where it found
#   one of our exports and would have found the driver's without us. The driver's own look-ups are left alone.

cdef extern from "platform.h" nogil:
    struct link_map:
        link_map *l_next
        link_map *l_prev
    ctypedef struct Dl_info:
        pass
    enum:
        RTLD_LAZY
        RTLD_NOLOAD
        RTLD_DL_LINKMAP
    void *RTLD_NEXT
    const char *gs_image_start
    void *GS_OWN_DLSYM
    void *GS_OWN_DLVSYM
    int dladdr1(const void *address, Dl_info *info, void **extra, int flags)
    void *dlopen(const char *name, int flags)
    char *dlerror()

ctypedef void *(*dlsym_function)(void *, const char *) noexcept nogil
ctypedef void *(*dlvsym_function)(void *, const char *, const char *) noexcept nogil

ctypedef struct Genuine:
    dlsym_function dlsym
    dlvsym_function dlvsym
    void *next_dlsym        # who would have been called without us: libc, or another preloaded library
    void *next_dlvsym
    uint32_t ready

ctypedef struct Driver:
    void *handle            # its link map
    int version
    uint32_t resolved
    uint32_t unknown_abis
    uint32_t is_unknown[GS_HOOK_COUNT]

cdef Genuine genuine
cdef Driver driver


# ---- the genuine dlsym ----

cdef int visit_for_libc(dl_phdr_info *info, size_t size, void *unused) noexcept nogil:
    """Take dlsym and dlvsym from libc when dl_iterate_phdr comes to it."""
    cdef Image image
    if not read_image(info, &image) or strcmp(image.soname, b"libc.so.6") != 0:
        return 0
    genuine.dlsym = <dlsym_function>symbol_in(&image, b"dlsym")
    genuine.dlvsym = <dlvsym_function>symbol_in(&image, b"dlvsym")
    return 1


cdef bint find_genuine() noexcept nogil:
    """Find the genuine dlsym; any number of threads may do so at once, they find the same."""
    if gs_load(&genuine.ready):
        return True
    dl_iterate_phdr(visit_for_libc, NULL)
    if genuine.dlsym == NULL or genuine.dlvsym == NULL:
        return False
    genuine.next_dlsym = genuine.dlsym(RTLD_NEXT, b"dlsym")
    if genuine.next_dlsym == NULL or gs_in_shim(genuine.next_dlsym):
        genuine.next_dlsym = <void *>genuine.dlsym
    genuine.next_dlvsym = genuine.dlsym(RTLD_NEXT, b"dlvsym")
    if genuine.next_dlvsym == NULL or gs_in_shim(genuine.next_dlvsym):
        genuine.next_dlvsym = <void *>genuine.dlvsym
    gs_store(&genuine.ready, 1)
    return True


# ---- the driver ----

cdef void *image_of(const void *address) noexcept nogil:
    """Return the link map of the library that holds an address, NULL if none does."""
    cdef Dl_info info
    cdef void *image = NULL
    if dladdr1(address, &info, &image, RTLD_DL_LINKMAP) == 0:
        return NULL
    return image


cdef int visit_for_driver(dl_phdr_info *info, size_t size, void *unused) noexcept nogil:
    """Stop dl_iterate_phdr at the driver."""
    cdef Image image
    return read_image(info, &image) and strcmp(image.soname, b"libcuda.so.1") == 0


cdef void *driver_handle() noexcept nogil:
    """Return the handle of libcuda.so.1 if the process has loaded it. A handle is a link map.

    The loader is asked for it only once it is there: for what is not loaded, RTLD_NOLOAD searches the file system.
    """
    if driver.handle == NULL and dl_iterate_phdr(visit_for_driver, NULL):
        gs_store_pointer(&driver.handle, dlopen(b"libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD))
    return driver.handle


cdef bint in_driver(const void *address) noexcept nogil:
    """Tell whether an address lies in the driver."""
    cdef void *image
    if driver_handle() == NULL:
        return False
    image = image_of(address)
    return image != NULL and image == driver.handle


cdef void **real_pointer(int row) noexcept nogil:
    """Return where gs_real keeps the function of a row."""
    return <void **>(<char *>&gs_real + gs_hook_rows[row].offset)


cdef inline bint gs_ready() noexcept nogil:
    """Make sure that the driver's functions are known; False if there is no driver."""
    return gs_load(&driver.resolved) != 0 or resolve_driver()


cdef bint gs_find(void *pointer) noexcept nogil:
    """Resolve, and tell whether the driver has the function that this member of gs_real stands for."""
    return gs_ready() and (<void **>pointer)[0] != NULL


cdef CUresult gs_absent() noexcept nogil:
    """Return the error for a function that is not there."""
    return CUDA_ERROR_NOT_SUPPORTED if gs_load(&driver.resolved) else CUDA_ERROR_NO_DEVICE


cdef int driver_version() noexcept nogil:
    """Return the CUDA version of the driver, 0 if unknown."""
    return driver.version


cdef void resolve_row(int row) noexcept nogil:
    """Fill in one member of gs_real."""
    cdef void *found = genuine.dlsym(driver.handle, gs_hook_rows[row].symbol)
    if found != NULL and gs_in_shim(found):
        gs_log(b"%s leads back into the shim; not used", gs_hook_rows[row].symbol)
        found = NULL
    gs_store_pointer(real_pointer(row), found)


cdef void resolve_by_version(int row) noexcept nogil:
    """Fill in a member that is no symbol of this driver, if cuGetProcAddress has it."""
    cdef void *found = NULL
    cdef const gs_hook_row *wanted = &gs_hook_rows[row]
    cdef CUresult rc
    if real_pointer(row)[0] != NULL or gs_real.cuGetProcAddress_v2 == NULL or wanted.since > driver.version:
        return
    rc = gs_real.cuGetProcAddress_v2(wanted.name, &found, wanted.since, wanted.variant, NULL)
    if rc == CUDA_SUCCESS and not gs_in_shim(found):
        gs_store_pointer(real_pointer(row), found)


cdef bint resolve_driver() noexcept nogil:
    """Fill in gs_real; False if no driver is loaded."""
    cdef int row
    if not find_genuine() or driver_handle() == NULL:
        return False
    gs_lock(&start_mutex)
    if gs_load(&driver.resolved) == 0:
        for row in range(GS_REAL_COUNT):
            resolve_row(row)
        if gs_real.cuDriverGetVersion != NULL:
            gs_real.cuDriverGetVersion(&driver.version)
        for row in range(GS_HOOK_COUNT):
            resolve_by_version(row)
        dlerror()  # what is missing in this driver is not the application's error
        decide_what_is_hidden()
        watch_forks()
        gs_store(&driver.resolved, 1)
    gs_unlock(&start_mutex)
    return True


# ---- the table ----

cdef int row_of_symbol(const char *symbol) noexcept nogil:
    """Return the row of an exported symbol, -1 if the table has none."""
    cdef int low = 0, high = GS_HOOK_COUNT, middle, order
    while low < high:
        middle = (low + high) // 2
        order = strcmp(gs_hook_rows[middle].symbol, symbol)
        if order == 0:
            return middle
        if order < 0:
            low = middle + 1
        else:
            high = middle
    return -1


cdef int first_of_name(const char *name) noexcept nogil:
    """Return the place in gs_rows_by_name where the rows of a name begin, -1 if the table has none."""
    cdef int low = 0, high = GS_HOOK_COUNT, middle
    while low < high:
        middle = (low + high) // 2
        if strcmp(gs_hook_rows[gs_rows_by_name[middle]].name, name) < 0:
            low = middle + 1
        else:
            high = middle
    if low < GS_HOOK_COUNT and strcmp(gs_hook_rows[gs_rows_by_name[low]].name, name) == 0:
        return low
    return -1


# ---- dlsym and dlvsym of others ----

cdef void *answer(void *handle, const char *name, void *found) noexcept nogil:
    """Return what a look-up of a hooked name gets that found `found`."""
    cdef void *wrapper
    if found != NULL and gs_in_shim(found):
        if handle == image_of(gs_image_start):
            return found
        # One of our exports stood in the way: what lies behind it? Failing look-ups last, for dlerror.
        driver_handle()
        found = genuine.dlsym(RTLD_NEXT, name)
        if found == NULL and driver.handle != NULL:
            found = genuine.dlsym(driver.handle, name)
    if found == NULL or not in_driver(found):
        return found
    wrapper = gs_hook_rows[row_of_symbol(name)].wrapper
    return wrapper if wrapper != NULL else found


cdef void *look_up(void *handle, const char *name) noexcept nogil:
    """Be dlsym for a hooked name."""
    return answer(handle, name, genuine.dlsym(handle, name))


cdef void *look_up_version(void *handle, const char *name, const char *version) noexcept nogil:
    """Be dlvsym for a hooked name."""
    return answer(handle, name, genuine.dlvsym(handle, name, version))


cdef void *look_up_ourselves(void *handle, const char *name, const char *version) noexcept nogil:
    """Be dlvsym for a library before us that looks for the dlsym behind it: that is ours, which has no version."""
    return GS_OWN_DLVSYM if strcmp(name, b"dlvsym") == 0 else GS_OWN_DLSYM


cdef void *look_up_nothing(void *handle, const char *name) noexcept nogil:
    """Be dlsym in a process without a libc that we can read."""
    return NULL


cdef bint comes_before_us(void *caller) noexcept nogil:
    """Tell whether the caller's library is searched before this one: its RTLD_NEXT would find us."""
    cdef void *image = image_of(caller)
    cdef link_map *each = <link_map *>image_of(gs_image_start)
    while each != NULL:
        each = each.l_prev
        if each == image:
            return image != NULL
    return False


cdef bint is_hooked(void *handle, const char *name, void *caller) noexcept nogil:
    """Tell whether a look-up concerns us: the table has the name, and the caller is not the driver."""
    if name == NULL or name[0] != c'c' or name[1] != c'u' or row_of_symbol(name) < 0:
        return False
    if handle == RTLD_NEXT and not comes_before_us(caller):
        return False
    return not in_driver(caller)


cdef bint asks_for_dlsym(const char *name) noexcept nogil:
    """Tell whether somebody looks for dlsym itself: another interposer, which must not be sent in a circle."""
    return name != NULL and (strcmp(name, b"dlsym") == 0 or strcmp(name, b"dlvsym") == 0)


cdef public void *gs_choose_dlsym(void *handle, const char *name, void *caller) noexcept nogil:
    """Return the function that a call of dlsym goes on to."""
    if not find_genuine():
        return <void *>look_up_nothing
    if is_hooked(handle, name, caller):
        return <void *>look_up
    return <void *>genuine.dlsym if asks_for_dlsym(name) else genuine.next_dlsym


cdef public void *gs_choose_dlvsym(void *handle, const char *name, void *caller) noexcept nogil:
    """Return the function that a call of dlvsym goes on to."""
    if not find_genuine():
        return <void *>look_up_nothing
    if is_hooked(handle, name, caller):
        return <void *>look_up_version
    if asks_for_dlsym(name) and handle == RTLD_NEXT and comes_before_us(caller):
        return <void *>look_up_ourselves
    return <void *>genuine.dlvsym if asks_for_dlsym(name) else genuine.next_dlvsym


# ---- cuGetProcAddress of others ----

cdef void unknown_abi(int row, int version) noexcept nogil:
    """Count a hooked name that was handed out without its wrapper: a suspend must refuse."""
    if gs_swap(&driver.is_unknown[row], 1) == 0:
        gs_add(&driver.unknown_abis, 1)
        gs_log(b"%s asked for at version %d: an ABI that is not known, not hooked", gs_hook_rows[row].name, version)


cdef bint is_unknown_abi(int row) noexcept nogil:
    """Tell whether that name was handed out without its wrapper."""
    return gs_load(&driver.is_unknown[row]) != 0


cdef uint32_t unknown_abi_count() noexcept nogil:
    """Return how many hooked names were handed out without their wrapper."""
    return gs_load(&driver.unknown_abis)


cdef int row_of_pointer(int first, const char *name, void *found) noexcept nogil:
    """Return the row of `name` whose real function is `found`, -1 if none is."""
    cdef int place = first, row
    while place < GS_HOOK_COUNT:
        row = gs_rows_by_name[place]
        if strcmp(gs_hook_rows[row].name, name) != 0:
            break
        if real_pointer(row)[0] == found:
            return row
        place += 1
    return -1


cdef int row_of_version(int first, const char *name, int version, bint per_thread) noexcept nogil:
    """Return the row that `name` means at a version for a default stream, -1 if the table has none."""
    cdef int place = first, wanted
    cdef const gs_hook_row *row
    wanted = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM if per_thread else CU_GET_PROC_ADDRESS_LEGACY_STREAM
    while place < GS_HOOK_COUNT:
        row = &gs_hook_rows[gs_rows_by_name[place]]
        if strcmp(row.name, name) != 0:
            break
        if row.variant == 0 or row.variant == wanted:
            if row.since <= version and (row.until == 0 or version < row.until):
                return gs_rows_by_name[place]
        place += 1
    return -1


cdef bint same_as_newest_known(const char *name, void *found, cuuint64_t flags) noexcept nogil:
    """Tell whether the driver gives the same function for the newest version that the table knows."""
    cdef void *known = NULL
    if gs_real.cuGetProcAddress_v2 != NULL:
        gs_real.cuGetProcAddress_v2(name, &known, GS_NEWEST_CUDA, flags, NULL)
    elif gs_real.cuGetProcAddress != NULL:
        gs_real.cuGetProcAddress(name, &known, GS_NEWEST_CUDA, flags)
    return known == found


cdef void *substitute(const char *name, void *found, int version, cuuint64_t flags) noexcept nogil:
    """Return what a caller of cuGetProcAddress gets in the place of the driver's function."""
    cdef int first = first_of_name(name), row
    if first < 0:
        return found
    row = row_of_pointer(first, name, found)
    if row < 0:
        # A driver gives what it has: for an older one the newest ABI is its own.
        if driver.version != 0 and version > driver.version:
            version = driver.version
        if version > GS_NEWEST_CUDA and same_as_newest_known(name, found, flags):
            version = GS_NEWEST_CUDA
        if version <= GS_NEWEST_CUDA:
            row = row_of_version(first, name, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM != 0)
    if row < 0:
        if gs_hook_rows[gs_rows_by_name[first]].may_be_unknown == 0:
            unknown_abi(gs_rows_by_name[first], version)
        return found
    if gs_hook_rows[row].wrapper == NULL:
        return found
    if real_pointer(row)[0] == NULL:
        gs_store_pointer(real_pointer(row), found)
    return gs_hook_rows[row].wrapper


cdef public CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags) noexcept nogil:
    """Answer as the driver does, with wrappers for hooked names (the form of CUDA 11)."""
    cdef CUresult rc
    if not gs_ready() or gs_real.cuGetProcAddress == NULL:
        return gs_absent()
    rc = gs_real.cuGetProcAddress(symbol, pfn, cudaVersion, flags)
    if rc == CUDA_SUCCESS and symbol != NULL and pfn != NULL and pfn[0] != NULL:
        pfn[0] = substitute(symbol, pfn[0], cudaVersion, flags)
    return rc


cdef public CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                         CUdriverProcAddressQueryResult *symbolStatus) noexcept nogil:
    """Answer as the driver does, with wrappers for hooked names (the form of CUDA 12)."""
    cdef CUresult rc
    if not gs_ready() or gs_real.cuGetProcAddress_v2 == NULL:
        return gs_absent()
    rc = gs_real.cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus)
    if rc == CUDA_SUCCESS and symbol != NULL and pfn != NULL and pfn[0] != NULL:
        pfn[0] = substitute(symbol, pfn[0], cudaVersion, flags)
    return rc
