"""How long a command waits for a store's answers outside of the steps that all ranks take.

Owns the end of that wait: a deadline, ten seconds after a signal, or a store that holds threads.  Must not know what is
asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from chunkstore.errors import StoreError
from gpususpend import errors
from gpususpend.deadline import Deadline
from gpususpend.interrupt import Interrupts


class Answers:
    """The answers of one command's store; `hangs` from the moment on when it is seen to hold threads of ours."""

    def __init__(self, interrupts: Interrupts, grace_s: float) -> None:
        self.hangs = False
        self._interrupts = interrupts
        self._grace_s = grace_s
        self._until: Deadline | None = None
        self._heed: Callable[[], None] | None = None  # raises for a signal; None where none is heeded

    @contextlib.contextmanager
    def asking(self, seconds: float, heed: Callable[[], None] | None = None) -> Iterator[None]:
        """Wait for answers so many seconds, and ten after a signal, for which `heed` raises."""
        self._until, self._heed = Deadline(seconds), heed
        try:
            yield
        except (StoreError, errors.StoreProblem):
            if heed is not None and self._signal_overdue():
                heed()
            raise
        finally:
            self._until = self._heed = None

    def waits(self) -> bool:
        """Tell whether an answer is waited for any longer; asked in any thread.

        In the steps that all ranks take, these say so themselves.
        """
        if self.hangs or (self._until is not None and self._until.passed()):
            return False
        return self._heed is None or not self._signal_overdue()

    def _signal_overdue(self) -> bool:
        return self._interrupts.overdue(self._grace_s)
