"""Libraries of the tests that need libcuda.so.1 by themselves, compiled on the spot without CUDA's headers.

They are linked with an empty library of that name, so that the loader finds the machine's driver, or the simulated
one, when they are loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent


def compiled(name: str, folder: Path) -> Path:
    """Compile tests/programs/NAME.c to a library in a folder; raises FileNotFoundError without a compiler."""
    compiler = os.environ.get("CC", "gcc").split()
    source = SOURCES / f"{name}.c"
    stub, stub_source, library = folder / "libcuda.so.1", folder / "stub.c", folder / f"lib{name}.so"
    functions = sorted(set(re.findall(r"^int (cu\w+)\(", source.read_text(), re.MULTILINE)))
    stub_source.write_text("".join(f"int {one}(void) {{ return 999; }}\n" for one in functions))
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    subprocess.run([*compiler, *flags, "-Wl,-soname,libcuda.so.1", "-o", stub, stub_source], check=True)
    subprocess.run([*compiler, *flags, "-o", library, source, stub], check=True)
    stub.unlink()
    return library
