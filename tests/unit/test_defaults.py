"""Every default and every limit stands in one place of the code and in one table of the reference, with one value."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from gpususpend import defaults
from tests.programs.setting import ROOT

ROW = re.compile(r"^\| `([\w]+)` \| ([\d.]+) \|", re.M)
# What is waited between two looks: nothing ends by it.
PAUSES = re.compile(r"(LOOK|PAUSE|POLL|JOIN)_S$")
SHIM_PAUSES = re.compile(r"(PAUSE|AGAIN|FOREVER)_M?U?S$")


def rows(heading: str) -> dict[str, float]:
    """Return names and values of the table under a heading of the reference."""
    text = (ROOT / "docs/reference/cli.md").read_text()
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    return {name: float(value) for name, value in ROW.findall(section)}


def numbers(path: Path) -> dict[str, float]:
    """Return the constants of a module that are plain numbers."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
            if not any(isinstance(part, (ast.Call, ast.Name, ast.Attribute)) for part in ast.walk(node.value)):
                value = eval(compile(ast.Expression(node.value), str(path), "eval"))
                values = value if isinstance(node.targets[0], ast.Tuple) else (value,)
                found |= {name: one for name, one in zip(names, values, strict=True) if isinstance(one, (int, float))}
    return found


def test_the_table_is_that_of_the_code() -> None:
    """Neither holds a row that the other lacks; versions are told elsewhere."""
    constants = numbers(Path(defaults.__file__))
    told = {name.lower(): value for name, value in constants.items() if not re.match("OLDEST|PROTOCOL", name)}
    assert rows("Defaults") == vars(defaults.Limits()) | told


def test_no_limit_stands_elsewhere() -> None:
    """No module of the commands has a time limit of its own."""
    elsewhere = {
        f"{path.name}: {name}"
        for path in [*(ROOT / "gpususpend").glob("*.py"), *(ROOT / "gpususpend/cli").rglob("*.py")]
        if path.name != "defaults.py"
        for name in numbers(path)
        if name.endswith("_S") and not PAUSES.search(name)
    }
    assert not elsewhere


def test_limits_of_the_shim_are_in_the_table() -> None:
    """With the values that it is compiled with."""
    text = "".join(path.read_text() for path in (ROOT / "shim").glob("*.pxi"))
    limits = {name: float(value) for name, value in re.findall(r"^    ([A-Z_]+_[MU]S) = (\d+)$", text, re.M)}
    assert rows("Limits of the shim") == {name: value for name, value in limits.items() if not SHIM_PAUSES.search(name)}
