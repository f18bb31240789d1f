"""One comparison of a benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """A value beside a named baseline of the same run. `limit` says in words what was wanted, if anything was.

    `within_limit` is None where nobody can tell: on the simulated driver, whose times say nothing about a GPU. `note`
    is what else is to be known.
    """

    what: str
    value: float
    unit: str
    baseline: str
    baseline_value: float | None
    limit: str = ""
    within_limit: bool | None = True
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Return the value as a part of the baseline's."""
        return self.value / self.baseline_value if self.baseline_value else None

    @property
    def verdict(self) -> str:
        """Return whether the limit was held, in a word; nothing where there is none."""
        words = {True: "held", False: "missed", None: "not judged"}
        return words[self.within_limit] if self.limit else ""

    def data(self) -> dict[str, Any]:
        """Return the line for a record."""
        return {**asdict(self), "ratio": self.ratio}
