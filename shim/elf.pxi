# Reading the images that the loader has mapped: their names, and functions of libc. No call that could be intercepted.

cdef extern from "platform.h" nogil:
    ctypedef struct Elf64_Sym:
        uint32_t st_name
        unsigned short st_shndx
        uint64_t st_value
    ctypedef union ElfValue "__typeof__(((Elf64_Dyn *)0)->d_un)":
        uint64_t d_val
        uint64_t d_ptr
    ctypedef struct Elf64_Dyn:
        long d_tag
        ElfValue d_un
    ctypedef struct Elf64_Phdr:
        uint32_t p_type
        uint64_t p_vaddr
    struct dl_phdr_info:
        uint64_t dlpi_addr
        const Elf64_Phdr *dlpi_phdr
        unsigned short dlpi_phnum
    enum:
        PT_DYNAMIC
        DT_NULL
        DT_SONAME
        DT_STRTAB
        DT_SYMTAB
        DT_VERSYM
        DT_GNU_HASH
    int dl_iterate_phdr(int (*callback)(dl_phdr_info *, size_t, void *) noexcept nogil, void *data)

ctypedef struct Image:
    uint64_t base
    const char *soname
    const char *strings
    const Elf64_Sym *symbols
    const unsigned short *versions
    const uint32_t *table   # DT_GNU_HASH


cdef const Elf64_Dyn *dynamic_section(dl_phdr_info *info) noexcept nogil:
    """Return the dynamic section of an image, NULL if it has none."""
    cdef int i
    for i in range(info.dlpi_phnum):
        if info.dlpi_phdr[i].p_type == PT_DYNAMIC:
            return <const Elf64_Dyn *>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr)
    return NULL


cdef bint read_image(dl_phdr_info *info, Image *image) noexcept nogil:
    """Fill in `image`; False if it has no name, or its addresses are not relocated (the vDSO)."""
    cdef const Elf64_Dyn *dynamic = dynamic_section(info)
    cdef uint64_t name = 0
    image.base = info.dlpi_addr
    image.strings = NULL
    image.symbols = NULL
    image.versions = NULL
    image.table = NULL
    if dynamic == NULL:
        return False
    while dynamic.d_tag != DT_NULL:
        if dynamic.d_tag == DT_STRTAB:
            image.strings = <const char *>dynamic.d_un.d_ptr
        elif dynamic.d_tag == DT_SYMTAB:
            image.symbols = <const Elf64_Sym *>dynamic.d_un.d_ptr
        elif dynamic.d_tag == DT_VERSYM:
            image.versions = <const unsigned short *>dynamic.d_un.d_ptr
        elif dynamic.d_tag == DT_GNU_HASH:
            image.table = <const uint32_t *>dynamic.d_un.d_ptr
        elif dynamic.d_tag == DT_SONAME:
            name = dynamic.d_un.d_val
        dynamic += 1
    if name == 0 or <uint64_t>image.strings <= image.base:
        return False
    image.soname = image.strings + name
    return True


cdef uint32_t gnu_hash(const char *name) noexcept nogil:
    """Return the hash of a symbol's name as DT_GNU_HASH wants it."""
    cdef uint32_t h = 5381
    while name[0]:
        h = h * 33 + <unsigned char>name[0]
        name += 1
    return h


cdef void *symbol_in(Image *image, const char *name) noexcept nogil:
    """Return the default version of a function that the image defines, NULL if it has none."""
    cdef const uint32_t *buckets
    cdef const uint32_t *chain
    cdef uint32_t h = gnu_hash(name), first, i
    if image.table == NULL or image.symbols == NULL or image.versions == NULL or image.table[0] == 0:
        return NULL
    # Words: buckets, first hashed symbol, bloom words (of 64 bits), shift; then bloom filter, buckets, chains.
    first = image.table[1]
    buckets = image.table + 4 + 2 * image.table[2]
    chain = buckets + image.table[0]
    i = buckets[h % image.table[0]]
    while i >= first:
        # Bit 0 of a hash ends its chain; 0x8000 marks a version that is kept for old programs.
        if (chain[i - first] | 1) == (h | 1) and image.symbols[i].st_shndx != 0 and image.versions[i] & 0x8000 == 0:
            if strcmp(image.strings + image.symbols[i].st_name, name) == 0:
                return <void *>(image.base + image.symbols[i].st_value)
        if chain[i - first] & 1:
            break
        i += 1
    return NULL
