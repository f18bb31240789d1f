"""The parts that all driver calls share: the answer, its code's name, the list of commands."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from cuda.bindings import driver as cu

MISSING = -1
"""Code of a call that the installed driver does not have."""

COMMANDS: dict[str, Callable[..., Any]] = {}


class Result(NamedTuple):
    """What the driver answered: its code (0 is success) and the value, None after a refusal."""

    code: int
    value: Any = None


class DriverError(RuntimeError):
    """A call that had to succeed was refused."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}: {code_name(code)}")
        self.code = code


def code_name(code: int) -> str:
    """Return the driver's name for `code`, with the number."""
    if code == MISSING:
        return "-1 (not in this driver)"
    try:
        return f"{code} {cu.CUresult(code).name}"
    except ValueError:
        return f"{code} (unknown)"


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Offer `function` under its own name."""
    COMMANDS[function.__name__] = function
    return function


def plain(value: Any) -> Any:
    """Turn the wrappers of cuda-bindings into numbers."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    try:
        return int(value)
    except TypeError:
        return str(value)


def ask(name: str, *arguments: Any) -> Result:
    """Call the driver function `name` and return its answer in plain values."""
    raw = ask_raw(name, *arguments)
    return Result(raw.code, plain(raw.value))


def ask_raw(name: str, *arguments: Any) -> Result:
    """Call the driver function `name`; the value stays as cuda-bindings returns it."""
    try:
        answer = getattr(cu, name)(*arguments)
    except RuntimeError as error:
        if "not found" not in str(error):
            raise
        return Result(MISSING)
    except (KeyError, ValueError) as error:
        # cuda-bindings cannot name a code that is newer than itself.
        number = re.fullmatch(r"'?(\d+)'?( is not a valid CUresult)?", str(error))
        if number is None:
            raise
        return Result(int(number[1]))
    answer = answer if isinstance(answer, tuple) else (answer,)
    code, values = int(answer[0]), answer[1:]
    if code != 0 or not values:
        return Result(code)
    return Result(0, values[0] if len(values) == 1 else list(values))


def need(result: Result, what: str = "driver call") -> Any:
    """Return the value of a call that has to succeed."""
    if result.code != 0:
        raise DriverError(what, result.code)
    return result.value


@functools.cache
def is_simulated() -> bool:
    """Tell whether the driver in this process is the simulated one."""
    return hasattr(ctypes.CDLL("libcuda.so.1"), "simcudaVersion")
