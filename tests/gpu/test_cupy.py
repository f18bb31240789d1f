"""Two CuPy processes that share arrays by CUDA IPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import need_package
from tests.gpu.conftest import Group
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping


@pytest.mark.machine(driver="real")
@pytest.mark.timeout(300)
def test_cupy_ranks_share_arrays(machine: Setting, group: Group, tmp_path: Path) -> None:
    need_package("cupy", "CuPy")
    ranks = Stepping(machine, "tests.programs.cupy_rank", 2, tmp_path, {})
    try:
        ranks.wait_for_more(3, 90)
        group.cycle_at_work(ranks, 3)
        ranks.finish()
    finally:
        ranks.kill()
