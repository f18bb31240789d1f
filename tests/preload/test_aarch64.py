"""The library for aarch64: the guards on the file, and its look-ups under emulation where that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shim import build
from tests.preload import stub, test_dlsym, test_library

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim, cross-compiled."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed (Debian package gcc-aarch64-linux-gnu)")
    return build.build_shim(tmp_path_factory.mktemp("aarch64") / "libnvsnap_gpushare.so", cc=COMPILER)


def test_library_for_aarch64(library: Path) -> None:
    header = subprocess.run(["readelf", "--file-header", str(library)], check=True, capture_output=True, text=True)
    assert "AArch64" in header.stdout
    test_library.check_library(library)


def _run(program: Path, preload: list[Path]) -> dict[str, str]:
    """Run a program under emulation and return what it printed."""
    command = [EMULATOR, "-L", SYSTEM, "-E", f"LD_PRELOAD={':'.join(map(str, preload))}"]
    libraries = f"{program.parent / 'stub'}:{program.parent}"
    result = subprocess.run(
        [*command, "-E", f"LD_LIBRARY_PATH={libraries}", str(program)], check=True, capture_output=True, timeout=100
    )
    return dict(line.split(" ", 1) for line in result.stdout.decode().splitlines())


def test_lookups_on_aarch64(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of dlsym is assembler: hooks are found, and RTLD_NEXT of others sees its caller."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not installed (Debian package qemu-user)")
    monkeypatch.setenv("CC", COMPILER)
    driver = stub.build(tmp_path / "stub")
    found = _run(stub.compile_c(tmp_path / "lookups", test_dlsym.LOOKUPS), [library])
    assert found["handle"] == found["entry"] == library.name
    assert found["unhooked"] == found["driver"] == driver.name and found["prefix"] == found["before"] == "none"
    linked = stub.compile_c(tmp_path / "linked", test_dlsym.LINKED, f"-L{driver.parent}", f"-l:{driver.name}")
    found = _run(linked, [library])
    assert (found["copy"], found["calls"], found["caller"]) == ("0", "1", library.name)
    links = [
        stub.compile_c(tmp_path / f"libchain-{name}.so", test_dlsym.CHAIN.replace("NAME", name), "-shared", "-fPIC")
        for name in "ABC"
    ]
    main = "int main(void) { alarm(60); chain(); return 0; }"
    chain = stub.compile_c(tmp_path / "chain", main, f"-L{tmp_path}", "-l:libchain-A.so")
    for place in range(4):
        found = _run(chain, [*links[:place], library, *links[place:]])
        assert found == {"A": "calls-on", "B": "calls-on", "C": "last"}
