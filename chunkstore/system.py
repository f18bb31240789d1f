"""The system calls that the store makes, one method each, so that a test can make any of them fail.

Owns nothing and decides nothing: every method raises the OSError of its call.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_UTIME_NOW = (1 << 30) - 1
_UTIME_OMIT = (1 << 30) - 2
_RENAME_NOREPLACE = 1
_STATX_DIOALIGN = 0x2000
_STATX_ALIGNMENTS = 152  # where stx_dio_mem_align and, behind it, stx_dio_offset_align stand in struct statx


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _check(result: int, path: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


class System:
    """The calls; see their man pages. Paths are absolute, offsets and sizes are in bytes.

    What is made is its user's alone, whatever the umask: memory is full of secrets.
    """

    def open(self, path: str, flags: int) -> int:
        """Open a file; it is closed at exec."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def set_direct(self, fd: int, direct: bool) -> None:
        """Switch O_DIRECT of an open file."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def alignments(self, fd: int) -> tuple[int, int]:
        """Return what direct I/O demands of addresses and of offsets, (0, 0) where the kernel does not say."""
        answer = ctypes.create_string_buffer(256)
        statx = getattr(_libc, "statx", None)
        if statx is None or statx(fd, b"", 0x1000, _STATX_DIOALIGN, answer) != 0:  # AT_EMPTY_PATH
            return 0, 0
        if not int.from_bytes(answer.raw[:4], "little") & _STATX_DIOALIGN:
            return 0, 0
        at = _STATX_ALIGNMENTS
        return int.from_bytes(answer.raw[at : at + 4], "little"), int.from_bytes(answer.raw[at + 4 : at + 8], "little")

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read at an offset; returns how many bytes came."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at an offset; returns how many bytes went."""
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, size)

    def datasync(self, fd: int) -> None:
        """Wait until content and size of a file are on the disk."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Wait until a file or a directory is on the disk."""
        os.fsync(fd)

    def forget_pages(self, fd: int) -> None:
        """Drop a file's pages from the page cache."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; EEXIST if the name is taken."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """Rename over whatever has the name."""
        os.rename(source, target)

    def rename_new(self, source: str, target: str) -> None:
        """Rename; EEXIST if the name is taken."""
        call = getattr(_libc, "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        _check(call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE), target)

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a directory."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def list(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)

    def scan(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of each regular file in a directory; files that vanish meanwhile are left out."""
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        yield entry.name, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue

    def stat(self, path: str) -> os.stat_result:
        """Return the status of a path."""
        return os.stat(path)

    def lstat(self, path: str) -> os.stat_result:
        """Return the status of a path; of a symbolic link, the link's own."""
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return os.fstat(fd)

    def room(self, path: str) -> os.statvfs_result:
        """Return how much room a filesystem has."""
        return os.statvfs(path)

    def mark_used(self, fd: int) -> None:
        """Set the access time to now, by the filesystem's clock, and leave the modification time."""
        times = (_Timespec * 2)(_Timespec(0, _UTIME_NOW), _Timespec(0, _UTIME_OMIT))
        _check(_libc.futimens(fd, times))

    def mark_published(self, fd: int) -> None:
        """Set access and modification time to now, by the filesystem's clock."""
        _check(_libc.futimens(fd, None))

    def try_lock(self, fd: int, exclusive: bool) -> bool:
        """Lock an open file (flock) if nobody's lock is in the way; closing unlocks."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
