"""Arenas: host memory, filled with pages ahead of time, into which a shim copies what was on the GPUs.

Owns how the memory is made and filled.  Must not know whose bytes it will hold.  It is made and filled here because
pages are charged to whoever touches them first, and going over a limit kills that process: better the command, before
anything changed, than the workload.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gpususpend import cgroup, errors, processes, system

HUGE_BYTES = 2 << 20
NAME = "gpushare-arena"
_PIECE_BYTES = 64 << 20
_PLACES = 16
_MOST_THREADS = 8
_FULL = (errno.ENOMEM, errno.ENOSPC)

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
_MFD_NOEXEC_SEAL = 0x8
_HUGETLB_2M = os.MFD_HUGETLB | (21 << 26)
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same numbers on every architecture
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_MOUNT_ATTRIBUTES = 0x2 | 0x4 | 0x8  # nosuid, nodev, noexec
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Kind(str, Enum):
    """What an arena is made of; huge pages are locked about twice as fast as plain ones."""

    THP = "huge pages (memfd)"
    COLLAPSED = "huge pages (memfd, collapsed)"
    HUGETLB = "huge pages (hugetlb memfd)"
    TMPFS = "huge pages (private tmpfs)"
    PLAIN = "plain pages"

    @property
    def huge(self) -> bool:
        """Tell whether these are huge pages."""
        return self is not Kind.PLAIN


# A file of a private tmpfs belongs to a mount that CRIU cannot find: only for arenas that are never dumped.
DUMPABLE_KINDS = (Kind.THP, Kind.COLLAPSED, Kind.HUGETLB, Kind.PLAIN)
ALL_KINDS = (Kind.THP, Kind.COLLAPSED, Kind.HUGETLB, Kind.TMPFS, Kind.PLAIN)


@dataclass(frozen=True)
class Arena:
    """A filled arena; `bytes` is its whole size, a multiple of a huge page.  The caller closes `fd`."""

    fd: int
    bytes: int
    kind: Kind


def prepare(
    size: int,
    kinds: Sequence[Kind] = DUMPABLE_KINDS,
    threads: int | None = None,
    check: Callable[[int], None] = cgroup.require_here,
    progress: Callable[[int], None] = lambda size: None,
) -> Arena:
    """Make an arena of at least `size` bytes, of the first kind that this machine gives, and fill it with zeros.

    `check` is called before each piece with the bytes from there to the end, and raises to stop: others use memory
    meanwhile.  `progress` is told the bytes just filled.  Raises NotEnoughMemory, SystemCall where the kernel gives
    none for another reason, or what `check` raises; nothing is left behind then.
    """
    whole = -(-max(size, 1) // HUGE_BYTES) * HUGE_BYTES
    workers = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    refusal = OSError(errno.ENOMEM, "no kind of memory is allowed")
    for kind in kinds:
        try:
            fd = _make(kind, whole)
            if fd is not None:
                return _filled(Arena(fd, whole, kind), workers, check, progress)
        except OSError as error:
            refusal = error
    if refusal.errno not in _FULL:
        raise system.refusal(refusal)
    if system.address_space_left() < whole + HUGE_BYTES:
        limit, way_out = "the address space of this command (ulimit -v)", "allow it more"
    else:
        limit, way_out = f"the kernel ({refusal.strerror})", "free memory"
    raise errors.NotEnoughMemory(need=whole, available="fewer", limit=limit, way_out=way_out)


def _filled(arena: Arena, threads: int, check: Callable[[int], None], progress: Callable[[int], None]) -> Arena:
    try:
        with _mapped(arena.fd, arena.bytes) as address, ThreadPoolExecutor(threads) as pool:

            def fill(offset: int) -> int:
                # Pages of a hugetlb pool are set aside already, and charged to no memory cgroup.
                if arena.kind is not Kind.HUGETLB:
                    check(arena.bytes - offset)
                piece = min(_PIECE_BYTES, arena.bytes - offset)
                _populate(arena.fd, address, offset, piece, arena.kind)
                return piece

            try:
                with system.starting(threads):
                    pieces = pool.map(fill, range(0, arena.bytes, _PIECE_BYTES))
                for piece in pieces:
                    progress(piece)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except BaseException:
        os.close(arena.fd)
        raise
    return arena


def _make(kind: Kind, size: int) -> int | None:
    """Return a file of that kind, or None where this machine does not give it."""
    try:
        if kind is Kind.HUGETLB:
            fd = system.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _HUGETLB_2M)
        elif kind is Kind.TMPFS:
            fd = _private_tmpfs_file(size)
        else:
            fd = _memfd()
    except OSError:
        if kind is Kind.PLAIN:
            raise
        return None
    try:
        system.set_size(fd, size)
        if kind is not Kind.TMPFS:
            # Whoever shrank it would make the shim die of SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        if not kind.huge or _gives_huge_pages(fd, size, kind):
            return fd
    except OSError:
        if kind is Kind.PLAIN:
            os.close(fd)
            raise
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _memfd() -> int:
    try:
        return system.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except PermissionError:
        # vm.memfd_noexec=2 demands this seal; elsewhere it is left out, since CRIU does not give it back as it was.
        return system.memfd_create(NAME, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)


def _private_tmpfs_file(size: int) -> int:
    """Return a nameless file on a tmpfs of its own that is mounted nowhere; needs CAP_SYS_ADMIN."""
    with contextlib.ExitStack() as undo:
        context = _syscall(_FSOPEN, b"tmpfs", _FSOPEN_CLOEXEC)
        undo.callback(os.close, context)
        for name, value in ((b"huge", b"always"), (b"size", str(size).encode()), (b"mode", b"0700")):
            _syscall(_FSCONFIG, context, _FSCONFIG_SET_STRING, name, value, 0)
        _syscall(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        mount = _syscall(_FSMOUNT, context, _FSMOUNT_CLOEXEC, _MOUNT_ATTRIBUTES)
        undo.callback(os.close, mount)
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)


def _gives_huge_pages(fd: int, size: int, kind: Kind) -> bool:
    """Touch the first huge page's worth and look what the kernel gave; settings alone do not tell."""
    with _mapped(fd, size) as address:
        _populate(fd, address, 0, HUGE_BYTES, kind)
        found = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                found = begin <= address < end
            elif found and re.match(r"(ShmemPmdMapped|FilePmdMapped|Shared_Hugetlb|Private_Hugetlb): +[1-9]", line):
                return True
    return False


def _populate(fd: int, address: int, offset: int, size: int, kind: Kind) -> None:
    if kind is Kind.THP:
        _madvise(address + offset, size, _MADV_HUGEPAGE)
    if kind is Kind.COLLAPSED:
        # Makes huge pages at once, on kernels that let it do so whatever the machine's setting is.
        _madvise(address + offset, size, _MADV_COLLAPSE)
    try:
        _madvise(address + offset, size, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 5.14.
        os.posix_fallocate(fd, offset, size)


def is_dumpable(pid: int) -> bool:
    """Tell whether the arena that a process has is of a kind that can be dumped: only these have a name."""
    return processes.has_mapped(pid, f"/memfd:{NAME}")


@contextmanager
def _mapped(fd: int, size: int) -> Iterator[int]:
    """Map the file at a multiple of a huge page: elsewhere the kernel maps no huge pages."""
    address = _map_aligned(fd, size)
    try:
        yield address
    finally:
        _libc.munmap(address, size)


def _map_aligned(fd: int, size: int) -> int:
    """Map the file where the kernel has just shown that there is room.

    Never with MAP_FIXED over a reservation: a mapping that is refused (no huge pages in the pool) leaves a hole there,
    another thread's stack may come to lie in the hole, and whoever unmaps the reservation takes it away.
    """
    for _ in range(_PLACES):
        room = size + HUGE_BYTES
        base = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        _libc.munmap(base, room)
        address = -(-base // HUGE_BYTES) * HUGE_BYTES
        try:
            return _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE, fd)
        except FileExistsError:
            continue  # another thread was faster
    return _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    result: int | None = _libc.mmap(address, size, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        _raise_errno()
    assert result is not None
    return result


def _madvise(address: int, size: int, advice: int) -> None:
    while _libc.madvise(address, size, advice):
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            _raise_errno()


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    plain = [ctypes.c_long(item) if isinstance(item, int) else ctypes.c_char_p(item) for item in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *plain)
    if result < 0:
        _raise_errno()
    return result


def _raise_errno() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
