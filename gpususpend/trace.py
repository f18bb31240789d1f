"""A command's trace: what it did when, in the Chrome trace event format, which Perfetto and chrome://tracing show.

Owns the form of the file.  Must not know the steps: it draws what the report has.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpususpend.newfile import NewFile
from gpususpend.phases import PhaseTime, Span
from gpususpend.progress import rate
from gpususpend.report import Report

PHASES, PARTS, COPIES = 1, 2, 3  # the rows of a process; those of the GPUs' copies come last
Event = dict[str, Any]


@contextlib.contextmanager
def traced(report: Report, path: str | None, apart: Mapping[str, str]) -> Iterator[None]:
    """Write what the report tells of the phases to `path` at the end, also of a command that fails.

    `apart` are places of the command that it may not lie in, as for NewFile.  Raises BadFile before it begins;
    afterwards a file that cannot be written is a warning.  Without a path: nothing.
    """
    if path is None:
        yield
        return
    file = NewFile(path, apart)
    begun, date = time.monotonic(), time.time()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        try:
            file.finish(json.dumps(document(report, begun, date, failure), default=str))
        except Exception as error:  # whatever it is, the command has done what it says
            report.warnings.append(f"the trace was not written to {path}: {error}")


@dataclass(frozen=True)
class _Row:
    """A row of the picture: a process, and a thread of it."""

    pid: int
    tid: int
    begun: float  # the moment that is 0

    def event(self, name: str, begun: float, seconds: float, **facts: object) -> Event:
        """Return one bar.  Times are in microseconds."""
        return {
            "ph": "X", "name": name, "cat": "gpushare", "pid": self.pid, "tid": self.tid,
            "ts": round((begun - self.begun) * 1e6, 3), "dur": round(seconds * 1e6, 3),
            "args": {word: fact for word, fact in facts.items() if fact},
        }  # fmt: skip

    def named(self, name: str) -> Event:
        """Return the event that names the row."""
        return {"ph": "M", "name": "thread_name", "pid": self.pid, "tid": self.tid, "args": {"name": name}}


def document(report: Report, begun: float, date: float, failure: BaseException | None = None) -> dict[str, Any]:
    """Return the trace until now of a command that began at `begun` on the monotonic clock and `date` on the wall's."""
    seconds = time.monotonic() - begun
    command = _Row(os.getpid(), PHASES, begun)
    events = [
        *_process(command.pid, f"nvsnap-gpu-suspend {report.command}", 0), command.named("phases"),
        command.event(report.command, begun, seconds, error=str(failure) if failure else ""),
    ]  # fmt: skip
    for number, group in enumerate(report.groups):
        for rank in group.ranks:
            events += _process(rank.pid, f"{rank.comm} {rank.pid}", number + 1)
        for phase in group.phases:
            facts = {"group": group.id, "bytes": phase.bytes}
            events.append(command.event(phase.name, phase.begun, phase.seconds, **facts))
            events += [command.event(part.name, part.begun, part.seconds) for part in phase.parts if not part.pid]
        events += _ranks(group.phases, begun)
    facts = {"version": report.data()["version"], "command": report.command, "simulated": report.simulated}
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(date))
    return {"displayTimeUnit": "ms", "otherData": facts | {"begun": when}, "traceEvents": events}


def _process(pid: int, name: str, order: int) -> list[Event]:
    """Return the events that name a process and give it its place in the picture."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}},
    ]


def _ranks(phases: list[PhaseTime], begun: float) -> list[Event]:
    """Return what each rank did in a row of its own, and below it a row for the copies of each of its GPUs."""
    events: list[Event] = []
    rows: dict[_Row, Event] = {}

    def bar(row: _Row, title: str, span: Span, **facts: object) -> Event:
        if row not in rows:
            rows[row] = row.named(title)
        return row.event(span.name, span.begun, span.seconds, **facts)

    devices = sorted({copy.device for phase in phases for copy in phase.copies})
    for phase in phases:
        for part in phase.parts:
            if part.pid:
                events.append(bar(_Row(part.pid, PARTS, begun), "steps", part, phase=phase.name))
        for copy in list(phase.copies):
            row = _Row(copy.pid, COPIES + devices.index(copy.device), begun)
            title = f"copies {copy.device}".rstrip()
            facts = {"bytes": copy.bytes, "rate": rate(copy.bytes, copy.seconds), "device": copy.device}
            events.append(bar(row, title, copy, phase=phase.name, **facts))
    return [*rows.values(), *events]
