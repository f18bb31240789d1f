"""Progress of a command on stderr: a bar on a terminal, a line every few seconds elsewhere.

Owns what is written there while a phase runs.  Must not know the phases, and loads nothing slow unless it draws a bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

from gpususpend.defaults import LIMITS

NAMED = 4  # of those that are waited for


def readable_bytes(count: float) -> str:
    """Return a count of bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def exact_bytes(count: int) -> str:
    """Return a count of bytes as a SIZE of the command line, which takes a bare number for GiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count}B"


def rate(count: int, seconds: float) -> str:
    """Return a rate in GB/s, or nothing where it would say nothing."""
    return f"{count / seconds / 1e9:.2f} GB/s" if count and seconds > 0 else ""


def time_left(rest: int, done: int, seconds: float) -> str:
    """Return how long the rest takes at the rate so far, or nothing where nobody can tell or nothing is left."""
    if rest <= 0 or done <= 0:
        return ""
    left_s = round(rest * seconds / done)
    return f"{left_s} s left" if left_s < 120 else f"{left_s // 60} min left"


class _Forgiving:
    """A stream that takes everything: a terminal may go away at any moment, and nothing must stop for that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or lose it."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or do not."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Tell whether it is a terminal still."""
        with suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """Tells how far a phase is.  A stream that cannot be written is no error."""

    def __init__(
        self,
        stream: TextIO | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = LIMITS.progress_s,
    ) -> None:
        self._stream = cast(TextIO, _Forgiving(sys.stderr if stream is None else stream))
        self._quiet = quiet
        self._clock = clock
        self._interval_s = interval_s
        self._phase, self._total, self._bytes, self._unit = "", 0, 0, ""
        self._begun = self._told = 0.0
        self._bar: Any = None
        self._task: Any = None

    def begin(self, phase: str, total: int, total_bytes: int = 0, unit: str = "ranks") -> None:
        """Begin a phase over `total` ranks, or of what `unit` says, that moves `total_bytes` (0: unknown or none)."""
        self.end()
        self._phase, self._total, self._bytes, self._unit = phase, total, total_bytes, unit
        self._begun = self._told = self._clock()
        if not self._quiet and self._stream.isatty():
            self._draw()

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn(),
            console=Console(file=self._stream), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(self._phase, total=max(1, self._bytes or self._total), text="")
        self._bar.start()

    def waiting(self, whom: Sequence[str], bytes_done: int = 0) -> None:
        """Say who is still at work, and how many bytes have moved."""
        named = ", ".join(whom[:NAMED]) + (", …" if len(whom) > NAMED else "")
        self.update(self._total - len(whom), bytes_done, f"waiting for {named}" if whom else "")

    def update(self, done: int, bytes_done: int = 0, more: str = "") -> None:
        """Say how many ranks have finished and how many bytes have moved; `more` comes after that."""
        if self._quiet or not self._phase:
            return
        elapsed = self._clock() - self._begun
        parts = [f"{done}/{self._total} {self._unit}"]
        if self._bytes:
            parts.append(f"{readable_bytes(bytes_done)} of {readable_bytes(self._bytes)}")
            parts.append(rate(bytes_done, elapsed))
            parts.append(time_left(self._bytes - bytes_done, bytes_done, elapsed))
        text = ", ".join(part for part in [*parts, more] if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=bytes_done if self._bytes else done, text=text)
        elif self._clock() - self._told >= self._interval_s:
            self._told = self._clock()
            self.say(f"{self._phase}: {text}, {elapsed:.0f} s")

    def end(self) -> None:
        """End the phase."""
        self._phase = ""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """Write one line."""
        if not self._quiet:
            self._stream.write(f"{text}\n")
            self._stream.flush()
