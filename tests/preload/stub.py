"""A stub of libcuda.so.1 with every symbol of the hook table, for tests of how calls find their way.

It computes nothing: each function counts its calls, remembers which library called it and succeeds. simcuda behaves
like a driver; this one has every symbol, any version, and answers look-ups by the rules of cuGetProcAddress.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from shim.generate import header
from shim.hooks import HOOKS, LOOKUPS, Hook

ROOT = Path(__file__).resolve().parents[2]

CONTROL = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cuda_abi.h"
#define EXPORT __attribute__((visibility("default")))

struct record { const char *symbol; int calls; void *caller; };
static struct record records[];
static int version(void) { const char *v = getenv("STUB_VERSION"); return v ? atoi(v) : 13050; }
static void note(int i) { __atomic_add_fetch(&records[i].calls, 1, __ATOMIC_SEQ_CST); }
#define NOTE(i) (note(i), records[i].caller = __builtin_return_address(0))

static struct record *find(const char *symbol) {
    for (struct record *r = records; r->symbol; r++) if (!strcmp(r->symbol, symbol)) return r;
    return 0;
}
EXPORT int stub_calls(const char *symbol) { struct record *r = find(symbol); return r ? r->calls : -1; }
EXPORT int *stub_counter(const char *symbol) { return &find(symbol)->calls; }
EXPORT const char *stub_caller(const char *symbol) {
    Dl_info info; struct record *r = find(symbol);
    if (!r || !r->caller || !dladdr(r->caller, &info)) return "";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}
EXPORT void *stub_own_lookup(const char *symbol) {
    return dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), symbol);
}
EXPORT int stub_hold;         /* while set, cuMemcpyDtoH_v2 and cuLaunchKernel do not return */
static void hold(void) { while (__atomic_load_n(&stub_hold, __ATOMIC_SEQ_CST)) usleep(1000); }
EXPORT int stub_captured;     /* what cuStreamIsCapturing answers */
EXPORT CUhostFn stub_fn;      /* the host function that was given last */
EXPORT void *stub_argument;
EXPORT CUstreamCallback stub_callback;
EXPORT int stub_fail;         /* the result of the functions that take host functions */
EXPORT int stub_new_abi(void) { return 0; }
"""

# What a symbol does beside counting; the parameters have the names of the table.
BODIES = {
    "cuDriverGetVersion": "*driverVersion = version();",
    "cuMemcpyDtoH_v2": "hold();",
    "cuLaunchKernel": "hold();",
    "cuStreamIsCapturing": "if (captureStatus) *captureStatus = stub_captured;",
    "cuLaunchHostFunc": "if (!stub_fail) { stub_fn = fn; stub_argument = userData; } return stub_fail;",
    "cuStreamAddCallback": "if (!stub_fail) { stub_callback = callback; stub_argument = userData; } return stub_fail;",
    "cuGraphAddHostNode": "stub_fn = nodeParams->fn; stub_argument = nodeParams->userData;",
    "cuGraphHostNodeSetParams": "stub_fn = nodeParams->fn; stub_argument = nodeParams->userData;",
    "cuGraphHostNodeGetParams": "nodeParams->fn = stub_fn; nodeParams->userData = stub_argument;",
    "cuGetProcAddress": "return look_up(symbol, pfn, cudaVersion, flags, 0);",
    "cuGetProcAddress_v2": "return look_up(symbol, pfn, cudaVersion, flags, symbolStatus);",
    # Fields: type, three words, then fn and userData.
    "cuGraphAddNode": "memcpy(&stub_fn, (char *)nodeParams + 16, 8);"
    " memcpy(&stub_argument, (char *)nodeParams + 24, 8);",
}

LOOK_UP = r"""
static CUresult look_up(const char *name, void **pfn, int asked, unsigned long long flags, int *status) {
    const struct row *best = 0;
    *pfn = 0;
    if (status) *status = 1;
    const char *fresh = getenv("STUB_NEW_ABI");
    if (asked > 13050 && fresh && name && !strcmp(fresh, name)) { *pfn = (void *)stub_new_abi; return 0; }
    if (asked > version()) asked = version();
    for (const struct row *r = rows; r->symbol; r++) {
        if (!name || strcmp(r->name, name) || r->since > asked) continue;
        if (r->variant && r->variant != ((flags & 2) ? 2 : 1)) continue;
        if (!best || r->since > best->since) best = r;
    }
    if (!best) return CUDA_ERROR_NOT_FOUND;
    if (status) *status = 0;
    *pfn = best->function;
    if (getenv("STUB_ALIAS")) *pfn = (char *)*pfn + 1; /* an address that no symbol has; nobody calls it */
    return 0;
}
"""


def _function(index: int, hook: Hook) -> str:
    """Return the C source of one stub function."""
    body = BODIES.get(hook.symbol, "")
    unused = "".join(f" (void){name};" for name in hook.arguments)
    return (
        f"EXPORT CUresult {hook.symbol}({hook.params or 'void'}) "
        f"{{{unused} NOTE({index}); {body} return 0; }}"
    )


def source(newest: int) -> str:
    """Return the stub as C, with the symbols that a driver of that version has."""
    hooks = [hook for hook in HOOKS if hook.since <= newest]
    opaque = [line for line in header().split("\n") if line.startswith("typedef struct CU") and "{" not in line]
    late = [hook for hook in hooks if hook.symbol.startswith("cuGetProcAddress")]
    early = [hook for hook in hooks if hook not in late]
    place = {hook.symbol: index for index, hook in enumerate(hooks)}
    records = "".join(f'    {{"{hook.symbol}", 0, 0}},\n' for hook in hooks)
    rows = "".join(
        f'    {{"{hook.symbol}", "{hook.name}", {hook.since}, {hook.variant.value}, (void *){hook.symbol}}},\n'
        for hook in LOOKUPS
        if hook.since <= newest
    )
    return "\n".join(
        [
            CONTROL,
            *opaque,
            f"static struct record records[] = {{\n{records}    {{0, 0, 0}}\n}};",
            *(_function(place[hook.symbol], hook) for hook in early),
            *(f"CUresult {hook.symbol}({hook.params});" for hook in late),
            "struct row { const char *symbol, *name; int since, variant; void *function; };",
            f"static const struct row rows[] = {{\n{rows}    {{0, 0, 0, 0, 0}}\n}};",
            LOOK_UP,
            *(_function(place[hook.symbol], hook) for hook in late),
        ]
    )


def compile_c(out: Path, text: str, *flags: str) -> Path:
    """Compile C source into a program or, with -shared, a library."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(f"{out.name}.c")
    file.write_text(text)
    compiler = shlex.split(os.environ.get("CC") or "gcc")
    subprocess.run([*compiler, "-O1", "-w", "-o", str(out), str(file), f"-I{ROOT / 'shim'}", *flags], check=True)
    return out


def build(folder: Path, newest: int = 13050, *flags: str) -> Path:
    """Build the stub as `folder`/libcuda.so.1."""
    return compile_c(
        folder / "libcuda.so.1", source(newest),
        "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", *flags,
    )  # fmt: skip
