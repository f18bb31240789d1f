"""SIGINT and SIGTERM as a request that the command looks at between steps.

A signal must not cut a step in two: the handler only notes it.  Suspend asks at every barrier and rolls back; what
brings a group back is never interrupted, since half-way is the one place where nobody wants to be left.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from gpususpend import errors
from gpususpend.start import SIGNALS, raise_early


class Interrupts:
    """Notes signals while it is entered as a context manager.  Used in the main thread."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0  # on the monotonic clock
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        """Install the handlers; a signal that is ignored (nohup) stays ignored."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, self._note)
                # What has begun has an end to tell, which a late signal must not take for one of before the beginning.
                self._before[number] = signal.SIG_IGN if before is raise_early else before
        return self

    def __exit__(self, *_: object) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self._at, self.received = time.monotonic(), signal.Signals(number)

    def overdue(self, seconds: float) -> bool:
        """Tell whether a signal came so long ago."""
        return self.received is not None and time.monotonic() - self._at >= seconds

    def check_begin(self) -> None:
        """Raise NotBegun if a signal came: nothing is changed yet, whatever the command would do next."""
        if self.received is not None:
            raise errors.NotBegun(signal=self.received.name)

    def check(self, step: str) -> None:
        """Raise Interrupt if a signal came."""
        if self.received is not None:
            raise errors.Interrupt(step=step, pid=0, signal=self.received.name)
