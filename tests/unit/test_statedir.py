"""The state directory: what is trusted, and that nothing outside it is ever touched (B15)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpususpend import errors
from gpususpend.statedir import Locked, StateDir


@pytest.fixture
def directory(tmp_path: Path) -> StateDir:
    """An opened state directory."""
    return StateDir.open(str(tmp_path / "state"))


def test_B15_made_with_mode_0700(tmp_path: Path) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        StateDir.open(str(tmp_path / "state")).close()
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o701, 0o750, 0o1700, 0o2700, 0o600, 0o500])
def test_B15_other_modes_are_refused(tmp_path: Path, mode: int) -> None:
    """Exactly 0700, the special bits included."""
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(errors.UnsafeStateDir) as caught:
        StateDir.open(str(path))
    assert str(path) in str(caught.value)
    assert path.stat().st_mode & 0o7777 == mode
    path.chmod(0o700)


def test_a_refusal_takes_no_record_away(tmp_path: Path) -> None:
    """It says what to look at and how to go on; to remove the directory may be to remove the only way back."""
    path, good = tmp_path / "state", tmp_path / "good"
    for directory in (path, good):
        directory.mkdir(mode=0o700)
    (path / "group-1a2b3c4d.json").touch()
    path.chmod(0o770)
    link, file, nowhere = tmp_path / "link", tmp_path / "file", tmp_path / "none" / "state"
    link.symlink_to(good)
    file.write_text("")
    ways = {path: f"chmod 700 {path}", link: "if that is yours, name it", file: "See what it is", nowhere: "See to"}
    for place, way_out in ways.items():
        with pytest.raises(errors.UnsafeStateDir) as caught:
            StateDir.open(str(place))
        message = str(caught.value)
        assert way_out in message and "--state-dir" in message and "remove" not in message, message
        assert ("record of a suspended group" in message) == (place in (path, link)), message


@pytest.mark.parametrize("inside", ["", "passwd", "groups.txt"])
def test_nobody_is_told_to_change_a_directory_that_is_not_ours(tmp_path: Path, inside: str) -> None:
    """Such as /etc: another one is to be named.  One of ours, by what lies in it, may hold a record."""
    path = tmp_path / "etc"
    path.mkdir(mode=0o755)
    if inside:
        (path / inside).touch()
    for owner in {os.geteuid(), 12345 if os.geteuid() == 0 else os.geteuid()}:
        os.chown(path, owner, -1)
        with pytest.raises(errors.UnsafeStateDir) as caught:
            StateDir.open(str(path))
        message = str(caught.value)
        assert "chmod" not in message and "record" not in message and "run as" not in message, message
        assert "Name another one with --state-dir" in message, message
    os.chown(path, os.geteuid(), -1)
    (path / "journal.lock").touch()
    with pytest.raises(errors.UnsafeStateDir, match=f"record of a suspended group: .*chmod 700 {path}"):
        StateDir.open(str(path))


def test_B15_symlinked_directory_is_refused(tmp_path: Path) -> None:
    """Even to a directory that would do."""
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(good)
    with pytest.raises(errors.UnsafeStateDir, match="symbolic link"):
        StateDir.open(str(tmp_path / "state"))
    assert list(good.iterdir()) == []


def test_B15_dangling_symlink_is_refused(tmp_path: Path) -> None:
    """And nothing is made at its target."""
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.UnsafeStateDir):
        StateDir.open(str(tmp_path / "state"))
    assert not (tmp_path / "elsewhere").exists()


def test_B15_file_in_its_place_is_refused(tmp_path: Path) -> None:
    """A plain file is no directory, and keeps its content."""
    path = tmp_path / "state"
    path.write_text("precious")
    with pytest.raises(errors.UnsafeStateDir):
        StateDir.open(str(path))
    assert path.read_text() == "precious"


def test_B15_foreign_owner_is_refused(tmp_path: Path) -> None:
    """Mode 0700 alone is not enough."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    (path / "holder-1-2.json").touch()
    os.chown(path, 12345, 12345)
    with pytest.raises(errors.UnsafeStateDir, match="user 12345, not to 0. It may hold .* run as that user"):
        StateDir.open(str(path))


def test_B15_symlinked_file_is_refused_and_its_target_untouched(tmp_path: Path, directory: StateDir) -> None:
    """Reading, appending and locking go through no link; writing and removing replace the link itself."""
    target = tmp_path / "target"
    target.write_text("precious")
    for name in ("a", "b", "c", "d"):
        os.symlink(target, name, dir_fd=directory.fd)
    with pytest.raises(errors.UnsafeStateDir):
        directory.read("a")
    with pytest.raises(errors.UnsafeStateDir):
        directory.append_fd("a")
    with pytest.raises(errors.UnsafeStateDir), directory.lock("b"):
        pass
    directory.write("c", b"new")
    directory.remove("d")
    assert target.read_text() == "precious"
    assert directory.read("c") == b"new" and "d" not in directory.names()


def test_B15_planted_fifo_device_and_hard_link_are_refused(tmp_path: Path, directory: StateDir) -> None:
    """A fifo must not keep the command waiting, and a hard link is another's file."""
    os.mkfifo("fifo", dir_fd=directory.fd)
    with pytest.raises(errors.UnsafeStateDir):
        directory.read("fifo")
    with pytest.raises(errors.UnsafeStateDir):
        directory.append_fd("fifo")
    target = tmp_path / "target"
    target.write_text("precious")
    os.link(target, "link", dst_dir_fd=directory.fd)
    with pytest.raises(errors.UnsafeStateDir):
        directory.append_fd("link")
    assert target.read_text() == "precious"


def test_what_is_none_of_ours_is_named(tmp_path: Path, directory: StateDir) -> None:
    """And nothing else."""
    directory.write("group-a.json", b"{}")
    os.mkfifo("fifo", dir_fd=directory.fd)
    os.mkdir("folder", dir_fd=directory.fd)
    os.symlink(tmp_path, "link", dir_fd=directory.fd)
    (tmp_path / "target").touch()
    os.link(tmp_path / "target", "second-name", dst_dir_fd=directory.fd)
    assert sorted(directory.odd()) == ["fifo", "folder", "link", "second-name"]
    for name in directory.odd():
        with pytest.raises(errors.UnsafeStateDir), directory.lock(name):
            pass
    directory.remove("folder")
    assert "folder" in directory.names()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", ".."])
def test_B15_names_with_a_path_are_refused(directory: StateDir, name: str) -> None:
    """Names come from our own code; one that escapes is a defect."""
    with pytest.raises(ValueError):
        directory.read(name)


def test_write_is_atomic_and_leaves_nothing_behind(directory: StateDir) -> None:
    """Content and mode; no temporary file, also after a failure."""
    directory.write("a", b"1")
    directory.write("a", b"22")
    assert directory.read("a") == b"22" and directory.names() == ["a"]
    assert os.stat("a", dir_fd=directory.fd).st_mode & 0o7777 == 0o600
    os.mkdir("d", dir_fd=directory.fd)
    with pytest.raises(errors.StateNotWritten):
        directory.write("d", b"1")
    assert directory.names() == ["a", "d"]


def test_lock_is_held_by_one_and_freed_by_death(directory: StateDir) -> None:
    """The holder's pid is told; a killed holder frees it."""
    code = (
        "import sys, time\nfrom gpususpend.statedir import StateDir\n"
        f"with StateDir.open({directory.path!r}).lock('x'):\n    print('ready', flush=True)\n    time.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline().strip() == "ready"
    with pytest.raises(Locked) as caught, directory.lock("x"):
        pass
    assert caught.value.pid == child.pid
    child.kill()
    child.wait()
    child.stdout.close()
    with directory.lock("x"):
        assert int(directory.read("x")) == os.getpid()
