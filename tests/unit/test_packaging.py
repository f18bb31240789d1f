"""What is built, what a wheel holds, and what `make` says where something is missing.

The wheel's behaviour in an empty environment is tested by .ci/run, which has a package index.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import gpususpend
from tests.programs.setting import ROOT

LOCK = ROOT / "requirements.lock"
STALE = b"a library of another architecture"
ELF = b"\x7fELF"
LIBRARIES = {"gpususpend/libnvsnap_gpushare.so", "gpususpend/simcuda/libcuda.so.1"}
SOURCES = ["shim", "gpususpend", "chunkstore", "docs", "tests", ".ci", "setup.py", "pyproject.toml", "MANIFEST.in",
           "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "requirements.lock"]  # fmt: skip


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return it, whatever its status."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON", "CC"))}
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with stale libraries everywhere that an earlier build could have left them."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools 77")
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.so.1")
    for source in SOURCES:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy / source, ignore=ignored)
        else:
            shutil.copy(ROOT / source, copy / source)
    for folder in (copy, copy / "build" / "lib", *(copy / "build").glob("lib.*")):
        for library in LIBRARIES:
            (folder / library).parent.mkdir(parents=True, exist_ok=True)
            (folder / library).write_bytes(STALE)
    (copy / "gpususpend" / "libleftover.so").write_bytes(STALE)
    (copy / "build" / "lib" / "gpususpend" / "gone.py").write_text("removed long ago\n")
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """A wheel of that tree."""
    done = run(sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", "dist", cwd=tree)
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "dist").glob("*.whl")
    return path


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestWheel:
    """What a wheel holds."""

    def test_b08_libraries_are_built_afresh(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            for library in LIBRARIES:
                assert archive.read(library)[:4] == ELF
            assert not [name for name in archive.namelist() if archive.read(name) == STALE]

    def test_names_that_reach_site_packages(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"gpususpend", "chunkstore"}
        assert "gpususpend/gone.py" not in names
        assert not [name for name in names if name.endswith((".c", ".h", ".pyx", ".pxi"))]
        assert {"gpususpend/demo/kernels.ptx", "gpususpend/py.typed", "chunkstore/py.typed", *LIBRARIES} <= set(names)
        modules = {f"chunkstore/{path.name}" for path in (ROOT / "chunkstore").iterdir() if path.is_file()}
        assert "chunkstore/store.py" in modules
        assert modules <= set(names)

    def test_tag_names_the_architecture_and_no_python(self, wheel: Path) -> None:
        assert wheel.name == f"gpushare-{gpususpend.__version__}-py3-none-linux_{os.uname().machine}.whl"

    def test_command_license_and_requirements(self, wheel: Path) -> None:
        info = f"gpushare-{gpususpend.__version__}.dist-info"
        with zipfile.ZipFile(wheel) as archive:
            commands = configparser.ConfigParser()
            commands.read_string(archive.read(f"{info}/entry_points.txt").decode())
            metadata = archive.read(f"{info}/METADATA").decode()
        assert commands["console_scripts"]["nvsnap-gpu-suspend"] == "gpususpend.start:main"
        assert "License-Expression: Apache-2.0" in metadata
        required = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", metadata, re.M)
        assert sorted(required) == ["click", "cuda-bindings", "numpy", "nvidia-ml-py", "rich", "xxhash"]


@pytest.mark.slow
def test_b08_source_distribution_holds_sources_only(tree: Path) -> None:
    done = run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", "sdist", cwd=tree)
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "sdist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if re.search(r"\.(so|so\.\d+|o|pyc)$", name)]
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "shim").iterdir() if path.is_file()}
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "gpususpend" / "simcuda").glob("*.[ch]")}
    assert sources | {"Makefile", "requirements.lock", "LICENSE", ".ci/run"} <= names


def test_lock_has_hashes_and_names_no_host() -> None:
    text = LOCK.read_text()
    assert not re.search(r"://|^-|--index|--find-links|@ ", text, re.M)
    entries = re.split(r"\n(?=\w)", text.split("\n", 2)[2])
    assert len(entries) > 30
    assert not [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]


def test_lock_satisfies_every_declared_requirement() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", LOCK.read_text(), re.M):
        locked.setdefault(name.lower(), []).append(version)
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        wanted = requirements.Requirement(text)
        versions = locked.get(wanted.name.lower(), [])
        assert versions and all(wanted.specifier.contains(version) for version in versions), text


def wrapper(folder: Path, refused: str) -> Path:
    """Return an interpreter on which every command that mentions `refused` fails."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncase \"$*\" in *{refused}*) exit 1;; esac\nexec '{sys.executable}' \"$@\"\n")
    path.chmod(0o755)
    return path


class TestMissing:
    """A missing system package is one line with its Debian name; nothing is built or downloaded."""

    def system(self, *arguments: str) -> list[str]:
        done = run("make", "--no-print-directory", "system", *arguments)
        assert done.returncode
        return [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]

    def test_compiler(self) -> None:
        assert self.system("CC=no-such-gcc") == ["missing: no-such-gcc (Debian package: gcc)"]

    def test_headers(self, tmp_path: Path) -> None:
        python = wrapper(tmp_path, "Python.h")
        assert self.system(f"BASE_PYTHON={python}") == ["missing: Python.h (Debian package: python3-dev)"]

    def test_venv(self, tmp_path: Path) -> None:
        python = wrapper(tmp_path, "ensurepip")
        assert self.system(f"BASE_PYTHON={python}") == ["missing: the module venv (Debian package: python3-venv)"]

    def test_python(self) -> None:
        assert self.system("BASE_PYTHON=no-such-python") == ["missing: no-such-python (Debian package: python3)"]

    def test_packages_of_a_given_interpreter(self, tmp_path: Path) -> None:
        venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
        python = tmp_path / "bare" / "bin" / "python"
        done = run("make", "--no-print-directory", "given-packages", f"PYTHON={python}")
        assert done.returncode
        lines = [line for line in done.stderr.splitlines() if line.startswith("missing in")]
        assert f"missing in {python}: the module cuda.bindings" in lines
        assert f"missing in {python}: the module Cython" in lines


def test_import_needs_no_driver_and_loads_no_cuda() -> None:
    program = "import sys, gpususpend, chunkstore; print([m for m in sys.modules if m.startswith(('cuda', 'pynvml'))])"
    done = run(sys.executable, "-c", program)
    assert done.stdout.strip() == "[]", done.stderr


def test_b08_library_of_another_architecture_is_not_current(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpushare_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    other = {"x86_64": 183, "aarch64": 62}[os.uname().machine]
    library = tmp_path / "library.so"
    library.write_bytes(ELF + bytes(14) + other.to_bytes(2, "little"))
    assert not setup.is_current(library, [])
    library.write_bytes(Path(sys.executable).resolve().read_bytes())
    assert setup.is_current(library, [])
    os.utime(library, (1, 1))
    assert not setup.is_current(library, [])
