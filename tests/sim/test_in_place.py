"""Groups that are only ever resumed where they are: their memory may lie where no dump can take it."""

from __future__ import annotations

import pytest

from gpususpend import arena
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import Pair, records, running

pytestmark = pytest.mark.usefixtures("own_network")


def in_place(tool: Tool, *pids: int) -> Answer:
    """Suspend with --in-place."""
    return tool.run("suspend", "--driver", "sim", "--in-place", *pids).expect(0)


def test_a_cycle(pair: Pair, tool: Tool) -> None:
    """The same as any other, again and again; asked for without the option, the group is suspended already."""
    for _ in range(2):
        assert in_place(tool, *pair.pids).json["groups"][0]["depth"] == "process"
        assert tool.suspend(*pair.pids).expect(0).json["already"] is True
        tool.resume(*pair.pids).expect(0)
        running(tool)
        pair.check()


def test_it_is_not_made_ready_for_a_dump(pair: Pair, tool: Tool) -> None:
    """`stop` is refused and changes nothing; a suspend without the option makes it possible."""
    in_place(tool, *pair.pids)
    before = records(tool)
    refusal = tool.run("stop", "--driver", "sim", *pair.pids).expect(3)
    assert refusal.json["reason"] == "in-place" and "--in-place" in refusal.json["error"]["message"]
    assert records(tool) == before
    tool.resume(*pair.pids).expect(0)
    tool.suspend(*pair.pids).expect(0)
    tool.run("stop", "--driver", "sim", *pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    pair.check()


@pytest.mark.usefixtures("private_huge_pages")
def test_an_arena_that_stayed_is_not_used_for_a_dump(pair: Pair, tool: Tool, machine: Setting) -> None:
    """One that the driver did not let go at a resume: the next suspend in place uses it, any other replaces it."""
    in_place(tool, *pair.pids)
    assert not arena.is_dumpable(pair.first.pid)
    machine.inject("cuMemHostUnregister 1 1", pair.first.pid)
    answer = tool.resume(*pair.pids).expect(0)
    assert any("keeps its arena" in text for text in answer.json["warnings"])
    machine.inject("", pair.first.pid)
    tool.suspend(*pair.pids).expect(0)
    assert arena.is_dumpable(pair.first.pid) and arena.is_dumpable(pair.second.pid)
    tool.run("stop", "--driver", "sim", *pair.pids).expect(0)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()
