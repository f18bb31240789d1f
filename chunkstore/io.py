"""Files that survive a power cut: direct I/O, durable publication, locks with a deadline, the filesystem's own clock.

Owns how bytes reach a disk and come back. Must not know what they mean. Everything raises OSError, where nothing else
is said; who calls says what that means for a store.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chunkstore import errors
from chunkstore.hashing import address_of
from chunkstore.system import System

ALIGNMENT = 4096
"""The least alignment used: filesystems and disks exist that refuse 512, whatever they say."""

SCRATCH_BYTES = 1 << 20
LOCK_WAIT_S = 60.0
TEMPORARY_SUFFIX = ".tmp"
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


class LocksUnsupported(OSError):
    """The filesystem has no file locks."""


@dataclass(frozen=True)
class Room:
    """Free room on a filesystem; None where it knows no limit."""

    bytes: int | None
    inodes: int | None

    def takes(self, size_bytes: int, files: int) -> bool:
        """Tell whether `size_bytes` in so many new files would fit."""
        return (self.bytes is None or self.bytes >= size_bytes) and (self.inodes is None or self.inodes >= files)

    def require(self, path: str, size_bytes: int, files: int) -> None:
        """Raise `NoRoom` if `size_bytes` in so many new files would not fit; `path` is what lies there."""
        if self.bytes is not None and self.bytes < size_bytes:
            raise errors.NoRoom(path=path, free=self.bytes, need=size_bytes, unit="bytes")
        if self.inodes is not None and self.inodes < files:
            raise errors.NoRoom(path=path, free=self.inodes, need=files, unit="inodes")


class Files:
    """File operations over one `System`; one object may be used from any number of threads.

    `notify` gets one line whenever something works less well than asked, such as a filesystem without direct I/O.
    `waits` is asked, from any thread, while an object store does not answer, whether to wait any longer.
    """

    def __init__(
        self,
        system: System | None = None,
        notify: Callable[[str], None] | None = None,
        waits: Callable[[], bool] = lambda: True,
    ) -> None:
        self.system = system or System()
        self._notify = notify or (lambda line: None)
        self.waits = waits
        self._buffered: set[int] = set()  # filesystems (by device) that refused direct I/O
        self._told: set[str] = set()
        self._guard = threading.Lock()
        self._local = threading.local()

    def tell(self, line: str) -> None:
        """Pass a notice on, once."""
        with self._guard:
            if line in self._told:
                return
            self._told.add(line)
        self._notify(line)

    def scratch(self) -> memoryview:
        """Return this thread's page-aligned buffer of `SCRATCH_BYTES`; the next use of it overwrites it."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = memoryview(mmap.mmap(-1, SCRATCH_BYTES))
        view: memoryview = self._local.scratch
        return view

    def open(self, path: str, flags: int = os.O_RDONLY | os.O_NOFOLLOW) -> int:
        """Open a regular file; anything else there but a directory that `flags` ask for is refused, and not waited for.

        The open of a FIFO waits for a writer, and a device may have no end.
        """
        try:
            fd = self.system.open(path, flags | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENXIO and not stat.S_ISREG(self.system.stat(path).st_mode):  # a socket
                raise _odd(path) from error
            raise
        try:
            if not flags & os.O_DIRECTORY and not stat.S_ISREG(self.system.fstat(fd).st_mode):
                raise _odd(path)
        except BaseException:
            self.system.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def opened(self, path: str, flags: int = os.O_RDONLY | os.O_NOFOLLOW) -> Iterator[int]:
        """Keep a file open for the length of a with statement; a symbolic link in its place is refused."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.system.close(fd)

    @contextlib.contextmanager
    def peeked(self, path: str) -> Iterator[int]:
        """Keep a file open for reading as `opened` does, without the reads counting as a use, where we may ask that."""
        flags = os.O_RDONLY | os.O_NOFOLLOW
        try:
            fd = self.open(path, flags | os.O_NOATIME)
        except PermissionError:  # another user's file
            fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.system.close(fd)

    # --- whole contents, past the page cache where the filesystem lets us

    def write_all(self, fd: int, data: memoryview, path: str) -> None:
        """Write the content of a new file and wait until it is on the disk."""
        direct = _Direct(self, fd, path)
        done = 0
        while done < len(data):
            count = direct.move(self.system.write, self._to_write(data[done:], direct.alignment), done)
            if count <= 0:
                raise OSError(errno.EIO, "the file takes no more bytes", path)
            done += count
        if self.system.fstat(fd).st_size > len(data):  # padding of the last block, even if that came short
            self.system.truncate(fd, len(data))
        self.system.datasync(fd)
        if not direct.alignment:
            with contextlib.suppress(OSError):  # a hint
                self.system.forget_pages(fd)

    def _to_write(self, rest: memoryview, alignment: int) -> memoryview:
        """Return what to write next: whole blocks of `rest` as they lie, else a copy that is aligned and padded."""
        if not alignment:
            return rest
        whole = _whole_blocks(rest, alignment)
        if len(whole) and address_of(rest) % alignment == 0:
            return whole
        scratch = _whole_blocks(self.scratch(), alignment)
        count = min(len(rest), len(scratch))
        padded = -(-count // alignment) * alignment
        scratch[:count] = rest[:count]
        scratch[count:padded] = bytes(padded - count)
        return scratch[:padded]

    def read_all(self, fd: int, into: memoryview, path: str) -> int:
        """Fill `into` from the start of a file and return how many bytes it had, fewer where it is shorter."""
        direct = _Direct(self, fd, path)
        done = 0
        while done < len(into):
            rest = into[done:]
            alignment = direct.alignment
            fits = not alignment or (len(rest) >= alignment and address_of(rest) % alignment == 0)
            room = rest if fits else self.scratch()
            count = min(direct.move(self.system.read, _whole_blocks(room, alignment), done), len(rest))
            if count == 0:
                break
            if not fits:
                rest[:count] = room[:count]
            done += count
        return done

    def pieces(self, fd: int, path: str) -> Iterator[memoryview]:
        """Yield the content of a file in pieces that lie in this thread's scratch buffer, each until the next."""
        direct = _Direct(self, fd, path)
        done = 0
        while count := direct.move(self.system.read, self.scratch(), done):
            yield self.scratch()[:count]
            done += count

    def is_buffered(self, device: int) -> bool:
        """Tell whether a filesystem has refused direct I/O."""
        return device in self._buffered

    def set_buffered(self, device: int, path: str) -> None:
        """Use the page cache for a filesystem from now on, and say so; `path` is a file on it."""
        with self._guard:
            self._buffered.add(device)
        self.tell(
            f"the filesystem of {os.path.dirname(path)} (device {os.major(device)}:{os.minor(device)}) "
            "refuses direct I/O; its page cache is used instead"
        )

    # --- publication

    @contextlib.contextmanager
    def temporary(self, directory: str, data: memoryview) -> Iterator[tuple[int, str]]:
        """Write a content under a random name that nobody had, durably; the name is gone after the with statement.

        The file stays locked meanwhile, by which a collector knows that its writer lives.
        """
        fd, path = self._create(directory)
        try:
            try:
                self.system.try_lock(fd, True)
            except OSError:
                pass  # age alone then protects it
            self.write_all(fd, data, path)
            yield fd, path
        finally:
            self.system.close(fd)
            try:
                self.system.unlink(path)
            except OSError:
                pass  # it was renamed, or the collector takes it

    def _create(self, directory: str) -> tuple[int, str]:
        while True:
            path = os.path.join(directory, f"{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
            try:
                return self.system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), path
            except FileExistsError:
                continue

    def publish(self, temporary: str, path: str, replace: bool = False) -> bool:
        """Give a written file its name; returns False, and changes nothing, if the name is taken.

        With `replace`, the file takes the name over. The caller has the directory synced.
        """
        if replace:
            self.system.rename(temporary, path)
            return True
        try:
            try:
                self.system.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self.system.rename_new(temporary, path)
        except FileExistsError:
            return False
        return True

    def sync_directory(self, path: str) -> None:
        """Wait until the names in a directory are on the disk."""
        with self.opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self.system.sync(fd)

    def make_directory(self, path: str) -> bool:
        """Make a directory and wait until its name is on the disk; returns False if it was there.

        The one above it is not made: where that is missing, something may not be mounted.
        """
        try:
            self.system.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            return False
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, f"{os.path.dirname(path)} is not there", path) from None
        try:
            self.sync_directory(os.path.dirname(path) or ".")
        except OSError:
            with contextlib.suppress(OSError):
                self.system.rmdir(path)
            raise
        return True

    def write_document(self, path: str, content: bytes, replace: bool = False) -> bool:
        """Write a small file, durably and in one step; returns False if there was one and `replace` is not given."""
        directory = os.path.dirname(path)
        with self.temporary(directory, memoryview(content)) as (_, temporary):
            if not self.publish(temporary, path, replace):
                return False
        self.sync_directory(directory)
        return True

    def write_small(self, fd: int, content: bytes, path: str) -> None:
        """Write a small content into an open, empty file, and wait until it is on the disk."""
        done = 0
        while done < len(content):
            count = self.system.write(fd, memoryview(content)[done:], done)
            if count <= 0:
                raise OSError(errno.EIO, "the file takes no more bytes", path)
            done += count
        self.system.datasync(fd)

    def read_document(self, path: str) -> bytes:
        """Return the content of a small file."""
        with self.opened(path) as fd:
            size = self.system.fstat(fd).st_size
            content = bytearray(size)
            done = 0
            while done < size:
                count = self.system.read(fd, memoryview(content)[done:], done)
                if count == 0:
                    break
                done += count
            return bytes(content[:done])

    # --- room, locks and time

    def room(self, path: str) -> Room:
        """Return how much room a filesystem has for this user; raises `WriteFailed` if it does not say."""
        try:
            found = self.system.room(path)
        except OSError as error:
            raise errors.write_failed("cannot look at", path, error) from error
        free_bytes = found.f_bavail * found.f_frsize if found.f_blocks else None
        return Room(free_bytes, found.f_favail if found.f_files else None)

    @contextlib.contextmanager
    def locked(self, path: str, exclusive: bool, what: str, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
        """Hold a lock file's lock for the length of a with statement; the file is made if it is missing.

        Raises `Busy` if others held it for `wait_s`, `LocksUnsupported` if the filesystem has no locks.
        """
        fd = self.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            self.wait_for_lock(fd, path, exclusive, wait_s, what)
            yield fd
        finally:
            self.system.close(fd)

    def wait_for_lock(self, fd: int, path: str, exclusive: bool, wait_s: float, what: str) -> None:
        """Lock an open file, as `locked` does."""
        deadline = time.monotonic() + wait_s
        pause_s = 0.001
        while not self._try_lock(fd, path, exclusive):
            if time.monotonic() >= deadline:
                raise errors.Busy(path=path, what=what)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.1)

    def _try_lock(self, fd: int, path: str, exclusive: bool) -> bool:
        try:
            return self.system.try_lock(fd, exclusive)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise LocksUnsupported(error.errno, os.strerror(error.errno or 0), path) from error
            raise

    def is_locked(self, path: str) -> bool:
        """Tell whether another may hold an exclusive lock on a file; where there are no locks, nobody can tell."""
        try:
            with self.opened(path) as fd:
                return not self._try_lock(fd, path, False)
        except FileNotFoundError:
            return False
        except LocksUnsupported:
            return True

    def keeps_access_times(self, directory: str) -> bool:
        """Tell whether a file's access time can be set by itself; some network filesystems keep none."""
        fd, path = self._create(directory)
        try:
            before = self.system.fstat(fd)
            os.utime(fd, ns=(1, before.st_mtime_ns))
            self.system.mark_used(fd)
            after = self.system.stat(path)
            return after.st_atime_ns > 1 and after.st_mtime_ns == before.st_mtime_ns
        except OSError:
            return False
        finally:
            self.system.close(fd)
            self.system.unlink(path)

    def clock_ns(self, directory: str) -> int:
        """Return the time by the clock that stamps this filesystem's files, which may be another machine's."""
        fd, path = self._create(directory)
        try:
            self.system.mark_published(fd)
            return self.system.fstat(fd).st_mtime_ns
        finally:
            self.system.close(fd)
            self.system.unlink(path)


def _odd(path: str) -> OSError:
    return OSError(errno.EMEDIUMTYPE, "it is no regular file", path)


def _whole_blocks(view: memoryview, alignment: int) -> memoryview:
    return view[: len(view) - len(view) % alignment] if alignment else view


class _Direct:
    """An open file that is read or written past the page cache for as long as that goes.

    `alignment` is what addresses, lengths and offsets have to be multiples of: 0 once the page cache is used.
    """

    def __init__(self, files: Files, fd: int, path: str) -> None:
        self._files = files
        self._fd = fd
        self._path = path
        self._device = files.system.fstat(fd).st_dev
        self.alignment = 0
        if not files.is_buffered(self._device):
            try:
                files.system.set_direct(fd, True)
            except OSError as error:
                self._require_refusal(error)
            else:
                self.alignment = max(ALIGNMENT, *files.system.alignments(fd))
                if self.alignment > SCRATCH_BYTES:  # whole extents of some megabytes, of which the last would be copied
                    self._give_up()

    def move(self, call: Callable[[int, memoryview, int], int], view: memoryview, offset: int) -> int:
        """Read or write a view at an offset and return how many bytes went.

        Filesystems exist that accept the flag and refuse the call: the same call is made again without it.
        """
        try:
            count = call(self._fd, view, offset)
        except OSError as error:
            if not self.alignment:
                raise
            self._require_refusal(error)
            count = call(self._fd, view, offset)
        if self.alignment and count % self.alignment:  # the file's end, or a short call: no block begins there
            self._end()
        return count

    def _require_refusal(self, error: OSError) -> None:
        if error.errno not in _NOT_DIRECT:
            raise error
        self._give_up()

    def _give_up(self) -> None:
        """Use the page cache for this filesystem."""
        self._end()
        self._files.set_buffered(self._device, self._path)

    def _end(self) -> None:
        """Use the page cache for the rest of this file."""
        self.alignment = 0
        with contextlib.suppress(OSError):  # where it could not be switched on
            self._files.system.set_direct(self._fd, False)
