"""Preloaded into programs that never touch CUDA, nothing may differ: pitfalls 26, 27, FR-33, FR-40, FR-41."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
Build = Callable[..., Path]

PROGRAM = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
    write(1, "START\n", 6);
    int threads = 0;
    DIR *dir = opendir("/proc/self/task");
    for (struct dirent *e; (e = readdir(dir));) threads += e->d_name[0] != '.';
    closedir(dir);
    printf("threads %d\n", threads);
    printf("cuInit %d\n", dlsym(RTLD_DEFAULT, "cuInit") != 0);
    printf("error %d\n", dlerror() != 0);
    printf("puts %d\n", dlsym(RTLD_DEFAULT, "puts") == (void *)puts);
    printf("next %d\n", dlsym(RTLD_NEXT, "getpid") == (void *)getpid);
    printf("none %d\n", dlsym(RTLD_DEFAULT, "cuNoSuchFunction") != 0);
    return 0;
}
"""

# Overrides dlsym as some tools do, and is asked by the program behind the shim or before it.
OTHER_DLSYM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "VERSION");
    return real(handle, name);
}
"""

# Takes over malloc as jemalloc and tcmalloc do, and looks the old one up while the process starts.
ALLOCATOR = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
static char early[65536]; static size_t used; static void *(*real)(size_t); static int looking;
void *malloc(size_t n) {
    if (!real && !looking) { looking = 1; real = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc"); looking = 0; }
    if (real) return real(n);
    void *p = early + used; used += (n + 15) & ~(size_t)15; return p;
}
"""

COMMANDS: dict[str, list[str]] = {
    "bash": ["bash", "-c", "for i in 1 2 3; do echo $i | cat; done; exit 3"],
    "true": ["true"],
    "perl": ["perl", "-MPOSIX", "-MData::Dumper", "-e", "print Dumper([floor(2.5)]); warn 'x'"],
    "python": [sys.executable, "-S", "-c", "import ctypes, json; print(json.dumps([ctypes.CDLL(None).getpid() > 0]))"],
}


@pytest.fixture(scope="session")
def programs(built: Build) -> dict[str, list[str]]:
    """The commands to compare, C programs of both kinds among them."""
    pie = built("program-pie", PROGRAM)
    plain = built("program-no-pie", PROGRAM, "-no-pie", "-fno-pie")
    return COMMANDS | {"C": [str(pie)], "C, not PIE": [str(plain)]}


@pytest.fixture(scope="session")
def others(built: Build) -> dict[str, Path]:
    """Libraries to preload beside the shim."""
    version = "GLIBC_2.34"
    return {
        "dlsym": built("libother-dlsym.so", OTHER_DLSYM.replace("VERSION", version), "-shared", "-fPIC"),
        "malloc": built("liballocator.so", ALLOCATOR, "-shared", "-fPIC"),
    }


@pytest.mark.parametrize("bind_now", [False, True], ids=["lazy", "bind-now"])
@pytest.mark.parametrize("other", [None, "dlsym", "malloc"])
@pytest.mark.parametrize("order", ["first", "last"])
def test_programs_do_not_notice(
    run: Run, shim_path: Path, programs: dict[str, list[str]], others: dict[str, Path],
    other: str | None, order: str, bind_now: bool,
) -> None:  # fmt: skip
    beside = [others[other]] if other else []
    with_shim = [shim_path, *beside] if order == "first" else [*beside, shim_path]
    env = {"LD_BIND_NOW": "1"} if bind_now else {}
    for name, command in programs.items():
        plain = run(command, preload=beside, **env)
        ours = run(command, preload=with_shim, **env)
        assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr), name


def test_log_is_off_by_default_and_silent_before_cuda(run: Run, built: Build) -> None:
    program = built("program-pie", PROGRAM)
    assert run([program], GPUSHARE_LOG="1").stderr == b""


def _calls(trace: Path) -> list[str]:
    """Return the names of the system calls in a strace log."""
    lines = (re.sub(r"^\d+ +", "", line) for line in trace.read_text().splitlines())
    return [name for line in lines if (name := re.split(r"[( ]", line)[0])]


@pytest.mark.parametrize("program", ["C", "python"])
def test_no_system_call_of_ours(
    shim_path: Path, programs: dict[str, list[str]], built: Build, tmp_path: Path, program: str
) -> None:
    """The same program with an empty library in the shim's place makes the same calls, but for mapping the file."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    empty = built("libempty.so", "int nothing;", "-shared", "-fPIC")
    traces = {}
    for name, library in {"empty": empty, "shim": shim_path}.items():
        log = tmp_path / name
        command = ["strace", "-f", "-o", str(log), "-E", f"LD_PRELOAD={library}", *programs[program]]
        env = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(command, check=True, capture_output=True, env=env)
        traces[name] = _calls(log)
    mapping = {"mmap", "mprotect", "munmap", "brk", "pread64"}
    assert [c for c in traces["shim"] if c not in mapping] == [c for c in traces["empty"] if c not in mapping]
    # Its segments and relro: a fixed few, none later.
    assert len(traces["shim"]) - len(traces["empty"]) <= 3


def test_no_thread(run: Run, built: Build) -> None:
    assert b"threads 1\n" in run([built("program-pie", PROGRAM)]).stdout
