"""Arenas: what they are made of, how they are filled, and what stops that."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpususpend import arena, cgroup, errors
from gpususpend.arena import HUGE_BYTES, Kind

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_that_the_machine_gives(kind: Kind) -> None:
    """Whole pages are there, zero, writable by whoever gets the descriptor; huge ones really are."""
    try:
        made = arena.prepare(130 * MIB + 1, [kind])
    except errors.NotEnoughMemory:
        assert kind is not Kind.PLAIN
        pytest.skip(f"this machine gives no {kind.value}")
    try:
        assert (made.kind, made.bytes) == (kind, 132 * MIB)
        assert allocated(made.fd) == made.bytes
        assert not os.get_inheritable(made.fd)
        with mmap.mmap(made.fd, made.bytes) as view:
            assert view[-1] == view[0] == 0
            view[-4:] = b"last"
            assert view[-4:] == b"last"
    finally:
        os.close(made.fd)


def test_plain_pages_are_the_last_resort_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_gives_huge_pages", lambda *_: False)
    made = arena.prepare(1)
    os.close(made.fd)
    assert (made.kind, made.kind.huge, made.bytes) == (Kind.PLAIN, False, HUGE_BYTES)
    assert made.kind.value == "plain pages"


def test_an_arena_for_a_dump_is_no_private_tmpfs() -> None:
    assert Kind.TMPFS not in arena.DUMPABLE_KINDS
    assert arena.DUMPABLE_KINDS[-1] is arena.ALL_KINDS[-1] is Kind.PLAIN


def test_nobody_can_shrink_it() -> None:
    made = arena.prepare(4 * MIB)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(made.fd)


def test_it_is_filled_in_pieces_each_checked_before() -> None:
    checked: list[int] = []
    told: list[int] = []
    made = arena.prepare(200 * MIB, [Kind.PLAIN], threads=1, check=checked.append, progress=told.append)
    os.close(made.fd)
    assert checked == [200 * MIB, 136 * MIB, 72 * MIB, 8 * MIB]
    assert told == [64 * MIB, 64 * MIB, 64 * MIB, 8 * MIB]


def test_a_check_that_fails_midway_stops_and_leaves_nothing() -> None:
    def check(left: int) -> None:
        if left < 150 * MIB:
            raise errors.NotEnoughMemory(need=left, available=0, limit="a test", way_out="none")

    before, maps = os.listdir("/proc/self/fd"), Path("/proc/self/maps").read_text().count("gpushare-arena")
    with pytest.raises(errors.NotEnoughMemory, match="within a test"):
        arena.prepare(512 * MIB, [Kind.PLAIN], threads=2, check=check)
    assert os.listdir("/proc/self/fd") == before
    assert Path("/proc/self/maps").read_text().count("gpushare-arena") == maps


def test_old_kernels_fill_by_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_populate(address: int, size: int, advice: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(arena, "_madvise", no_populate)
    made = arena.prepare(3 * MIB, [Kind.PLAIN])
    try:
        assert allocated(made.fd) == made.bytes == 4 * MIB
    finally:
        os.close(made.fd)


SIDE_BY_SIDE = """
import os
from concurrent.futures import ThreadPoolExecutor
from gpususpend import arena

def one(number):
    os.close(arena.prepare(8 << 20, check=lambda left: None).fd)

for _ in range(50):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8)))
"""


def test_arenas_made_side_by_side_leave_the_memory_of_others_alone() -> None:
    """Kinds that are refused leave no hole that another thread's stack could fall into; it would be unmapped."""
    done = subprocess.run([sys.executable, "-c", SIDE_BY_SIDE], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_has_no_memory_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(address: int, size: int, advice: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arena, "_madvise", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(errors.NotEnoughMemory, match="the kernel \\(Cannot allocate memory\\)"):
        arena.prepare(3 * MIB)
    assert os.listdir("/proc/self/fd") == before


def test_more_than_the_machine_has_is_refused_before_a_page_is_touched() -> None:
    total = cgroup.machine_limits()[0].limit_bytes
    with pytest.raises(errors.NotEnoughMemory, match=r"MemAvailable|cgroup"):
        arena.prepare(total * 2, [Kind.PLAIN])
