"""The support matrix names nothing that is not there, and says of every cell what stands behind it.

Pitfall 18, FR-25, FR-32: what works where is what was seen, not what a driver's version lets one hope.
"""

from __future__ import annotations

import re

import pytest

from tests.programs.setting import ROOT

TEXT = (ROOT / "docs" / "reference" / "support-matrix.md").read_text()
SCENARIOS = (ROOT / "docs" / "results" / "gpu-scenarios.md").read_text()
NEVER = "never run"
ONLY = "simulated driver only"


def rows() -> list[list[str]]:
    """Return the cells of every row: what, simulated driver, GPU."""
    lines = [line.strip("| \n").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if cells[0] != "what"]


ROWS = rows()
IDS = [cells[0][:60] for cells in ROWS]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", TEXT))))
def test_named_test_exists(path: str) -> None:
    file, _, name = path.partition("::")
    assert (ROOT / file).is_file()
    assert not name or re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M)


@pytest.mark.parametrize("cells", ROWS, ids=IDS)
def test_every_cell_says_what_stands_behind_it(cells: list[str]) -> None:
    """A test on the simulated driver, or why there is none; on a GPU a test or a record with its run, or none."""
    assert len(cells) == 3
    _, simulated, gpu = cells
    assert re.search(r"`tests/[\w/]+\.py::\w+`|^no \w+ runs there$", simulated)
    assert gpu == ONLY or gpu.startswith(NEVER) or re.search(r"record `[\w.-]+`$|, [0-9a-f]{7}$", gpu)
    assert not gpu.startswith("the same") or "tests/gpu/" in simulated
    assert gpu != ONLY or "::" in simulated


@pytest.mark.parametrize("cells", ROWS, ids=IDS)
def test_runs_that_are_named_are_recorded(cells: list[str]) -> None:
    gpu = cells[2]
    for commit in re.findall(r"\b[0-9a-f]{7}\b", gpu):
        assert f"| {commit} |" in SCENARIOS
    for name in re.findall(r"record `([\w.-]+)`", gpu):
        assert (ROOT / "docs" / "results" / "raw" / f"{name}.json").is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/reference/support-matrix.md"])
def test_multicast_and_fabric_are_said_to_be_simulated(page: str) -> None:
    """FR-19: nobody shall take them for something that has met a GPU."""
    text = " ".join((ROOT / page).read_text().split())
    assert re.search(r"Multicast and fabric handles have run on the simulated driver only", text)
    for cells in ROWS:
        if re.match(r"multicast, from|fabric", cells[0]):
            assert cells[2] == ONLY
