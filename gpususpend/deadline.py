"""A point in time by which a wait ends."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Deadline:
    """A deadline `seconds` from now; `clock` and `sleep` are replaced by tests."""

    def __init__(
        self, seconds: float, clock: Clock = time.monotonic, sleeper: Callable[[float], None] = time.sleep
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._sleep = sleeper
        self._end = clock() + seconds

    @property
    def at(self) -> float:
        """Return the moment on the monotonic clock."""
        return self._end

    def left(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self._end - self._clock())

    def passed(self) -> bool:
        """Tell whether the time is over."""
        return self._clock() >= self._end

    def sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the deadline."""
        self._sleep(min(seconds, self.left()))

    def within(self, seconds: float) -> Deadline:
        """Return a deadline `seconds` from now that is not later than this one."""
        return Deadline(min(seconds, self.left()), self._clock, self._sleep)

    @classmethod
    def until(cls, at: float) -> Deadline:
        """Return the deadline at a moment of the monotonic clock."""
        return cls(at - time.monotonic())
