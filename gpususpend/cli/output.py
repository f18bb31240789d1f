"""How a command ends: its report on stdout, its error on stderr, its exit status.

Owns the two streams.  Must not know the commands.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from gpususpend import errors
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
    except Exception as error:
        # A defect of ours still has to be machine-readable; the trace goes to stderr.
        sys.excepthook(type(error), error, error.__traceback__)
        report.error = errors.GpushareError(what=f"internal error: {type(error).__name__}: {error}")
    sys.exit(_finish(report, as_json))


def finish_error(words: Sequence[str], error: errors.GpushareError) -> int:
    """Print the report of a command line that could not begin; return the exit status."""
    command = next((word for word in words if not word.startswith("-")), "")
    return _finish(Report(command, error=error), "--json" in words)


def _finish(report: Report, as_json: bool) -> int:
    if as_json:
        print(report.json())
    else:
        text = report.text()
        if report.already and report.error is None:
            text = "\n".join(part for part in ["nothing to do", text] if part)
        if text:
            print(text)
    for warning in report.warnings:
        _say(f"warning: {warning}")
    if report.error is not None:
        _say(f"{report.error}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return report.exit_code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"{COMMAND}: {text}", file=sys.stderr)
