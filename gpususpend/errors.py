"""The errors of gpushare, and the exit codes they carry.

Owns the hierarchy `GpushareError`: the class carries the exit code, the error's word and a template; the instance
carries the facts.  Knows nothing of processes, drivers or output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What the exit status of every command means."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    ROLLED_BACK = 4
    LOST = 5
    STORE_DAMAGED = 6
    UNKNOWN = 7
    STILL_SUSPENDED = 8
    INTERRUPTED = 130


class GpushareError(Exception):
    """Base of every error that a user sees; `facts` fill the template and go into the JSON as they are.

    `code` is the error's word, unique in the hierarchy and listed in docs/reference/cli.md.  `next_action` tells a
    controller what helps: `retry`, `cold-start` or `operator`.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    code: ClassVar[str] = "failure"
    next_action: ClassVar[str] = "operator"
    template: ClassVar[str] = "{what}"

    def __init__(self, **facts: object) -> None:
        self.facts: dict[str, object] = facts
        super().__init__(self.template.format(**{name: _text(value) for name, value in facts.items()}))

    @property
    def reason(self) -> str:
        """Return the word for `reason` in the JSON: that of the cause where an outcome wraps one."""
        cause = self.facts.get("cause")
        return cause.reason if isinstance(cause, GpushareError) else self.code


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return ", ".join(_text(item) for item in value)
    return str(value)


# --- exit 2: the arguments make no sense, whatever the machine's state


class UsageError(GpushareError):
    """The arguments are malformed."""

    exit_code = ExitCode.USAGE
    code = "usage"


class NotANumber(UsageError):
    """A pid that is not a positive number."""

    code = "not-a-number"
    template = "'{value}' is not a process id; give a positive number"


class NoTarget(UsageError):
    """No process was named."""

    code = "no-target"
    template = "no process named; give process ids, --tree PID or --all"


# --- exit 3: refused before anything changed


class Refused(GpushareError):
    """The command refuses before it has changed anything."""

    exit_code = ExitCode.REFUSED
    code = "refused"


class NoSuchProcess(Refused):
    """No process has this pid."""

    code = "no-such-process"
    template = "pid {pid}: no such process"


class NothingFound(Refused):
    """There is nothing for the command to work on."""

    code = "nothing-found"
    template = "{what}; nothing to do"


class ThreadId(Refused):
    """The number is a thread's, not a process's."""

    code = "thread-id"
    template = "{pid} is the id of a thread of process {owner}; name process {owner}"


class ProcessGone(Refused):
    """A process ended while it was being examined."""

    code = "process-gone"
    next_action = "retry"
    template = "pid {pid} ended while the command looked at it; nothing was changed"


class PidReused(Refused):
    """The pid belongs to another process than the one that was recorded."""

    code = "pid-reused"
    template = "pid {pid} now belongs to another process ({comm}); nothing was changed"


class OtherUser(Refused):
    """The process belongs to another user."""

    code = "other-user"
    template = "pid {pid} belongs to user {uid}, not to you ({own_uid}); run as that user or as root"


class OtherPidNamespace(Refused):
    """The process lives in another pid namespace."""

    code = "other-pid-namespace"
    template = (
        "pid {pid} lives in another pid namespace (its pid there is {inner_pid}); "
        "run the command inside its container: nsenter -t {pid} -p -m -n …"
    )


class OtherNetNamespace(Refused):
    """The process lives in another network namespace, where its socket cannot be reached."""

    code = "other-net-namespace"
    template = "pid {pid} lives in another network namespace; run the command inside it: nsenter -t {pid} -n …"


class OwnAncestor(Refused):
    """The group would freeze the command itself or a process that waits for it."""

    code = "own-ancestor"
    template = "pid {pid} is this command or a parent of it; run the command outside that tree"


class NoShim(Refused):
    """A process uses CUDA without the shim."""

    code = "no-shim"
    template = (
        "pid {pid} ({comm}) uses CUDA without the shim: what it shares cannot be carried; start it with "
        "`nvsnap-gpu-suspend run -- COMMAND`, or name --allow-unshimmed if it shares nothing"
    )


class MayShare(Refused):
    """An unshimmed process was allowed, but other processes may share memory with it."""

    code = "may-share"
    template = (
        "pid {pid} ({comm}) runs without the shim and may map memory of pid {others}; a restore would lose it. "
        "Start it with `nvsnap-gpu-suspend run -- COMMAND`"
    )


class WrongPeer(Refused):
    """Another process answers on the socket's name."""

    code = "wrong-peer"
    template = "the socket @nvsnap-gpushare.{inner_pid} of pid {pid} is held by pid {peer_pid} (user {peer_uid})"


class NoAnswer(Refused):
    """A shim listens and does not answer."""

    code = "no-answer"
    next_action = "retry"
    template = "pid {pid}: its shim does not answer properly: {detail}; nothing was changed"


class ProtocolVersion(Refused):
    """The shim speaks another version of the control protocol."""

    code = "protocol-version"
    template = "pid {pid}: its shim speaks control protocol {theirs}, this command {ours}; install one version"


class HalfGroup(Refused):
    """Processes that share memory with the named ones were not named."""

    code = "half-group"
    template = "the named processes share memory with pid {missing}; name these too (or use --tree or --all)"


class Uncarried(Refused):
    """A process owns objects of a kind that is not carried."""

    code = "uncarried"
    template = "pid {pid} owns {count} object(s) of kind {kind} ({object}), which cannot be carried yet; {way_out}"


class UnresolvedImport(Refused):
    """The exporter of imported memory cannot be found."""

    code = "unresolved-import"
    template = (
        "pid {pid} maps memory imported from a process that cannot be found (object {object}, exporter {exporter}); "
        "the exporter must run under the shim in the same pid and network namespace"
    )


class KeptDescriptor(Refused):
    """A process whose shim takes no part keeps a descriptor of the group's memory."""

    code = "kept-descriptor"
    template = (
        "descriptor {fd} of pid {pid} ({comm}) stands for memory of pid {owner}, and would stand for memory that nobody"
        " uses after a cycle; {way_out}"
    )


class HiddenDescriptor(Refused):
    """A descriptor of the driver that may stand for the group's memory cannot be looked at."""

    code = "hidden-descriptor"
    template = (
        "descriptor {fd} ({path}) of pid {pid} ({comm}) may stand for memory of these processes, and cannot be looked"
        " at: {detail}; run the command with CAP_SYS_PTRACE, or end that process"
    )


class DriverTooOld(Refused):
    """The driver lacks what the command needs."""

    code = "driver-too-old"
    template = "driver {version} is too old for {feature}: it needs {needed} or newer"


class NoDriver(Refused):
    """No usable driver."""

    code = "no-driver"
    template = "the NVIDIA driver cannot be used: {detail}"


class DriverMismatch(Refused):
    """The workload and the command use different drivers."""

    code = "driver-mismatch"
    template = "pid {pid} runs on the {theirs} driver, the command was told {ours}; {way_out}"


class Mig(Refused):
    """A process runs on an instance of a GPU."""

    code = "mig"
    template = "pid {pid} ({comm}) runs on a part of a GPU (MIG: {sign}), which the driver cannot checkpoint"


class Mps(Refused):
    """A process shares its GPU through the MPS daemon."""

    code = "mps"
    template = (
        "pid {pid} ({comm}) uses its GPU through MPS ({sign}), which the driver cannot checkpoint; start it without MPS"
    )


class NotEnoughMemory(Refused):
    """Host memory or a cgroup limit is too small for the content of the GPUs."""

    code = "not-enough-memory"
    template = "{need} bytes of memory are needed, {available} are available within {limit}; {way_out}"


class NoGpuRoom(Refused):
    """A GPU has too little free memory for a restore; asking the driver anyway could lose the processes."""

    code = "no-gpu-room"
    next_action = "retry"
    template = "GPU {uuid} has {free} bytes free, {need} are needed; used by pid {users}; nothing was changed"


class GpuMapMismatch(Refused):
    """The GPUs of the map and of the machine do not pair."""

    code = "gpu-map"
    template = "the GPU map does not fit: {detail}"


class UnsafeStateDir(Refused):
    """The state directory is not one that may be trusted."""

    code = "unsafe-state-dir"
    template = "state directory {path} is refused: {why}; remove it or name another with --state-dir"


class StateNotWritten(Refused):
    """The state directory cannot be written."""

    code = "state-not-written"
    next_action = "retry"
    template = "{path} cannot be written: {detail}; make room there, or name another directory with --state-dir"


class Busy(Refused):
    """Another command works on the group."""

    code = "busy"
    next_action = "retry"
    template = "another command (pid {pid}) works on these processes; wait for it"


class HeldElsewhere(Refused):
    """A holder that is in no record here keeps the process."""

    code = "held-elsewhere"
    template = (
        "pid {pid} is suspended, and its threads are held by process {holder} of another state directory; name that by"
        " --state-dir. If it is lost: kill {holder} (the threads run, the gates hold), then try again"
    )


class MixedStates(Refused):
    """Some of the named processes are suspended and others are not."""

    code = "mixed-states"
    template = "pid {suspended} are suspended already, pid {running} are not; resume those first, or leave them out"


class NeedsRecover(Refused):
    """An earlier command was cut off half-way."""

    code = "needs-recover"
    template = "pid {pid} was left in phase {phase} by an earlier command; run `nvsnap-gpu-suspend recover {pid}`"


class OtherDepth(Refused):
    """A suspended group is at another depth than the command needs."""

    code = "other-depth"
    template = "pid {pid} is suspended with --depth {depth}, not {wanted}; resume its group first, then suspend it anew"


class NoShimForPages(Refused):
    """Only a shim can move memory off a GPU and leave the context there."""

    code = "no-shim-for-pages"
    template = "pid {pid} ({comm}) uses CUDA without the shim: only --depth process can suspend it"


class NotSuspended(Refused):
    """The command needs a suspended group and there is none."""

    code = "not-suspended"
    template = "no suspended group has pid {pid}"


class NothingToRecover(Refused):
    """A process that is in no group was to be recovered to suspended."""

    code = "nothing-to-recover"
    template = (
        "pid {pid} is in no group that is suspended or was left half-way; nothing was changed. recover suspends nothing"
        " that simply runs: use `nvsnap-gpu-suspend suspend`"
    )


class CannotTrace(Refused):
    """The system does not let this user stop the threads of the process."""

    code = "cannot-trace"
    template = "pid {pid}: its threads may not be stopped: {detail} ({setting})"


class LookFailed(Refused):
    """A question that had to be answered before anything may change was not answered."""

    code = "look-failed"
    next_action = "retry"
    template = "{cause}; nothing was changed"


class BadFile(Refused):
    """A file that cannot be written or read."""

    code = "bad-file"
    template = "{path}: {detail}"


class BadCommand(Refused):
    """A command that cannot be started with the shim."""

    code = "bad-command"
    template = "{detail}"


# --- the store: one class for each kind of its errors


class StoreProblem(GpushareError):
    """What the store says: `word` is its own word, `said` its message; further facts are the store's."""

    code = "store-problem"
    template = "{said}"

    @property
    def reason(self) -> str:
        """Return the store's word."""
        return str(self.facts["word"])


class StoreRefused(StoreProblem):
    """The store refused before it had changed anything."""

    exit_code = ExitCode.REFUSED
    code = "store-refused"


class StoreBusy(StoreRefused):
    """Another process works on the store."""

    code = "store-busy"
    next_action = "retry"


class StoreNotWritten(StoreProblem):
    """A store or a cache took no more bytes."""

    code = "store-not-written"


class StoreUnsound(StoreProblem):
    """Something that was saved is damaged, missing or unreadable."""

    exit_code = ExitCode.STORE_DAMAGED
    code = "store-unsound"


class CutOff(GpushareError):
    """A signal ended a command that can be repeated at any time."""

    exit_code = ExitCode.INTERRUPTED
    code = "cut-off"
    next_action = "retry"
    template = "ended by {signal}; {state}"


# --- causes: what failed in a step.  An outcome below says where that left the group


class StepFailed(GpushareError):
    """A step failed on one rank."""

    code = "step-failed"
    template = "{step} failed on pid {pid}: {detail}"


class GroupGone(GpushareError):
    """No process of a suspended group lives any more."""

    exit_code = ExitCode.LOST
    code = "group-gone"
    next_action = "cold-start"
    template = "no process of group {group} lives any more (pid {pids}); its record was dropped"


class RankDied(StepFailed):
    """A process ended during the command."""

    code = "rank-died"
    next_action = "cold-start"
    template = "pid {pid} ({comm}) died during {step}"


class MemoryGone(StepFailed):
    """A process needs memory whose owner is gone: nothing can bring it back."""

    code = "memory-gone"
    next_action = "cold-start"
    template = "{step}: pid {pid} ({comm}) cannot run again: it needs {bytes} bytes that pid {owners} took along"


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


# --- outcomes: one class for each exit code from 4 on


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
    template = "{cause}. {count_lost} of {count} processes did not come back to running: pid {lost}. {detail}"


class StoreDamaged(Outcome):
    """A checkpoint's store is damaged or incomplete; the group is still suspended."""

    exit_code = ExitCode.STORE_DAMAGED
    code = "store-damaged"
    template = "{cause}. Still suspended; repair the store and resume again"


class StateUnknown(Outcome):
    """A driver call did not return; the state of a process is not known."""

    exit_code = ExitCode.UNKNOWN
    code = "state-unknown"
    template = (
        "{cause}. The call {call} on pid {pid} was left in driver process {driver_pid}; nothing was ended. "
        "Run `nvsnap-gpu-suspend recover {pid}`"
    )


class StillSuspended(Outcome):
    """Resume failed; the group is still suspended and resume can be repeated."""

    exit_code = ExitCode.STILL_SUSPENDED
    code = "still-suspended"
    next_action = "retry"
    template = "{cause}. Still suspended: {count_suspended} of {count} processes; resume can be repeated"


class Interrupted(Outcome):
    """A signal interrupted suspend; every process runs again."""

    exit_code = ExitCode.INTERRUPTED
    code = "interrupted"
    next_action = "retry"
    template = "{cause}. Rolled back: all {count} processes run again"
