# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""libnvsnap_gpushare.so in one translation unit, compiled so that nothing of Python is left in it (shim/build.py).

Every function is `noexcept nogil`; module-level state is zero at start or stands in platform.h. The parts are included
in the order in which they build on each other.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t  # no-cython-lint

include "cuda_abi.pxi"
include "util.pxi"
include "hooks_gen.pxi"
include "gates.pxi"
include "elf.pxi"
include "resolve.pxi"
include "hostfuncs.pxi"
include "core.pxi"
include "lifecycle.pxi"
