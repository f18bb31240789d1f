"""The store's errors in the command's words: each kind becomes the class with that kind's exit code.

Loads the store, and with it numpy: import this late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from chunkstore import Busy, Damaged, Refused, StoreError, WriteFailed
from gpususpend import errors

_KINDS: tuple[tuple[type[StoreError], type[errors.StoreProblem]], ...] = (
    (Busy, errors.StoreBusy),
    (Refused, errors.StoreRefused),
    (WriteFailed, errors.StoreNotWritten),
    (Damaged, errors.StoreUnsound),
)


def problem(error: StoreError) -> errors.StoreProblem:
    """Return what the store raised as an error of the command."""
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), errors.StoreProblem)
    return kind(**{**error.facts, "word": error.code, "said": str(error)})


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise what the store raises as errors of the command."""
    try:
        yield
    except StoreError as error:
        raise problem(error) from error
