"""Where the tests of the store put their files: in memory where there is a tmpfs, since most of them sync a lot."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkstore import Store
from tests.store.tools import SIZE

SHM = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """An empty directory of this test."""
    if not os.access(SHM, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="gpushare-test-store-", dir=SHM))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def disk_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory where temporary files lie by default, often on a disk."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of small chunks."""
    return Store.create(tmp_path / "store", chunk_size_bytes=SIZE)
