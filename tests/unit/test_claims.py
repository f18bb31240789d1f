"""Claims: who has what, told with what is known, and a group that is done meanwhile told from everything else."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpususpend import claims, discover, errors, operations, origin, processes
from gpususpend.discover import Targets
from gpususpend.journal import Depth, Manner
from gpususpend.report import Report
from gpususpend.session import Session
from gpususpend.statedir import Locked, StateDir
from tests.unit.model import scene

LOCKER = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


@pytest.mark.parametrize("text", ["", "4000000\n"])
def test_a_lock_whose_holder_has_not_written_its_pid(tmp_path: Path, text: str) -> None:
    """The kernel knows it, also where the file still says who had it before."""
    path = tmp_path / "state" / "x.lock"
    with StateDir.open(str(path.parent)) as directory:
        with directory.lock(path.name):
            pass
        path.write_text(text)
        command = [sys.executable, "-c", LOCKER, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(Locked) as caught, directory.lock(path.name):
                pass
            other.communicate(b"\n")
        assert caught.value.pid == other.pid


def test_a_holder_that_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another pid namespace: no process is named that does not exist."""
    monkeypatch.setattr(processes, "lock_holder", lambda inode: 0)
    fd = os.open("/proc/self/environ", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(errors.Busy, match="pid namespace") as caught, claims.exclusive([os.getpid()]):
            pass
    finally:
        os.close(fd)
    assert "pid 0" not in str(caught.value) and caught.value.facts["pid"] is None


@pytest.mark.parametrize("then", ["nobody", "another"])
@pytest.mark.parametrize("kind", ["process", "file"])
def test_a_holder_that_lets_go_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, then: str
) -> None:
    """It was none of another pid namespace: its lock is free, or another's, who is named."""
    path = Path("/proc/self/environ") if kind == "process" else tmp_path / "state" / "x.lock"
    with StateDir.open(str(tmp_path / "state")) as directory:
        with directory.lock("x.lock"):
            pass
        fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2)]
        fcntl.flock(fds[0], fcntl.LOCK_EX)

        def let_go(inode: int) -> int:
            monkeypatch.undo()
            fcntl.flock(fds[0], fcntl.LOCK_UN)
            if then == "another":
                fcntl.flock(fds[1], fcntl.LOCK_EX)
            return 0

        monkeypatch.setattr(processes, "lock_holder", let_go)
        kinds = errors.Busy if kind == "process" else Locked
        taken = claims.exclusive([os.getpid()]) if kind == "process" else directory.lock("x.lock")
        try:
            if then == "nobody":
                with taken:
                    pass
            else:
                with pytest.raises(kinds) as caught, taken:
                    pass
                pid = caught.value.facts["pid"] if isinstance(caught.value, errors.Busy) else caught.value.pid
                assert pid == os.getpid()
        finally:
            for fd in fds:
                os.close(fd)


def test_a_table_of_locks_that_cannot_be_read(tmp_path: Path) -> None:
    """A container may hide it: nobody is named then, and a command that is busy stays one that is busy."""
    assert processes.lock_holder(1, proc=str(tmp_path)) == 0


def test_a_group_that_is_done_meanwhile(tmp_path: Path) -> None:
    """Another command has finished with it: nothing to do."""
    with scene(tmp_path) as one:
        report = Report("resume")
        one.context.journal.remove(one.record)
        operations._one_group(one.context, one.record, report, lambda session: None)
        assert report.already


def test_a_file_that_is_missing_is_no_group_that_is_done(tmp_path: Path) -> None:
    """Work that fails for want of any other file has failed."""

    def work(session: Session) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")

    with scene(tmp_path) as one:
        report = Report("resume")
        members = [replace(member, nonce="") for member in one.members]  # nobody listens behind the model's shims
        record = one.context.journal.write(replace(one.record, members=members))
        with pytest.raises(FileNotFoundError, match="/nowhere"):
            operations._one_group(one.context, record, report, work)
        assert not report.already


def test_a_group_of_another_namespace_is_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim that does not answer would be waited for at each look."""
    asked: list[int] = []
    monkeypatch.setattr(claims, "_restored_here", lambda member: asked.append(member.pid))
    with scene(tmp_path) as one:
        there = origin.here().replace("pid:[", "pid:[1")
        record = one.context.journal.write(replace(one.record, origin=there))
        for _ in range(2):
            claims.named_records(one.context, Targets(everything=True))
            assert claims.elsewhere(one.context.journal.read(record.id)) == "pid"
        assert asked == record.pids


@pytest.mark.parametrize("error", [ValueError("odd"), PermissionError(1, "denied"), errors.NoDriver(detail="none")])
def test_what_nobody_foresaw_names_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """One of several groups, and what was to become one; an error of ours says itself what it is about."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(operations, "_one_group", fail)
    monkeypatch.setattr(operations, "_suspend_found", fail)
    ours = isinstance(error, errors.GpushareError)
    with scene(tmp_path) as one:
        pids = ", ".join(map(str, one.pids))
        records = [one.record, one.context.journal.write(replace(one.record, id="00000001"))]
        monkeypatch.setattr(claims, "named_records", lambda context, targets: (records, []))
        monkeypatch.setattr(claims, "unrecorded", lambda context, targets: (None, []))
        with pytest.raises(type(error) if ours or isinstance(error, OSError) else operations.GroupFailed) as caught:
            operations.resume_targets(one.context, Targets(everything=True), None, Report("resume"))
        assert (f"group {one.record.id} (pid {pids}): " in str(caught.value)) != ours, caught.value
        assert (f"group 00000001 (pid {pids}): " in one.context.warnings[0]) != ours, one.context.warnings
        monkeypatch.setattr(discover, "examine_all", lambda targets, warn: [])
        with pytest.raises(Exception, match="none" if ours else "the group to be suspended"):
            manner = Manner(Depth.PROCESS)
            operations.suspend_targets(one.context, Targets(pids=(1,)), False, manner, Report("suspend"))
