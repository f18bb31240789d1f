"""What failed in a step, and where that left the group.

Owns causes and the outcomes around them: one class for each exit code from 4 on.
"""

from __future__ import annotations

from gpususpend.errors.base import ExitCode, GpushareError

START_ANEW = "Start the workload anew, or what was lost of it if the others can go on"

# --- causes


class StepFailed(GpushareError):
    """A step failed on one rank."""

    code = "step-failed"
    template = "{step} failed on pid {pid}: {detail}"

    @property
    def pids(self) -> list[int]:
        """Return the processes that it is about."""
        pids = self.facts.get("pids", self.facts["pid"])
        return [int(str(pid)) for pid in (pids if isinstance(pids, (list, tuple)) else [pids])]


class GroupGone(GpushareError):
    """No process of a suspended group lives any more."""

    exit_code = ExitCode.LOST
    code = "group-gone"
    next_action = "cold-start"
    template = "no process of group {group} lives any more as it was suspended (pid {pids}); its record was dropped"


class RankDied(StepFailed):
    """A process ended during the command."""

    code = "rank-died"
    next_action = "cold-start"
    template = "pid {pid} ({comm}) died {when}"

    def __init__(self, **facts: object) -> None:
        step = facts.get("step")
        when = "while it was suspended" if step == "suspended" else f"during the step {step}"
        super().__init__(**{"when": when, **facts})


class RankReplaced(RankDied):
    """A process became another program, and what it had on the GPUs is gone."""

    code = "rank-replaced"
    template = "pid {pid} ({comm}) became another program (exec) {when}; what it had on the GPUs is gone"


class RankStopped(StepFailed):
    """Somebody keeps a process stopped that has to answer."""

    code = "rank-stopped"
    next_action = "retry"
    template = (
        "{step}: pid {pid} does not answer, it is stopped {by}; let it run (kill -CONT {pid}, end the debugger, or "
        "thaw the cgroup), then try again"
    )


def let_run(pid: int) -> str:
    """Return the advice to let a process run that somebody keeps stopped."""
    return f"let it run (kill -CONT {pid}, end the debugger, or thaw the cgroup)"


class MemoryGone(StepFailed):
    """A process needs memory whose owner is gone: nothing can bring it back."""

    code = "memory-gone"
    next_action = "cold-start"
    template = (
        "{step}: pid {pid} ({comm}) cannot run again: it needs {bytes} bytes that pid {owners} took along; "
        "end pid {pid}"
    )


class DeadlinePassed(StepFailed):
    """A step did not finish in time."""

    code = "deadline"
    next_action = "retry"
    template = "{step} did not finish within {seconds} s on pid {pid}: {detail}"


class ShimError(StepFailed):
    """The shim answered with an error."""

    code = "shim-error"
    template = "{step} failed on pid {pid}: {detail}"


class DriverError(StepFailed):
    """A driver call on a process failed."""

    code = "driver-error"
    template = "{step} failed on pid {pid}: driver error {cuda} {cuda_name}"


class ConnectionLost(StepFailed):
    """The shim hung up or answered nonsense."""

    code = "connection-lost"
    template = "{step}: the shim of pid {pid} does not answer: {detail}"


class HolderFailed(StepFailed):
    """The process that keeps threads stopped failed."""

    code = "holder-failed"
    template = "{step} failed on pid {pid}: {detail}"


class NewCudaProcess(StepFailed):
    """A process of the tree began to use CUDA while the others were being suspended."""

    code = "new-cuda-process"
    next_action = "retry"
    template = "{step}: pid {pid} ({comm}) began to use CUDA during the suspend"


class NotQuiet(StepFailed):
    """After the checkpoint something of the GPU was left in a process."""

    code = "not-quiet"
    template = "{step}: pid {pid} still has {left}"


class Interrupt(StepFailed):
    """A signal asked the command to stop."""

    code = "interrupt"
    next_action = "retry"
    template = "{step} was interrupted by {signal}"


class NotBegun(GpushareError):
    """A signal ended the command before it had begun."""

    exit_code = ExitCode.INTERRUPTED
    code = "not-begun"
    next_action = "retry"
    template = "ended by {signal} before it had begun; nothing was changed"


# --- outcomes


class Outcome(GpushareError):
    """A failure after something changed: `cause` says what failed, the class where that left the group."""

    code = "outcome"
    template = "{cause}"

    @property
    def cause(self) -> GpushareError | None:
        """Return what failed."""
        cause = self.facts.get("cause")
        return cause if isinstance(cause, GpushareError) else None


class RolledBack(Outcome):
    """Suspend failed; every process runs again."""

    exit_code = ExitCode.ROLLED_BACK
    code = "rolled-back"
    next_action = "retry"
    template = "{cause}. Rolled back: all {count} processes run again"


class Lost(Outcome):
    """Something cannot be brought back; it is named."""

    exit_code = ExitCode.LOST
    code = "lost"
    next_action = "cold-start"
    template = (
        "{cause}. {count_lost} of {count} processes did not come back to running: pid {lost}{detail}. " + START_ANEW
    )


class StoreDamaged(Outcome):
    """A checkpoint's store is damaged or incomplete; nothing runs, and resume can be repeated."""

    exit_code = ExitCode.STORE_DAMAGED
    code = "store-damaged"
    template = "{cause}. {left} ({states}); resume again once the store can be read"


class StateUnknown(Outcome):
    """A driver call did not return; the state of a process is not known."""

    exit_code = ExitCode.UNKNOWN
    code = "state-unknown"
    template = (
        "{cause}. The call {call} on pid {pid} was {fate} driver process {driver_pid}; no rank was ended. "
        "Run `nvsnap-gpu-suspend recover {pid}`"
    )


class StillSuspended(Outcome):
    """Resume failed; some do not run, and resume can be repeated."""

    exit_code = ExitCode.STILL_SUSPENDED
    code = "still-suspended"
    next_action = "retry"
    template = "{cause}. {left} ({states}); resume can be repeated"


class Interrupted(Outcome):
    """A signal interrupted suspend; every process runs again."""

    exit_code = ExitCode.INTERRUPTED
    code = "interrupted"
    next_action = "retry"
    template = "{cause}. Rolled back: all {count} processes run again"
