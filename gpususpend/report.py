"""What a command says at its end: one JSON schema for machines, a table for people.

Owns the schema (docs/reference/cli.md) and the layout.  Must not know how anything was found out; loads nothing slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpususpend import __version__, errors
from gpususpend.journal import StorePlaces
from gpususpend.phases import PhaseTime
from gpususpend.progress import rate, readable_bytes

SCHEMA = 1
MOVING = ("release", "save", "zeros", "load")  # phases in which the shims' memory moves


@dataclass
class RankReport:
    """One member of a group."""

    pid: int
    inner_pid: int
    comm: str
    kind: str  # shimmed, unshimmed or plain
    state: str  # running, suspended, dead, …
    phase: str = "-"  # the shim's
    lease: str = "-"
    bytes: int = 0  # carried by the shim
    host_bytes: int = 0
    arena_bytes: int = 0  # host memory that the shim holds page-locked, or keeps the content in
    busy: str = "-"  # long verb that the shim is in


@dataclass
class GroupReport:
    """One group."""

    state: str
    ranks: list[RankReport] = field(default_factory=list)
    id: str | None = None
    step: str | None = None
    phases: list[PhaseTime] = field(default_factory=list)
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    holder: int | None = None
    depth: str | None = None
    note: str = ""  # what a reader should do or know
    not_running: int = 0
    ended: dict[int, str] = field(default_factory=dict)  # members without CUDA that have ended: name by pid
    stored: StorePlaces | None = None  # where the memory is kept, if in a store
    stored_bytes: dict[str, int] = field(default_factory=dict)  # moved by this command, by what the store did or had

    def data(self) -> dict[str, Any]:
        """Return the JSON of the group."""
        return {
            "id": self.id,
            "state": self.state,
            "step": self.step,
            "depth": self.depth,
            "note": self.note,
            "holder": self.holder,
            "not_running": self.not_running,
            "stored": vars(self.stored) | {"bytes": self.stored_bytes} if self.stored is not None else None,
            "bytes": sum(phase.bytes for phase in self.phases if phase.name in MOVING),
            "seconds": round(sum(phase.seconds for phase in self.phases), 6),
            "phases": [
                {
                    "name": phase.name,
                    "seconds": round(phase.seconds, 6),
                    "bytes": phase.bytes,
                    "ranks": {str(pid): round(seconds, 6) for pid, seconds in phase.rank_seconds.items()},
                    "copying": {str(pid): round(seconds, 6) for pid, seconds in phase.copy_seconds.items()},
                    "locking": {str(pid): round(seconds, 6) for pid, seconds in phase.lock_seconds.items()},
                }
                for phase in self.phases
            ],
            "ranks": [vars(rank) for rank in self.ranks],
            "ended": [{"pid": pid, "comm": comm} for pid, comm in self.ended.items()],
            "gpus": [
                {"uuid": uuid, "used_before": before, "used_after": after}
                for uuid, (before, after) in self.usage.items()
            ],
        }


@dataclass
class Report:
    """Everything that a command says."""

    command: str
    simulated: bool = False
    groups: list[GroupReport] = field(default_factory=list)
    already: bool = False
    changed: bool = False  # the command has begun to change something
    error: errors.GpushareError | None = None
    warnings: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # a command's own entries
    lines: list[str] = field(default_factory=list)  # a command's own lines for people

    @property
    def exit_code(self) -> int:
        """Return the exit status."""
        return int(self.error.exit_code) if self.error else 0

    def data(self) -> dict[str, Any]:
        """Return the whole JSON document."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "command": self.command,
            "simulated": self.simulated,
            "ok": self.error is None,
            "exit_code": self.exit_code,
            "already": self.already,
            "reason": self.error.reason if self.error else None,
            "next": self.error.next_action if self.error else None,
            "error": error_data(self.error),
            "warnings": self.warnings,
            "groups": [group.data() for group in self.groups],
            **self.extra,
        }

    def json(self) -> str:
        """Return the JSON text."""
        return json.dumps(self.data(), indent=1, default=str)

    def text(self) -> str:
        """Return the tables."""
        lines = [*self.lines]
        for group in self.groups:
            lines += _group_lines(group)
        return "\n".join(["simulated driver", *lines] if self.simulated and lines else lines)


def error_data(error: errors.GpushareError | None) -> dict[str, Any] | None:
    """Return the JSON of an error: that of its cause inside, so that step, pid and driver code stand in one place."""
    if error is None:
        return None
    inner = error.facts.get("cause")
    cause = inner if isinstance(inner, errors.GpushareError) else error
    facts = {**cause.facts, **error.facts}
    facts.pop("cause", None)
    named = {name: facts.pop(name, None) for name in ("step", "pid", "cuda", "cuda_name")}
    named["step"] = cause.facts.get("step", named["step"])
    named["pid"] = cause.facts.get("pid", named["pid"])
    return {"code": error.code, "cause": error.reason, "message": str(error), **named, "facts": facts}


def table(rows: Iterable[Sequence[object]], heads: Sequence[str]) -> list[str]:
    """Return aligned lines; numbers stand to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [bool(cells) and all(row[i][:1].isdigit() or row[i] == "-" for row in cells) for i in range(len(heads))]
    widths = [max(len(line[i]) for line in [list(heads), *cells]) for i in range(len(heads))]
    lines = []
    for line in [list(heads), *cells]:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _group_lines(group: GroupReport) -> list[str]:
    lines = [f"group {group.id or '-'}: {group.state}" + (f" ({group.note})" if group.note else "")]
    if group.stored is not None and (group.stored.checkpoint or group.state != "running"):  # else none was begun
        cache = f", cache {group.stored.cache}" if group.stored.cache else ""
        lines.append(f"memory: checkpoint {group.stored.directory} in store {group.stored.store}{cache}")
    if group.stored_bytes:
        lines.append(", ".join(f"{word} {readable_bytes(count)}" for word, count in group.stored_bytes.items()))
    if group.ranks:
        heads = ("PID", "COMMAND", "KIND", "STATE", "PHASE", "LEASE", "CARRIED", "HOST", "ARENA")
        rows = [
            (
                r.pid, r.comm, r.kind, r.state, r.phase, r.lease, readable_bytes(r.bytes), readable_bytes(r.host_bytes),
                readable_bytes(r.arena_bytes),
            )
            for r in group.ranks
        ]  # fmt: skip
        lines += table(rows, heads)
    if group.ended:
        lines.append("ended, without CUDA: " + ", ".join(f"pid {pid} ({comm})" for pid, comm in group.ended.items()))
    if group.phases:
        lines.append("")
        steps = [
            (p.name, f"{p.seconds:.3f}", readable_bytes(p.bytes) if p.bytes else "-", rate(p.bytes, p.seconds) or "-")
            for p in group.phases
        ]
        lines += table(steps, ("STEP", "SECONDS", "BYTES", "RATE"))
    if group.usage:
        lines.append("")
        lines += table(
            [(uuid, readable_bytes(before), readable_bytes(after)) for uuid, (before, after) in group.usage.items()],
            ("GPU", "USED BEFORE", "USED AFTER"),
        )
    return lines
