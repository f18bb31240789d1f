"""Every default of the command line and every fixed time limit, in one place.

docs/reference/cli.md shows the same values in one table; a test compares the two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

COMMAND = "nvsnap-gpu-suspend"
PROTOCOL_VERSION = 1
OLDEST_DRIVER = 570
OLDEST_DRIVER_FOR_MAP = 580
COPY_THREADS = 4  # --threads: chunks of a store that are worked on at a time
GRACE_S = 24 * 3600.0  # --grace: how long an unneeded chunk of a store stays


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds; each wait of a command ends by one of these."""

    timeout_s: float = 60.0  # --timeout: for quiesce as a whole, and for the driver's lock
    copy_timeout_s: float = 3600.0  # --copy-timeout: for release and for load
    checkpoint_timeout_s: float = 600.0  # --checkpoint-timeout: for the driver's checkpoint and its restore
    connect_s: float = 10.0
    request_s: float = 30.0  # requests that a shim answers at once
    prepare_s: float = 1800.0  # populating and page-locking the arena
    seal_s: float = 60.0
    remap_s: float = 120.0
    canary_s: float = 5.0
    open_s: float = 30.0
    threads_s: float = 30.0  # stopping or continuing all threads of the group
    driver_start_s: float = 60.0  # cuInit of the driver process
    driver_quick_s: float = 30.0  # state queries and unlock
    memory_back_s: float = 10.0  # until the GPUs report the memory as free
    nodes_gone_s: float = 2.0  # until the driver has closed its descriptors after the checkpoint
    poll_s: float = 0.005  # between two looks at a drain
    stall_s: float = 0.05  # a drain without progress for this long lets launches through
    longest_stall_s: float = 1.0  # which grows up to this, for kernels that take long
    one_by_one_s: float = 1.0  # a stall that lasts longer lets one launch of every rank through at a time
    progress_s: float = 2.0  # between two progress lines where stderr is not a terminal


LIMITS = Limits()


def limits_with(**given: float | None) -> Limits:
    """Return the limits, with those that were given in place of the defaults."""
    values = {field.name: getattr(LIMITS, field.name) for field in fields(Limits)}
    values.update({name: value for name, value in given.items() if value is not None})
    return Limits(**values)


def state_directory(euid: int | None = None) -> str:
    """Return the default state directory of a user."""
    uid = os.geteuid() if euid is None else euid
    return "/tmp/nvsnap-gpu-suspend" if uid == 0 else f"/tmp/nvsnap-gpu-suspend-{uid}"
