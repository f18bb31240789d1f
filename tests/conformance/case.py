"""What a case is: a function that asks the driver and notes the answers.

Noted are codes, values and relations, never an address or another number that differs from run to run. A case that
needs several processes starts workers; one that needs one asks the driver in its own process.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from tests.programs import calls
from tests.programs.calls import Result, need
from tests.programs.client import Worker, WorkerTimeout

MIB = 1 << 20
HANGS = "hangs"
HANG_S = 30.0
"""How long a call may take before it counts as hanging; every call of the suite is done in milliseconds otherwise."""
LOST_S = 2.0
"""The same for a call of a process that is lost: it is expected to hang, and a busy machine can only delay the rest."""


class Seen:
    """The answers of one case, written out as they come, so that a case that hangs keeps what it saw before."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, name: str, answer: Any) -> None:
        """Note an answer: of a `Result` its code."""
        self._out.write(json.dumps([name, answer.code if isinstance(answer, Result) else answer]) + "\n")
        self._out.flush()

    def value(self, name: str, answer: Result) -> None:
        """Note the value of a call, or its code if it was refused."""
        self(name, answer.value if answer.code == 0 else f"refused {answer.code}")


Start = Callable[..., Worker]
"""Starts a worker on a device: start(0), start(None) for one without CUDA."""


@dataclass(frozen=True)
class Case:
    """One case and what it needs.

    `bare`: it is about what the shim replaces, so it runs without the shim only. `crashes`: a real driver was seen to
    take the process with it, so only a simulated one is asked.
    """

    name: str
    function: Callable[[Seen, Start], None]
    devices: int = 1
    bare: bool = False
    crashes: bool = False
    alone: bool = False
    timeout_s: float = 60.0


CASES: dict[str, Case] = {}


def case(**needs: Any) -> Callable[[Callable[[Seen, Start], None]], Callable[[Seen, Start], None]]:
    """Add a function to the suite."""

    def add(function: Callable[[Seen, Start], None]) -> Callable[[Seen, Start], None]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        CASES[name] = Case(name, function, **needs)
        return function

    return add


def all_cases() -> dict[str, Case]:
    """Return every case by name."""
    package = importlib.import_module("tests.conformance.cases")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return CASES


def here(ordinal: int = 0) -> int:
    """Start CUDA in this process and return the context."""
    need(calls.init(), "cuInit")
    context = int(need(calls.primary_retain(ordinal), "primary context"))
    need(calls.ctx_set(context), "set the context")
    return context


def asked(worker: Worker, name: str, *arguments: Any, deadline_s: float = HANG_S) -> Any:
    """Return the code of a worker's call, or `hangs`."""
    try:
        return worker.try_(name, *arguments, deadline_s=deadline_s).code
    except WorkerTimeout:
        return HANGS


def mapped(size: int, kind: str = "device", handle_type: int = 1, access: bool = True) -> tuple[int, int]:
    """Create and map memory in this process; return handle and address."""
    handle = int(need(calls.mem_create(size, kind, 0, handle_type), "create"))
    address = int(need(calls.mem_reserve(size), "reserve"))
    need(calls.mem_map(address, size, handle), "map")
    if access:
        need(calls.mem_access(address, size, [["device", 0, 3]]), "access")
    return handle, address
