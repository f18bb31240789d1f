"""Errors of commands on stores: one class for each kind of what the store says."""

from __future__ import annotations

from gpususpend.errors.base import ExitCode, GpushareError


class StoreProblem(GpushareError):
    """What the store says: `word` is its own word, `said` its message; further facts are the store's."""

    code = "store-problem"
    template = "{said}"

    @property
    def reason(self) -> str:
        """Return the store's word."""
        return str(self.facts["word"])


class StoreRefused(StoreProblem):
    """The store refused before it had changed anything."""

    exit_code = ExitCode.REFUSED
    code = "store-refused"


class StoreBusy(StoreRefused):
    """Another process works on the store."""

    code = "store-busy"
    next_action = "retry"


class StoreNotWritten(StoreProblem):
    """A store or a cache took no more bytes."""

    code = "store-not-written"


class StoreUnsound(StoreProblem):
    """Something that was saved is damaged, missing or unreadable."""

    exit_code = ExitCode.STORE_DAMAGED
    code = "store-unsound"


class CutOff(GpushareError):
    """A signal ended a command that can be repeated at any time."""

    exit_code = ExitCode.INTERRUPTED
    code = "cut-off"
    next_action = "retry"
    template = "ended by {signal}; {state}"
