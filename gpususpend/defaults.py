"""Every default of the command line and every fixed time limit, in one place.

docs/reference/cli.md shows the same values in one table; a test compares the two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

COMMAND = "nvsnap-gpu-suspend"
PROTOCOL_VERSION = 1
SAME_PIDS = 16  # names that a shim tries: so many processes of one network namespace may have the same pid
OLDEST_DRIVER = 570
OLDEST_DRIVER_FOR_MAP = 580
# Drivers that have hung machines when a restored process was killed, and from which compute capability on.
HANGS_AT_KILL = {"595.71.05": 10}
TORCH_HEARTBEAT_S = 480.0  # of PyTorch's NCCL watchdog, where its environment does not say
COPY_THREADS = 4  # --threads: chunks of a store that are worked on at a time
RING_BYTES = 2 << 30  # --ring: for all ranks together
GRACE_S = 24 * 3600.0  # --grace: how long an unneeded chunk of a store stays
DESCRIPTORS = 64  # that a command and its helpers open at most, whatever it works on
DESCRIPTORS_A_RANK = 8  # and for each process that it works on
ARENA_ROOM_BYTES = 32 << 20  # at least so much larger is an arena made than what there is to save
APART_BYTES = 4 << 30  # at depth pages an arena from this size on is locked apart: unlocking it is not waited for
MEMORY_MARGIN_BYTES = 64 << 20  # of a limit on host memory that is left free
OWN_BYTES = 2 << 30  # of a process on the GPUs, beyond what its shim carries, from which a suspend tells of it
KEPT_BYTES = 32 << 20  # of a GPU at depth pages, by which what others do there is told from memory that stays


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds; each wait of a command ends by one of these."""

    timeout_s: float = 60.0  # --timeout: for quiesce as a whole, and for the driver's lock
    copy_timeout_s: float = 3600.0  # --copy-timeout: for release and for load
    checkpoint_timeout_s: float = 600.0  # --checkpoint-timeout: for the driver's checkpoint and its restore
    connect_s: float = 10.0
    stopped_s: float = 2.0  # a process that somebody keeps stopped for this long is not waited for any more
    request_s: float = 30.0  # requests that a shim answers at once
    last_look_s: float = 1.0  # a request at its deadline still gets this long, for the answer says what is not finished
    exec_s: float = 1.0  # children on their way from their fork to their program, which have what their parents have
    prepare_s: float = 1800.0  # populating and page-locking the arena
    unlock_pages_s: float = 30.0  # unlocking arenas and rings, at some 60 GB/s
    seal_s: float = 60.0  # seal and unseal, all attempts together
    seal_attempt_s: float = 5.0  # one attempt, while all threads stand still
    arena_cut_s: float = 5.0  # what a workload is held up at most so that it can give arenas back
    answer_s: float = 1.0  # a shim's answer while its process is being frozen; then its threads run on for a moment
    status_s: float = 2.0  # a shim's answer to `status`
    store_grace_s: float = 10.0  # what a store still works on when a save or a load ends before its time
    remap_s: float = 120.0
    fabric_s: float = 10.0  # that a fabric which is not ready (802) is asked again, by all ranks at once
    canary_s: float = 5.0
    open_s: float = 30.0
    threads_s: float = 30.0  # stopping or continuing all threads of the group
    driver_start_s: float = 60.0  # cuInit of the driver process
    driver_quick_s: float = 30.0  # state queries and unlock
    driver_patience_s: float = 5.0  # a process that the driver says it does not know, and has known
    pending_grace_s: float = 5.0  # a driver call that is past its deadline, once more before the way back
    helper_grace_s: float = 5.0  # a helper's answer, beyond the time limit of what it was told to do
    helper_kill_s: float = 5.0  # until a helper that was told to end is killed
    claim_s: float = 5.0  # another command that looks groups up
    claim_look_s: float = 0.5  # another command that may only be looking whether somebody works on the group
    leftover_s: float = 3600.0  # a temporary file in the state directory, until another command removes it
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
