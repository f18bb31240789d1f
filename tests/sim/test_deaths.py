"""A rank is killed before a phase or in one, either way: its death is what is told, and the others run again (FR-2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim.conftest import DOWN, DOWN_PAGES, MIB, UP, UP_PAGES, Run, Start, paused, running, stopped_threads

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]

# Calls of the rank itself, one after the other, in which it dies; and those of the driver process on all ranks.
OWN_DOWN = ["cuMemHostRegister_v2", "cuMemcpyDtoHAsync_v2", "cuMemUnmap", "cuMemHostUnregister"]
OWN_UP = [
    "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemHostRegister_v2", "cuMemcpyHtoDAsync_v2", "cuMemHostUnregister",
]  # fmt: skip
CALLS_DOWN = [("Lock", 1), ("Checkpoint", 1), ("GetState", 4)]
# The first question comes before the way up, the last ones end it.
CALLS_UP = [("GetState", 1), ("GetState", 4), ("Restore", 1), ("Unlock", 1), ("GetState", 7)]


class Crew:
    """Two ranks that share memory, and between them one that shares none, which dies."""

    def __init__(self, start: Start) -> None:
        first, self.doomed, last = start(0), start(0), start(1)
        self.others = first, last
        self.pids = [first.pid, self.doomed.pid, last.pid]
        self.doomed.fill(self.doomed.alloc(MIB), MIB, 1)
        for owner, other, seed in ((first, last, 3), (last, first, 7)):
            block = owner.alloc(3 * MIB)
            owner.fill(block, 3 * MIB, seed)
            other.expect(other.ipc_open(owner.ipc_get(block)), 3 * MIB, [seed])

    def told(self, answer: Answer, tool: Tool) -> None:
        """Check that a command names the dead as such and as the only loss, and that the others run."""
        error = answer.expect(5).json["error"]
        assert f"pid {self.doomed.pid} (python) died" in error["message"], answer
        assert "The other 2 run again" in error["message"] and error["facts"]["lost"] == [self.doomed.pid], answer
        assert (error["code"], error["cause"], answer.json["next"]) == ("lost", "rank-died", "cold-start"), answer
        assert not [warning for warning in answer.json["warnings"] if "driver error" in warning], answer
        self.works(tool)

    def works(self, tool: Tool) -> None:
        """Check that those who live run as before, and go through a cycle."""
        running(tool)
        for worker in self.others:
            assert stopped_threads(worker.pid) == []
            worker.check()
        pids = [worker.pid for worker in self.others]
        tool.suspend(*pids).expect(0)
        tool.resume(*pids).expect(0)
        for worker in self.others:
            worker.check()


def held(call: str, first: int = 1) -> str:
    """Return rules that hold a driver call on all three ranks."""
    return "; ".join(f"cuCheckpointProcess{call} {number} hold" for number in range(first, first + 3))


@pytest.fixture
def crew(start_worker: Start) -> Crew:
    """Three ranks, one of which is to die."""
    return Crew(start_worker)


@pytest.mark.parametrize("step", DOWN[1:])
def test_FR2_before_a_phase_of_a_suspend(crew: Crew, tool: Tool, tmp_path: Path, step: str) -> None:
    """Whatever has been done by then is undone for the others."""
    with paused(tool, tmp_path / "p", step, "suspend", *crew.pids) as go_on:
        crew.doomed.kill()
        crew.told(go_on(), tool)


@pytest.mark.parametrize("step", DOWN_PAGES[1:])
def test_FR2_before_a_phase_of_a_suspend_to_pages(crew: Crew, tool: Tool, tmp_path: Path, step: str) -> None:
    """The same without the driver's checkpoint."""
    with paused(tool, tmp_path / "p", step, "suspend", "--depth", "pages", *crew.pids) as go_on:
        crew.doomed.kill()
        crew.told(go_on(), tool)


@pytest.mark.parametrize("step", UP)
def test_FR2_before_a_phase_of_a_resume(crew: Crew, tool: Tool, tmp_path: Path, step: str) -> None:
    """The same command brings the others back."""
    tool.suspend(*crew.pids).expect(0)
    with paused(tool, tmp_path / "p", step, "resume", *crew.pids) as go_on:
        crew.doomed.kill()
        crew.told(go_on(), tool)


@pytest.mark.parametrize("step", UP_PAGES)
def test_FR2_before_a_phase_of_a_resume_from_pages(crew: Crew, tool: Tool, tmp_path: Path, step: str) -> None:
    """The same without the driver's restore."""
    tool.suspend(*crew.pids, options=("--depth", "pages")).expect(0)
    with paused(tool, tmp_path / "p", step, "resume", *crew.pids) as go_on:
        crew.doomed.kill()
        crew.told(go_on(), tool)


@pytest.mark.parametrize("call", OWN_DOWN)
def test_FR2_in_a_call_of_a_suspend(crew: Crew, tool: Tool, machine: Setting, call: str) -> None:
    """Its shim is at work for the command at that moment."""
    machine.inject(f"{call} 1 kill", crew.doomed.pid)
    crew.told(tool.suspend(*crew.pids), tool)


@pytest.mark.parametrize("call", OWN_UP)
def test_FR2_in_a_call_of_a_resume(crew: Crew, tool: Tool, machine: Setting, call: str) -> None:
    """The same on the way up."""
    tool.suspend(*crew.pids).expect(0)
    machine.inject(f"{call} 1 kill", crew.doomed.pid)
    crew.told(tool.resume(*crew.pids), tool)


@pytest.mark.parametrize(("call", "number"), CALLS_DOWN)
def test_FR2_in_a_driver_call_of_a_suspend(
    crew: Crew, tool: Tool, machine: Setting, background: Run, call: str, number: int
) -> None:
    """The driver's answer is an error that says nothing of a death."""
    machine.inject(held(call, number))
    command = background("suspend", *crew.pids)
    machine.wait_until_held()
    crew.doomed.kill()
    machine.inject("")
    crew.told(command.end(), tool)


def test_FR2_before_a_suspend_has_changed_anything(
    crew: Crew, tool: Tool, machine: Setting, background: Run
) -> None:
    """Refused, and the others can be suspended without it."""
    machine.inject(held("GetState"))
    command = background("suspend", *crew.pids)
    machine.wait_until_held()
    crew.doomed.kill()
    machine.inject("")
    answer = command.end().expect(3)
    assert answer.json["reason"] == "process-gone" and answer.json["error"]["pid"] == crew.doomed.pid, answer
    crew.works(tool)


@pytest.mark.parametrize(("call", "number"), CALLS_UP)
def test_FR2_in_a_driver_call_of_a_resume(
    crew: Crew, tool: Tool, machine: Setting, background: Run, call: str, number: int
) -> None:
    """The same on the way up, and where the driver is only asked for the state."""
    tool.suspend(*crew.pids).expect(0)
    machine.inject(held(call, number))
    command = background("resume", *crew.pids)
    machine.wait_until_held()
    crew.doomed.kill()
    machine.inject("")
    crew.told(command.end(), tool)
