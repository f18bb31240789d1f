"""The journal: what is written is what is read, and one command at a time works on a group."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import pytest

from gpususpend import errors
from gpususpend.journal import Journal, Kind, Member, PendingCall, Record, Stage, decode, encode
from gpususpend.statedir import StateDir


def record(group: str = "g1", created: str = "2025-01-01T00:00:00+00:00") -> Record:
    """Return a record that uses every field."""
    member = Member(7, 99, 7, 0, "python", Kind.SHIMMED, "0xabc", 10, 20, {"GPU-a": 30})
    return Record(
        group, Stage.SUSPENDED, "suspended", created, True, "580.1", [member, Member(8, 1, 8, 0, "sh", Kind.PLAIN)],
        frozen=True, holder={"pid": 5}, calls=[PendingCall(7, "lock", 9, 3)], gpus=["GPU-a"],
        room_bytes={"GPU-a": 40}, error="x",
    )  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal(StateDir.open(str(tmp_path / "state")))


def test_round_trip() -> None:
    """Every field, the nested ones too."""
    assert decode(encode(record())) == record()


def test_unknown_fields_are_passed_over() -> None:
    """A newer version may have written more."""
    data = json.loads(encode(record()))
    data["new"] = 1
    data["members"][0]["new"] = 2
    assert decode(json.dumps(data).encode()) == record()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"schema": 99}', b'{"schema": 1, "members": 3}'])
def test_damage_is_a_value_error(content: bytes) -> None:
    """Nothing else escapes."""
    with pytest.raises(ValueError):
        decode(content)


def test_a_nonce_that_is_no_number_is_damage() -> None:
    """Whether a process is the same one hangs on it."""
    data = json.loads(encode(record()))
    data["members"][0]["nonce"] = "xyz"
    with pytest.raises(ValueError):
        decode(json.dumps(data).encode())


def test_records_are_listed_oldest_first_without_the_damaged(journal: Journal) -> None:
    """A damaged file is named, not believed, and hides no other."""
    journal.write(record("b", "2025-01-02T00:00:00+00:00"))
    journal.write(record("a", "2025-01-03T00:00:00+00:00"))
    warnings: list[str] = []
    journal = Journal(journal._directory, warnings.append)
    journal._directory.write("group-c.json", b"{")
    journal._directory.write("other.json", b"{}")
    assert [one.id for one in journal.records()] == ["b", "a"]
    assert len(warnings) == 1 and "group-c.json is passed over" in warnings[0]
    journal.remove(record("b"))
    assert [one.id for one in journal.records()] == ["a"]


def test_update_is_on_disk_at_once(journal: Journal) -> None:
    """A killed command loses nothing that it noted."""
    changed = journal.update(journal.write(record()), step="release", stage=Stage.SUSPENDING)
    assert journal.read("g1") == changed and changed.step == "release"


def test_no_lock_is_left_of_a_group_that_is_gone(journal: Journal) -> None:
    """Whoever held it last; that of a group with a record stays."""
    with journal.held("g1"):
        journal.write(record())
    assert journal._directory.names() == ["group-g1.json", "group-g1.lock"]
    with journal.held("g1"):
        journal.remove(record())
    with journal.held("g1"):
        pass
    assert journal._directory.names() == []


def test_a_look_keeps_nobody_out(journal: Journal, tmp_path: Path) -> None:
    """`status` holds the lock for a moment; a command that begins just then waits for that."""
    other = Journal(StateDir.open(str(tmp_path / "state")))
    holding = contextlib.ExitStack()
    holding.enter_context(other.held("g1"))
    timer = threading.Timer(0.1, holding.close)
    timer.start()
    with journal.held("g1", patience_s=60):
        timer.join()


def test_one_command_holds_a_group(journal: Journal, tmp_path: Path) -> None:
    """The second is told the pid of the first; other groups are free."""
    other = Journal(StateDir.open(str(tmp_path / "state")))
    with journal.held("g1", [7]):
        with pytest.raises(errors.Busy), other.held("g1", [7]):
            pass
        with other.held("g2"):
            pass
    with other.held("g1"):
        pass
