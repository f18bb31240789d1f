"""The state directory: the only place where the supervisor keeps files, in a folder that others may share (/tmp).

Owns opening and checking it (semantics: a real directory, of the own user, mode exactly 0700) and every file access
inside, always relative to the checked directory and never through a symbolic link.  Must not know what the files say.
docs/reference/state-directory.md lists them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator

from gpususpend import errors, processes, system
from gpususpend.defaults import LIMITS, state_directory

_NAME_ANOTHER = "name another one with --state-dir"
_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.tmp")
JOURNAL_LOCK = "journal.lock"  # made with the first record, and never removed
_OURS = re.compile(r"(group|holder|driver)-.|journal\.lock$")


class Locked(Exception):
    """Another process holds the lock; `pid` is what it wrote there, 0 if unknown."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"locked by pid {pid}")
        self.pid = pid


class StateDir:
    """An opened state directory.

    Guarantees that nothing outside it is read, written or removed, whatever lies at its path.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._swept = False

    @classmethod
    def open(cls, path: str, create: bool = True) -> StateDir:
        """Open the directory, making it if it is missing and `create` is set.

        Raises UnsafeStateDir if it may not be trusted, FileNotFoundError if it is missing and not to be made.
        """
        try:
            fd = _open_directory(path)
        except FileNotFoundError:
            if not create:
                raise
            _make_directory(path)
            fd = _open_directory(path)
        try:
            _check_directory(path, fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def close(self) -> None:
        """Close the directory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def names(self) -> list[str]:
        """Return the names of the files inside, sorted."""
        return sorted(os.listdir(self.fd))

    def read(self, name: str) -> bytes:
        """Return the content of a file.  Raises FileNotFoundError, UnsafeStateDir."""
        fd = self._open_checked(name, os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def odd(self) -> dict[str, str]:
        """Return what lies here and cannot be of a command, by name, each with the reason."""
        found = {}
        for name in self.names():
            with contextlib.suppress(FileNotFoundError):
                why = _why_not(os.stat(name, dir_fd=self.fd, follow_symlinks=False))
                if why:
                    found[name] = why
        return found

    def write(self, name: str, content: bytes) -> None:
        """Replace a file durably: after a crash it holds the old content or the new.  Raises StateNotWritten."""
        with self._writing(name):
            self._sweep()
            self._replace(name, content)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            room = error.errno in (errno.ENOSPC, errno.EDQUOT)
            way_out = f"{'make room there' if room else 'see to that'}, or name another directory with --state-dir"
            if error.errno == errno.EFBIG:  # it is the command that may write none, wherever
                way_out = system.LARGER_FILES
            raise errors.StateNotWritten(path=f"{self.path}/{name}", detail=error.strerror, way_out=way_out) from None

    def _replace(self, name: str, content: bytes) -> None:
        temporary = f"{name}.{os.urandom(8).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self.fd)
        try:
            with os.fdopen(fd, "wb") as file:
                processes.lock(fd)  # until it has its name: see `_sweep`
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(temporary)
            raise
        os.fsync(self.fd)

    def _sweep(self) -> None:
        """Remove once what writers left that were killed: old, and locked by nobody."""
        if self._swept:
            return
        self._swept = True
        for name in filter(_TEMPORARY.fullmatch, self.names()):
            with contextlib.suppress(OSError, errors.UnsafeStateDir):
                fd = self._open_checked(name, os.O_RDWR)
                try:
                    if os.fstat(fd).st_mtime < time.time() - LIMITS.leftover_s and processes.lock(fd) is None:
                        os.unlink(name, dir_fd=self.fd)
                finally:
                    os.close(fd)

    def append_fd(self, name: str) -> int:
        """Return a descriptor that appends to a file of its own, such as a log."""
        return self._open_checked(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def remove(self, name: str) -> None:
        """Remove a file; a missing one, or a directory of that name, is no error.  Raises StateNotWritten."""
        with self._writing(name), contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self.fd)

    def _open_checked(self, name: str, flags: int) -> int:
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"not a plain file name: {name!r}")
        # Without O_NONBLOCK a planted fifo would keep the command waiting.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES):
                raise _odd(f"{self.path}/{name}", "it is no regular file") from None
            raise
        why = _why_not(os.fstat(fd))
        if why:
            os.close(fd)
            raise _odd(f"{self.path}/{name}", why)
        return fd

    def _open_lock(self, name: str) -> int:
        try:
            return self._open_checked(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.EROFS or name not in self.names():
                raise
        # A file system that has become read-only must keep nobody from waking a group; a lock there works as well.
        return self._open_checked(name, os.O_RDONLY)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock file `name`; raises Locked if another process has it.  The kernel frees a dead one's."""
        with self._writing(name):
            fd = self._open_lock(name)
        try:
            if (holder := processes.lock(fd)) is not None:
                text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                # Who has just got the lock has not written its pid yet; the kernel shows pids of this namespace only.
                raise Locked(holder or (int(text) if text.isdigit() else 0))
            with contextlib.suppress(OSError):  # of a full disk: only who waits would like to know it
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def __enter__(self) -> StateDir:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the directory."""
        self.close()


def _why_not(facts: os.stat_result) -> str:
    """Return why a file inside is none of ours, or nothing."""
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_nlink == 1:
        return ""
    return "it is no regular file of this user alone"


def _odd(path: str, why: str) -> errors.UnsafeStateDir:
    return errors.UnsafeStateDir(path=path, why=why, way_out="See who made it, and move it away")


def _open_directory(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP or os.path.islink(path):
            check = "see where it leads and, if that is yours, name it"
            raise _distrusted(path, "it is a symbolic link", check) from None
        why = f"it cannot be opened: {error.strerror}"
        if error.errno == errno.EACCES:
            raise _distrusted(path, why, "see whose it is, and run as that user") from None
        raise errors.UnsafeStateDir(path=path, why=why, way_out=f"See what it is, or {_NAME_ANOTHER}") from None


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another command was faster
        pass
    except OSError as error:
        why = f"it cannot be made: {error.strerror}"
        raise errors.UnsafeStateDir(path=path, why=why, way_out=f"See to that, or {_NAME_ANOTHER}") from None


def _distrusted(path: str, why: str, check: str) -> errors.UnsafeStateDir:
    """Return the refusal of a directory that others may have been in: what it holds may be the only way back."""
    way_out = f"It may hold the record of a suspended group: {check}, or {_NAME_ANOTHER}"
    return errors.UnsafeStateDir(path=path, why=why, way_out=way_out)


def _check_directory(path: str, fd: int) -> None:
    facts, mode = os.fstat(fd), stat.S_IMODE(os.fstat(fd).st_mode)
    if facts.st_uid != os.geteuid():
        why, check = f"it belongs to user {facts.st_uid}, not to {os.geteuid()}", "run as that user"
    elif mode != 0o700:
        why, check = f"its mode is {mode:04o}, not 0700", f"see that nobody else has been in it, then chmod 700 {path}"
    else:
        return
    if _is_ours(path, fd):
        raise _distrusted(path, why, check)
    # Somebody else's directory, such as /etc, is not to be changed for us.
    way_out = "Name another one with --state-dir; one that is missing is made"
    raise errors.UnsafeStateDir(path=path, why=f"{why}, and it holds nothing of this command", way_out=way_out)


def _is_ours(path: str, fd: int) -> bool:
    """Tell whether a directory is a state directory, by its place or by what lies in it."""
    if path == state_directory():
        return True
    try:
        return any(_OURS.match(name) for name in os.listdir(fd))
    except OSError:  # then it may be
        return True
