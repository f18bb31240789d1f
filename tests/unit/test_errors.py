"""Errors and exit codes: each used once, each documented."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import re
import string
from pathlib import Path

import pytest

import chunkstore.errors
import gpususpend
from chunkstore.errors import StoreError
from gpususpend import errors, preflight

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"


def hierarchy(root: type[errors.GpushareError] = errors.GpushareError) -> list[type[errors.GpushareError]]:
    """Return every error class of the package."""
    for module in pkgutil.iter_modules(gpususpend.__path__):
        if module.name not in ("__main__", "demo", "simcuda") and not module.name.startswith("lib"):
            importlib.import_module(f"gpususpend.{module.name}")
    found = [root]
    for one in found:
        found += [sub for sub in one.__subclasses__() if sub not in found]
    return [one for one in found if one.__module__.startswith("gpususpend")]


def test_every_word_is_used_once() -> None:
    """A controller can tell errors apart by their word."""
    words = [one.code for one in hierarchy()]
    assert sorted(words) == sorted(set(words))


def test_FR83_every_word_and_exit_code_is_documented() -> None:
    """In the reference, the exit codes with their numbers."""
    text = REFERENCE.read_text()
    missing = [one.code for one in hierarchy() if f"`{one.code}`" not in text]
    assert missing == []
    rows = re.findall(r"^\| (\d+) \|", text, re.M)
    assert sorted(map(int, rows)) == sorted(int(code) for code in errors.ExitCode)


def test_outcomes_have_an_exit_code_each() -> None:
    """From 4 on one class stands for one code."""
    codes = [one.exit_code for one in hierarchy(errors.Outcome)[1:]]
    assert sorted(codes) == sorted(set(codes))
    assert set(codes) == {code for code in errors.ExitCode if code >= 4}


@pytest.mark.parametrize("kind", hierarchy(), ids=lambda kind: kind.__name__)
def test_templates_need_no_more_than_their_facts(kind: type[errors.GpushareError]) -> None:
    """Every template can be filled, and the facts are kept."""
    names = [name for _, name, _, _ in string.Formatter().parse(kind.template) if name]
    error = kind(**{name: f"<{name}>" for name in names}, extra=1)
    assert all(f"<{name}>" in str(error) for name in names) and error.facts["extra"] == 1
    assert kind.next_action in ("retry", "cold-start", "operator")


def test_no_message_ends_its_sentence() -> None:
    """It stands before a full stop where it is the cause of another."""
    ours = [*hierarchy(), *store_errors()]
    told = [kind.template for kind in ours] + [*preflight.WAYS_OUT.values(), *chunkstore.errors._ADVICE.values()]
    missing = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    told.append(str(chunkstore.errors.unreadable("cannot read", "/x", missing)))
    assert [text for text in told if text.endswith((".", "?", "!"))] == []


def store_errors(root: type[StoreError] = StoreError) -> list[type[StoreError]]:
    """Return every error class of the store."""
    return [root, *(found for sub in root.__subclasses__() for found in store_errors(sub))]


def test_reason_is_that_of_the_cause() -> None:
    """A deadline that ended in rollback says so."""
    late = errors.DeadlinePassed(step="lock", pid=1, seconds=60, detail="")
    assert errors.RolledBack(cause=late, count=2).reason == "deadline"
