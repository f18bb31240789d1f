"""Files that a user names for a command's output: whole or not there, and refused before anything else happens.

Owns the care with which they are written.  Must not know what they say.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping

from gpususpend import errors
from gpususpend.statedir import JOURNAL_LOCK


class NewFile:
    """A file that appears with its whole content at `finish`, or not at all; what lies at its path stays until then.

    A place that cannot be written is refused at once: raises BadFile.  So is what is no regular file, a link among it,
    since `/dev/stdout` and the like must not be replaced, and what belongs to another user, whom root could rob of it.
    So is a place in a store, a cache, a checkpoint or a state directory, where it could replace the only copy of
    something, or be taken for a part; `apart` are those that may not be there yet, path by kind.
    """

    def __init__(self, path: str, apart: Mapping[str, str] | None = None) -> None:
        if not path:  # as a variable that is not set leaves it
            raise errors.BadFile(path="''", detail="the name is empty")
        _refuse_owned(path, apart or {})
        self._path = os.path.abspath(path)
        folder, name = os.path.split(self._path)
        self._temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
        try:
            _check_replaceable(self._path)
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise errors.BadFile(path=path, detail=error.strerror) from None

    def finish(self, text: str) -> None:
        """Write the content.  Raises OSError, or BadFile for what was put there since; then the path is as it was."""
        try:
            with open(self._fd, "w", encoding="utf-8") as file:
                file.write(text)
            _check_replaceable(self._path)
            os.rename(self._temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            raise


def _refuse_owned(path: str, apart: Mapping[str, str]) -> None:
    from chunkstore.place import lies_in, owner_of  # which loads slowly

    owners = [f"{kind} {owner}" for kind, owner in apart.items() if lies_in(path, owner)]
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.lexists(os.path.join(folder, JOURNAL_LOCK)):
        owners.append(f"state directory {folder}")
    if owner := next(iter(owners), "") or owner_of(path):
        raise errors.BadFile(path=path, detail=f"it lies in {owner}; name a file elsewhere")


def _check_replaceable(path: str) -> None:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(facts.st_mode):
        raise errors.BadFile(path=path, detail="it is no regular file")
    if facts.st_uid != os.geteuid():
        whose = f"it belongs to user {facts.st_uid}, not to {os.geteuid()}, and is not replaced; name another"
        raise errors.BadFile(path=path, detail=whose)
    if not os.access(path, os.W_OK):
        raise errors.BadFile(path=path, detail="Permission denied")
