"""What all errors of gpushare share, and the exit codes they carry.

Owns the hierarchy `GpushareError`: the class carries the exit code, the error's word and a template; the instance
carries the facts.  Knows nothing of processes, drivers or output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What the exit status of every command means."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    ROLLED_BACK = 4
    LOST = 5
    STORE_DAMAGED = 6
    UNKNOWN = 7
    STILL_SUSPENDED = 8
    INTERRUPTED = 130


class GpushareError(Exception):
    """Base of every error that a user sees; `facts` fill the template and go into the JSON as they are.

    `code` is the error's word, unique in the hierarchy and listed in docs/reference/cli.md.  `next_action` tells a
    controller what helps: `retry`, `cold-start` or `operator`.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    code: ClassVar[str] = "failure"
    next_action: ClassVar[str] = "operator"
    template: ClassVar[str] = "{what}"

    def __init__(self, **facts: object) -> None:
        self.facts: dict[str, object] = facts
        super().__init__(self.template.format(**{name: _text(value) for name, value in facts.items()}))

    @property
    def reason(self) -> str:
        """Return the word for `reason` in the JSON: that of the cause where an outcome wraps one."""
        cause = self.facts.get("cause")
        return cause.reason if isinstance(cause, GpushareError) else self.code


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return ", ".join(_text(item) for item in value)
    return str(value)
