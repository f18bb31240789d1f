"""Output files that a user names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpususpend import errors
from gpususpend.newfile import NewFile


def test_it_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    file = NewFile(str(path))
    assert path.read_text() == "old"
    file.finish("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    NewFile("file").finish("text")
    assert Path("file").read_text() == "text"


@pytest.mark.parametrize("name", ["/dev/null", "/dev/stdout", "", "x" * 300, "missing/file", "."])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At once, and what lies there stays."""
    monkeypatch.chdir(tmp_path)
    before = os.lstat(name) if os.path.lexists(name) else None
    with pytest.raises(errors.BadFile):
        NewFile(name)
    assert before is None or os.lstat(name).st_ino == before.st_ino
    assert not os.listdir(tmp_path)


def test_an_empty_name_is_told() -> None:
    """As a variable that is not set leaves it."""
    with pytest.raises(errors.BadFile, match="the name is empty"):
        NewFile("")


def test_what_cannot_be_finished_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    file = NewFile(str(path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        file.finish("new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_what_is_another_users_is_not_replaced(tmp_path: Path) -> None:
    """Neither what is there at once nor what is put there meanwhile: root writes into directories that all share."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    path, late, link = tmp_path / "file", tmp_path / "late", tmp_path / "link"
    path.write_text("theirs")
    os.chown(path, 12345, 12345)
    link.symlink_to(path)
    with pytest.raises(errors.BadFile, match="belongs to user 12345"):
        NewFile(str(path))
    with pytest.raises(errors.BadFile, match="no regular file"):
        NewFile(str(link))
    for make in (late.mkdir, late.touch, lambda: late.symlink_to(path)):
        file = NewFile(str(late))
        make()
        os.chown(late, 12345, 12345, follow_symlinks=False)
        with pytest.raises(errors.BadFile):
            file.finish("ours")
        late.rmdir() if late.is_dir() else late.unlink()
    assert path.read_text() == "theirs" and sorted(os.listdir(tmp_path)) == ["file", "link"]
