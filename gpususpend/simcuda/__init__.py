"""simcuda, the simulated CUDA driver: a ``libcuda.so.1`` for machines without a GPU.

It owns the path of the built library and nothing else; the driver itself is the C code in this folder. Programs find it
with LD_LIBRARY_PATH set to `library_dir` before they start, or by loading `library_path` before their first CUDA call.
"""

from __future__ import annotations

from pathlib import Path


def library_dir() -> Path:
    """Return the folder that holds the simulated ``libcuda.so.1``."""
    return Path(__file__).resolve().parent


def library_path() -> Path:
    """Return the path of the simulated ``libcuda.so.1``, built or not."""
    return library_dir() / "libcuda.so.1"
