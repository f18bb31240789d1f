"""The command's first moments: a signal that comes while it is still being loaded ends it in good order.

Owns the signal handlers until `interrupt.Interrupts` takes over.  Loads nothing slow, and must not know the commands.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EarlySignal(BaseException):
    """A signal came before the command had begun.  No Exception: nobody on the way may take it for a failure."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.name = number.name


def raise_early(number: int, frame: FrameType | None) -> None:
    """Turn the first signal into an EarlySignal; further ones change nothing about the end."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise EarlySignal(signal.Signals(number))


def open_streams() -> None:
    """Give the command the standard streams that it was started without, leading nowhere.

    Else the next file to be opened would be taken for one of them.  What a stream's encoding lacks is written escaped:
    names of processes and files may hold anything.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
        stream = getattr(sys, name)
        if name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; a signal that is ignored (nohup) stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, raise_early)
    open_streams()
    words = sys.argv[1:] if arguments is None else arguments
    # What is loaded stays: to look for garbage among it would take a while of the start.
    gc.disable()
    try:
        from gpususpend import cli

        gc.freeze()
        gc.enable()
        cli.main(words)
    except EarlySignal as early:
        from gpususpend import errors
        from gpususpend.cli import output

        sys.exit(output.finish_error(words, errors.NotBegun(signal=early.name)))
