"""The library as its page describes it: the example runs, is typed, and every name is there."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chunkstore
from tests.programs.setting import ROOT

PAGE = (ROOT / "docs" / "reference" / "chunkstore.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
SPANS = set(re.findall(r"`([\w.]+)`", PAGE))
OURS = sorted(span for span in SPANS if span.split(".")[0] in ("chunkstore", *chunkstore.__all__))


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python beside a file with the example, as somebody who has the packages installed."""
    (tmp_path / "example.py").write_text(EXAMPLE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)


def test_example_prints_what_the_page_says(tmp_path: Path) -> None:
    done = run(tmp_path, "example.py", ".")
    assert done.returncode == 0, done.stderr
    sizes = ("67108864", "37748736")
    assert done.stdout.split() == ["new", sizes[0], "zero", sizes[1], "store", sizes[0], "zero", sizes[1], "1"]
    assert all(size in PAGE for size in sizes)


def test_example_is_typed(tmp_path: Path) -> None:
    """Strictly, from outside of this tree; and a content of another type is an error."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    wrong = EXAMPLE.replace("store.put(memory[", "store.put(str(memory)[")
    assert wrong != EXAMPLE
    (tmp_path / "wrong.py").write_text(wrong)
    check = ("-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache"))
    done = run(tmp_path, *check, "example.py")
    assert done.returncode == 0, done.stdout
    (line, _) = run(tmp_path, *check, "wrong.py").stdout.splitlines()
    assert 'has incompatible type "str"; expected "memoryview' in line, line


def test_page_names_everything_public() -> None:
    names = {span.split(".")[0] for span in SPANS}
    assert set(chunkstore.__all__) <= names


@pytest.mark.parametrize("span", OURS)
def test_what_the_page_names_is_there(span: str) -> None:
    first, *rest = span.split(".")
    if first == "chunkstore" and rest:
        module, *rest = rest
        found: object = importlib.import_module(f"chunkstore.{module}")
    else:
        found = chunkstore if first == "chunkstore" else getattr(chunkstore, first)
    for name in rest:
        found = getattr(found, name)
    assert found.__doc__ or not callable(found)
