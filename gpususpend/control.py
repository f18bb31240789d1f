"""Client of the control protocol: one connection to the shim of one process.

Owns connecting, the check of who answers, parsing, file descriptors and time limits of single requests
(docs/reference/control-protocol.md).  Must not know what the verbs do to a group.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpususpend import errors, processes, system
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS, PROTOCOL_VERSION, SAME_PIDS

DATAGRAM_BYTES = 32768
LOOK_S = 0.25  # between two looks at a process that does not answer
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def socket_name(inner_pid: int, place: int = 0) -> str:
    """Return an abstract name, without its leading NUL, on which the shim of a process may listen.

    It has the first one (place 0), unless a process with the same pid in another pid namespace has that already.
    """
    return f"nvsnap-gpushare.{inner_pid}" + (f".{place}" if place else "")


@dataclass(frozen=True)
class Reply:
    """A parsed reply: `fields` of the head, and the `groups` of a list."""

    ok: bool
    fields: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, str]] = field(default_factory=list)

    def number(self, name: str, default: int = 0) -> int:
        """Return a field as a number, decimal or with 0x."""
        return number(self.fields, name, default)

    def text(self, name: str, default: str = "") -> str:
        """Return a field as text."""
        return self.fields.get(name, default)


class ShimRefused(Exception):
    """The shim answered `err`; `reply` is the answer."""

    def __init__(self, verb: str, reply: Reply) -> None:
        super().__init__(f"{verb}: {describe(reply)}")
        self.verb = verb
        self.reply = reply

    @property
    def code(self) -> str:
        """Return the protocol's word for what is wrong."""
        return self.reply.text("code", "unknown")


def number(fields: dict[str, str], name: str, default: int = 0) -> int:
    """Return `fields[name]` as a number; malformed text raises ValueError."""
    value = fields.get(name)
    return default if value is None or value == "" else int(value, 0)


def describe(reply: Reply) -> str:
    """Return one line for an `err` reply: its sentence, then step, driver code and object where given."""
    told = ("step", "cuda", "object", "addr", "errno", "need")
    facts = [f"{name} {reply.fields[name]}" for name in told if name in reply.fields]
    sentence = reply.text("msg") or f"error {reply.text('code', 'unknown')}"
    return f"{sentence} ({', '.join(facts)})" if facts else sentence


def parse_reply(text: str) -> Reply:
    """Parse a reply datagram; raises ValueError if it is not one."""
    if text.startswith(("msg=", " ")) or not text:
        raise ValueError("not a reply")
    head, separator, sentence = text.partition(" msg=")
    parts = head.split(" |")
    words = parts[0].split()
    if len(words) < 2 or words[0] not in ("ok", "err") or words[1] != str(PROTOCOL_VERSION):
        raise ValueError(f"not a reply of protocol {PROTOCOL_VERSION}: {text[:60]!r}")
    fields = _pairs(words[2:])
    if separator:
        fields["msg"] = sentence
    return Reply(words[0] == "ok", fields, [_pairs(part.split()) for part in parts[1:]])


def _pairs(words: list[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"not a pair: {word!r}")
        pairs[name] = value
    return pairs


class Silence:
    """A wait for a process: raises RankStopped once it was seen stopped all through `stopped_s`.

    A command has this patience with a process once: later waits go on from where it was, until it has answered.
    """

    _patience: ClassVar[dict[int, Deadline]] = {}  # by pid, of those that are stopped

    def __init__(self, pid: int, step: str) -> None:
        self._pid, self._step = pid, step

    def look(self) -> bool:
        """Tell whether the process is stopped now; to be called every LOOK_S."""
        by = processes.stopped_by(self._pid)
        if not by:
            self.over()
        elif self._patience.setdefault(self._pid, Deadline(LIMITS.stopped_s)).passed():
            raise errors.RankStopped(step=self._step, pid=self._pid, by=by)
        return bool(by)

    def over(self) -> None:
        """Have patience anew: the process has answered."""
        self._patience.pop(self._pid, None)


class ControlClient:
    """A connection to one shim.  Used by one thread at a time.

    Guarantees that the process with this pid answers, and no other: the pid and user that the kernel recorded for the
    listening socket are compared on every connection.
    """

    def __init__(self, pid: int, inner_pid: int, uid: int) -> None:
        self.pid = pid
        self.inner_pid = inner_pid
        self.uid = uid
        self._socket: socket.socket | None = None

    def connect(self, deadline: Deadline) -> None:
        """Connect, if not connected.

        Raises ConnectionRefusedError where no shim listens, WrongPeer where another process does, TimeoutError at the
        deadline, RankStopped where somebody keeps the process stopped.
        """
        if self._socket is not None:
            return
        others = []
        with contextlib.closing(_connections(self.inner_pid, deadline, Silence(self.pid, "connect"))) as met:
            for connection in met:
                peer = _peer(connection)
                if peer == (self.pid, self.uid):
                    self._socket = socket.socket(fileno=connection.detach())
                    return
                others.append(peer)
        for pid, uid in others:
            if pid:  # one of another pid namespace is no squatter
                raise errors.WrongPeer(pid=self.pid, inner_pid=self.inner_pid, peer_pid=pid, peer_uid=uid)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no shim listens")

    def close(self) -> None:
        """Hang up.  A verb that is running in the shim goes on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def request(self, verb: str, deadline: Deadline, fd: int | None = None, **fields: Any) -> Reply:
        """Send one request and return its `ok` reply.

        `fd` travels along.  Raises ShimRefused for an `err` reply, TimeoutError at the deadline (the connection is then
        closed, since a late reply would answer the next request), RankStopped where somebody keeps the process stopped,
        ConnectionError if the shim hangs up, ValueError for nonsense, ProtocolVersion where the shim knows only
        another version.
        """
        self.connect(deadline)
        assert self._socket is not None
        text = " ".join([str(PROTOCOL_VERSION), verb, *(f"{name}={value}" for name, value in fields.items())])
        try:
            self._socket.settimeout(max(0.001, deadline.left()))
            socket.send_fds(self._socket, [text.encode()], [] if fd is None else [fd])
            silence = Silence(self.pid, verb)
            data = self._receive(deadline, silence)
            silence.over()
        except BaseException:
            self.close()
            raise
        if not data:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the shim closed the connection")
        self._check_version(data)
        reply = parse_reply(data)
        if not reply.ok:
            raise ShimRefused(verb, reply)
        return reply

    def _receive(self, deadline: Deadline, silence: Silence) -> str:
        """Receive one datagram; descriptors that nobody asked for are closed."""
        assert self._socket is not None
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        # At its deadline a request still gets the moment that an answer takes, which tells more than no answer.
        until = Deadline(max(LIMITS.last_look_s, deadline.left()))
        while not poller.poll(until.within(LOOK_S).left() * 1000):
            silence.look()
            if until.passed():
                raise TimeoutError("no answer")
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        data, ancillary, _, _ = self._socket.recvmsg(DATAGRAM_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                for received in fds:
                    os.close(received)
        return data.decode("utf-8", "replace")

    def _check_version(self, text: str) -> None:
        words = text.split()
        if len(words) >= 2 and words[0] in ("ok", "err"):
            version = dict(word.partition("=")[::2] for word in words if "=" in word).get("supported", words[1])
            if words[1] != str(PROTOCOL_VERSION) or "code=version" in words:
                self.close()
                raise errors.ProtocolVersion(pid=self.pid, theirs=version, ours=PROTOCOL_VERSION)

    def listing(self, verb: str, deadline: Deadline, **fields: Any) -> list[dict[str, str]]:
        """Return all groups of a paged list."""
        groups: list[dict[str, str]] = []
        start = 0
        while True:
            page: dict[str, Any] = {"from": start} if start else {}
            reply = self.request(verb, deadline, **fields, **page)
            groups += reply.groups
            following = reply.number("next")
            if following <= start:
                return groups
            start = following

    def __enter__(self) -> ControlClient:
        """Return self; the connection is made by the first request."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up."""
        self.close()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user of who made the socket at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(system.peer(connection, _CREDENTIALS.size))
    return pid, uid


def who_listens(inner_pid: int, deadline: Deadline) -> list[tuple[int, int]]:
    """Return pid (0: of a PID namespace that is not seen from here) and user of all shims that have this inner pid.

    Raises TimeoutError at the deadline where one accepts no connections.
    """
    with contextlib.closing(_connections(inner_pid, deadline)) as met:
        return [_peer(connection) for connection in met]


def listens(process: processes.Process) -> bool:
    """Tell whether the shim of a process listens; one that accepts no connections counts as if it did not."""
    with contextlib.suppress(TimeoutError):
        return process.pid in (pid for pid, _ in who_listens(process.inner_pid, Deadline(LIMITS.connect_s)))
    return False


def _connections(
    inner_pid: int, deadline: Deadline, silence: Silence | None = None
) -> Generator[socket.socket, None, None]:
    """Yield a connection to each shim that listens under a name of this inner pid; it is closed unless detached.

    One whose backlog is full is tried again after the others, until the deadline: it may be a stranger that is frozen.
    Then raises TimeoutError.
    """
    places = list(range(SAME_PIDS))
    while places:
        full = []
        for place in places:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.setblocking(False)
                try:
                    with system.named("connect"):
                        connection.connect(b"\0" + socket_name(inner_pid, place).encode())
                except BlockingIOError:
                    full.append(place)
                except ConnectionRefusedError:
                    pass
                else:
                    yield connection
        if full:
            if deadline.passed():
                raise TimeoutError(f"@{socket_name(inner_pid, full[0])} does not accept connections")
            if silence is not None:
                silence.look()
            deadline.sleep(LIMITS.poll_s)
        places = full


def listeners(proc: str = "/proc") -> list[int]:
    """Return the inner pids in the names of all shim sockets that listen in this network namespace."""
    prefix = "@" + socket_name(0)[:-1]
    found = set()
    with contextlib.suppress(OSError), open(f"{proc}/net/unix", encoding="utf-8", errors="replace") as table:
        for words in _rows(table.read()):
            listening = int(words[3], 16) & 0x10000  # __SO_ACCEPTCON
            if len(words) == 8 and words[7].startswith(prefix) and listening:
                inner_pid, *place = words[7][len(prefix) :].split(".")
                if _is_number(inner_pid) and all(map(_is_number, place)) and len(place) <= 1:
                    found.add(int(inner_pid))
    return sorted(found)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text and int(text) > 0


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) >= 7:
            yield words
