"""A state directory that somebody else has been in, or whose disk takes nothing more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs.tool import Tool
from tests.sim import shim_control
from tests.sim.conftest import MIB, Pair, Start, records, running

pytestmark = pytest.mark.usefixtures("own_network")


@pytest.fixture
def small_disk(tool: Tool, tmp_path: Path) -> Iterator[Path]:
    """The tool's state directory on a disk of its own, of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    before, tool.state_dir = tool.state_dir, str(path)
    try:
        yield path
    finally:
        tool.state_dir = before
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    """Leave no room on a disk."""
    with contextlib.suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def strange(folder: Path, target: Path) -> list[str]:
    """Lay things under names that a command might read; return the names."""
    os.mkfifo(folder / "group-fifo.json")
    os.mkfifo(folder / "driver-1-1.json")
    (folder / "group-folder.json").mkdir()
    (folder / "holder-1-1.json").mkdir()
    (folder / "group-link.json").symlink_to(target)
    (folder / "holder-2-2.json").symlink_to(target)
    os.link(target, folder / "group-second-name.json")
    (folder / "whatever").mkdir()
    return sorted(path.name for path in folder.iterdir())


def test_odd_entries_stand_in_nobodys_way(pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """Each command works, warns of each of them once, and touches none."""
    target = tmp_path / "target"
    target.write_text("precious")
    names = strange(Path(tool.state_dir), target)
    commands: list[list[str | int]] = [
        ["status"], ["gpus"], ["suspend", *pair.pids], ["status"], ["stop", *pair.pids], ["recover"],
        ["resume", *pair.pids], ["recover"],
    ]  # fmt: skip
    for words in commands:
        answer = tool.run(*words, "--driver", "sim").expect(0)
        warned = sorted(Path(text.split()[0]).name for text in answer.json["warnings"] if "passed over" in text)
        assert warned == names, answer
        assert all("move it away" in text for text in answer.json["warnings"] if "passed over" in text), answer
    assert target.read_text() == "precious"
    assert sorted(path.name for path in Path(tool.state_dir).iterdir() if path.name != "journal.lock") == names
    pair.check()
    for path in Path(tool.state_dir).iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_what_killed_writers_left_goes(pair: Pair, tool: Tool) -> None:
    """With the next command that writes there: what is old, and no writer has locked, a stopped one's stays."""
    state = Path(tool.state_dir)
    old, young, locked, other, link = (
        state / f"group-{name}.json.{'0123456789abcdef' if name != 'other' else 'notes'}.tmp"
        for name in ("old", "young", "locked", "other", "link")
    )
    for path in (old, young, locked, other):
        path.touch()
    link.symlink_to(old)
    for path in (old, locked, other):
        os.utime(path, (1, 1))
    tool.run("status", "--driver", "sim").expect(0)
    assert old.exists()
    with locked.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        tool.suspend(*pair.pids).expect(0)
        left = {path for path in state.iterdir() if path.suffix == ".tmp"}
        assert left == {young, locked, other, link}
    tool.resume(*pair.pids).expect(0)
    assert {path for path in state.iterdir() if path.suffix == ".tmp"} == {young, other, link}
    pair.check()


def test_odd_lock_is_refused(pair: Pair, tool: Tool) -> None:
    """Nobody could be kept from working on the group meanwhile; the path is named, and without it all is well."""
    tool.suspend(*pair.pids).expect(0)
    lock = next(Path(tool.state_dir).glob("group-*.lock"))
    lock.unlink()
    os.mkfifo(lock)
    for command in ("resume", "stop", "recover"):
        answer = tool.run(command, "--driver", "sim", *pair.pids).expect(3)
        assert answer.json["reason"] == "unsafe-state-dir" and str(lock) in answer.json["error"]["message"]
    tool.run("status").expect(0)
    lock.unlink()
    tool.resume(*pair.pids).expect(0)
    running(tool)
    pair.check()


def test_full_disk(pair: Pair, tool: Tool, small_disk: Path) -> None:
    """A suspend is refused in one line; a resume goes on, says so, and leaves no record."""
    fill(small_disk)
    answer = tool.suspend(*pair.pids).expect(3)
    assert answer.json["reason"] == "state-not-written" and answer.json["next"] == "retry"
    assert answer.stderr.count("\n") == 1 and records(tool) == []
    pair.check()
    (small_disk / "ballast").unlink()
    tool.suspend(*pair.pids).expect(0)
    fill(small_disk)
    answer = tool.resume(*pair.pids).expect(0)
    assert any("Going on without" in text for text in answer.json["warnings"])
    running(tool)
    pair.check()


def test_disk_that_has_become_read_only(pair: Pair, tool: Tool, small_disk: Path) -> None:
    """Nobody stays suspended for that; a resume that is repeated changes nothing, and the record goes later."""
    tool.suspend(*pair.pids).expect(0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for _ in range(2):
        answer = tool.resume(*pair.pids).expect(0)
        assert any("Read-only" in text for text in answer.json["warnings"])
        pair.check()
    assert tool.suspend(*pair.pids).expect(3).json["reason"] == "needs-recover"
    tool.run("recover", "--driver", "sim").expect(0)
    pair.check()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    tool.run("recover", "--driver", "sim").expect(0)
    running(tool)
    pair.check()


def test_disk_that_was_read_only_from_the_beginning(pair: Pair, tool: Tool, small_disk: Path) -> None:
    """That is what is said, and not that a lock is missing."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    answer = tool.suspend(*pair.pids).expect(3)
    assert "Read-only file system" in answer.stderr, answer
    pair.check()


def test_status_shows_an_arena_that_stayed(start_worker: Start, tool: Tool) -> None:
    """Of a process that runs, in bytes and in words; the next suspend uses it and gives it back."""
    worker = start_worker(0)
    block = worker.alloc(4 * MIB)
    worker.fill(block, 4 * MIB, 1)
    with shim_control.Group([worker]) as group:
        group.arenas()
    found = tool.run("status").expect(0).json["groups"][0]
    assert found["ranks"][0]["arena_bytes"] >= 4 * MIB and str(worker.pid) in found["note"]
    assert "ARENA" in tool.run("status", json_out=False).stdout
    tool.suspend(worker.pid).expect(0)
    tool.resume(worker.pid).expect(0)
    found = tool.run("status").expect(0).json["groups"][0]
    assert found["ranks"][0]["arena_bytes"] == 0 and found["note"] == ""
    worker.check()
