"""The journal: one file for each group, written before every change, from which any later command can go on.

Owns the records and their files `group-<id>.json` in the state directory.  A record names processes by start time and
by the shim's nonce, which survives a restore elsewhere; a pid alone is never believed.  Must not know how steps work.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeVar

from gpususpend import errors
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.processes import Process
from gpususpend.statedir import JOURNAL_LOCK, Locked, StateDir

SCHEMA = 1
_PREFIX, _SUFFIX = "group-", ".json"


class OtherSchema(ValueError):
    """A record of another version."""


class Stage(str, Enum):
    """How far a group is.  Between two stages the record's `step` names the step begun last."""

    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    ROLLING_BACK = "rolling-back"


class Depth(str, Enum):
    """How much of a group leaves the GPUs."""

    PROCESS = "process"  # everything: the driver checkpoints each process, and its threads are stopped
    PAGES = "pages"  # the memory that the shims carry; contexts stay, threads run until they come to a gate


class Kind(str, Enum):
    """What a member of a group is to the commands."""

    SHIMMED = "shimmed"  # uses CUDA under the shim
    UNSHIMMED = "unshimmed"  # uses CUDA, allowed without the shim: driver calls and freezing only
    PLAIN = "plain"  # no CUDA: only frozen and continued


@dataclass(frozen=True)
class Member:
    """One process of a group, as recorded."""

    pid: int
    start_time: int
    inner_pid: int
    uid: int
    comm: str
    kind: Kind
    nonce: str = ""  # the shim's, hexadecimal
    arena_bytes: int = 0
    host_bytes: int = 0
    device_bytes: dict[str, int] = field(default_factory=dict)  # by GPU UUID: what the shim re-creates at load
    used_bytes: dict[str, int] = field(default_factory=dict)  # by GPU UUID: what the driver said before the suspend
    tree: bool = False  # found by --tree: what appears below it belongs to the group too

    @property
    def process(self) -> Process:
        """Return the identity alone."""
        return Process(self.pid, self.start_time, self.inner_pid, self.uid, 0, self.comm)

    def room(self, with_context: bool) -> dict[str, int]:
        """Return by GPU the bytes that it needs again: what its shim carries, or all that it used."""
        used = self.used_bytes if with_context else {}
        return {uuid: max(used.get(uuid, 0), self.device_bytes.get(uuid, 0)) for uuid in {*used, *self.device_bytes}}


@dataclass(frozen=True)
class StorePlaces:
    """Where the memory of a group is kept: store, the checkpoint's directory, cache (or none), the checkpoint's id."""

    store: str = ""
    directory: str = ""
    cache: str = ""
    checkpoint: str = ""


@dataclass(frozen=True)
class Manner:
    """How a group is suspended: what leaves the GPUs, whether no dump is to follow, and the store that it goes to."""

    depth: Depth
    in_place: bool = False
    stored: StorePlaces | None = None


@dataclass(frozen=True)
class PendingCall:
    """A driver call that was still running at its deadline, and the process in which it was left."""

    pid: int
    call: str
    driver_pid: int
    driver_start_time: int


@dataclass(frozen=True)
class Record:
    """Everything that is known about a group that is not simply running."""

    id: str
    stage: Stage
    step: str
    created: str  # UTC, ISO 8601
    simulated: bool
    driver: str
    members: list[Member]
    depth: Depth = Depth.PROCESS
    in_place: bool = False  # its host memory may be of a kind that no dump can take
    frozen: bool = False  # the holder keeps the threads stopped (as far as this record knows)
    holder: dict[str, Any] | None = None
    calls: list[PendingCall] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)  # UUIDs of all GPUs at the suspend
    room_bytes: dict[str, int] = field(default_factory=dict)  # by GPU UUID: what a restore needs again
    stored: StorePlaces | None = None  # None: the shims keep the content in host memory
    error: str = ""
    origin: str = ""  # where its pids and start times were read (origin.py); empty in records of before

    @property
    def pids(self) -> list[int]:
        """Return the pids of the members."""
        return [member.pid for member in self.members]

    @property
    def age_s(self) -> float:
        """Return the seconds since the suspend began, by the clock of the wall; none if the record does not say."""
        with contextlib.suppress(ValueError, TypeError):
            begun = datetime.datetime.fromisoformat(self.created)
            return (datetime.datetime.now(datetime.timezone.utc) - begun).total_seconds()
        return 0.0

    @property
    def holder_pid(self) -> int | None:
        """Return the pid of the holder as recorded, which may have ended."""
        pid = (self.holder or {}).get("pid")
        return pid if isinstance(pid, int) else None


_T = TypeVar("_T")


def _build(kind: type[_T], data: dict[str, Any]) -> _T:
    """Make a dataclass of the entries it knows: a newer version may have written more."""
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in known})


def encode(record: Record) -> bytes:
    """Return the file content of a record."""
    return (json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1) + "\n").encode()


def decode(content: bytes) -> Record:
    """Parse a record; raises ValueError if it is damaged or of another schema."""
    try:
        data = json.loads(content)
        if data["schema"] != SCHEMA:
            raise OtherSchema(f"schema {data['schema']}, not {SCHEMA}")
        data["members"] = [_build(Member, {**item, "kind": Kind(item["kind"])}) for item in data["members"]]
        for member in data["members"]:
            int(member.nonce or "0", 16)
        data["calls"] = [_build(PendingCall, item) for item in data["calls"]]
        data["stage"] = Stage(data["stage"])
        data["depth"] = Depth(data.get("depth", Depth.PROCESS))
        data["stored"] = _build(StorePlaces, data["stored"]) if data.get("stored") else None
        return _build(Record, data)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"damaged record: {error!r}") from None


def _way_out(damage: ValueError) -> str:
    """Return what is to be done about a record that cannot be read, which would be warned of for ever."""
    if isinstance(damage, OtherSchema):
        return "it is of another version of gpushare: use that one for its group"
    return (
        "resume the processes of its group by their pids (`status` lists those under the shim); once none of them is "
        "suspended any more, delete that file"
    )


def new_id() -> str:
    """Return a fresh group id."""
    return os.urandom(4).hex()


class Journal:
    """The records of one state directory."""

    def __init__(self, directory: StateDir, warn: Callable[[str], None] = lambda text: None) -> None:
        self._directory = directory
        self._warn = warn

    def records(self) -> list[Record]:
        """Return all readable records, oldest first; a damaged one is passed over with a warning."""
        found = []
        for group in self._ids():
            # What is no file of ours was warned of when the directory was opened.
            with contextlib.suppress(FileNotFoundError, errors.UnsafeStateDir):
                try:
                    found.append(self.read(group))
                except ValueError as damage:
                    self._warn(f"{self.path(group)} is passed over: {damage}; {_way_out(damage)}")
        return sorted(found, key=lambda record: (record.created, record.id))

    def _ids(self) -> list[str]:
        names = [name for name in self._directory.names() if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
        return [name[len(_PREFIX) : -len(_SUFFIX)] for name in names]

    def read(self, group: str) -> Record:
        """Return the record of one group.  Raises FileNotFoundError, ValueError."""
        return decode(self._directory.read(f"{_PREFIX}{group}{_SUFFIX}"))

    def path(self, group: str) -> str:
        """Return the path of a group's record, for messages."""
        return f"{self._directory.path}/{_PREFIX}{group}{_SUFFIX}"

    def write(self, record: Record) -> Record:
        """Write a record durably and return it."""
        self._directory.write(f"{_PREFIX}{record.id}{_SUFFIX}", encode(record))
        return record

    def update(self, record: Record, **changes: Any) -> Record:
        """Write a changed record and return it."""
        return self.write(replace(record, **changes))

    def remove(self, record: Record) -> None:
        """Forget a group: it runs, or nothing is left of it."""
        self._directory.remove(f"{_PREFIX}{record.id}{_SUFFIX}")
        self._directory.remove(f"{_PREFIX}{record.id}.lock")

    @contextlib.contextmanager
    def held(self, group: str, pids: Iterable[int] = (), patience_s: float = LIMITS.claim_look_s) -> Iterator[None]:
        """Hold the group for one command; raises Busy while another command has it, for longer than a look takes."""
        lock = f"{_PREFIX}{group}.lock"
        with self._locked(lock, patience_s, group=group, pids=list(pids)):
            try:
                yield
            finally:
                # Who waited for a command that has finished with the group has made the file anew.
                if f"{_PREFIX}{group}{_SUFFIX}" not in self._directory.names():
                    with contextlib.suppress(errors.StateNotWritten):
                        self._directory.remove(lock)

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Hold the whole journal while groups are looked up and claimed; brief, so others wait for it."""
        with self._locked(JOURNAL_LOCK, LIMITS.claim_s, group="", pids=[]):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, patience_s: float, **facts: object) -> Iterator[None]:
        deadline = Deadline(patience_s)
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self._directory.lock(name))
                    break
                except Locked as locked:
                    if deadline.passed():
                        raise errors.Busy.by(locked.pid, **facts) from None
                    deadline.sleep(0.02)
            yield
