"""A group of workers driven by the verbs of the control protocol alone: the supervisor's part, as small as it can be.

Knows the protocol and nothing of the supervisor, so that the shim's tests do not stand on it.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.programs.client import Worker
from tests.programs.setting import Setting

DEADLINE_S = 60.0
TIMEOUT_MS = 30_000
FAILED_MS = 2_000  # where others wait in vain for what one has failed to do
GRANULE = 2 << 20
PLACEHOLDER = "gpushare-export"


class Refused(Exception):
    """The shim answered `err`; `fields` are the pairs of the reply."""

    def __init__(self, verb: str, text: str) -> None:
        super().__init__(f"{verb}: {text}")
        self.fields = pairs(text)

    @property
    def code(self) -> str:
        """Return the protocol's word."""
        return self.fields.get("code", "")


def pairs(text: str) -> dict[str, str]:
    """Return the pairs of a reply's head or of one group."""
    head, _, sentence = text.partition(" msg=")
    found = dict(word.split("=", 1) for word in head.split() if "=" in word)
    return found | ({"msg": sentence} if sentence else {})


def talk(pid: int, text: str, fd: int | None = None) -> tuple[str, list[int]]:
    """Send one datagram to the shim of a process on a connection of its own; return the reply and descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(DEADLINE_S)
        link.connect(f"\0nvsnap-gpushare.{pid}")
        return exchange(link, text, fd)


def exchange(link: socket.socket, text: str, fd: int | None = None) -> tuple[str, list[int]]:
    """Send one datagram on a connection; return the reply and descriptors."""
    socket.send_fds(link, [text.encode()], [] if fd is None else [fd])
    data, fds, _, _ = socket.recv_fds(link, 32768, 4)
    return data.decode(), list(fds)


def patiently(pid: int, text: str, fd: int | None = None) -> str:
    """Send one request and return the reply.  A busy shim (others may ask it, too) is asked again."""
    until = time.monotonic() + DEADLINE_S
    while True:
        reply, fds = talk(pid, text, fd)
        for received in fds:
            os.close(received)
        if "code=busy verb=" not in reply or time.monotonic() > until:
            return reply
        time.sleep(0.01)


def ask(pid: int, verb: str, fd: int | None = None, /, **fields: Any) -> dict[str, str]:
    """Send one request; return the pairs of a good reply."""
    text = patiently(pid, " ".join(["1", verb, *(f"{name}={value}" for name, value in fields.items())]), fd)
    if not text.startswith("ok 1"):
        raise Refused(verb, text)
    return pairs(text.split(" |")[0])


def rows(pid: int, verb: str, /, **fields: Any) -> list[dict[str, str]]:
    """Return all groups of a list."""
    found: list[dict[str, str]] = []
    start = 0
    while True:
        words = [f"{name}={value}" for name, value in {**fields, "from": start}.items()]
        text = patiently(pid, " ".join(["1", verb, *words]))
        if not text.startswith("ok 1"):
            raise Refused(verb, text)
        head, *groups = text.split(" |")
        found += [pairs(group) for group in groups]
        start = int(pairs(head)["next"])
        if start == 0:
            assert len(found) == int(pairs(head)["total"])
            return found


class Group:
    """Workers that are suspended and resumed together."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.pids = [worker.pid for worker in workers]
        self._pool = ThreadPoolExecutor(len(self.pids))

    def all(self, verb: str, **fields: Any) -> list[dict[str, str]]:
        """Send a verb to all at once; the first refusal is raised after all have answered."""
        futures = [self._pool.submit(ask, pid, verb, **fields) for pid in self.pids]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def arenas(self) -> None:
        """Hand every process an arena of the size that it plans."""
        for pid in self.pids:
            size = int(ask(pid, "plan")["arena_bytes"])
            self.arena(pid, size)

    def arena(self, pid: int, size: int, **fields: Any) -> dict[str, str]:
        """Hand one process an arena."""
        if size == 0:
            return ask(pid, "arena", bytes=0)
        fd = os.memfd_create("test-arena")
        os.ftruncate(fd, size)
        try:
            return ask(pid, "arena", fd, bytes=size, **fields)
        finally:
            os.close(fd)

    def quiesce(self) -> None:
        """Close both gates of all and drain them."""
        self.all("close-launch")
        until = time.monotonic() + DEADLINE_S
        while not all(reply["drained"] == "1" for reply in self.all("drain")):
            assert time.monotonic() < until, "the group does not drain"
            time.sleep(0.005)
        self.all("close-memory", timeout_ms=TIMEOUT_MS)

    def release(self) -> list[dict[str, str]]:
        """Release all."""
        return self.all("release")

    # Threads are not stopped here: the workers wait for their client meanwhile.

    def seal(self, host: int = 1) -> list[dict[str, str]]:
        """Seal all."""
        return self.all("seal", host=host, timeout_ms=TIMEOUT_MS)

    def unseal(self) -> list[dict[str, str]]:
        """Unseal all."""
        return self.all("unseal", timeout_ms=TIMEOUT_MS)

    def suspend(self, host: int = 1) -> None:
        """Take all device memory (and host-class memory) away."""
        self.arenas()
        self.quiesce()
        self.release()
        self.seal(host)

    def back(self) -> None:
        """Bring everything back, but leave the gates closed."""
        self.all("load")
        self.all("remap")
        self.unseal()

    def resume(self) -> None:
        """Bring everything back and let the group run on."""
        self.back()
        self.all("bind")
        self.all("check")
        self.all("arena", bytes=0)
        self.all("open")

    def cycle(self) -> None:
        """Suspend and resume."""
        self.suspend()
        self.resume()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


HARMLESS = {"cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2", "cuMemAddressFree", "cuStreamDestroy_v2", "cuStreamQuery",
            "cuMemHostGetDevicePointer_v2"}
"""Calls whose failure a verb may survive.

They give something back, belong to polls, whose number varies, or ask for a registration, which is then made again.
"""


class Faults:
    """One verb of a cycle, `verbs` up to it and a process in which its driver calls fail (B20).

    The group's processes write `trace` (SIMCUDA_TRACE), which tells what they call.
    """

    def __init__(self, group: Group, machine: Setting, trace: Path, victim: Worker, verbs: Sequence[str]) -> None:
        self.group, self.machine, self.trace, self.victim = group, machine, trace, victim.pid
        *self.before, self.verb = verbs
        self.counts: Counter[str] = Counter()
        self.timeout_ms = TIMEOUT_MS

    def run(self, verb: str) -> None:
        """Run one step on all."""
        self.group.all(verb, **({"timeout_ms": self.timeout_ms} if verb in ("seal", "remap", "unseal") else {}))

    def lead(self) -> None:
        """Take the group to where the verb is due."""
        self.group.arenas()
        self.group.quiesce()
        for verb in self.before:
            self.run(verb)

    def back(self) -> None:
        """Do what a rollback, a retry and a resume do."""
        self.group.resume()

    def count(self) -> None:
        """Run the verb once without failures, count the driver calls of the victim, and bring the group back."""
        self.lead()
        begin = self.trace.stat().st_size
        self.run(self.verb)
        with self.trace.open() as lines:
            lines.seek(begin)
            words = [line.split() for line in lines]
        self.counts = Counter(parts[0] for parts in words if len(parts) == 3 and int(parts[2]) == self.victim)
        self.back()

    def fail_each(self, before: Callable[[int], None], after: Callable[[int], None], harmless: Set[str]) -> None:
        """Fail each driver call of the verb in turn, and bring the group back; only harmless failures are survived.

        `before` and `after` are called with a number around each turn, while the group runs.
        """
        calls = [(name, nth) for name in sorted(self.counts) for nth in range(1, self.counts[name] + 1)]
        survived = []
        for number, (name, nth) in enumerate(calls):
            before(number)
            self.lead()
            self.machine.inject(f"{name} {nth} 2", self.victim)
            self.timeout_ms = FAILED_MS
            try:
                self.run(self.verb)
                survived.append((name, nth))
            except Refused as refusal:
                assert refusal.code in ("cuda", "deadline", "gone"), (name, nth, refusal)
                assert ask(self.victim, "status")["launch"] == "closed"
            self.timeout_ms = TIMEOUT_MS
            self.machine.inject("", self.victim)
            self.back()
            after(number)
        print(self.verb, dict(self.counts), "survived", survived)
        assert not [one for one in survived if one[0] not in harmless]


def used_bytes(worker: Worker) -> int:
    """Return how much of its device's memory is in use, by the driver's own account."""
    free, total = worker.mem_info()
    return int(total - free)
