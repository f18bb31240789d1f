"""A shim that is no shim: answers the control protocol as a test says, in a process of its own or in a thread.

It is stricter than the real one where it matters: every request is recorded, and one that is malformed is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

Answers = Mapping[str, "str | Callable[[dict[str, str]], str]"]

HELLO = "ok 1 pid={pid} nonce=0xabc phase=running build=test cuda=1 driver=580.1 simulated=1 uid={uid}"
STATUS = (
    "ok 1 phase=running launch=open memory=open waiting_launch=0 waiting_memory=0 in_flight=0 admitted=0 objects=0"
    " imports=0 exports=0 mappings=0 allocations=0 host_registrations=0 carried_bytes=0 arena_bytes=0 lease=none busy=-"
)


class FakeShim:
    """Listens on the name of a pid, this process's own unless another is given, and answers from a table.

    An answer is text, or a function of the request's pairs; what is not in the table is answered `ok 1`.
    """

    def __init__(self, answers: Answers | None = None, pid: int | None = None, name: str | None = None) -> None:
        self.answers = dict(answers or {})
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.fds = 0
        self.pid = os.getpid() if pid is None else pid
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name or f'nvsnap-gpushare.{self.pid}'}")
        self._listener.listen(16)
        self._connections: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
                for fd in fds:
                    os.close(fd)
                self.fds += len(fds)
                if not data:
                    return
                reply = self.reply(data.decode())
                if reply is None:
                    connection.close()
                    return
                connection.send(reply.encode())

    def reply(self, text: str) -> str | None:
        """Return the answer to one request; None hangs up."""
        version, verb, *words = text.split(" ")
        if version != "1":
            return "err 1 code=version supported=1"
        pairs = dict(word.split("=", 1) for word in words)
        self.requests.append((verb, pairs))
        defaults = {"hello": HELLO.format(pid=self.pid, uid=os.geteuid()), "status": STATUS}
        answer = self.answers.get(verb, defaults.get(verb, "ok 1"))
        return answer if answer is None or isinstance(answer, str) else answer(pairs)

    def verbs(self) -> list[str]:
        """Return the verbs that were asked, in order."""
        return [verb for verb, _ in self.requests]

    def close(self) -> None:
        """Stop listening and hang up."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        # A thread inside accept keeps the name bound, and the next one here wants it.
        self._acceptor.join(10)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> FakeShim:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()


@contextlib.contextmanager
def sleeper(code: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run a process that prints a line when it is ready and then waits; `code` runs before that."""
    program = f"import os, sys, time\n{code}\nprint('ready', flush=True)\ntime.sleep(600)\n"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
