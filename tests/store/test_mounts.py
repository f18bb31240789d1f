"""Filesystems of other kinds, each mounted for one test: full, without direct I/O, read-only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkstore import Store, gc
from chunkstore.save import remove
from tests.programs.setting import ROOT
from tests.store.tools import SIZE, save


def run_mounted(path: Path, mounts: str, program: str) -> None:
    """Run a program in a mount namespace of its own in which a shell has mounted something first; it has to succeed."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", f'{mounts}\nexec "$0" -c "$1" "$2"']
    done = subprocess.run(
        [*command, sys.executable, PRELUDE + program, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"this system does not let us mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


PRELUDE = """
import os, sys
from pathlib import Path
import pytest
from chunkstore import *
from chunkstore import errors, fsck, gc, roots
from chunkstore.transfer import prefetch
from tests.store.tools import *
path, told = Path(sys.argv[1]), []
files = Files(notify=told.append)
"""


def test_fr65_full_filesystem(tmp_path: Path) -> None:
    """A save on a filesystem that fills up fails and leaves room as before; older checkpoints load."""
    (tmp_path / "small").mkdir()
    run_mounted(
        tmp_path,
        f"mount -t tmpfs -o size=1m,mode=755 none '{tmp_path}/small'",
        """
store = Store.create(path / "small/store", chunk_size_bytes=SIZE, files=files)
save(store, path / "old", [1, 2])
with pytest.raises(errors.NoRoom, match="bytes free"):
    store.require_room(1 << 20, 1)
store.require_room(SIZE, 1)
with pytest.raises(errors.WriteFailed, match="free space"):
    save(store, path / "new", list(range(1, 40)))
assert not (path / "new").exists()
assert not os.listdir(path / "small/store/tmp")
assert load(store, path / "old") == [content(1), content(2)]
assert fsck.check(store).clean
assert gc.collect(store, grace_s=0).removed_chunks > 5
save(store, path / "new", [3, 4])
""",
    )


def test_fr65_full_cache_is_bypassed(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    run_mounted(
        tmp_path,
        f"mount -t tmpfs -o size=512k,mode=755 none '{tmp_path}/small'",
        """
store = Store.create(path / "store", chunk_size_bytes=SIZE, cache=path / "small/cache", files=files)
numbers = list(range(1, 20))
save(store, path / "ckpt", numbers)
assert load(store, path / "ckpt") == [content(number) for number in numbers]
assert sum("bypassed" in line for line in told) == 1, told
""",
    )


def test_out_of_inodes(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    run_mounted(
        tmp_path,
        f"mount -t tmpfs -o nr_inodes=280,mode=755 none '{tmp_path}/small'",
        """
store = Store.create(path / "small/store", chunk_size_bytes=SIZE, files=files)
with pytest.raises(errors.NoRoom, match="inodes free"):
    store.require_room(0, 100)
with pytest.raises(errors.WriteFailed, match="free space"):
    save(store, path / "ckpt", list(range(1, 40)))
assert not (path / "ckpt").exists()
""",
    )


def test_b26_filesystem_without_direct_io(tmp_path: Path) -> None:
    """ramfs has none; it also reports no size."""
    (tmp_path / "ram").mkdir()
    run_mounted(
        tmp_path,
        f"mount -t ramfs -o mode=755 none '{tmp_path}/ram'",
        """
store = Store.create(path / "ram/store", chunk_size_bytes=SIZE, cache=path / "ram/cache", files=files)
save(store, path / "ram/ckpt", [1, 0, 2])
assert load(store, path / "ram/ckpt") == [content(1), bytes(SIZE), content(2)]
assert [line.count("refuses direct I/O") for line in told] == [1], told
assert store.room().bytes is None
store.require_room(1 << 60, 1 << 60)
assert fsck.check(store).clean
""",
    )


@pytest.mark.parametrize("cached", [False, True])
def test_read_only_mount_serves_loads_and_refuses_saves(tmp_path: Path, cached: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    store = Store.create(disk / "store", chunk_size_bytes=SIZE, cache=disk / "cache" if cached else None)
    save(store, disk / "ckpt", [1, 0, 2])
    run_mounted(
        tmp_path,
        f"mount --bind '{disk}' '{disk}'; mount -o remount,bind,ro '{disk}'",
        f"""
store = Store.open(path / "disk/store", cache={'path / "disk/cache"' if cached else None}, files=files)
assert load(store, path / "disk/ckpt") == [content(1), bytes(SIZE), content(2)]
checked = fsck.check(store)
assert checked.clean
with pytest.raises(errors.WriteFailed, match="read-only"):
    store.put(memory(content(1)))
with pytest.raises(errors.WriteFailed, match="read-only"):
    store.put(memory(content(3)))
with pytest.raises(errors.WriteFailed, match="read-only"):
    Save.begin(store, path / "disk/new")
with pytest.raises(errors.WriteFailed, match="read-only"):
    Save.begin(store, path / "elsewhere")
assert not (path / "elsewhere").exists()
with pytest.raises(errors.WriteFailed, match="read-only"):
    gc.collect(store)
""",
    )


def contents(*directories: Path) -> dict[Path, bytes]:
    """Return what lies in directories."""
    return {file: file.read_bytes() for directory in directories for file in directory.iterdir()}


@pytest.mark.parametrize("read_only", ["store", "ckpt"])
def test_read_only_store_or_directory_refuses_a_removal(tmp_path: Path, read_only: str) -> None:
    """One of the two can be written to: the checkpoint is in both as it was, and its removal is repeated later."""
    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE)
    save(store, tmp_path / "ckpt", [1, 2])
    before = contents(tmp_path / "ckpt", tmp_path / "store/roots")
    run_mounted(
        tmp_path,
        f"mount --bind '{tmp_path}/{read_only}' '{tmp_path}/{read_only}'; "
        f"mount -o remount,bind,ro '{tmp_path}/{read_only}'",
        """
import subprocess
rm = [sys.executable, "-m", "gpususpend", "store", "rm", path / "store", path / "ckpt", "--state-dir", path / "state"]
done = subprocess.run(rm, capture_output=True, text=True)
assert done.returncode == 1 and "read-only" in done.stderr, done
assert load(Store.open(path / "store"), path / "ckpt") == [content(1), content(2)]
""",
    )
    assert contents(tmp_path / "ckpt", tmp_path / "store/roots") == before
    remove(store, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists() and gc.collect(store, grace_s=0).removed_chunks == 2


def test_store_that_is_not_mounted(tmp_path: Path) -> None:
    """The mount point is there and empty: nothing is taken for gone."""
    (tmp_path / "mnt").mkdir()
    store = Store.create(tmp_path / "store", chunk_size_bytes=SIZE)
    run_mounted(
        tmp_path,
        f"mount -t tmpfs -o mode=755 none '{tmp_path}/mnt'",
        """
store = Store.open(path / "store", files=files)
save(store, path / "mnt/ckpt", [1])
""",
    )
    assert not os.listdir(tmp_path / "mnt")
    run_mounted(
        tmp_path,
        "true",
        """
store = Store.open(path / "store", files=files)
with pytest.raises(errors.UnreachableRoots, match="ckpt"):
    gc.collect(store, grace_s=0)
""",
    )
    assert len(list(store.chunks.entries())) == 1
