"""The control socket under a process that has no descriptor left: it is served, it burns nothing, it recovers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpususpend import processes
from tests.programs.client import Worker
from tests.sim.shim_control import ask, exchange

Start = Callable[..., Worker]
SPARE_FDS = 4
TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def connected(pid: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections to the shim of a process."""
    with contextlib.ExitStack() as stack:
        links = []
        for _ in range(count):
            links.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            links[-1].settimeout(60)
            links[-1].connect(f"\0nvsnap-gpushare.{pid}")
        yield links


def processor_seconds(pid: int) -> float:
    """Return the time that the threads of the shim have used."""
    ticks = 0
    for tid in processes.threads_named(pid, [processes.CONTROL_THREAD]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            task = Path(f"/proc/{pid}/task/{tid}")
            ticks += sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / TICKS


def test_a_process_without_a_free_descriptor(start_worker: Start) -> None:
    """A few connections are served at once, the next one waits without a thread spinning, and gets its turn."""
    worker = start_worker(0)
    worker.use_up_fds()
    for _ in range(3):
        with connected(worker.pid, SPARE_FDS) as links:
            for link in links:
                assert exchange(link, "1 status")[0].startswith("ok 1")
    with connected(worker.pid, SPARE_FDS + 1) as links:
        for link in links[:-1]:
            assert exchange(link, "1 status")[0].startswith("ok 1")
        before = processor_seconds(worker.pid)
        links[-1].settimeout(1.5)
        with pytest.raises(TimeoutError):
            exchange(links[-1], "1 status")
        assert processor_seconds(worker.pid) - before < 0.1
        links[-1].settimeout(60)
        links[0].close()
        assert links[-1].recv(32768).startswith(b"ok 1")


def test_a_descriptor_that_the_application_frees_is_enough(start_worker: Start) -> None:
    worker = start_worker(0)
    opened = worker.use_up_fds()
    with connected(worker.pid, SPARE_FDS + 1) as links:
        links[-1].settimeout(0.5)
        for link in links[:-1]:
            exchange(link, "1 status")
        with pytest.raises(TimeoutError):
            exchange(links[-1], "1 status")
        worker.close_fd(opened[0])
        links[-1].settimeout(60)
        assert links[-1].recv(32768).startswith(b"ok 1")
    assert ask(worker.pid, "status")["phase"] == "running"


def test_a_client_that_does_not_read_keeps_nobody_waiting(start_worker: Start) -> None:
    """It loses its connection."""
    worker = start_worker(0)
    with connected(worker.pid, 1) as (link,), pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            link.send(b"1 status")
    assert ask(worker.pid, "status")["phase"] == "running"


def test_a_request_that_is_too_long_is_refused_whole(start_worker: Start) -> None:
    """Not cut and then obeyed."""
    worker = start_worker(0)
    with connected(worker.pid, 1) as (link,):
        assert exchange(link, "1 admit pad=" + "x" * 2000 + " n=12345")[0] == "err 1 code=size"
        assert exchange(link, "1 status")[0].startswith("ok 1")
