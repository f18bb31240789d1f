"""shim/cuda_abi.h against NVIDIA's header: every size, offset and constant, where that header is installed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).parents[2] / "shim" / "cuda_abi.h"
OPAQUE = {"CUarrayMapInfo"}  # declared by size only


def nvidia_header() -> Path | None:
    """Return the first cuda.h of CUDA_HOME or of an installed toolkit, newest first, or None."""
    homes = [os.environ.get("CUDA_HOME", "")] + sorted(map(str, Path("/usr/local").glob("cuda*")), reverse=True)
    return next((p for home in homes if home and (p := Path(home) / "include" / "cuda.h").is_file()), None)


def probe_source(text: str) -> str:
    """Return a C program that prints every constant, size and offset that the header's text declares."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    lines = []
    for body in re.findall(r"^enum \{(.*?)\}", text, flags=re.S | re.M):
        lines += [f'printf("{n} %lld\\n", (long long){n});' for n in re.findall(r"(\w+)\s*=", body)]
    for body, name in re.findall(r"^typedef (?:struct|union) \w+ \{\n(.*?)^\} (\w+);", text, flags=re.S | re.M):
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        members = re.findall(r"^ {4}(?! |struct|union).*?(\w+)(?:\[[^;]*\])?;", body, flags=re.M)
        members += re.findall(r"^ {4}\} (\w+)", body, flags=re.M)
        if name not in OPAQUE:  # reserved words get names in later versions of CUDA
            named = [member for member in members if not member.startswith("reserved")]
            lines += [f'printf("{name}.{m} %zu\\n", offsetof({name}, {m}));' for m in named]
    assert len(lines) > 300
    return "#include <stdio.h>\n#include <stddef.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"


def run_probe(source: Path, header: Path) -> list[str]:
    """Compile the probe against one header and return what it prints."""
    program = source.with_suffix("")
    subprocess.run(["gcc", "-include", str(header), str(source), "-o", str(program)], check=True, timeout=60)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


def test_abi_matches_nvidia_header(tmp_path: Path) -> None:
    header = nvidia_header()
    if header is None:
        pytest.skip("no cuda.h found (CUDA_HOME, /usr/local/cuda*)")
    source = tmp_path / "probe.c"
    source.write_text(probe_source(HEADER.read_text()))
    assert run_probe(source, HEADER) == run_probe(source, header)
