"""How a command ends: its report on stdout, its error on stderr, its exit status.

Owns the two streams.  Must not know the commands.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from gpususpend import errors, system
from gpususpend.defaults import COMMAND
from gpususpend.report import Report
from gpususpend.start import EarlySignal


@contextlib.contextmanager
def reporting(command: str, as_json: bool, simulated: bool = False) -> Iterator[Report]:
    """Yield the report of a command, print it at the end whatever happens, and exit with its status."""
    report = Report(command, simulated)
    try:
        yield report
    except errors.GpushareError as error:
        report.error = error
    except EarlySignal as early:
        report.error = errors.NotBegun(signal=early.name)
    except (OSError, MemoryError) as error:
        report.error = unforeseen(error, report)
    except Exception as error:
        # A defect of ours still has to be machine-readable; the trace goes to stderr.
        sys.excepthook(type(error), error, error.__traceback__)
        report.error = errors.GpushareError(what=f"internal error: {type(error).__name__}: {error}")
    sys.exit(_finish(report, as_json))


def unforeseen(error: OSError | MemoryError, report: Report) -> errors.GpushareError:
    """Return what the system denied the command as an error that says what things are in now."""
    if not report.changed:
        return system.refusal(error, system.NOTHING_CHANGED)
    groups = "".join(f". Group {group.id}: {group.state}" for group in report.groups if group.id)
    cause = system.refusal(error, groups or ". The command had begun; look at what there is before you repeat it")
    return errors.GpushareError(what=cause, cause=cause)


def finish_error(words: Sequence[str], error: errors.GpushareError) -> int:
    """Print the report of a command line that could not begin; return the exit status."""
    named = [word for word in words if not word.startswith("-")]
    command = " ".join(named[: 2 if named[:1] == ["store"] else 1])
    return _finish(Report(command, error=error), "--json" in words)


def _finish(report: Report, as_json: bool) -> int:
    text = report.json() if as_json else report.text()
    if not as_json and report.already and report.error is None:
        text = "\n".join(part for part in ["nothing to do", text] if part)
    told = [f"warning: {warning}" for warning in report.warnings]
    if text and (problem := _write(sys.stdout, text)):
        told.insert(0, f"the result could not be written: {problem}; the exit status stands")
    for line in [*told, *([str(report.error)] if report.error is not None else [])]:
        _write(sys.stderr, f"{COMMAND}: {line}")
    return report.exit_code


def _write(stream: TextIO, text: str) -> str:
    """Write a line, and return why nobody could take it: a full disk, a reader that has gone.

    The exit status says what the command did, all the same.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # What is left in the buffer must not be tried again at the end, which would change the exit status.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return error.strerror or str(error)
    return ""
