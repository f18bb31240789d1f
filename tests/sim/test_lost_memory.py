"""A rank dies suspended and takes memory along that others map: nothing brings these back, all others run again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim.conftest import records

MIB = 1 << 20
LOST = 5
Start = Callable[..., Worker]
pytestmark = pytest.mark.machine(driver="sim")


def needs(owner: Worker, other: Worker, size: int) -> int:
    """Let one map memory of another; return its address there."""
    memory = owner.alloc(size)
    owner.fill(memory, size, 1)
    opened = int(other.ipc_open(owner.ipc_get(memory)))
    other.expect(opened, size, [1])
    return opened


def test_only_who_needs_it_is_lost(start_worker: Start, tool: Tool) -> None:
    """The dead and who needs its memory are named, with the bytes; who maps memory of the latter runs again."""
    dead, needy, third = start_worker(0), start_worker(1), start_worker(0)
    needs(dead, needy, 4 * MIB)
    needs(needy, third, 2 * MIB)
    tool.suspend(dead.pid, needy.pid, third.pid).expect(0)
    dead.kill()
    answer = tool.resume(dead.pid, needy.pid, third.pid).expect(LOST)
    assert answer.json["next"] == "cold-start"
    facts, message = answer.json["error"]["facts"], answer.json["error"]["message"]
    assert facts["lost"] == sorted([dead.pid, needy.pid])
    assert f"pid {needy.pid}" in message and f"{4 * MIB} bytes that pid {dead.pid} took along" in message
    assert "The other 1 run again" in message
    third.check()

    left, = records(tool)
    assert [member["pid"] for member in left["members"]] == [needy.pid]
    again = tool.resume(needy.pid).expect(LOST)
    assert str(needy.pid) in again.stdout and again.json["next"] == "cold-start"
    needy.kill()
    tool.suspend(third.pid).expect(0)
    tool.resume(third.pid).expect(0)
    third.fill(third.alloc(MIB), MIB, 1)


def test_a_lost_descriptor_is_no_lost_process(start_worker: Start, tool: Tool) -> None:
    """Who only holds a descriptor of memory that is gone runs again, with a warning."""
    owner, other = start_worker(0), start_worker(0)
    block = owner.block(2 * MIB)
    owner.fill(block["address"], 2 * MIB, 1)
    number = owner.hand(owner.mem_export(block["handle"]), other)
    tool.suspend(owner.pid, other.pid).expect(0)
    owner.kill()
    answer = tool.resume(owner.pid, other.pid).expect(LOST)
    assert answer.json["error"]["facts"]["lost"] == [owner.pid]
    assert any("1 descriptor" in warning for warning in answer.json["warnings"])
    assert other.readlink(number) == "/dev/null"
    other.close_fd(number)
    other.check()
