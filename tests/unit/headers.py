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


def newest_cuda_h() -> str:
    """Return cuda.h of the version that the table was compared with, or of a newer one."""
    text = (include_folder() / "cuda.h").read_text()
    found = re.search(r"#define CUDA_VERSION (\d+)", text)
    assert found
    if int(found[1]) < NEWEST_CUDA:
        pytest.skip(f"the header is of CUDA {found[1]}, the table of {NEWEST_CUDA}")
    return text
