"""One message at a time between the demo and a rank, with file descriptors beside it.

A message is one JSON object in one datagram of a SOCK_SEQPACKET pair.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 65536
MAX_FDS = 64


class Closed(Exception):
    """The other side has gone."""


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send `message` and copies of `fds`; the caller keeps its own. Raises Closed."""
    try:
        socket.send_fds(channel, [json.dumps(message).encode()], fds)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and the descriptors that came with it, which the caller owns. Raises Closed."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_FDS)
    except ConnectionResetError as error:
        raise Closed from error
    for fd in fds:
        os.set_inheritable(fd, False)
    if not data:
        raise Closed
    message: dict[str, Any] = json.loads(data)
    return message, list(fds)
