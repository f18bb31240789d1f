"""A model of a group: shims, driver and holder as state machines, stricter than the real ones.

Every call is recorded; one that comes in the wrong state is a failure of the test at once (`Wrong`), not an answer.
Failures, hangs, deaths and signals are planted by the name of the call.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpususpend import errors, processes
from gpususpend.control import Reply, ShimRefused
from gpususpend.deadline import Deadline
from gpususpend.defaults import limits_with
from gpususpend.driver import DriverResult, DriverState, DriverVersion
from gpususpend.gpus import GpuUsage
from gpususpend.group import Group, Rank
from gpususpend.holder import HolderRecord, HoldTarget
from gpususpend.interrupt import Interrupts
from gpususpend.journal import Kind, Member, PendingCall, Record, Stage
from gpususpend.progress import Progress
from gpususpend.session import Context, Session
from gpususpend.statedir import StateDir

GIB = 1 << 30
PHASES = ("running", "quiescing", "quiesced", "released", "sealed", "loading", "loaded", "remapped")


class Wrong(AssertionError):
    """The supervisor did what must never be done."""


@dataclass
class World:
    """Everything that a test plants and looks at."""

    calls: list[str] = field(default_factory=list)  # "verb pid" and "driver:call pid", in order
    fail: dict[str, int] = field(default_factory=dict)  # call -> how many times it still fails
    hang: set[str] = field(default_factory=set)  # driver calls that do not return
    mute: set[str] = field(default_factory=set)  # requests that are not answered
    on: dict[str, Callable[[], None]] = field(default_factory=dict)  # what happens just before a call
    shims: dict[int, ModelShim] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)  # by a holder that outlives its command

    def begin(self, call: str) -> None:
        """Record a call and let happen what was planted for it."""
        self.calls.append(call)
        for name in (call, call.split()[0]):
            if name in self.on:
                self.on.pop(name)()

    def fails(self, call: str) -> bool:
        """Tell whether this call fails, and count it."""
        for name in (call, call.split()[0]):
            if self.fail.get(name, 0) > 0:
                self.fail[name] -= 1
                return True
        return False

    def order(self, *names: str) -> list[str]:
        """Return the calls of these names in the order of their first occurrence."""
        seen = dict.fromkeys(call.split()[0] for call in self.calls)
        return [name for name in seen if name in names]


class ModelShim:
    """One shim.  `dirty` is what a half-done release or load leaves."""

    def __init__(self, world: World, pid: int) -> None:
        self.world = world
        self.pid = pid
        self.phase = "running"
        self.gates = "open"
        self.dropped = self.unmapped = self.sealed = False
        self.arena = 0

    def request(self, verb: str, deadline: Deadline, fd: int | None = None, **fields: Any) -> Reply:
        """Answer as the protocol says."""
        call = f"{verb} {self.pid}"
        self.world.begin(call)
        if not alive(self.pid):
            raise ConnectionResetError("gone")
        if call in self.world.mute:
            raise TimeoutError
        if self.world.fails(call):
            self._half_done(verb)
            raise ShimRefused(verb, Reply(False, {"code": "cuda", "step": "x", "cuda": "2", "msg": "planted"}))
        answer = getattr(self, "_" + verb.replace("-", "_"))(fields)
        return Reply(True, {name: str(value) for name, value in answer.items()}, self._groups(verb))

    def listing(self, verb: str, deadline: Deadline, **fields: Any) -> list[dict[str, str]]:
        """Answer a list."""
        return self.request(verb, deadline, **fields).groups

    def close(self) -> None:
        """Nothing to hang up."""

    def _groups(self, verb: str) -> list[dict[str, str]]:
        return [{"device": "GPU-a", "bytes": str(GIB)}] if verb == "plan" else []

    def _need(self, condition: bool, what: str) -> None:
        if not condition:
            raise Wrong(f"{what} on {self.pid} in phase {self.phase}, gates {self.gates}")

    def _half_done(self, verb: str) -> None:
        if verb == "release":
            self.phase, self.unmapped = "releasing", True
        if verb in ("load", "remap"):
            self.phase = "loading"

    def _status(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"phase": self.phase, "arena_bytes": self.arena, "carried_bytes": GIB, "lease": "none", "busy": "-"}

    def _plan(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"arena_bytes": GIB, "host_bytes": 0, "unresolved": 0, "uncarried": 0}

    def _arena(self, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("unlock"):
            self._need(self.phase == "released" and self.dropped, "an arena is unlocked before all is in it")
            return {"bytes": self.arena, "locked_bytes": 0}
        if int(fields["bytes"]) == 0:
            self._need(not self.dropped, "the arena is given up while it holds the only copy")
        if self.arena > 0:
            # The driver waits for the GPU when it unlocks pages, and holds others up meanwhile.
            self._need(self.phase not in ("running", "quiescing"), "a locked arena is given up while the rank works")
        self.arena = int(fields["bytes"])
        return {"bytes": self.arena, "locked_bytes": self.arena}

    def _close_launch(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._need(self.phase in ("running", "quiescing"), "close-launch")
        self.phase, self.gates = "quiescing", "launch closed"
        return {}

    def _drain(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._need(self.gates == "launch closed", "drain")
        return {"drained": 1, "waiting": 0, "admitted": 0, "in_flight": 0}

    def _close_memory(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._need(all(shim.gates != "open" for shim in living(self.world)), "close-memory before all drained")
        self.phase, self.gates = "quiesced", "closed"
        return {}

    def _imports(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _orphans(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _release(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._need(self.phase in ("quiesced", "releasing"), "release")
        self._need(all(s.gates == "closed" for s in living(self.world)), "release before all are quiesced")
        self._need(self.arena >= GIB, "release without an arena")
        self.phase, self.dropped, self.unmapped = "released", True, True
        return {"saved_bytes": GIB, "freed_bytes": GIB, "copy_us": 1}

    def _seal(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._need(self.phase in ("released", "sealed"), "seal")
        self._need(self._everybody_stopped(), "seal while threads run")
        self.phase, self.sealed = "sealed", True
        return {"fds": 1, "host_bytes": 0}

    def _everybody_stopped(self) -> bool:
        return all(shim.pid in self.world.stopped for shim in living(self.world))

    def _driver_free(self, verb: str) -> None:
        self._need(self.world.states[self.pid] == DriverState.RUNNING, f"{verb} while the driver holds it")
        self._need(verb in ("unseal",) or self.pid not in self.world.stopped, f"{verb} while its threads are stopped")

    def _load(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._driver_free("load")
        self._need(not self.dropped or self.arena > 0, "load without the arena")
        self.dropped = False
        if self.phase != "running":
            self.phase = "loaded"
        return {"loaded_bytes": GIB, "copy_us": 1}

    def _remap(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._driver_free("remap")
        self._need(not any(shim.dropped for shim in living(self.world)), "remap before all have loaded")
        self.unmapped = False
        if self.phase != "running":
            self.phase = "remapped"
        return {}

    def _unseal(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._driver_free("unseal")
        self._need(self._everybody_stopped(), "unseal while threads run")
        self.sealed = False
        return {"fds": 1, "host_bytes": 0}

    def _bind(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._driver_free("bind")
        return {}

    def _check(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._driver_free("check")
        return {"bytes": 1}

    def _open(self, fields: dict[str, Any]) -> dict[str, Any]:
        whole = not any(s.dropped or s.unmapped or s.sealed for s in living(self.world))
        self._need(whole, "open before everything is whole")
        self._driver_free("open")
        self.phase, self.gates = "running", "open"
        return {}


def alive(pid: int) -> bool:
    """Tell whether a process lives."""
    try:
        processes.read_process(pid)
        return True
    except Exception:
        return False


def living(world: World) -> list[ModelShim]:
    """Return the shims whose processes live."""
    return [shim for shim in world.shims.values() if alive(shim.pid)]


class ModelDriver:
    """The driver process, with the driver's own rules."""

    pid = os.getpid()
    start_time = 1

    def __init__(self, world: World) -> None:
        self.world = world

    def version(self) -> DriverVersion:
        """Return a version."""
        return DriverVersion("580.1", 13000, True)

    def ended(self) -> bool:
        """It lives."""
        return False

    def close(self) -> None:
        """Nothing to end."""

    def _each(self, call: str, pids: Sequence[int], step: Callable[[int], int]) -> dict[int, DriverResult]:
        answers = {}
        for pid in pids:
            name = f"driver:{call} {pid}"
            self.world.begin(name)
            if name in self.world.hang:
                answers[pid] = DriverResult(0, "", 0.0, False)
            elif not alive(pid):
                answers[pid] = DriverResult(1, "CUDA_ERROR_INVALID_VALUE", 0.0, True)
            elif self.world.fails(name):
                answers[pid] = DriverResult(999, "CUDA_ERROR_UNKNOWN", 0.0, True)
            else:
                answers[pid] = DriverResult(0, "CUDA_SUCCESS", 0.0, True, step(pid))
        return answers

    def _move(self, pid: int, before: int, after: int, what: str) -> int:
        if self.world.states[pid] != before:
            raise Wrong(f"{what} of {pid} in state {self.world.states[pid]}")
        self.world.states[pid] = after
        return 0

    def states(self, pids: Sequence[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Return the states."""
        return self._each("state", pids, lambda pid: self.world.states[pid])

    def restore_threads(self, pids: Sequence[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Return a thread of each."""
        return self._each("thread", pids, lambda pid: pid)

    def lock(self, pids: Sequence[int], timeout_s: float) -> dict[int, DriverResult]:
        """Lock."""
        if self.world.stopped & set(pids):
            raise Wrong("lock while threads are stopped: the driver hangs")
        for shim in living(self.world):
            if not shim.sealed:
                raise Wrong(f"lock while {shim.pid} maps memory of others")
        return self._each(
            "lock", pids, lambda pid: self._move(pid, DriverState.RUNNING, DriverState.LOCKED, "lock")
        )

    def checkpoint(self, pids: Sequence[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Checkpoint."""
        for pid, state in self.world.states.items():
            if alive(pid) and state == DriverState.RUNNING:
                raise Wrong("checkpoint before all are locked")
        return self._each(
            "checkpoint", pids, lambda pid: self._move(pid, DriverState.LOCKED, DriverState.CHECKPOINTED, "checkpoint")
        )

    def restore(self, pids: Sequence[int], pairs: object, deadline: Deadline) -> dict[int, DriverResult]:
        """Restore."""
        return self._each(
            "restore", pids, lambda pid: self._move(pid, DriverState.CHECKPOINTED, DriverState.LOCKED, "restore")
        )

    def unlock(self, pids: Sequence[int], deadline: Deadline) -> dict[int, DriverResult]:
        """Unlock."""
        if self.world.stopped & set(pids):
            raise Wrong("unlock while threads are stopped: the driver hangs")
        if any(self.world.states[pid] == DriverState.CHECKPOINTED and alive(pid) for pid in self.world.states):
            # Every failure before has to be told first.
            raise Wrong("unlock before all are restored")
        return self._each(
            "unlock", pids, lambda pid: self._move(pid, DriverState.LOCKED, DriverState.RUNNING, "unlock")
        )


class ModelHolder:
    """A holder; `keep` hands its threads to the world."""

    pid = os.getpid()

    def __init__(self, world: World) -> None:
        self.world = world
        self.mine: set[int] = set()

    def check(self, targets: Sequence[HoldTarget], deadline: Deadline, holders: Sequence[int] = ()) -> None:
        """Allowed."""

    def stop(self, targets: Sequence[HoldTarget], deadline: Deadline) -> None:
        """Stop all."""
        self.world.begin("holder:stop")
        if self.world.fails("holder:stop"):
            raise errors.HolderFailed(step="holder: stop", pid=[0], detail="planted")
        self.mine = {target.pid for target in targets}
        self.world.stopped |= self.mine

    def go(self, deadline: Deadline) -> None:
        """Continue all that this one stopped."""
        self.world.begin("holder:go")
        self.world.stopped -= self.mine
        self.mine = set()

    def keep(self) -> HolderRecord:
        """Leave them stopped."""
        self.world.begin("holder:keep")
        self.world.kept, self.mine = self.mine, set()
        return HolderRecord(1, 1, "boot", "/", {})

    def ended(self) -> bool:
        """It lives."""
        return False

    def close(self) -> None:
        """Continue what was not kept."""
        self.world.stopped -= self.mine
        self.mine = set()


@dataclass
class ModelArena:
    """An arena without memory."""

    fd: int
    bytes: int
    kind: Any


class ModelTools:
    """The means, all models."""

    def __init__(self, world: World, path: str) -> None:
        self.world = world
        self.state_dir = Path(path)
        self.simulated = True

    def start_driver(self) -> ModelDriver:
        """Return a driver."""
        return ModelDriver(self.world)

    def start_holder(self) -> ModelHolder:
        """Return a holder."""
        return ModelHolder(self.world)

    def prepare_arena(self, size: int, progress: Callable[[int], None], dumpable: bool) -> ModelArena:
        """Return an arena."""
        from gpususpend.arena import Kind as ArenaKind

        self.world.begin("fill 0")
        if self.world.fails("fill"):
            raise errors.NotEnoughMemory(need=size, available=0, limit="planted", way_out="wait")
        progress(size)
        return ModelArena(os.memfd_create("model"), size, ArenaKind.THP)

    def is_dumpable(self, pid: int) -> bool:
        """All are."""
        return True

    def check_memory(self, charges: Sequence[tuple[int, int]]) -> None:
        """There is enough."""

    def usage(self, driver: ModelDriver) -> dict[str, GpuUsage]:
        """Return what the states imply."""
        users = [pid for pid, state in self.world.states.items() if state != DriverState.CHECKPOINTED and alive(pid)]
        return {"GPU-a": GpuUsage(len(users) * 2 * GIB, 80 * GIB, dict.fromkeys(users, 2 * GIB))}

    def await_calls(
        self, calls: Sequence[PendingCall], deadline: Deadline, while_waiting: Callable[[], None] = lambda: None
    ) -> bool:
        """Tell whether the hanging calls were let go."""
        return not self.world.hang

    def holders_of(self, record: Record) -> list[HolderRecord]:
        """Nobody asks."""
        return []

    def end_holders(
        self, record: Record, deadline: Deadline, warn: Callable[[str], None], tell: Callable[[str], None]
    ) -> bool:
        """Continue what was kept."""
        self.world.begin("holder:end")
        held = bool(self.world.kept)
        self.world.stopped -= self.world.kept
        self.world.kept = set()
        return held


@dataclass
class Scene:
    """A group of real processes with modelled shims, and the sessions on it."""

    world: World
    context: Context
    members: list[Member]
    processes: list[subprocess.Popen[bytes]]
    record: Record

    @property
    def pids(self) -> list[int]:
        """Return the pids of the ranks."""
        return [member.pid for member in self.members]

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Begin a command, as after a fresh start of the program."""
        known = {member.pid: member for member in self.record.members}
        living_members = [known.get(member.pid, member) for member in self.members if alive(member.pid)]
        group = Group([Rank(member, self.world.shims[member.pid]) for member in living_members])  # type: ignore[arg-type]
        session = Session(self.context, group, self.record)
        session.gone = [member for member in self.members if not alive(member.pid)]
        try:
            yield session
        finally:
            self.record = session.record
            session.close()

    def kill(self, index: int) -> None:
        """Kill a rank."""
        self.processes[index].kill()
        self.processes[index].wait()

    def all_running(self) -> bool:
        """Tell whether every living rank runs, with gates open and threads going."""
        pids = [pid for pid in self.pids if alive(pid)]
        shims = [self.world.shims[pid] for pid in pids]
        return (
            all(self.world.states[pid] == DriverState.RUNNING for pid in pids)
            and all(shim.phase == "running" and shim.gates == "open" for shim in shims)
            and not any(shim.dropped or shim.unmapped or shim.sealed for shim in shims)
            and not self.world.stopped & set(pids)
        )

    def all_suspended(self) -> bool:
        """Tell whether every rank is down and stopped."""
        return all(
            self.world.states[pid] == DriverState.CHECKPOINTED
            and self.world.shims[pid].phase == "sealed"
            and pid in self.world.stopped
            for pid in self.pids
        )


@contextmanager
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that does nothing, for its pid."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def scene(tmp_path: Path, count: int = 3, **limits: float) -> Iterator[Scene]:
    """Make a group of `count` ranks that run."""
    world = World()
    with ExitStack() as stack:
        children = [stack.enter_context(bystander()) for _ in range(count)]
        members = []
        for child in children:
            process = processes.read_process(child.pid)
            members.append(
                Member(process.pid, process.start_time, process.pid, process.uid, "rank", Kind.SHIMMED, "0xabc")
            )
            world.shims[child.pid] = ModelShim(world, child.pid)
            world.states[child.pid] = DriverState.RUNNING
        directory = stack.enter_context(StateDir.open(str(tmp_path / "state")))
        context = Context(
            directory, ModelTools(world, directory.path), Progress(quiet=True), Interrupts(),  # type: ignore[arg-type]
            simulated=True, limits=limits_with(**{"memory_back_s": 0.5, **limits}),
        )  # fmt: skip
        record = Record("g1", Stage.SUSPENDING, "preflight", "2025", True, "580.1", members)
        context.journal.write(record)
        yield Scene(world, context, members, children, record)
