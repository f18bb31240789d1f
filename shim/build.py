"""Compile and link ``libnvsnap_gpushare.so``: ``python -m shim.build [OUT]``, or `build_shim` from setup.py.

Cython turns interposer.pyx into C; the linker then drops everything of Python, because nothing exported reaches it, and
refuses the library if anything does. Knows the tools, not the sources' content.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from shim import generate

SOURCES = Path(__file__).resolve().parent
DEFAULT_OUT = SOURCES.parent / "gpususpend" / "libnvsnap_gpushare.so"

COMPILE_FLAGS = ["-std=gnu11", "-g", "-fPIC", "-ffunction-sections", "-fdata-sections", "-Wall", "-Wextra", "-Werror"]
# Warnings that Cython's own C gives rise to, and why they say nothing about ours.
GENERATED_CODE = [
    "-Wno-unused-function",  # helpers of the module object, which the linker drops
    "-Wno-unused-variable",  # the same
    "-Wno-unused-parameter",  # callbacks whose signature is given
    "-Wno-missing-field-initializers",  # tables of the module object
    "-Wno-cast-function-type",  # method tables of the module object
    "-Wno-sign-compare",  # `int` loop counters that Cython compares with enumerators
]
LINK_FLAGS = [
    "-shared",
    "-Wl,-soname,libnvsnap_gpushare.so",
    "-Wl,--gc-sections",  # drops the module initialisation, the only thing that needs Python
    "-Wl,-z,defs",  # refuses what is left undefined: a shim that needs Python does not link
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noexecstack",
    "-Wl,-z,nodelete",  # threads run in it, and the driver holds functions of it
    "-Wl,-Bsymbolic",  # our references are to our own functions, whoever else exports the name
    "-Wl,--as-needed",
    "-Wl,--fatal-warnings",
]


# Some distributions' compilers turn this on by themselves, and with it warnings: everywhere the same.
FORTIFY = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]

# GCC's run-time choice of atomics on aarch64 is made by a constructor; this library has none.
TARGET_FLAGS = {"aarch64": ["-mno-outline-atomics"]}


def _run(command: list[str]) -> None:
    """Run a tool; its output goes to ours, its failure is an exception."""
    subprocess.run(command, check=True)


def _target_flags(compiler: list[str]) -> list[str]:
    """Return the flags for the architecture that the compiler builds for."""
    triplet = subprocess.run([*compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout
    return TARGET_FLAGS.get(triplet.split("-")[0].strip(), [])


def cythonize(work: Path, allow_missing: bool) -> Path:
    """Generate the table's parts and the C source into the folder `work`; return the C file."""
    from Cython.Compiler.Main import CompilationOptions, compile_single

    generate.write(work, allow_missing)
    out = work / "interposer.c"
    options = CompilationOptions(
        output_file=str(out),
        include_path=[str(SOURCES), str(work)],
        language_level=3,
        emit_linenums=False,
    )
    result = compile_single(str(SOURCES / "interposer.pyx"), options, None)
    if result.num_errors:
        raise RuntimeError(f"Cython refused shim/interposer.pyx: {result.num_errors} errors, printed above")
    return out


def python_headers(work: Path) -> list[str]:
    """Return include flags for Python.h. The headers of this machine serve every target: nothing of them is linked."""
    include = sysconfig.get_paths()["include"]
    config = Path(sysconfig.get_config_h_filename())
    # Debian's pyconfig.h forwards to a folder named after the target, which a cross build does not have.
    real = next(iter(sorted(Path("/usr/include").glob(f"*-linux-gnu/{Path(include).name}/pyconfig.h"))), None)
    if real is not None and config.is_relative_to("/usr/include"):
        for triplet in ("aarch64-linux-gnu", "x86_64-linux-gnu"):
            forward = work / triplet / Path(include).name / "pyconfig.h"
            if not Path("/usr/include", triplet, Path(include).name, "pyconfig.h").exists():
                forward.parent.mkdir(parents=True, exist_ok=True)
                forward.write_text(f'#include "{real}"\n')
    return ["-isystem", include, "-isystem", str(work)]


def build_shim(
    out_path: Path | str = DEFAULT_OUT,
    cc: str | None = None,
    debug: bool = False,
    optimisation: str = "-O2",
    allow_missing: bool = False,
    keep: Path | None = None,
) -> Path:
    """Build the library at `out_path` and return that path.

    `cc` is the compiler (default: $CC or gcc) and with it the target; `debug` asserts the lock order; `allow_missing`
    lets custom hooks that nobody has written pass to the driver (development only); `keep` is a folder for the
    intermediate files. Raises CalledProcessError or RuntimeError when a tool refuses.
    """
    compiler = shlex.split(cc or os.environ.get("CC") or "gcc")
    out = Path(out_path)
    if not allow_missing and (missing := generate.missing_hooks()):
        raise RuntimeError(f"custom hooks of shim/hooks.py that no .pxi defines: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="gpushare-shim-") as temporary:
        work = keep or Path(temporary)
        source = cythonize(work, allow_missing)
        flags = [
            *COMPILE_FLAGS,
            *_target_flags(compiler),
            *GENERATED_CODE,
            optimisation,
            *(FORTIFY if optimisation != "-O0" else []),  # it needs an optimiser
            *(["-DGS_DEBUG"] if debug else []),
        ]
        includes = [f"-I{SOURCES}", f"-I{work}", *python_headers(work)]
        fresh = work / "libnvsnap_gpushare.so"
        _run([*compiler, *flags, *includes, *LINK_FLAGS, f"-Wl,--version-script={work / 'exports.map'}",
              "-o", str(fresh), str(source)])  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        # Copied under another name and moved: a process that has the library open keeps the old file.
        beside = out.with_name(f"{out.name}.{os.getpid()}.tmp")
        beside.write_bytes(fresh.read_bytes())
        beside.chmod(0o755)
        beside.replace(out)
    return out


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="shim.build", description="Build libnvsnap_gpushare.so.")
    parser.add_argument("out", type=Path, nargs="?", default=DEFAULT_OUT)
    parser.add_argument("--cc", help="compiler, and with it the target (default: $CC or gcc)")
    parser.add_argument("--debug", action="store_true", help="assert the lock order")
    parser.add_argument("--optimisation", default="-O2", metavar="-ON")
    parser.add_argument("--allow-missing", action="store_true", help="let unwritten custom hooks pass to the driver")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the intermediate files here")
    options = parser.parse_args(arguments)
    build_shim(options.out, options.cc, options.debug, options.optimisation, options.allow_missing, options.keep)


if __name__ == "__main__":
    main()
