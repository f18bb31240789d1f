"""Limits of memory, on real cgroups where these can be made, else on a tree of files."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpususpend import cgroup, errors

MIB = 1 << 20
GIB = 1 << 30
MEMINFO = (
    "MemTotal:       16777216 kB\nMemAvailable:   8388608 kB\nCommitLimit: 8388608 kB\nCommitted_AS: 7340032 kB\nX:\n"
)
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "32 24 0:28 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A made-up machine with 8 GiB available and one process, pid 10, in no group."""
    for folder in ("proc/self", "proc/10", "proc/11", "proc/sys/vm", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text("0\n")
    (tmp_path / "proc/self/mountinfo").write_text("24 1 0:1 / / rw - ext4 /dev/sda rw\n" + V2)
    (tmp_path / "proc/10/cgroup").write_text("0::/\n")
    (tmp_path / "proc/11/cgroup").write_text("0::/\n")
    return tmp_path


def group(machine: Path, path: str, **files: object) -> None:
    folder = machine / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def v2(machine: Path, path: str, limit: object, used: int, cache: int = 0, high: object = "max") -> None:
    stat = f"anon 5\nactive_file {cache // 2}\ninactive_file {cache - cache // 2}"
    group(machine, path, memory__max=limit, memory__high=high, memory__current=used, memory__stat=stat)


def test_the_machine_alone(machine: Path) -> None:
    room = cgroup.require([(10, 4 * GIB)], machine)
    assert room.limit == cgroup.Limit("the machine's memory (MemAvailable)", 16 * GIB, 8 * GIB)
    assert room.needed_bytes == 4 * GIB + 64 * MIB + 64 * MIB
    with pytest.raises(errors.NotEnoughMemory, match="MemAvailable"):
        cgroup.require([(10, 8 * GIB)], machine)


def test_strict_commit_accounting_counts(machine: Path) -> None:
    (machine / "proc/sys/vm/overcommit_memory").write_text("2\n")
    with pytest.raises(errors.NotEnoughMemory, match=r"vm\.overcommit_memory=2"):
        cgroup.require([(10, 2 * GIB)], machine)


def test_every_ancestor_counts_in_version_2(machine: Path) -> None:
    (machine / "proc/10/cgroup").write_text("0::/pod/inner/leaf\n")
    v2(machine, "pod", 4 * GIB, 3 * GIB)
    v2(machine, "pod/inner", "max", 0)
    v2(machine, "pod/inner/leaf", 6 * GIB, GIB)
    with pytest.raises(errors.NotEnoughMemory) as caught:
        cgroup.require([(10, 2 * GIB)], machine)
    assert caught.value.facts["limit"] == "cgroup /pod (memory.max)"
    assert caught.value.facts["available"] == GIB
    assert caught.value.exit_code == errors.ExitCode.REFUSED
    assert cgroup.require([(10, GIB // 2)], machine).limit.name == "cgroup /pod (memory.max)"


def test_file_cache_can_be_given_up(machine: Path) -> None:
    (machine / "proc/10/cgroup").write_text("0::/pod\n")
    v2(machine, "pod", 4 * GIB, 4 * GIB, cache=3 * GIB)
    assert cgroup.require([(10, 2 * GIB)], machine).limit.available_bytes == 3 * GIB


def test_the_limit_that_slows_down_counts_too(machine: Path) -> None:
    (machine / "proc/10/cgroup").write_text("0::/pod\n")
    v2(machine, "pod", "max", 0, high=GIB)
    with pytest.raises(errors.NotEnoughMemory, match=r"memory\.high"):
        cgroup.require([(10, GIB)], machine)


def test_charges_below_one_group_add_up(machine: Path) -> None:
    """Each of two processes would fit alone."""
    for pid, leaf in ((10, "a"), (11, "b")):
        (machine / f"proc/{pid}/cgroup").write_text(f"0::/pod/{leaf}\n")
        v2(machine, f"pod/{leaf}", 3 * GIB, 0)
    v2(machine, "pod", 3 * GIB, 0)
    for pid in (10, 11):
        cgroup.require([(pid, 2 * GIB)], machine)
    with pytest.raises(errors.NotEnoughMemory, match=r"cgroup /pod \(memory\.max\)"):
        cgroup.require([(10, 2 * GIB), (11, 2 * GIB)], machine)


def test_version_1_and_its_limit_with_swap(machine: Path) -> None:
    (machine / "proc/self/mountinfo").write_text(V1.format(root="/"))
    (machine / "proc/10/cgroup").write_text("5:cpu:/other\n4:memory:/docker/abc\n0::/\n")
    unlimited = (1 << 63) - 4096
    group(machine, "memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=GIB)
    group(machine, "memory/docker", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=GIB)
    group(
        machine,
        "memory/docker/abc",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"active_file 9\ntotal_active_file {GIB // 2}\ntotal_inactive_file {GIB // 4}",
        memory__memsw__limit_in_bytes=2 * GIB,
        memory__memsw__usage_in_bytes=GIB + GIB // 2,
    )
    limits = {limit.name: limit.available_bytes for limit in cgroup.group_limits(10, machine)}
    assert limits == {
        "cgroup /docker/abc (memory.limit_in_bytes)": GIB + GIB // 4 * 3,
        "cgroup /docker/abc (memory.memsw.limit_in_bytes)": GIB // 2 + GIB // 4 * 3,
    }


def test_a_container_that_sees_only_its_own_group(machine: Path) -> None:
    """Without a cgroup namespace the path is the host's, and the mount begins at the container's group."""
    (machine / "proc/self/mountinfo").write_text(V1.format(root="/docker/abc"))
    group(machine, "memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    group(machine, "memory/sub", memory__limit_in_bytes=GIB // 2, memory__usage_in_bytes=0)
    for path, count in (("/docker/abc", 1), ("/docker/abc/sub", 2), ("/docker/other", 1), ("/../../elsewhere", 1)):
        (machine / "proc/10/cgroup").write_text(f"4:memory:{path}\n")
        assert len(cgroup.group_limits(10, machine)) == count, path


def test_a_process_that_is_gone(machine: Path) -> None:
    with pytest.raises(errors.ProcessGone):
        cgroup.require([(12, 1)], machine)


def test_nothing_needed_fits_anywhere(machine: Path) -> None:
    (machine / "proc/10/cgroup").write_text("0::/pod\n")
    v2(machine, "pod", GIB, GIB)
    assert cgroup.require([(10, 0)], machine).enough


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A real memory cgroup (version 1, or version 2 with the controller enabled) with a child."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        outer = top / f"gpushare-test-{os.getpid()}"
        inner = outer / "inner"
        try:
            inner.mkdir(parents=True)
            if limit == "memory.max":
                (outer / "cgroup.subtree_control").write_text("+memory")
            (outer / limit).write_text(str(256 * MIB))
        except OSError:
            for folder in (inner, outer):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            continue
        yield inner
        inner.rmdir()
        outer.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


def test_a_real_group_limits_what_is_below_it(real_group: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        (real_group / "cgroup.procs").write_text(str(process.pid))
        with pytest.raises(errors.NotEnoughMemory) as caught:
            cgroup.require([(process.pid, 300 * MIB)])
        assert f"gpushare-test-{os.getpid()} (" in str(caught.value.facts["limit"])
        room = cgroup.require([(process.pid, 16 * MIB)])
        assert room.enough
        # This process is elsewhere.
        cgroup.require([(os.getpid(), 300 * MIB)])
    finally:
        process.kill()
        process.wait()


def test_mounts_are_read_once(machine: Path) -> None:
    """A process that does not answer is looked at again and again."""
    assert cgroup.frozen_by(10, machine) == ""
    (machine / "proc/self/mountinfo").unlink()
    group(machine, "", cgroup__events="populated 1\nfrozen 1")
    assert cgroup.frozen_by(10, machine) == "/"
