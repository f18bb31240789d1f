"""Look-ups by dlsym, dlvsym and the ELF symbol: pitfalls 24, 25, FR-33, FR-34, FR-36."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
Build = Callable[..., Path]

# `where` prints the file that a function lies in. The alarm ends an endless recursion.
PRELUDE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static const char *where(void *f) {
    Dl_info info;
    if (!f) return "none";
    if (!dladdr(f, &info)) return "nowhere";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}
"""

LOOKUPS = PRELUDE + r"""
int main(int argc, char **argv) {
    alarm(60);
    printf("before %s\n", where(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2")));
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    printf("handle %s\n", where(dlsym(handle, "cuMemAlloc_v2")));
    printf("ptsz %s\n", where(dlsym(handle, "cuLaunchKernel_ptsz")));
    printf("entry %s\n", where(dlsym(handle, "cuGetProcAddress_v2")));
    printf("unhooked %s\n", where(dlsym(handle, "cuCtxSynchronize")));
    printf("prefix %s\n", where(dlsym(handle, "cuMemAlloc_v2_and_more")));
    printf("error %d\n", dlerror() != 0);
    printf("version %s\n", where(dlvsym(handle, "cuMemAlloc_v2", "NONE_1.0")));
    printf("driver %s\n", where(((void *(*)(const char *))dlsym(handle, "stub_own_lookup"))("cuInit")));
    void *program = dlopen(0, RTLD_NOW);
    printf("program %s\n", where(dlsym(program, "cuMemAlloc_v2")));
    printf("libc %s\n", where(dlsym(program, "getpid")));
    return 0;
}
"""


def _answers(result: subprocess.CompletedProcess[bytes]) -> dict[str, str]:
    """Return what a program printed, as name → value."""
    assert result.returncode == 0, result
    return dict(line.split(" ", 1) for line in result.stdout.decode().splitlines())


def test_lookup_by_handle(run: Run, built: Build, stub_driver: Path, shim_path: Path) -> None:
    found = _answers(run([built("lookups", LOOKUPS)], libraries=stub_driver))
    assert found["before"] == "none", "nobody has loaded the driver yet"
    assert found["handle"] == found["ptsz"] == found["entry"] == shim_path.name
    assert found["unhooked"] == "libcuda.so.1"
    assert found["prefix"] == "none" and found["error"] == "1"
    assert found["driver"] == "libcuda.so.1", "FR-34: the driver's own look-up was answered with a hook"
    assert found["libc"] == "libc.so.6"


def test_without_the_shim_the_same_names_are_found(run: Run, built: Build, stub_driver: Path) -> None:
    program = built("lookups", LOOKUPS)
    plain = _answers(run([program], preload=[], libraries=stub_driver))
    ours = _answers(run([program], libraries=stub_driver))
    # Opened RTLD_LOCAL, so not in the program's scope: here we answer although the driver's name would not be found.
    assert plain.pop("program") == "none" and ours.pop("program") != "none"
    assert {name: value == "none" for name, value in plain.items()} == {
        name: value == "none" for name, value in ours.items()
    }


LINKED = PRELUDE + r"""
extern int cuInit(unsigned); extern int cuMemAlloc_v2(unsigned long long *, unsigned long);
extern int cuMemcpyHtoD_v2(unsigned long long, const void *, unsigned long);
extern int stub_calls(const char *); extern const char *stub_caller(const char *);
int main(void) {
    alarm(60);
    unsigned long long p = 0;
    printf("init %d\n", cuInit(0));
    printf("copy %d\n", cuMemcpyHtoD_v2(p, &p, 8));
    printf("calls %d\n", stub_calls("cuMemcpyHtoD_v2"));
    printf("caller %s\n", stub_caller("cuMemcpyHtoD_v2"));
    printf("default %s\n", where(dlsym(RTLD_DEFAULT, "cuMemcpyHtoD_v2")));
    printf("next %s\n", where(dlsym(RTLD_NEXT, "cuMemcpyHtoD_v2")));
    return 0;
}
"""


@pytest.mark.parametrize("flags", [(), ("-no-pie", "-fno-pie"), ("-Wl,-z,now",)], ids=["pie", "no-pie", "now"])
def test_direct_link(run: Run, built: Build, stub_driver: Path, shim_path: Path, flags: tuple[str, ...]) -> None:
    """A program linked with -lcuda, as vLLM's allocator is."""
    name = "linked" + "".join(flags).replace(",", "")
    program = built(name, LINKED, *flags, f"-L{stub_driver}", "-l:libcuda.so.1")
    found = _answers(run([program], libraries=stub_driver))
    assert (found["init"], found["copy"], found["calls"]) == ("0", "0", "1")
    assert found["default"] == found["caller"] == found["next"] == shim_path.name
    plain = _answers(run([program], preload=[], libraries=stub_driver))
    assert plain["caller"] == name and plain["next"] == "libcuda.so.1"


WITHOUT_DRIVER = PRELUDE + r"""
extern int cuInit(unsigned) __attribute__((weak)); extern int cuMemcpyHtoD_v2() __attribute__((weak));
int main(void) {
    alarm(60);
    printf("init %d\n", cuInit ? cuInit(0) : -1);
    printf("copy %d\n", cuMemcpyHtoD_v2 ? cuMemcpyHtoD_v2(0L, 0L, 0L) : -1);
    return 0;
}
"""


def test_no_driver_is_no_device(run: Run, built: Build) -> None:
    """A program that asks for a weak symbol sees a machine without a GPU."""
    found = _answers(run([built("weak", WITHOUT_DRIVER)]))
    assert set(found.values()) <= {"100", "-1"}


# An interposer of somebody else: it overrides a driver function and calls on by RTLD_NEXT, and looks up by dlsym.
SECOND = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int cuMemcpyHtoD_v2(unsigned long long d, const void *s, unsigned long n) {
    int (*next)(unsigned long long, const void *, unsigned long) = dlsym(RTLD_NEXT, "cuMemcpyHtoD_v2");
    printf("second 1\n");
    return next(d, s, n);
}
void *dlsym_of_second(void *handle, const char *name) { return dlsym(handle, name); }
"""


@pytest.mark.parametrize("order", ["first", "last"])
def test_another_interposer(run: Run, built: Build, stub_driver: Path, shim_path: Path, order: str) -> None:
    """Whoever comes first is called; the driver is reached once, and by us."""
    second = built("libsecond.so", SECOND, "-shared", "-fPIC")
    program = built("linked", LINKED, f"-L{stub_driver}", "-l:libcuda.so.1")
    preload = [shim_path, second] if order == "first" else [second, shim_path]
    found = _answers(run([program], preload=preload, libraries=stub_driver))
    assert (found["copy"], found["calls"], found["caller"]) == ("0", "1", shim_path.name)
    assert ("second" in found) == (order == "last")


LATE = PRELUDE + r"""
/* Opened late, looked up from a library that was opened late, with other dlsym overrides around. */
int main(int argc, char **argv) {
    alarm(60);
    void *plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void *(*look)(void *, const char *) = dlsym(plugin, "dlsym_of_second");
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    printf("handle %s\n", where(look(handle, "cuMemAlloc_v2")));
    printf("next %s\n", where(look(RTLD_NEXT, "getpid")));
    printf("default %s\n", where(look(RTLD_DEFAULT, "getpid")));
    return 0;
}
"""


def test_lookup_from_a_library_opened_late(run: Run, built: Build, stub_driver: Path, shim_path: Path) -> None:
    second = built("libsecond.so", SECOND, "-shared", "-fPIC")
    found = _answers(run([built("late", LATE), second], libraries=stub_driver))
    assert found["handle"] == shim_path.name
    plain = _answers(run([built("late", LATE), second], preload=[], libraries=stub_driver))
    assert {**found, "handle": ""} == {**plain, "handle": ""}


OVERRIDE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return real(handle, name);
}
"""


@pytest.mark.parametrize("order", ["first", "last"])
def test_another_dlsym(run: Run, built: Build, stub_driver: Path, shim_path: Path, order: str) -> None:
    """A second override of dlsym, before or behind: the hooks are found and nothing goes in circles."""
    other = built("liboverride.so", OVERRIDE, "-shared", "-fPIC")
    preload = [shim_path, other] if order == "first" else [other, shim_path]
    found = _answers(run([built("lookups", LOOKUPS)], preload=preload, libraries=stub_driver))
    assert found["handle"] == shim_path.name
    assert found["libc"] == "libc.so.6"


# Each calls the same function behind it: the genuine dlsym must see who asks.
CHAIN = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
void chain(void) {
    void (*next)(void) = dlsym(RTLD_NEXT, "chain");
    printf("NAME %s\n", next ? "calls-on" : "last");
    if (next && next != chain) next();
}
"""


def test_rtld_next_of_others_keeps_its_caller(run: Run, built: Build, shim_path: Path) -> None:
    """Pitfall 24's other side, (3) of cuda-facts 3.8: looked up on the shim's behalf, each would find itself."""
    links = [built(f"libchain-{name}.so", CHAIN.replace("NAME", name), "-shared", "-fPIC") for name in "ABC"]
    main = "int main(void) { alarm(60); chain(); return 0; }"
    program = built("chain", main, f"-L{links[0].parent}", "-l:libchain-A.so")
    for place in range(4):
        preload = [*links[:place], shim_path, *links[place:]]
        result = run([program], preload=preload, libraries=links[0].parent)
        assert result.stdout == b"A calls-on\nB calls-on\nC last\n", preload
