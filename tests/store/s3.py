"""A server that speaks S3 (moto's), as a process of its own, and a way to it that fails now and then."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUCKET = "checkpoints"
START_S = 60


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Have it take connections and answer nothing, until the end of the with statement."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def wait_for_client(self, pid: int) -> None:
        """Wait until a process has a connection to it."""
        port = int(self.url.rsplit(":", 1)[1])
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()]
            inodes = [words[9] for words in lines if words[2].endswith(f":{port:04X}") and words[3] == "01"]
            fds = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
            if any(f"socket:[{inode}]" in fds for inode in inodes):
                return
            time.sleep(0.05)
        raise AssertionError(f"pid {pid} asks nothing")


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """Yield the URL of a server that runs until the end of the with statement."""
    with running(log) as server:
        yield server.url


@contextmanager
def running(log: Path) -> Iterator[Server]:
    """Yield a server that runs until the end of the with statement."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=out, stderr=out
        )
    try:
        yield Server(_wait(process, log), process)
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(START_S * 20):
        found = re.search(r"Running on (http://127\.0\.0\.1:\d+)\s", log.read_text())
        if found:
            urllib.request.urlopen(
                urllib.request.Request(f"{found[1]}/{BUCKET}", method="PUT"), timeout=START_S
            ).close()
            return found[1]
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"moto's server did not start: {log.read_text()}")


def variables(url: str) -> dict[str, str]:
    """Return the variables by which a client finds that server, as it would find Amazon's."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
    }  # fmt: skip


class Unreliable:
    """A way to a server: the first `refused` connections get 503, the `cut` ones after them end after some bytes.

    With `together` set, a connection is passed on when that many are there, and closed if they do not come.
    """

    def __init__(self, url: str, refused: int = 0, cut: int = 0) -> None:
        self._target = (url.split("//")[1].split(":")[0], int(url.rsplit(":", 1)[1]))
        self._refused, self._cut = refused, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self.together: threading.Barrier | None = None
        self.connections = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Unreliable:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.connections += 1
            self._start(self._serve, client, self.connections)

    def _serve(self, client: socket.socket, number: int) -> None:
        with client:
            if number <= self._refused:
                client.recv(65536)
                client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            if self.together is not None:
                try:
                    self.together.wait(60)
                except threading.BrokenBarrierError:
                    return
            with socket.create_connection(self._target) as server:
                self._start(self._pass_on, client, server, None)
                self._pass_on(server, client, 20_000 if number <= self._refused + self._cut else None)

    def _pass_on(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        """Pass bytes on until either side ends, or so many went."""
        source.settimeout(0.1)
        passed = 0
        while not self._over.is_set() and (limit is None or passed < limit):
            try:
                content = source.recv(16384)
            except TimeoutError:
                continue
            except OSError:
                break
            if not content:
                break
            try:
                target.sendall(content)
            except OSError:
                break
            passed += len(content)
        for side in (source, target):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has gone


def set_variables(url: str) -> None:
    """Let this process's clients find that server."""
    os.environ.update(variables(url))
