"""The shim with a way in: the same C source, and exports for tests of what has no entry point of its own."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from shim import build

NAME = "libnvsnap_gpushare.so"
PREFIX = "__pyx_f_4shim_10interposer_"

WAY_IN = r"""
#include "interposer.c"
#define EXPORT __attribute__((visibility("default")))
EXPORT void inside_close(int cls) { @gate_close(cls); }
EXPORT void inside_open(void) { @gate_open_all(); }
EXPORT void inside_admit(unsigned n) { while (n--) @gate_admit(0); }
EXPORT void inside_admit_thread(unsigned id) { @gate_admit(id); }
EXPORT unsigned inside_in_flight(int cls) { return @gate_in_flight(cls); }
EXPORT unsigned inside_waiting(int cls) { return @gate_waiting(cls); }
EXPORT unsigned inside_admitted(void) { return @gate_admitted(); }
EXPORT void *inside_closed_word(void) { return &gates.closed; }
EXPORT void *inside_shards(void) { return gs_shards; }
EXPORT int inside_closed(int cls) { return @gate_is_closed(cls); }
EXPORT void inside_enter(int cls) { @gs_enter(cls, NULL, 0); }
EXPORT void inside_leave(int cls) { @gs_leave(cls); }
EXPORT void inside_bypass(int on) { gs_self.bypass = on; }
EXPORT void inside_lock(int which) { gs_lock(which ? &tables_mutex : &start_mutex); }
EXPORT void inside_unlock(int which) { gs_unlock(which ? &tables_mutex : &start_mutex); }
EXPORT volatile int inside_state; /* of the tables: 1 being changed, 2 changed */
EXPORT void inside_change(unsigned us) {
    gs_lock(&tables_mutex);
    inside_state = 1;
    @sleep_us(us);
    inside_state = 2;
    gs_unlock(&tables_mutex);
}
EXPORT unsigned inside_hostfuncs(void) { return @hostfuncs_used(); }
EXPORT unsigned inside_captures(void) { return @captures_live(); }
EXPORT unsigned inside_unknown(void) { return @unknown_abi_count(); }
EXPORT unsigned long inside_format(char *out, unsigned long size, const char *text, int number, unsigned long wide) {
    return gs_format(out, size, "<%s %.*s %d %u %lx %zu %c%%>", text, 2, text, number, number, wide, wide, 'c');
}
EXPORT int inside_import_under_way(void) {
    __auto_type o = @object_new(2 /* ORIGIN_IMPORTED */);
    @refresh_imports();
    int owner = o->owner;
    @object_unpin(o);
    return owner;
}
static void thread_of_ours(void *seen) { prctl(PR_GET_NAME, seen); ((char *)seen)[16] = 1; }
EXPORT int inside_thread(char *seen) { return @start_thread(thread_of_ours, seen); }
"""


def built_inside(factory: pytest.TempPathFactory) -> Path:
    """Return the library, which is built once for all pytest workers: it takes one a third of a minute."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "inside"
    with (shared / "inside.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _build(fresh := factory.mktemp("inside"))
            fresh.rename(folder)  # whole or not at all
    return folder / NAME


def _build(folder: Path) -> None:
    work = folder / "work"
    build.cythonize(work, allow_missing=True)
    script = work / "exports.map"
    script.write_text(script.read_text().replace("global:", "global:\n    inside_*;", 1))
    source = work / "inside.c"
    source.write_text(WAY_IN.replace("@", PREFIX))
    compiler = shlex.split(os.environ.get("CC") or "gcc")
    subprocess.run(
        [*compiler, *build.COMPILE_FLAGS, *build.GENERATED_CODE, "-O1", "-DGS_DEBUG", f"-I{build.SOURCES}", f"-I{work}",
         *build.python_headers(work), *build.LINK_FLAGS, f"-Wl,--version-script={script}", "-o", str(folder / NAME),
         str(source)],
        check=True,
    )  # fmt: skip
