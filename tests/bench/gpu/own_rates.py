"""The machine's own copy rates, without the shim: a program, `python -m tests.bench.gpu.own_rates SPEC`.

SPEC is JSON: `devices`, `mib` of each, `host` (`driver`: cuMemHostAlloc; else the name of a kind of arena), `locked`,
`node` (null: wherever the kernel likes), `scattered` (plain pages whose neighbours lie anywhere, as on a machine that
has run for long) and `piece_mib` (of the allocations on the device). It prints JSON: GB/s out and in, of all devices
together, and those of filling and of locking the host memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from gpususpend import arena
from gpususpend.demo.cuda import Device, call

MIB = 1 << 20
STEP = 1 << 30
"""Of a registration, as the shim makes it; a copy does not cross from one into the next."""

Copies = list[tuple[int, int, int]]
"""Offset in host memory, address on the device, bytes."""


def source(device: Device, size: int, piece: int) -> Copies:
    """Allocate device memory as the shim does, and cut it where the registrations of host memory meet."""
    found, at = [], 0
    while at < size:
        made = device.create_shared(min(piece, size - at))
        end = at + made.size_bytes
        address = made.address
        while at < end:
            part = min(STEP - at % STEP, end - at)
            found.append((at, address, part))
            at, address = at + part, address + part
    return found


def cpus_of(node: int) -> set[int]:
    """Return the processors of a NUMA node."""
    text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text()
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


class Host:
    """Host memory of one device: `base`, and what was measured when it was made."""

    def __init__(self, spec: dict[str, Any], size: int) -> None:
        self.facts: dict[str, Any] = {}
        if spec["host"] == "driver":
            self.base = int(call(driver.cuMemHostAlloc, size, driver.CU_MEMHOSTALLOC_PORTABLE))
            return
        self.base = self._fill(spec, size)
        if spec["locked"]:
            begun = time.perf_counter()
            for at in range(0, size, STEP):
                part = min(STEP, size - at)
                call(driver.cuMemHostRegister, self.base + at, part, driver.CU_MEMHOSTREGISTER_PORTABLE)
            self.facts["lock"] = size / (time.perf_counter() - begun) / 1e9

    def _fill(self, spec: dict[str, Any], size: int) -> int:
        before = os.sched_getaffinity(0)
        if spec["node"] is not None:
            os.sched_setaffinity(0, cpus_of(spec["node"]))  # a page comes from the node of whoever touches it first
        begun = time.perf_counter()
        if spec["scattered"]:
            self._memory = scattered(size)
            self.facts["fill"] = size / (time.perf_counter() - begun) / 1e9
            return address_of(self._memory)
        try:
            made = arena.prepare(size, (arena.Kind[spec["host"]],), threads=min(8, len(os.sched_getaffinity(0))))
        finally:
            os.sched_setaffinity(0, before)
        self.facts["fill"] = made.bytes / (time.perf_counter() - begun) / 1e9
        self._memory = mmap.mmap(made.fd, made.bytes)
        os.close(made.fd)
        return address_of(self._memory)


def address_of(memory: mmap.mmap) -> int:
    """Return where a mapping lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def scattered(size: int) -> mmap.mmap:
    """Return shared memory of plain pages that were made in a random order, so that few of them have a neighbour."""
    fd = os.memfd_create("gpushare-arena")
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    os.close(fd)
    pages = np.random.default_rng(1).permutation(size // mmap.PAGESIZE) * mmap.PAGESIZE
    np.frombuffer(memory, np.uint8)[pages] = 1
    return memory


def current(device: Device) -> None:
    """Make a device's context the thread's."""
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device.device))


def timed(devices: list[Device], copies: list[Copies], one: Callable[[int, tuple[int, int, int], Any], None]) -> float:
    """Put the copies of all devices into their streams and wait for all; return GB/s."""
    begun = time.perf_counter()
    for number, device in enumerate(devices):
        current(device)
        for copy in copies[number]:
            one(number, copy, device.stream)
    for device in devices:
        current(device)
        device.synchronize()
    total = sum(size for part in copies for _, _, size in part)
    return total / (time.perf_counter() - begun) / 1e9


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what SPEC asks for."""
    size = spec["mib"] * MIB
    devices = [Device(ordinal) for ordinal in spec["devices"]]
    copies = []
    for device in devices:
        current(device)
        copies.append(source(device, size, spec["piece_mib"] * MIB))
    hosts = [Host(spec, sum(part for _, _, part in each)) for each in copies]

    def out(number: int, copy: tuple[int, int, int], stream: Any) -> None:
        call(driver.cuMemcpyDtoHAsync, hosts[number].base + copy[0], copy[1], copy[2], stream)

    def back(number: int, copy: tuple[int, int, int], stream: Any) -> None:
        call(driver.cuMemcpyHtoDAsync, copy[1], hosts[number].base + copy[0], copy[2], stream)

    for once in (out, back):
        timed(devices, [each[:1] for each in copies], once)
    return {**hosts[0].facts, "out": timed(devices, copies, out), "in": timed(devices, copies, back)}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
