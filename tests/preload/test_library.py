"""What the library file itself must be like, on every architecture: it is loaded into programs that are not ours."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shim import build, generate
from shim.hooks import HOOKS, LOADER_EXPORTS, Kind
from tests.preload.conftest import Runner

NEWEST_GLIBC = (2, 34)


def _tool(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _symbols(library: Path, kind: str) -> list[str]:
    """Return the dynamic symbols that nm's option `kind` selects."""
    output = _tool("nm", "--dynamic", f"--{kind}", library)
    return [line.split()[-1] for line in output.splitlines()]


def needed(library: Path) -> set[str]:
    """Return the libraries that the loader must find for this one."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", _tool("readelf", "--dynamic", "--wide", library)))


def check_library(library: Path) -> None:
    """Assert everything that holds for the file on any architecture."""
    undefined = [name.split("@")[0] for name in _symbols(library, "undefined-only")]
    assert not [name for name in undefined if re.match(r"_?Py", name)]
    assert needed(library) <= {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    table = {hook.symbol for hook in HOOKS if hook.kind is not Kind.REAL}
    assert set(_symbols(library, "defined-only")) == table | set(LOADER_EXPORTS)
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", _tool("objdump", "-T", library))
    assert max((int(major), int(minor)) for major, minor in versions) <= NEWEST_GLIBC
    dynamic = _tool("readelf", "--dynamic", "--wide", library)
    assert "BIND_NOW" in dynamic and "SYMBOLIC" in dynamic
    assert "TEXTREL" not in dynamic
    # One entry: the compiler's frame_dummy. A constructor of ours would be a second one.
    assert re.search(r"\(INIT_ARRAYSZ\)\s+8 ", dynamic)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the shim at -O0 was made of."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def shim_without_optimisation(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim at -O0 with its assertions: inlining hides mistakes at -O2."""
    out = tmp_path_factory.mktemp("O0") / "libnvsnap_gpushare.so"
    return build.build_shim(out, optimisation="-O0", debug=True, keep=work)


def test_library(shim_path: Path) -> None:
    """Pitfall 28, FR-41: no symbol newer than glibc 2.34, nothing needed but libc, no constructor."""
    check_library(shim_path)


def test_links_without_optimisation(shim_without_optimisation: Path) -> None:
    check_library(shim_without_optimisation)


def test_without_optimisation_in_front_of_another_dlsym(
    shim_without_optimisation: Path, run: Callable[..., subprocess.CompletedProcess[bytes]], built: Callable[..., Path]
) -> None:
    """A C tail call is none at -O0: there the spike went in circles."""
    other = built("libother.so", OTHER_DLSYM, "-shared", "-fPIC")
    python = ["/usr/bin/env", "perl", "-MPOSIX", "-e", "print POSIX::floor(2.5)"]
    assert run(python, preload=[shim_without_optimisation, other]).stdout == b"2"


OTHER_DLSYM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return real(handle, name);
}
"""


def test_no_hook_is_half_written() -> None:
    assert generate.missing_hooks() == []


def test_it_stays_where_a_program_closes_it(run: Runner, shim_path: Path) -> None:
    """A plugin loader closes what it has opened, and threads of ours would run on in nothing."""
    program = f"""
import _ctypes, ctypes
shim = ctypes.CDLL("{shim_path}")
_ctypes.dlclose(shim._handle)
assert "{shim_path}" in open("/proc/self/maps").read()
"""
    done = run([sys.executable, "-c", program], preload=[])
    assert done.returncode == 0, done.stderr


def test_a_shim_that_needs_python_does_not_link(shim_without_optimisation: Path, work: Path, tmp_path: Path) -> None:
    """The defect put back: one function that may raise."""
    source = tmp_path / "bad.c"
    text = (work / "interposer.c").read_text()
    assert "static int __pyx_f_4shim_10interposer_driver_version(void) {" in text
    source.write_text(
        text.replace(
            "static int __pyx_f_4shim_10interposer_driver_version(void) {",
            "static int __pyx_f_4shim_10interposer_driver_version(void) { PyErr_Clear();",
        ).replace("CUresult cuInit(unsigned int __pyx_v_Flags) {",
                  "CUresult cuInit(unsigned int __pyx_v_Flags) { __pyx_f_4shim_10interposer_driver_version();")
    )  # fmt: skip
    compiler = shlex.split("gcc")
    command = [
        *compiler, *build.COMPILE_FLAGS, "-w", "-O0", f"-I{build.SOURCES}", f"-I{work}", *build.python_headers(work),
        *build.LINK_FLAGS, f"-Wl,--version-script={work / 'exports.map'}", "-o", str(tmp_path / "bad.so"), str(source),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "undefined reference to `PyErr_Clear'" in result.stderr
