"""With the shim a program gets the answers that it gets without, but for a list."""

from __future__ import annotations

import dataclasses

import pytest

from tests.programs import transparency
from tests.programs.setting import Setting
from tests.programs.transparency import Allowed


def differences(machine: Setting, with_shim: Setting) -> list[str]:
    """Ask with and without the shim, and return what the list does not explain; skipped where there is no list."""
    without = transparency.answers(machine, with_shim=False)
    assert len(without) > 900  # with one device; each more adds its own
    kind = "simulated" if machine.simulated else "real"
    rows = transparency.allowed().get(kind)
    found = transparency.unexplained(without, transparency.answers(with_shim, with_shim=True), rows or [])
    if rows is None:
        pytest.skip(f"no list for a {kind} driver in {transparency.LIST.name} yet; it has to hold: {'; '.join(found)}")
    return found


def test_the_difference_is_the_list(machine: Setting) -> None:
    assert differences(machine, machine) == []


def test_what_is_kept_is_not_different(machine: Setting) -> None:
    """The entry for multicast is there because of a setting: without it the list has one row too many."""
    if not machine.simulated:
        pytest.skip("multicast is kept on the simulated driver only")
    kept = dataclasses.replace(machine, extra=machine.extra | {"GPUSHARE_MULTICAST": "keep"})
    found = differences(machine, kept)
    assert found == ["device *: MULTICAST_SUPPORTED: listed, and there is no such difference"]


def test_a_difference_that_is_not_listed_is_found() -> None:
    row = Allowed("device *: A", 1, 0, "")
    same = {"device 0: A": 1, "device 0: B": 2}
    assert transparency.unexplained(same, same | {"device 0: A": 0}, [row]) == []
    for changed in ({"device 0: A": 2}, {"device 0: A": 0, "device 0: B": 0}, {"device 0: A": 0, "device 1: C": 0}):
        assert len(transparency.unexplained(same, same | changed, [row])) == (2 if changed["device 0: A"] == 2 else 1)


def test_a_row_is_missed_only_where_the_machine_gives_its_answer() -> None:
    row = Allowed("device *: A", 1, 0, "")
    assert transparency.unexplained({"device 0: A": 0}, {"device 0: A": 0}, [row]) == []
    assert transparency.unexplained({"device 0: B": 1}, {"device 0: B": 1}, [row]) == []
    assert len(transparency.unexplained({"device 0: A": 1}, {"device 0: A": 1}, [row])) == 1


def test_the_page_prints_the_list() -> None:
    assert transparency.PAGE.read_text() == transparency.page(), "run: python -m tests.programs.transparency"
