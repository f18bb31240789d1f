"""With the shim a program gets the answers that it gets without, but for a list."""

from __future__ import annotations

import dataclasses

import pytest

from tests.programs import transparency
from tests.programs.setting import Setting
from tests.programs.transparency import Allowed


def rows_for(machine: Setting) -> list[Allowed]:
    """Return the differences that are meant on this driver."""
    driver = "simulated" if machine.simulated else "real"
    if driver not in transparency.allowed():
        pytest.skip(f"no list for a {driver} driver in {transparency.LIST.name} yet")
    return transparency.allowed()[driver]


def test_the_difference_is_the_list(machine: Setting) -> None:
    rows = rows_for(machine)
    without = transparency.answers(machine, with_shim=False)
    assert len(without) > 1000
    assert transparency.unexplained(without, transparency.answers(machine, with_shim=True), rows) == []


def test_what_is_kept_is_not_different(machine: Setting) -> None:
    """The entry for multicast is there because of a setting: without it the list has one row too many."""
    rows = rows_for(machine)
    kept = dataclasses.replace(machine, extra=machine.extra | {"GPUSHARE_MULTICAST": "keep"})
    if not machine.simulated:
        pytest.skip("multicast is kept on the simulated driver only")
    found = transparency.unexplained(
        transparency.answers(machine, with_shim=False), transparency.answers(kept, with_shim=True), rows
    )
    assert found == ["device *: MULTICAST_SUPPORTED: listed, and there is no such difference"]


def test_a_difference_that_is_not_listed_is_found() -> None:
    row = Allowed("device *: A", 1, 0, "")
    same = {"device 0: A": 1, "device 0: B": 2}
    assert transparency.unexplained(same, same | {"device 0: A": 0}, [row]) == []
    for changed in ({"device 0: A": 2}, {"device 0: A": 0, "device 0: B": 0}, {"device 0: A": 0, "device 1: C": 0}):
        assert len(transparency.unexplained(same, same | changed, [row])) == (2 if changed["device 0: A"] == 2 else 1)


def test_the_page_prints_the_list() -> None:
    assert transparency.PAGE.read_text() == transparency.page(), "run: python -m tests.programs.transparency"
