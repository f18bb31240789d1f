"""How much host memory may still be used, by whom, and what limits it; and which processes a cgroup keeps frozen.

Owns the reading of cgroups (version 1, version 2 and both at once) and of the machine's memory.  Must not know what the
memory is for.  Going over a cgroup's limit does not fail, it kills: hence the check before anything is filled.

Limits above the root of a container's own view cannot be seen from inside; the machine's free memory is what is left
to go by there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpususpend import errors
from gpususpend.defaults import MEMORY_MARGIN_BYTES

MIB = 1 << 20
# Page tables, the file's index and the driver's lists of locked pages come on top of the pages themselves.
_MARGIN_SHARE = 64
# Version 1 writes "no limit" as the largest multiple of a page.
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Limit:
    """One limit: what it is called, its bytes, and how many of them are still to be had."""

    name: str
    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Room:
    """The tightest limit for a need: `needed_bytes` includes a margin for what comes on top of the pages."""

    limit: Limit
    needed_bytes: int

    @property
    def enough(self) -> bool:
        """Tell whether the need fits."""
        return self.needed_bytes <= self.limit.available_bytes


def require(charges: Sequence[tuple[int, int]], root: Path = Path("/")) -> Room:
    """Check that every process can be charged its bytes, all of them together; return the tightest limit.

    `charges` are (pid, bytes); `root` holds `proc` and `sys`, for tests.  Raises NotEnoughMemory.
    """
    machine = machine_limits(root)
    limits = {limit.name: limit for limit in machine}
    needs = dict.fromkeys(limits, 0)
    for pid, size in charges:
        for limit in [*machine, *group_limits(pid, root)]:
            # Several processes below one group draw on the same limit.
            limits.setdefault(limit.name, limit)
            needs[limit.name] = needs.get(limit.name, 0) + size
    rooms = [Room(limit, _with_margin(needs[name])) for name, limit in limits.items()]
    tightest = min(rooms, key=lambda room: room.limit.available_bytes - room.needed_bytes)
    if not tightest.enough:
        raise errors.NotEnoughMemory(
            need=tightest.needed_bytes,
            available=max(0, tightest.limit.available_bytes),
            limit=tightest.limit.name,
            way_out="free memory or raise that limit",
        )
    return tightest


def _with_margin(size: int) -> int:
    return size + MEMORY_MARGIN_BYTES + size // _MARGIN_SHARE if size else 0


def require_here(size: int) -> None:
    """Check that this process can be charged `size` bytes; raises NotEnoughMemory."""
    require([(os.getpid(), size)])


def machine_limits(root: Path = Path("/")) -> list[Limit]:
    """Return what limits everybody: free memory, and the commit limit where the kernel promises no more than it has."""
    facts = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
        if value.split()
    }
    limits = [Limit("the machine's memory (MemAvailable)", facts["MemTotal"], facts["MemAvailable"])]
    if _number(root / "proc/sys/vm/overcommit_memory") == 2:
        left = facts["CommitLimit"] - facts["Committed_AS"]
        limits.append(Limit("vm.overcommit_memory=2 (CommitLimit)", facts["CommitLimit"], left))
    return limits


def group_limits(pid: int, root: Path = Path("/")) -> list[Limit]:
    """Return the memory limits of every cgroup above a process, from the innermost out."""
    groups = _groups(pid, root, "memory")
    return [limit for version, folder, name in groups for limit in _limits_of(version, folder, name)]


def frozen_by(pid: int, root: Path = Path("/"), versions: Collection[int] = (1, 2)) -> str:
    """Return the name of the innermost cgroup that keeps a process frozen, "" if none does.  Raises ProcessGone.

    One of version 2 can be killed all the same, one of version 1 cannot.
    """
    for version, folder, name in _groups(pid, root, "freezer"):
        if version not in versions:
            continue
        file, told = ("cgroup.events", "frozen 1") if version == 2 else ("freezer.state", "FROZEN")
        with contextlib.suppress(OSError):  # the top of version 2 has no such file
            if told in (folder / file).read_text().splitlines():
                return name
    return ""


def _groups(pid: int, root: Path, controller: str) -> Iterator[tuple[int, Path, str]]:
    """Yield version, folder and name of every cgroup above a process, in each hierarchy with this controller."""
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        raise errors.ProcessGone(pid=pid) from None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        for mount_version, mount_root, mount_point in _mounts(root, controller):
            if mount_version == version:
                top = root / mount_point.lstrip("/")
                inner = _below(path, mount_root)
                for part in [inner, *inner.parents]:
                    yield version, top / part, f"/{part}" if str(part) != "." else "/"
                break


def _below(path: str, mount_root: str) -> PurePosixPath:
    """Return where a group lies under a mount; a group that the mount does not show counts as its top."""
    plain = PurePosixPath(path)
    if ".." in plain.parts or not plain.is_relative_to(mount_root):
        return PurePosixPath(".")
    return plain.relative_to(mount_root)


@functools.cache
def _mounts(root: Path, controller: str) -> list[tuple[int, str, str]]:
    """Return version, root and mount point of the cgroup mounts that can have this controller."""
    found = []
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        words, (kind, _, options) = head.split(), tail.split(maxsplit=2)
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            found.append((2 if kind == "cgroup2" else 1, _unescape(words[3]), _unescape(words[4])))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _limits_of(version: int, folder: Path, name: str) -> Iterator[Limit]:
    if version == 2:
        # memory.high does not kill, but it slows whoever is over it to a crawl.
        files = [("memory.max", "memory.current"), ("memory.high", "memory.current")]
        cache_names = ("active_file", "inactive_file")
    else:
        files = [
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
        ]
        cache_names = ("total_active_file", "total_inactive_file")
    for limit_file, usage_file in files:
        limit, used = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and used is not None and limit < _UNLIMITED:
            # The kernel gives up its file cache before it kills.
            available = limit - used + _cache(folder / "memory.stat", cache_names)
            yield Limit(f"cgroup {name} ({limit_file})", limit, min(available, limit))


def _cache(path: Path, names: tuple[str, ...]) -> int:
    try:
        rows = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
    except OSError:
        return 0
    return sum(int(rows.get(name, 0)) for name in names)


def _number(path: Path) -> int | None:
    """Return a file's number; None where there is no such file or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
