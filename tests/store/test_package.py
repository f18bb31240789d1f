"""What holds of the package as a whole: its errors, its imports, its memory."""

from __future__ import annotations

import ast
import errno
import string
import subprocess
import sys
from pathlib import Path

import pytest

import chunkstore
from chunkstore import Store, errors
from tests.programs.setting import ROOT
from tests.store.tools import SIZE

SOURCES = sorted((ROOT / "chunkstore").glob("*.py"))
KINDS = (errors.Refused, errors.WriteFailed, errors.Damaged)


def all_errors(base: type[errors.StoreError] = errors.StoreError) -> list[type[errors.StoreError]]:
    """Return every error below a class."""
    return [kind for child in base.__subclasses__() for kind in [child, *all_errors(child)]]


def test_every_error_is_of_one_kind_and_has_its_own_code() -> None:
    assert len({kind.code for kind in all_errors()}) == len(all_errors())
    for kind in all_errors():
        assert sum(issubclass(kind, base) for base in KINDS) == 1, kind
        assert kind.next_action in ("retry", "cold-start", "operator")


def example(kind: type[errors.StoreError]) -> errors.StoreError:
    """Return an error of that class with a word for each of its facts."""
    names = {name for _, name, _, _ in string.Formatter().parse(kind.template) if name}
    return kind(**{name: f"<{name}>" for name in names})


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.code)
def test_every_error_says_its_facts(kind: type[errors.StoreError]) -> None:
    error = example(kind)
    assert all(word in str(error) for word in error.facts.values())


@pytest.mark.parametrize("make", [errors.write_failed, errors.unreadable])
def test_every_failed_call_says_what_where_and_what_to_do(make: object) -> None:
    assert callable(make)
    for number in errno.errorcode:
        message = str(make("cannot write", "/the/path", OSError(number, "the reason")))
        assert message.startswith("cannot write /the/path: the reason; ")
        assert len(message.split("; ")[1]) > 10


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_nothing_of_ours(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported <= {"chunkstore", "numpy", "xxhash", "blake3", "obstore"} | set(sys.stdlib_module_names)


def test_every_public_name_is_there() -> None:
    assert all(hasattr(chunkstore, name) for name in chunkstore.__all__)


def test_fr70_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Chunks of 8 MiB through one slot: what else the process needs is counted by the kernel."""
    program = """
import mmap, sys
import numpy as np
from chunkstore import Allocation, Checkpoint, Save, Store, fsck
size = 8 << 20
store = Store.create(sys.argv[1] + "/store", chunk_size_bytes=size)
slot = memoryview(mmap.mmap(-1, size))
np.frombuffer(slot, np.uint64)[:] = 7
with Save.begin(store, sys.argv[1] + "/ckpt") as save:
    for number in range(int(sys.argv[2])):
        np.frombuffer(slot, np.uint64)[0] = number
        for _ in range(2):
            put = store.put(slot)
        save.add(1, Allocation(0, number * size, size, (put.chunk,)))
    checkpoint = save.commit()
for chunk in checkpoint.all_chunks():
    store.get(chunk, slot)
# Of this program alone: what getrusage says begins with the size of the process that has started it.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""
    peaks = []
    for chunks in (2, 16):
        folder = tmp_path / str(chunks)
        folder.mkdir()
        command = [sys.executable, "-c", program, str(folder), str(chunks)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 6 << 20, peaks


def test_any_memory_is_taken(tmp_path: Path) -> None:
    """Also what is not made of bytes, and what may not be written to."""
    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE)
    numbers = memoryview(bytearray(range(256)) * 8).cast("Q")
    first = store.put(numbers)
    assert store.put(memoryview(bytes(numbers))).chunk == first.chunk
    into = memoryview(bytearray(2048)).cast("I", (8, 64))
    store.get(first.chunk, into)
    assert bytes(into) == bytes(numbers)
    with pytest.raises(ValueError, match="one piece"):
        store.put(memoryview(bytes(64))[::2])
    with pytest.raises(ValueError, match="one piece"):
        store.get(first.chunk, memoryview(bytearray(8192))[::2])
