"""Two CuPy processes that share arrays by CUDA IPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import lacking
from tests.gpu.conftest import Group
from tests.programs.setting import Setting
from tests.programs.stepping import Stepping
from tests.programs.usage import memory_by_pid


@pytest.mark.machine(driver="real")
@pytest.mark.timeout(300)
def test_cupy_ranks_share_arrays(machine: Setting, group: Group, tmp_path: Path) -> None:
    try:
        import cupy  # noqa: F401
    except ImportError:
        lacking("this test needs CuPy")
    ranks = Stepping(machine, "tests.programs.cupy_rank", 2, tmp_path, {})
    try:
        ranks.wait_for_more(3, 90)
        for _ in range(3):
            group.tool.suspend(*ranks.pids).expect(0)
            assert not memory_by_pid(machine).keys() & set(ranks.pids)
            group.tool.resume(*ranks.pids).expect(0)
            ranks.wait_for_more(3, 60)
        ranks.finish()
    finally:
        ranks.kill()
