"""Memory of the group that somebody else opens while a suspend is on its way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.sim.conftest import MIB, Background

pytestmark = pytest.mark.machine(driver="sim")

SIZE = 2 * MIB


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_an_outsider_is_named(
    start_worker: Callable[..., Worker], background: Callable[..., Background], machine: Setting, depth: str
) -> None:
    """It would keep the memory of before: its pid is told, everybody runs, and the memory is shared still.

    By IPC; who got a descriptor is found by that.
    """
    owner, outsider = start_worker(0), start_worker(1)
    address = owner.alloc(SIZE)
    handle = owner.ipc_get(address)
    owner.write(address, [1])
    machine.inject("cuMemHostRegister_v2 1 hold", owner.pid)
    command = background("suspend", "--depth", depth, owner.pid)
    command.wait_for_step("prepare")
    machine.wait_until_held()
    opened = outsider.ipc_open(handle)
    machine.inject("", owner.pid)
    answer = command.end().expect(4)
    assert answer.json["error"]["facts"]["missing"] == [outsider.pid], answer
    owner.write(address, [7])
    assert outsider.read(opened) == [7]
