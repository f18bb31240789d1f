"""Where NVIDIA's own headers are, for tests that compare with them."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from shim.hooks import NEWEST_CUDA


def include_folder() -> Path:
    """Return the folder of cuda.h: $GPUSHARE_CUDA_INCLUDE, or that of the wheel nvidia-cuda-runtime."""
    if folder := os.environ.get("GPUSHARE_CUDA_INCLUDE"):
        return Path(folder)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(root) / "cu13" / "include" / "cudaTypedefs.h").exists():
            return found.parent
    pytest.skip("NVIDIA's header is not installed (wheel nvidia-cuda-runtime, extra dev)")


HEADERS = ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")
"""The headers of the driver's library that the wheel has; of the profiler's it has the types alone."""

ABI = re.compile(r"PFN_(cu\w+?)_v(\d+)(_pt[ds]s?z?)?\)\(([^;]*)\);")
"""A type of a function, as its *Typedefs.h have them: name, version, form, parameters."""


def abis() -> list[tuple[str, str, str, str]]:
    """Return name, version, form and parameters of every type of a function of the driver's library."""
    text = "".join(path.read_text() for path in sorted(include_folder().glob("cuda*Typedefs.h")))
    return [(found[1], found[2], found[3] or "", found[4]) for found in ABI.finditer(text.replace("CUDAAPI ", ""))]


def newest_headers() -> list[str]:
    """Return cuda.h of the version that the table was compared with, or of a newer one, and those beside it."""
    return [newest_cuda_h(), *((include_folder() / name).read_text() for name in HEADERS[1:])]


def newest_cuda_h() -> str:
    """Return cuda.h of the version that the table was compared with, or of a newer one."""
    text = (include_folder() / "cuda.h").read_text()
    found = re.search(r"#define CUDA_VERSION (\d+)", text)
    assert found
    if int(found[1]) < NEWEST_CUDA:
        pytest.skip(f"the header is of CUDA {found[1]}, the table of {NEWEST_CUDA}")
    return text
