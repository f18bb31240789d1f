"""The real libcudart, shared and static, as far as its look-ups: cuda-facts 3.8, FR-36.

It refuses a simulated driver after it has looked everything up (a self-test through cuGetExportTable); that is not
worked around. What it keeps is checked: none of the pointers in its data leads to a hooked function of the driver.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shim.generate import exported
from tests.programs.setting import Setting

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
Build = Callable[..., Path]

# Prints every pointer into the driver or into the shim that lies in the writable data of the file that holds
# cudaGetDeviceCount: "driver SYMBOL" or "shim SYMBOL".
PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef SHARED
static int (*count)(int *);
#else
extern int cudaGetDeviceCount(int *);
#define count cudaGetDeviceCount
#endif
static void look(unsigned long from, unsigned long to) {
    for (unsigned long at = from; at < to; at += sizeof(void *)) {
        Dl_info info;
        void *value = *(void **)at;
        if (!value || !dladdr(value, &info) || info.dli_saddr != value || !info.dli_sname) continue;
        if (strstr(info.dli_fname, "libcuda.so")) printf("driver %s\n", info.dli_sname);
        if (strstr(info.dli_fname, getenv("LD_PRELOAD"))) printf("shim %s\n", info.dli_sname);
    }
}
int main(int argc, char **argv) {
    alarm(60);
#ifdef SHARED
    void *runtime = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!runtime) return puts(dlerror()), 2;
    count = dlsym(runtime, "cudaGetDeviceCount");
#endif
    int n = 0;
    dlopen("libcuda.so.1", RTLD_LAZY); /* libcudart closes it when it gives up; names are looked up in it below */
    printf("result %d\n", count(&n));
    Dl_info mine;
    dladdr((void *)count, &mine);
    unsigned long from, to, previous = 0;
    char line[512], permissions[8], path[400];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) {
        path[0] = 0;
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %399s", &from, &to, permissions, path) < 3) continue;
        char real[4096];
        int own = path[0] && realpath(mine.dli_fname, real) && !strcmp(path, real);
        /* Its .bss follows without a name. */
        if ((own || (!path[0] && from == previous)) && permissions[1] == 'w') look(from, to);
        previous = own ? to : 0;
    }
    return 0;
}
"""


def _runtime() -> Path:
    """Return the folder of libcudart: $GPUSHARE_CUDART, or that of the wheel nvidia-cuda-runtime."""
    if folder := os.environ.get("GPUSHARE_CUDART"):
        return Path(folder)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(root) / "cu13" / "lib").exists():
            return found
    pytest.skip("libcudart is not installed (wheel nvidia-cuda-runtime, extra dev)")


@pytest.fixture
def runtime_program(request: pytest.FixtureRequest, built: Build) -> list[Path]:
    """The command that drives libcudart, linked in or opened."""
    folder = _runtime()
    if request.param == "shared":
        (library,) = folder.glob("libcudart.so.1[0-9]")
        return [built("runtime-shared", PROGRAM, "-DSHARED"), library]
    flags = (f"-L{folder}", "-l:libcudart_static.a", "-lpthread", "-ldl", "-lrt")
    return [built("runtime-static", PROGRAM, "-rdynamic", *flags)]


@pytest.mark.machine(driver="sim")
@pytest.mark.parametrize("runtime_program", ["shared", "static"], indirect=True)
def test_libcudart_keeps_our_pointers(
    run: Run, machine: Setting, libcuda_path: Path, runtime_program: list[Path]
) -> None:
    env = {name: value for name, value in machine.environ().items() if name.startswith("SIMCUDA_")}
    result = run(runtime_program, libraries=libcuda_path.parent, **env)
    assert result.returncode == 0, result
    lines = [line.split() for line in result.stdout.decode().splitlines()]
    assert lines[0][0] == "result" and lines[0][1] != "0"
    kept = {place: {name for where, name in lines[1:] if where == place} for place in ("driver", "shim")}
    hooked = {hook.symbol for hook in exported()}
    assert kept["driver"], "the scan found what it looked for"
    assert kept["driver"] & hooked == set()
    assert {"cuLaunchKernel", "cuLaunchKernel_ptsz", "cuMemcpyHtoD_v2", "cuMemcpyHtoD_v2_ptds", "cuMemAlloc_v2",
            "cuIpcOpenMemHandle_v2", "cuGraphLaunch", "cuStreamAddCallback"} <= kept["shim"]  # fmt: skip


@pytest.mark.machine(driver="sim")
@pytest.mark.parametrize("runtime_program", ["shared"], indirect=True)
def test_without_the_shim_it_keeps_the_drivers(
    run: Run, machine: Setting, libcuda_path: Path, runtime_program: list[Path]
) -> None:
    """The scan would see the difference."""
    env = {name: value for name, value in machine.environ().items() if name.startswith("SIMCUDA_")}
    empty = runtime_program[0].with_name("libempty-cudart.so")
    if not empty.exists():
        subprocess.run(["gcc", "-shared", "-o", str(empty), "-x", "c", "-"], input=b"int nothing;", check=True)
    result = run(runtime_program, preload=[empty], libraries=libcuda_path.parent, **env)
    assert b"driver cuLaunchKernel\n" in result.stdout and b"shim" not in result.stdout
