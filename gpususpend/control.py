"""Client of the control protocol: one connection to the shim of one process.

Owns connecting, the check of who answers, parsing, file descriptors and time limits of single requests
(docs/reference/control-protocol.md).  Must not know what the verbs do to a group.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpususpend import errors
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS, PROTOCOL_VERSION

DATAGRAM_BYTES = 32768
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def socket_name(inner_pid: int) -> str:
    """Return the abstract name, without its leading NUL, on which the shim of a process listens."""
    return f"nvsnap-gpushare.{inner_pid}"


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

        Raises FileNotFoundError or ConnectionRefusedError where no shim listens, WrongPeer where another process does,
        TimeoutError at the deadline.
        """
        if self._socket is not None:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(max(0.001, deadline.left()))
            _connect(connection, socket_name(self.inner_pid), deadline)
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            peer_pid, peer_uid, _ = _CREDENTIALS.unpack(raw)
            if peer_pid != self.pid or peer_uid != self.uid:
                raise errors.WrongPeer(pid=self.pid, inner_pid=self.inner_pid, peer_pid=peer_pid, peer_uid=peer_uid)
        except BaseException:
            connection.close()
            raise
        self._socket = connection

    def close(self) -> None:
        """Hang up.  A verb that is running in the shim goes on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def request(self, verb: str, deadline: Deadline, fd: int | None = None, **fields: Any) -> Reply:
        """Send one request and return its `ok` reply.

        `fd` travels along.  Raises ShimRefused for an `err` reply, TimeoutError at the deadline (the connection is then
        closed, since a late reply would answer the next request), ConnectionError if the shim hangs up, ValueError for
        nonsense, ProtocolVersion where the shim knows only another version.
        """
        self.connect(deadline)
        assert self._socket is not None
        text = " ".join([str(PROTOCOL_VERSION), verb, *(f"{name}={value}" for name, value in fields.items())])
        try:
            self._socket.settimeout(max(0.001, deadline.left()))
            socket.send_fds(self._socket, [text.encode()], [] if fd is None else [fd])
            data = self._receive()
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

    def _receive(self) -> str:
        """Receive one datagram; descriptors that nobody asked for are closed."""
        assert self._socket is not None
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


def _connect(connection: socket.socket, name: str, deadline: Deadline) -> None:
    """Connect to the abstract name; a full backlog answers EAGAIN and is tried again until the deadline."""
    while True:
        try:
            connection.connect(b"\0" + name.encode())
            return
        except BlockingIOError:
            if deadline.passed():
                raise TimeoutError(f"@{name} does not accept connections") from None
            deadline.sleep(LIMITS.poll_s)


def listeners(proc: str = "/proc") -> list[int]:
    """Return the inner pids in the names of all shim sockets that listen in this network namespace."""
    prefix = "@" + socket_name(0)[:-1]
    found = set()
    with contextlib.suppress(OSError), open(f"{proc}/net/unix", encoding="utf-8", errors="replace") as table:
        for words in _rows(table.read()):
            listening = int(words[3], 16) & 0x10000  # __SO_ACCEPTCON
            if len(words) == 8 and words[7].startswith(prefix) and listening:
                suffix = words[7][len(prefix) :]
                if suffix.isascii() and suffix.isdigit() and str(int(suffix)) == suffix and int(suffix) > 0:
                    found.add(int(suffix))
    return sorted(found)


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) >= 7:
            yield words
