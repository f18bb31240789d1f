"""Build the two native libraries of gpushare and package them.

``python setup.py build_native`` builds them in place for development and needs no setuptools. A wheel is built by any
PEP 517 front end (``pip wheel .``); it always compiles into its own build folder, so that a library that lies in the
tree, perhaps of another architecture, is never packaged. Environment: ``CC`` names the compiler, and so the target.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
SHIM_SOURCES = ROOT / "shim"
SIM_SOURCES = ROOT / "gpususpend" / "simcuda"
SHIM_LIBRARY = Path("libnvsnap_gpushare.so")  # relative to the package gpususpend
SIM_LIBRARY = Path("simcuda") / "libcuda.so.1"
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
SOURCE_SUFFIXES = {".c", ".h", ".py", ".pyx", ".pxi", ".pxd"}
SIM_FLAGS = [
    "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror",
    # Some distributions' compilers turn this on by themselves, and with it warnings: everywhere the same.
    "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2",
    "-fPIC", "-fvisibility=hidden", "-pthread", "-shared",
    # As the real driver is linked: its own references stay its own, whatever is preloaded.
    "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-Wl,-z,defs", "-Wl,-z,now",
    "-Wl,-z,nodelete",  # its threads outlive a dlclose
]  # fmt: skip


def compiler() -> list[str]:
    """Return the C compiler command: ``CC``, else gcc."""
    return shlex.split(os.environ.get("CC") or "gcc")


def target_machine() -> str:
    """Return the architecture that the compiler builds for, as in ``uname -m``."""
    triplet = subprocess.run([*compiler(), "-dumpmachine"], check=True, capture_output=True, text=True).stdout
    return triplet.split("-")[0].strip()


def build_shim(package: Path) -> None:
    """Build the shim into the folder `package`, a copy of gpususpend."""
    sys.path.insert(0, str(ROOT))
    try:
        from shim.build import build_shim as build
    finally:
        sys.path.remove(str(ROOT))
    package.mkdir(parents=True, exist_ok=True)
    build(package / SHIM_LIBRARY)


def build_sim(package: Path) -> None:
    """Build the simulated driver into the folder `package`, a copy of gpususpend."""
    out = package / SIM_LIBRARY
    out.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(path) for path in sorted(SIM_SOURCES.glob("*.c"))]
    # Linked under another name and moved: a process that has the library open keeps the old file.
    fresh = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    command = [*compiler(), *SIM_FLAGS, f"-I{SHIM_SOURCES}", f"-I{SIM_SOURCES}", "-o", str(fresh), *sources]
    try:
        subprocess.run([*command, "-lpthread", "-ldl", "-lrt", "-lm"], check=True)
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)


def machine_of(library: Path) -> str | None:
    """Return the architecture of an ELF file, None for any other file."""
    head = library.read_bytes()[:20]
    return ELF_MACHINES.get(int.from_bytes(head[18:20], "little")) if head[:4] == b"\x7fELF" else None


def is_current(out: Path, folders: list[Path]) -> bool:
    """Tell whether `out` is of the compiler's architecture and newer than every source file in `folders`."""
    if not out.exists() or machine_of(out) != target_machine():
        return False
    sources = [path for folder in folders for path in folder.iterdir() if path.suffix in SOURCE_SUFFIXES]
    return out.stat().st_mtime > max(path.stat().st_mtime for path in [*sources, Path(__file__)])


def build_native(arguments: list[str]) -> None:
    """Run the command ``build_native``: build what is older than its sources."""
    parser = argparse.ArgumentParser(prog="setup.py build_native", description="Build the native libraries.")
    parser.add_argument("--shim-only", action="store_true", help="build only libnvsnap_gpushare.so")
    parser.add_argument("--sim-only", action="store_true", help="build only the simulated libcuda.so.1")
    parser.add_argument("--force", action="store_true", help="build even what is newer than its sources")
    parser.add_argument("--out", type=Path, default=ROOT / "gpususpend", help="folder to build into")
    options = parser.parse_args(arguments)
    out = options.out
    if not options.sim_only and (options.force or not is_current(out / SHIM_LIBRARY, [SHIM_SOURCES])):
        build_shim(out)
    if not options.shim_only and (options.force or not is_current(out / SIM_LIBRARY, [SIM_SOURCES, SHIM_SOURCES])):
        build_sim(out)


def run_setup() -> None:
    """Hand over to setuptools, with the native libraries as package data of a platform wheel."""
    from setuptools import Distribution, setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_py import build_py

    class PlatformDistribution(Distribution):  # type: ignore[misc]
        """A distribution that belongs to one platform, though it has no extension module."""

        def has_ext_modules(self) -> bool:
            """Place everything under platlib."""
            return True

    class BuildWithNative(build_py):  # type: ignore[misc]
        """Copy the Python files and compile the libraries beside them."""

        def run(self) -> None:
            """Build into an emptied folder: what an earlier build left there is not packaged."""
            if self.editable_mode:
                super().run()
                build_native([])
                return
            shutil.rmtree(self.build_lib, ignore_errors=True)
            super().run()
            package = Path(self.build_lib) / "gpususpend"
            build_shim(package)
            build_sim(package)

        def get_outputs(self, include_bytecode: bool = True) -> list[str]:
            """Add the libraries, so that they are recorded as installed."""
            package = Path(self.build_lib) / "gpususpend"
            return [*super().get_outputs(include_bytecode), str(package / SHIM_LIBRARY), str(package / SIM_LIBRARY)]

    class PlatformWheel(bdist_wheel):  # type: ignore[misc]
        """Tag the wheel by architecture alone: the libraries use nothing of any Python version."""

        def get_tag(self) -> tuple[str, str, str]:
            """Take the architecture from the compiler, so that a cross build is not mislabelled."""
            return "py3", "none", f"linux_{target_machine()}"

    commands: dict[str, Any] = {"build_py": BuildWithNative, "bdist_wheel": PlatformWheel}
    setup(distclass=PlatformDistribution, cmdclass=commands)


if __name__ == "__main__":
    if sys.argv[1:2] == ["build_native"]:
        try:
            build_native(sys.argv[2:])
        except subprocess.CalledProcessError as error:
            sys.exit(f"{error.cmd[0]} failed, see above")
    else:
        run_setup()
