"""`suspend --store` when something goes wrong: told, rolled back or still suspended, repeated; no byte lost or wrong.

`tests.programs.faulty` is the tool on a filesystem whose calls fail as a string says, or kill it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkstore import Store
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, Background, Pair, records, running, state
from tests.sim.places import CHUNK, Places, mounted

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]
Start = Callable[..., Worker]
Run = Callable[..., Background]


def down(places: Places, *pids: int, depth: str = "pages") -> tuple[str | int, ...]:
    """Return the words of a suspend into the first checkpoint."""
    return ("suspend", "--depth", depth, *places.words(), *pids)


def cycle(pair: Pair, places: Places) -> None:
    """The same suspend works now, and so does its resume."""
    places.suspend(*pair.pids).expect(0)
    places.tool.resume(*pair.pids).expect(0)
    running(places.tool)
    pair.check()


@pytest.mark.parametrize(
    ("call", "behaviour", "detail"),
    [
        ("write", "rE", "Input/output error"), ("write", "rrF", "No space left"), ("write", "Q", "quota"),
        ("link", "rrO", "Read-only"),
        ("datasync", "rrrE", "Input/output error"), ("link", "rG", "mounted"), ("sync", "rrrrrEr", "error"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("depth", ["pages", "process"])
def test_save_that_fails_is_rolled_back(
    pair: Pair, places: Places, call: str, behaviour: str, detail: str, depth: str
) -> None:
    """FR-65: exit 3 or 4 with the cause; everything runs with every byte, and no checkpoint is left."""
    answer = places.program("faulty", call, behaviour, *down(places, *pair.pids, depth=depth)).expect(3, 4)
    assert answer.json["reason"] == "write-failed" and detail in answer.json["error"]["message"], answer
    running(places.tool)
    pair.check()
    places.require_no_checkpoint()
    cycle(pair, places)


def test_every_write_of_a_save_fails_once(start_worker: Start, places: Places) -> None:
    """Wherever it is: the workload runs, and no checkpoint is left."""
    worker = start_worker(0)
    worker.fill(worker.alloc(3 * MIB), 3 * MIB, 1)
    for call, most in (("write", 40), ("link", 20), ("sync", 40)):
        for number in range(most):
            words = down(places, worker.pid)
            answer = places.program("faulty", call, "r" * number + "Er", *words).expect(0, 3, 4)
            if answer.exit_code == 0:
                assert number > 3, answer
                places.tool.resume(worker.pid).expect(0)
                places.tool.run("store", "rm", places.store, places.directory()).expect(0)
                break
            running(places.tool)
            places.require_no_checkpoint()
            for chunk in (places.store / "chunks").glob("*/*"):
                chunk.unlink()  # so that the next one writes it again
        else:
            pytest.fail(f"more than {most} calls of {call}")
        worker.check()


KILLED = [
    ("faulty", "write", "rrK"), ("faulty", "datasync", "rrrrK"), ("faulty", "link", "rrK"),
    *(("killed", step) for step in ("prepare", "save", "commit", "release", "unlock-pages", "seal")),
]  # fmt: skip


@pytest.mark.parametrize("how", KILLED, ids=" ".join)
@pytest.mark.parametrize("depth", ["pages", "process"])
def test_command_killed_while_it_suspends(
    pair: Pair, places: Places, tool: Tool, how: tuple[str, ...], depth: str
) -> None:
    """`recover` brings the workload back, whole, and leaves no checkpoint; the same suspend works then."""
    words = down(places, *pair.pids, depth=depth)
    assert places.program(*how, *words).exit_code == -signal.SIGKILL
    assert records(tool)[0]["stage"] == "suspending" and records(tool)[0]["stored"]["directory"]
    tool.run("recover", "--driver", "sim", *pair.pids).expect(0)
    running(tool)
    pair.check()
    places.require_no_checkpoint()
    cycle(pair, places)


@pytest.mark.parametrize("step", ["save", "release", "seal"])
def test_recover_to_suspended_after_a_kill(pair: Pair, places: Places, tool: Tool, step: str) -> None:
    """It is brought to where it was going: into the same checkpoint."""
    assert places.program("killed", step, *down(places, *pair.pids)).exit_code == -signal.SIGKILL
    tool.run("recover", "--driver", "sim", "--to", "suspended", *pair.pids).expect(0)
    group = tool.run("status").expect(0).json["groups"][0]
    assert group["state"] == "suspended" and group["stored"]["directory"] == str(places.directory())
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("step", ["load", "open"])
@pytest.mark.parametrize("depth", ["pages", "process"])
def test_recover_to_suspended_after_a_cut_off_resume(
    pair: Pair, places: Places, tool: Tool, step: str, depth: str
) -> None:
    """It goes up and down again: into a directory beside, since the checkpoint is of before and may be needed."""
    places.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    kept = places.checkpoint().id
    for name in ("one.recovered", "one.recovered-2"):
        assert places.program("killed", step, "resume", *pair.pids).exit_code == -signal.SIGKILL
        answer = tool.run("recover", "--driver", "sim", "--to", "suspended", *pair.pids).expect(0)
        assert str(places.directory(name)) in answer.json["warnings"][-1], answer
        group = tool.run("status").expect(0).json["groups"][0]
        assert group["state"] == "suspended" and group["stored"]["directory"] == str(places.directory(name))
        assert places.checkpoint().id == kept and places.checkpoint(name).id != kept
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_checkpoint_of_before_stays_where_a_new_one_is_refused(pair: Pair, places: Places, tool: Tool) -> None:
    """The group runs then, and the error is told."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    kept = places.checkpoint().id
    assert places.program("killed", "load", "resume", *pair.pids).exit_code == -signal.SIGKILL
    words = ("faulty", "mkdir", "P", "recover", "--to", "suspended", *pair.pids)
    answer = places.program(*words).expect(3)
    assert "Permission denied" in answer.json["error"]["message"] and "runs" in answer.json["warnings"][-1]
    assert places.checkpoint().id == kept
    running(tool)
    pair.check()


@pytest.mark.parametrize("step", ["prepare", "create", "zeros", "load", "remap", "unseal", "check", "open"])
def test_command_killed_while_it_resumes(pair: Pair, places: Places, tool: Tool, step: str) -> None:
    """The next resume, or `recover`, goes on from there; the checkpoint stays."""
    for finish in (("resume",), ("recover",)):
        name = finish[0]
        places.suspend(*pair.pids, name=name, options=("--depth", "pages")).expect(0)
        assert places.program("killed", step, "resume", *pair.pids).exit_code == -signal.SIGKILL
        tool.run(*finish, "--driver", "sim", *pair.pids).expect(0)
        running(tool)
        pair.check()
        places.checkpoint(name)


def test_command_killed_in_the_middle_of_a_load(pair: Pair, places: Places, tool: Tool) -> None:
    """Some pieces are back and others are not: only these are loaded by the next resume."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    assert places.program("faulty", "read", "rrrrrrrrK", "resume", *pair.pids).exit_code == -signal.SIGKILL
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("behaviour", ["rrrrrrrrrrrrE", "rrrrrrrrrG"])
@pytest.mark.parametrize("depth", ["pages", "process"])
def test_load_that_fails_leaves_everything_suspended(
    pair: Pair, places: Places, tool: Tool, behaviour: str, depth: str
) -> None:
    """FR-53: exit 6, never content that is not what was saved; the resume can be repeated."""
    places.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    answer = places.program("faulty", "read", behaviour, "resume", *pair.pids).expect(6)
    assert answer.json["error"]["code"] == "store-damaged" and answer.json["groups"][0]["not_running"] == 2
    for pid in pair.pids:
        assert state(tool, tool.setting, pid)["state"] in ("suspended", "loading", "loaded")
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("what", ["store", "directory", "chunk", "damage"])
def test_b14_store_that_is_away_and_comes_back(
    pair: Pair, places: Places, tool: Tool, held: bool, what: str
) -> None:
    """Load fails (exit 6), is repeated and succeeds, with and without the holder; `status` calls it what that did."""
    places.suspend(*pair.pids).expect(0)
    if not held:
        tool.run("stop", *pair.pids).expect(0)
    chunk = next((places.store / "chunks").glob("*/*"))
    content = chunk.read_bytes()
    away = {"store": places.store, "directory": places.directory(), "chunk": chunk}
    if what == "damage":
        chunk.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        os.rename(away[what], places.root / "away")
    for _ in range(2):
        answer = tool.resume(*pair.pids).expect(6)
        error, begun = answer.json["error"], what in ("chunk", "damage")
        left = ("Left in phase resuming: 2 of 2 processes do not run", "Still suspended: 2 of 2 processes")[not begun]
        assert error["code"] == "store-damaged" and f"{left} (" in error["message"], error
        assert error["message"].endswith("; resume again once the store can be read"), error
        [group] = tool.run("status").expect(0).json["groups"]
        assert group["state"] == ("resuming" if begun else "suspended") and error["message"] in group["note"], group
    if what == "damage":
        chunk.write_bytes(content)
    else:
        os.rename(places.root / "away", away[what])
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_damage_that_nobody_looks_for(start_worker: Start, places: Places, tool: Tool) -> None:
    """`--no-verify` takes what is there: that is what it says."""
    worker = start_worker(0)
    address = worker.alloc(2 * MIB)
    worker.fill(address, 2 * MIB, 3)
    places.suspend(worker.pid, options=("--depth", "pages")).expect(0)
    for chunk in (places.store / "chunks").glob("*/*"):
        chunk.write_bytes(b"\1" * CHUNK)
    tool.resume(worker.pid).expect(6)
    tool.resume(worker.pid, options=("--no-verify",)).expect(0)
    assert worker.read(address) == [0x01010101]


@pytest.mark.parametrize("verify", ["all", "new", "none"])
def test_existing_chunks_are_compared_as_told(
    start_worker: Start, places: Places, tool: Tool, verify: str
) -> None:
    """Pitfall 46: one that rots after a clean check is found by `all` alone, and else by the load; never silently."""
    worker = start_worker(0)
    worker.fill(worker.alloc(2 * MIB), 2 * MIB, 3)
    places.suspend(worker.pid, options=("--depth", "pages")).expect(0)
    tool.resume(worker.pid).expect(0)
    chunk = next((places.store / "chunks").glob("*/*"))
    content, published_ns = chunk.read_bytes(), chunk.stat().st_mtime_ns
    time.sleep(0.1)  # the check begins after the chunk was published, by the filesystem's coarse clock
    tool.run("store", "fsck", places.store).expect(0)
    with chunk.open("r+b") as file:
        file.write(b"rot")
    os.utime(chunk, ns=(published_ns, published_ns))
    options = ("--depth", "pages", "--verify-existing", verify)
    saved = places.suspend(worker.pid, name="two", options=options).expect(0).json["groups"][0]["stored"]["bytes"]
    assert saved.get("repaired", 0) == (MIB if verify == "all" else 0), saved
    assert (chunk.read_bytes() == content) is (verify == "all")
    if verify != "all":
        assert tool.resume(worker.pid).expect(6).json["error"]["code"] == "store-damaged"
        chunk.write_bytes(content)
    tool.resume(worker.pid).expect(0)
    worker.check()


def test_suspend_that_fails_after_the_commit(pair: Pair, places: Places, tool: Tool, machine: Setting) -> None:
    """The memory comes back from the store, and the checkpoint goes: the same suspend can be repeated."""
    for rule in ("cuCheckpointProcessLock 1 600", "cuCheckpointProcessCheckpoint 2 304"):
        machine.inject(rule)
        answer = places.suspend(*pair.pids).expect(4)
        assert answer.json["error"]["cause"] == "driver-error"
        machine.inject("")
        running(tool)
        pair.check()
        places.require_no_checkpoint()
    cycle(pair, places)


CALLS = ("cuMemcpyDtoHAsync_v2", "cuMemUnmap", "cuMemRelease", "cuStreamCreate", "cuMemHostUnregister")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_b19_driver_call_that_fails_on_the_way_down(
    pair: Pair, places: Places, tool: Tool, machine: Setting, call: str, nth: int
) -> None:
    """Rolled back from wherever that is; or, where it only cost memory, suspended."""
    machine.inject(f"{call} {nth} 2", pair.second.pid)
    answer = places.suspend(*pair.pids, options=("--depth", "pages")).expect(0, 4)
    machine.inject("", pair.second.pid)
    if answer.exit_code == 0:
        tool.resume(*pair.pids).expect(0)
        tool.run("store", "rm", places.store, places.directory()).expect(0)
    running(tool)
    pair.check()
    places.require_no_checkpoint()
    cycle(pair, places)


UP = ("cuMemcpyHtoDAsync_v2", "cuMemCreate", "cuMemMap", "cuMemHostRegister_v2")


@pytest.mark.parametrize(
    ("call", "nth"), [("cuMemsetD8Async", 1), *((call, nth) for call in UP for nth in (1, 2))]
)
def test_b14_driver_call_that_fails_on_the_way_up(
    pair: Pair, places: Places, tool: Tool, machine: Setting, call: str, nth: int
) -> None:
    """Exit 8, and the resume can be repeated; without page-locking it is only slower."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    machine.inject(f"{call} {nth} 2", pair.second.pid)
    answer = tool.resume(*pair.pids).expect(0, 8)
    assert (answer.exit_code == 0) == (call == "cuMemHostRegister_v2"), answer
    machine.inject("", pair.second.pid)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_FR2_rank_that_dies_during_a_save(pair: Pair, places: Places, tool: Tool, background: Run,
                                           machine: Setting) -> None:
    """Exit 5, the dead one is named; a checkpoint of half a group does not exist."""
    machine.inject("cuMemcpyDtoHAsync_v2 2 hold", pair.second.pid)
    command = background("suspend", "--depth", "pages", *places.words(), *pair.pids)
    command.wait_for_step("save")
    machine.wait_until_held()
    pair.second.kill()
    answer = command.end().expect(5)
    assert pair.second.pid in answer.json["error"]["facts"]["lost"]
    assert not (places.directory() / "manifest.json").exists()


def test_FR2_rank_that_died_while_suspended(start_worker: Start, places: Places, tool: Tool) -> None:
    """Exit 5, the dead one is named; the other one comes back, from the store."""
    ranks = [start_worker(0), start_worker(1)]
    for worker in ranks:
        worker.fill(worker.alloc(3 * MIB), 3 * MIB, 2)
    places.suspend(*[worker.pid for worker in ranks]).expect(0)
    ranks[1].kill()
    answer = tool.resume(ranks[0].pid).expect(5)
    assert answer.json["error"]["facts"]["lost"] == [ranks[1].pid]
    ranks[0].check()
    running(tool)


def test_arena_that_an_earlier_command_left(pair: Pair, places: Places, tool: Tool) -> None:
    """A suspend into RAM was killed while it filled arenas: the one into a store replaces them with its rings."""
    assert places.program("killed", "quiesce", "suspend", *pair.pids).exit_code == -signal.SIGKILL
    assert state(tool, tool.setting, pair.first.pid)["arena_bytes"]
    for path in Path(tool.state_dir).glob("group-*"):
        path.unlink()
    places.suspend(*pair.pids).expect(0)
    assert state(tool, tool.setting, pair.first.pid)["arena_bytes"] == 0
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_signal_during_a_save(pair: Pair, places: Places, tool: Tool, background: Run, machine: Setting) -> None:
    """It turns back within a piece's time: exit 130, everything runs, no checkpoint."""
    machine.inject("cuMemcpyDtoHAsync_v2 2 hold")
    command = background("suspend", "--depth", "pages", *places.words(), *pair.pids)
    command.wait_for_step("save")
    machine.wait_until_held()
    command.process.send_signal(signal.SIGTERM)
    machine.inject("")
    assert command.end().expect(130).json["error"]["code"] == "interrupted"
    running(tool)
    pair.check()
    places.require_no_checkpoint()


def test_b06_load_has_the_time_of_copies(pair: Pair, places: Places, tool: Tool) -> None:
    """A slow store is waited for beyond --timeout, with and without a cache; only --copy-timeout ends a load."""
    for name, words in (("one", ()), ("two", ("--cache", str(places.root / "cache")))):
        places.suspend(*pair.pids, name=name, options=("--depth", "pages", *words)).expect(0)
        slow = ("faulty", "read", "rrrrrrrS", "resume", *pair.pids)
        assert places.program(*slow, "--copy-timeout", "1").expect(8).json["reason"] == "deadline"
        places.program("faulty", "read", "rrrrrrrSr", "resume", *pair.pids, "--timeout", "1").expect(0)
        pair.check()


@pytest.mark.parametrize("depth", ["pages", "process"])
def test_store_that_never_answers(pair: Pair, places: Places, tool: Tool, depth: str) -> None:
    """As a filesystem whose server is gone: the workload runs, or stays suspended, after --copy-timeout and a grace."""
    words = down(places, *pair.pids, depth=depth)
    answer = places.program("faulty", "write", "rrrH", *words, "--copy-timeout", "3").expect(4)
    assert answer.json["reason"] == "deadline" and "does not answer" in " ".join(answer.json["warnings"])
    running(tool)
    pair.check()
    assert not (places.directory() / "manifest.json").exists()
    places.suspend(*pair.pids, options=("--depth", depth)).expect(0)
    slow = ("faulty", "read", "rrrrrrrH", "resume", *pair.pids, "--copy-timeout", "3")
    assert places.program(*slow).expect(8).json["reason"] == "deadline"
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_b26_direct_io_that_is_refused(pair: Pair, places: Places, tool: Tool) -> None:
    """Accepted at open and refused at the first write or read: done without, and told once."""
    answer = places.program("faulty", "write", "I", *down(places, *pair.pids)).expect(0)
    assert sum("direct I/O" in text for text in answer.json["warnings"]) == 1, answer
    answer = places.program("faulty", "read", "I", "resume", *pair.pids).expect(0)
    assert sum("direct I/O" in text for text in answer.json["warnings"]) == 1, answer
    pair.check()


# Filesystems of other kinds


def test_read_only_mount_serves_a_resume(pair: Pair, places: Places, tool: Tool) -> None:
    """Store and checkpoint on a filesystem that cannot be written: loads; a suspend there is refused."""
    places.suspend(*pair.pids).expect(0)
    before = places.seen()
    read_only = f"mount --bind '{places.root}' '{places.root}'; mount -o remount,ro,bind '{places.root}'"
    mounted(places, read_only, "resume", *pair.pids).expect(0)
    assert places.seen() == before
    pair.check()
    answer = mounted(places, read_only, "suspend", *places.words("two"), *pair.pids).expect(3)
    assert answer.json["reason"] == "write-failed" and "read-only" in answer.json["error"]["message"]
    running(tool)
    pair.check()


def test_file_that_is_none(pair: Pair, places: Places, tool: Tool) -> None:
    """A FIFO in the place of a chunk or a document: a resume says so at once, and works when the file is back."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    chunk = next((places.store / "chunks").glob("*/*"))
    rank = next(places.directory().glob("gpu-*.json"))
    for path in (chunk, rank, places.directory() / "manifest.json", places.store / "store.json"):
        before = path.rename(path.with_name("away"))
        os.mkfifo(path)
        answer = tool.resume(*pair.pids, deadline_s=60).expect(6)
        assert "no regular file" in answer.json["error"]["message"] and str(path) in answer.json["error"]["message"]
        before.rename(path)
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def small(places: Places, options: str) -> str:
    """Return what mounts an empty filesystem where the store is, and makes the store anew."""
    make = f"from chunkstore import Store; Store.create('{places.store}', chunk_size_bytes={CHUNK})"
    return f"mount -t tmpfs -o {options},mode=755 none '{places.store}'; {sys.executable} -c \"{make}\""


def test_fr65_too_little_room_is_seen_before(pair: Pair, places: Places, tool: Tool) -> None:
    """Not a chunk's room for each process, or with --require-room not for all memory: bytes and inodes, both told."""
    for options, unit, words in (
        ("size=1m", "bytes", ()), ("size=64m,nr_inodes=262", "inodes", ()),
        ("size=6m", "bytes", ("--require-room",)), ("size=64m,nr_inodes=268", "inodes", ("--require-room",)),
    ):  # fmt: skip
        command = ("suspend", "--depth", "pages", *words, *places.words(), *pair.pids)
        answer = mounted(places, small(places, options), *command).expect(3)
        message = answer.json["error"]["message"]
        assert answer.json["reason"] == "no-room" and unit in message and "free" in message, message
        running(tool)
    pair.check()


def test_fr65_zeros_need_no_room(start_worker: Start, places: Places, tool: Tool) -> None:
    """More memory than room, but most of it is zeros: that is told before, and fits."""
    worker = start_worker(0)
    worker.memset_d32(address := worker.alloc(24 * MIB), 0, 6 * MIB)
    worker.expect(address, 24 * MIB, [])
    worker.fill(worker.alloc(2 * MIB), 2 * MIB, 1)
    told = places.root / "told"
    command = [sys.executable, "-m", "gpususpend", *map(str, down(places, worker.pid)), "--driver", "sim", "--json"]
    first = f"{small(places, 'size=6m')}\n{' '.join(command)} >'{told}'"
    mounted(places, first, "resume", worker.pid).expect(0)
    (warning,) = json.loads(told.read_text())["warnings"]
    assert "no room for all" in warning and "free are" in warning
    worker.check()


def test_fr65_filesystem_that_fills_up(pair: Pair, places: Places, tool: Tool) -> None:
    """Rolled back, the room is told, everything runs."""
    answer = mounted(places, small(places, "size=4m"), *down(places, *pair.pids)).expect(4)
    assert answer.json["reason"] == "write-failed" and "free space" in answer.json["error"]["message"]
    running(tool)
    pair.check()
    assert not places.directory().exists()
    cycle(pair, places)


@pytest.mark.parametrize(("letter", "left"), [("F", False), ("Q", False), ("E", True)])
def test_fr65_room_is_given_back(pair: Pair, places: Places, tool: Tool, letter: str, left: bool) -> None:
    """A save that filled the disk leaves no chunk of its own there; one that failed otherwise does, for the next."""
    ours = Store.open(places.store).put(memoryview(b"somebody else's"))
    answer = places.program("faulty", "write", "rrrrrr" + letter, *down(places, *pair.pids)).expect(4)
    assert not answer.json["warnings"] and str(ours.chunk.hash) in places.chunks()
    assert (len(places.chunks()) > 1) is left
    cycle(pair, places)


def test_fr65_known_memory_needs_no_room(pair: Pair, places: Places, tool: Tool) -> None:
    """What the store has is taken off: a second checkpoint of the same fits where a first one would not."""
    places.suspend(*pair.pids, options=("--depth", "pages")).expect(0)
    tool.resume(*pair.pids).expect(0)
    full = places.root / "full"
    full.mkdir()
    fill = (
        f"mount -t tmpfs -o size=10m,mode=755 none '{full}'; cp -a '{places.store}' '{full}/store'; "
        f"mkdir '{full}/ckpt'; rm '{full}'/store/roots/*"
    )
    words = ("--store", full / "store", "--ckpt-dir", full / "ckpt/two")
    answer = mounted(places, fill, "suspend", "--depth", "pages", *words, *pair.pids)
    assert answer.exit_code == 0 and "new" not in answer.json["groups"][0]["stored"]["bytes"], answer
    # That filesystem is gone: with its memory the processes are lost, and the test ends them.
    tool.resume(*pair.pids).expect(6)


def test_fr7_ring_that_does_not_fit(pair: Pair, places: Places, tool: Tool, tmp_path: Path) -> None:
    """Less memory than the ring needs: refused in both directions, before anything changes."""
    small = tmp_path / "meminfo"
    small.write_text(re.sub(r"(MemAvailable:\s+)\d+", rf"\g<1>{1 << 10}", Path("/proc/meminfo").read_text()))
    less = f"mount --bind {small} /proc/meminfo"
    assert mounted(places, less, *down(places, *pair.pids)).expect(3).json["reason"] == "not-enough-memory"
    running(tool)
    places.suspend(*pair.pids).expect(0)
    before = records(tool)
    assert mounted(places, less, "resume", *pair.pids).expect(3).json["reason"] == "not-enough-memory"
    assert [record["stage"] for record in records(tool)] == ["suspended"] == [record["stage"] for record in before]
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_b03_savers_beside_each_other(start_worker: Start, places: Places, tool: Tool, background: Run) -> None:
    """Two groups with the same content suspend into one store at once."""
    ranks = [start_worker(0), start_worker(1)]
    for worker in ranks:
        worker.fill(worker.alloc(12 * MIB), 12 * MIB, 9)
    commands = [
        background("suspend", "--depth", "pages", *places.words(f"of-{worker.pid}"), worker.pid) for worker in ranks
    ]
    for command in commands:
        command.end().expect(0)
    assert len(places.chunks()) == 12
    assert not os.listdir(places.store / "tmp")
    tool.resume(*[worker.pid for worker in ranks]).expect(0)
    for worker in ranks:
        worker.check()


def test_b04_peer_access_and_memory_made_after(start_worker: Start, places: Places, tool: Tool) -> None:
    """The round through a store: peers reach memory of before, and what is made after a resume goes with the next."""
    ranks = [start_worker(0), start_worker(1)]
    for name in ("one", "two"):
        for worker in ranks:
            worker.fill(worker.alloc(2 * MIB), 2 * MIB, len(name))
        block = ranks[0].alloc(MIB)
        ranks[0].fill(block, MIB, 4)
        ranks[1].expect(ranks[1].ipc_open(ranks[0].ipc_get(block)), MIB, [4])
        places.suspend(*[worker.pid for worker in ranks], name=name).expect(0)
        tool.resume(*[worker.pid for worker in ranks]).expect(0)
        for worker in ranks:
            worker.check()
    assert Store.open(places.store) and Path(places.directory("two"))
