"""What the simulated driver does to processes that the real one was seen to lose, and how locks behave."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs.client import Worker, WorkerTimeout
from tests.programs.crossing import CROSSED, INTERPROCESS, crossing
from tests.programs.setting import Setting
from tests.sim.test_simcuda_machine import FULL, bare, cycle, run_script

pytestmark = pytest.mark.machine(driver="sim")
MIB = 1 << 20
Start = Callable[..., Worker]


@pytest.mark.machine(driver="sim", memory_bytes=256 * MIB)
def test_restore_without_room_is_terminal(machine: Setting, start_worker: Start) -> None:
    victim, other = bare(start_worker), bare(start_worker)
    victim.alloc(128 * MIB)
    assert cycle(machine, victim.pid, "lock", "checkpoint") == [0, 0]
    other.alloc(128 * MIB)
    assert cycle(machine, victim.pid, "restore", "restore", "restore", "unlock") == [2, 304, 401, 401]
    with pytest.raises(WorkerTimeout):
        victim.do("mem_info", deadline_s=1)


def test_lost_process_hangs(machine: Setting, start_worker: Start) -> None:
    owner, importer = bare(start_worker), bare(start_worker)
    handle = owner.mem_create(2 * MIB)
    importer.import_block(owner.hand(owner.mem_export(handle), importer), 2 * MIB)
    assert cycle(machine, importer.pid, *FULL) == [0, 0, 801, 401]
    with pytest.raises(WorkerTimeout):
        importer.do("ctx_sync", deadline_s=1)
    assert owner.mem_info()


def test_own_import_is_carried(machine: Setting, start_worker: Start) -> None:
    worker = bare(start_worker)
    block = worker.block(2 * MIB)
    again = worker.import_block(worker.mem_export(block["handle"]), 2 * MIB)
    worker.write(block["address"], [7])
    assert cycle(machine, worker.pid, *FULL) == [0, 0, 0, 0]
    worker.write(again["address"], [8])
    assert worker.read(block["address"]) == [8]


def test_events_while_nobody_has_them(machine: Setting, start_worker: Start) -> None:
    """Both sides are away at a time: records cross afterwards, also of an event that one side alone still has."""
    owner, opener, late = bare(start_worker), bare(start_worker), bare(start_worker)
    event, left = (owner.event_create(INTERPROCESS) for _ in range(2))
    handles = [owner.event_ipc_get(one) for one in (event, left)]
    opened, kept = (opener.event_ipc_open(handle) for handle in handles)
    for _ in range(40):
        owner.event_record(event)
    owner.event_destroy(left)
    for step in FULL:
        assert [cycle(machine, one.pid, step) for one in (owner, opener)] == [[0], [0]]
    assert crossing(owner, event, opener, opened) == crossing(opener, opened, owner, event) == CROSSED
    assert crossing(opener, kept, late, late.event_ipc_open(handles[1])) == CROSSED


def test_events_of_processes_that_were_killed(machine: Setting, start_worker: Start) -> None:
    """Nobody can open them any more, and they take no room."""
    late = bare(start_worker)
    for _ in range(3):
        owner = bare(start_worker)
        handles = [owner.event_ipc_get(owner.event_create(INTERPROCESS)) for _ in range(1500)]
        owner.kill()
        assert late.code("event_ipc_open", handles[-1]) == 205
    late.event_create(INTERPROCESS)


def threads_of(pid: int) -> dict[int, str]:
    """Return the name of each thread."""
    names = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


@contextlib.contextmanager
def stopped(tids: list[int]) -> Iterator[None]:
    """Stop threads by ptrace, as the freezer does."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tid in tids:
        assert libc.ptrace(0x4206, tid, None, None) == 0
        assert libc.ptrace(0x4207, tid, None, None) == 0
        os.waitpid(tid, 0x40000000)
    try:
        yield
    finally:
        for tid in tids:
            assert libc.ptrace(17, tid, None, None) == 0


def restore_tid(machine: Setting, pid: int) -> int:
    """Ask for the restore thread from another process."""
    done = run_script(machine, f"from tests.programs import calls\ncalls.init()\nprint(calls.cp_thread({pid}).value)")
    return int(done.stdout)


def test_threads_stopped_before_the_lock_hang_it(machine: Setting, start_worker: Start) -> None:
    worker = bare(start_worker)
    worker.alloc(MIB)
    tid = restore_tid(machine, worker.pid)
    threads = threads_of(worker.pid)
    assert tid in threads
    with stopped([other for other in threads if other != tid]):
        assert cycle(machine, worker.pid, "state", "lock", "state") == [0, 600, 0]
    assert worker.do("mem_info")
    assert cycle(machine, worker.pid, *FULL) == [0, 0, 0, 0]


def test_threads_stopped_after_the_lock(machine: Setting, start_worker: Start) -> None:
    worker = bare(start_worker)
    address = worker.alloc(MIB)
    worker.fill(address, MIB, 3)
    tid = restore_tid(machine, worker.pid)
    assert cycle(machine, worker.pid, "lock") == [0]
    with stopped([other for other in threads_of(worker.pid) if other != tid]):
        assert cycle(machine, worker.pid, "checkpoint", "restore") == [0, 0]
    assert cycle(machine, worker.pid, "unlock") == [0]
    worker.check()


def test_lock_given_up_by_a_dead_caller(machine: Setting, start_worker: Start) -> None:
    """A caller that is killed while it waits leaves the process running."""
    worker = bare(start_worker)
    flag = worker.alloc(4096)
    worker.write(flag, [0])
    worker.kernel("gs_wait_flag", [flag, 1], worker.stream_create())
    text = ("from tests.programs import calls\ncalls.init()\nprint('up', flush=True)\n"
            f"calls.cp_lock({worker.pid}, 60000)")
    caller = subprocess.Popen([sys.executable, "-c", text], env=machine.environ(), stdout=subprocess.PIPE)
    assert caller.stdout is not None
    caller.stdout.readline()
    until = time.monotonic() + 60
    while worker.job_answer(worker.job("mem_info"), 0.2) is not None:  # its calls wait once the lock does
        assert time.monotonic() < until, "the lock is not begun"
    caller.kill()
    caller.wait()
    worker.write(flag, [1])
    worker.ctx_sync()
    assert cycle(machine, worker.pid, *FULL) == [0, 0, 0, 0]


def test_gpu_threads_have_their_name(machine: Setting, start_worker: Start) -> None:
    worker = bare(start_worker)
    worker.fill(worker.alloc(MIB), MIB, 1)
    names = set(threads_of(worker.pid).values())
    assert {"simcuda-gpu", "simcuda-restore", "simcuda-driver"} <= names
