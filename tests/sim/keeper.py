"""What keeps memory for shims that hand it out through a ring: a store for the shim's tests, as small as it can be.

Knows the protocol and nothing of the supervisor or of a real store.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from tests.sim.shim_control import Group, ask, rows

PLACES = 2
STEP = 1 << 20


class Keeper:
    """Keeps the content of every piece of a group, by pid, object and offset."""

    def __init__(self, group: Group, step: int = STEP) -> None:
        self.group = group
        self.step = step
        self.kept: dict[tuple[int, str, str], bytes] = {}
        self.ring = {pid: os.memfd_create("test-ring") for pid in group.pids}
        self.seen: dict[int, mmap.mmap] = {}
        for pid, fd in self.ring.items():
            os.ftruncate(fd, PLACES * step)
            self.seen[pid] = mmap.mmap(fd, PLACES * step)

    def hand_over(self) -> None:
        """Give every process its ring."""
        for pid, fd in self.ring.items():
            ask(pid, "arena", fd, bytes=PLACES * self.step)

    def give_up(self) -> None:
        """Take the rings back."""
        self.group.all("arena", bytes=0)

    def _each(self, name: str) -> None:
        with ThreadPoolExecutor(len(self.group.pids)) as pool:
            futures = [pool.submit(getattr(self, name), pid) for pid in self.group.pids]
        for future in futures:
            future.result()

    def save(self) -> None:
        """Copy all pieces out of all processes."""
        self._each("save_one")

    def load(self) -> None:
        """Copy everything that is missing in all processes back in."""
        self._each("load_one")

    def save_one(self, pid: int) -> None:
        """Copy all pieces of a process out."""
        for number, row in enumerate(rows(pid, "pieces", bytes=self.step)):
            at, size = number % PLACES * self.step, int(row["bytes"])
            ask(pid, "copy-out", piece=row["piece"], at=at)
            self.kept[pid, row["object"], row["offset"]] = self.seen[pid][at : at + size]

    def load_one(self, pid: int) -> None:
        """Copy what is missing in a process back in."""
        for number, row in enumerate(rows(pid, "pieces", bytes=self.step)):
            if row["missing"] == "1":
                at, size = number % PLACES * self.step, int(row["bytes"])
                content = self.kept[pid, row["object"], row["offset"]]
                if not any(content):
                    ask(pid, "clear", piece=row["piece"])
                    continue
                self.seen[pid][at : at + size] = content
                ask(pid, "copy-in", piece=row["piece"], at=at)

    def suspend(self) -> None:
        """Take all memory away: to the keeper."""
        self.hand_over()
        self.group.quiesce()
        self.save()
        self.group.all("release", stored="checkpoint-1")
        self.give_up()
        self.group.seal()

    def back(self) -> None:
        """Bring all memory back, where any is away, but leave the gates closed."""
        if any(ask(pid, "status")["stored"] != "-" for pid in self.group.pids):
            self.hand_over()
            self.group.all("load")
            self.load()
        self.group.back()

    def resume(self) -> None:
        """Bring everything back and let the group run on."""
        self.back()
        self.group.all("bind")
        self.group.all("check")
        self.give_up()
        self.group.all("open")
