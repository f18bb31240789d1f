"""Fixtures of the guard tests: the stub driver, small C programs and libraries, processes with the shim."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preload import stub
from tests.preload.inside import built_inside

SHIM_VARIABLES = (
    "LD_PRELOAD", "LD_BIND_NOW", "GPUSHARE_LOG", "GPUSHARE_MULTICAST", "GPUSHARE_FABRIC", "NVSNAP_GPUSHARE_FABRIC"
)
LIMIT_S = 100
"""A recursion without end or a lost wake-up is a failure, not a hang."""

Runner = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that compiles C once a session: built(name, source, *flags)."""
    folder = tmp_path_factory.mktemp("built")
    known: dict[str, Path] = {}

    def build(name: str, source: str, *flags: str) -> Path:
        if name not in known:
            known[name] = stub.compile_c(folder / name, source, *flags)
        return known[name]

    return build


@pytest.fixture(scope="session")
def stub_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stub driver with every symbol of the table."""
    return stub.build(tmp_path_factory.mktemp("stub")).parent


@pytest.fixture(scope="session")
def old_stub_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stub driver of CUDA 11.3: nothing newer is in it."""
    return stub.build(tmp_path_factory.mktemp("old-stub"), newest=11030).parent


@pytest.fixture(scope="session")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim with a way in."""
    return built_inside(tmp_path_factory)


@pytest.fixture
def run(shim_path: Path) -> Runner:
    """A function that runs a command: run(command, preload=[...], libraries=folder, **env); the shim is a preload."""

    def start(
        command: list[str | Path], preload: list[Path] | None = None, libraries: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[bytes]:
        env = {name: value for name, value in os.environ.items() if name not in SHIM_VARIABLES}
        if wanted := [shim_path] if preload is None else preload:
            env["LD_PRELOAD"] = ":".join(map(str, wanted))
        if libraries is not None:
            env["LD_LIBRARY_PATH"] = str(libraries)
        return subprocess.run(
            [str(part) for part in command],
            env=env | extra,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )

    return start
