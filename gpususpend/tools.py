"""The means of a command: driver process, holder, arenas, memory limits, GPU usage.

Owns how they are started for the real and for the simulated driver, as one object that tests can replace.  A command
that needs no driver starts none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpususpend import driver, holder, processes
from gpususpend.deadline import Deadline
from gpususpend.driver import DriverProcess, DriverState
from gpususpend.holder import Holder, HolderRecord
from gpususpend.journal import PendingCall, Record

if TYPE_CHECKING:
    from chunkstore.system import System
    from gpususpend.arena import Arena
    from gpususpend.gpus import Gpu, GpuUsage


def state_name(state: int) -> str:
    """Return a state's name; one that is not known is not RUNNING, and its number is shown."""
    try:
        return DriverState(state).name
    except ValueError:
        return f"state {state}"


class Tools:
    """The real means, on one state directory."""

    def __init__(self, state_dir: str, simulated: bool) -> None:
        self.state_dir = Path(state_dir)
        self.simulated = simulated

    def start_driver(self) -> DriverProcess:
        """Start a driver process.  Raises NoDriver, DriverTooOld, HelperFailed."""
        return DriverProcess.start(self.state_dir, self.simulated)

    def start_holder(self) -> Holder:
        """Start a holder; on the simulated driver the GPU's own threads go on too."""
        names = [processes.CONTROL_THREAD, *([processes.SIMULATED_GPU_THREAD] if self.simulated else [])]
        return Holder.start(self.state_dir, names)

    def prepare_arena(self, size: int, progress: Callable[[int], None], dumpable: bool) -> Arena:
        """Make an arena of populated memory, of a kind that CRIU can dump or of any.  Raises NotEnoughMemory."""
        from gpususpend import arena

        return arena.prepare(size, arena.DUMPABLE_KINDS if dumpable else arena.ALL_KINDS, progress=progress)

    def is_dumpable(self, pid: int) -> bool:
        """Tell whether the arena that a process has is of a kind that CRIU can dump."""
        from gpususpend import arena

        return arena.is_dumpable(pid)

    def system(self) -> System:
        """Return the file operations on stores."""
        from chunkstore.system import System

        return System()

    def check_memory(self, charges: Sequence[tuple[int, int]]) -> None:
        """Refuse unless every process can be charged its bytes, all together.  Raises NotEnoughMemory."""
        from gpususpend import cgroup

        cgroup.require(charges)

    def usage(self, process: DriverProcess) -> dict[str, GpuUsage]:
        """Return the memory of every GPU, by UUID."""
        from gpususpend import gpus

        return gpus.gpus_of(process).usage()

    def gpus(self, process: DriverProcess) -> Sequence[Gpu]:
        """Return every GPU."""
        from gpususpend import gpus

        return gpus.gpus_of(process).list()

    def pairs(self, path: str, old: Sequence[str], process: DriverProcess) -> list[tuple[str, str]]:
        """Read a GPU map and check it against the GPUs of the suspend and of this machine.  Raises GpuMapMismatch."""
        from gpususpend import gpus

        found = gpus.read_map(Path(path))
        gpus.check_map(found, old or [pair[0] for pair in found], gpus.gpus_of(process).list())
        return found

    def call_returned(self, driver_pid: int, call: str, pid: int) -> bool:
        """Tell whether a call that was left in a driver process has returned by now."""
        for leftover in driver.leftovers(self.state_dir):
            if leftover.pid == driver_pid:
                result = leftover.results.get((call, pid))
                return result is not None and result.finished
        return False

    def await_calls(
        self, calls: Sequence[PendingCall], deadline: Deadline, while_waiting: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until every call has returned, or its driver process has ended; False if one runs at the deadline."""

        def over(call: PendingCall) -> bool:
            ended = not processes.is_alive(call.driver_pid, call.driver_start_time)
            return ended or self.call_returned(call.driver_pid, call.call, call.pid)

        while not all(over(call) for call in calls):
            if deadline.passed():
                return False
            while_waiting()
            deadline.sleep(0.05)
        return True

    def holders_of(self, record: Record) -> list[HolderRecord]:
        """Return the holders that were kept for a group.

        Also those that the record does not know yet: a command may die between the two notes.
        """
        found: dict[tuple[int, int], HolderRecord] = {}
        if record.holder is not None:
            with contextlib.suppress(ValueError):
                known = HolderRecord.from_dict(record.holder)
                found[known.pid, known.start_time] = known
        members = {member.pid: member.start_time for member in record.members}
        with contextlib.suppress(FileNotFoundError):
            for other in holder.records(self.state_dir):
                if any(members.get(pid) == start_time for pid, start_time in other.targets.items()):
                    found[other.pid, other.start_time] = other
        return list(found.values())

    def end_holders(
        self, record: Record, deadline: Deadline, warn: Callable[[str], None], tell: Callable[[str], None]
    ) -> bool:
        """End every holder of a group: its threads go on.  Return whether there was one that still held them.

        `tell` is called with whom is waited for.
        """
        held = False
        for kept in self.holders_of(record):
            result = holder.end(kept, deadline, tell)
            held = held or result.found
            if result.killed:
                warn(f"the holder (pid {kept.pid}) did not end by itself and was killed; its threads go on")
        return held
