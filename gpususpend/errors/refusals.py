"""What is refused: exit 2, malformed arguments, and exit 3, before anything changed."""

from __future__ import annotations

from collections.abc import Sequence

from gpususpend.defaults import COMMAND
from gpususpend.errors.base import ExitCode, GpushareError


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
    template = "pid {pid} lives in another pid namespace ({detail}); run the command inside its container{way}"

    @classmethod
    def of_process(cls, pid: int, inner_pid: int) -> OtherPidNamespace:
        """Return it for a process that is seen from here."""
        detail, way = f"its pid there is {inner_pid}", f": nsenter -t {pid} -p -m -n …"
        return cls(pid=pid, inner_pid=inner_pid, detail=detail, way=way)

    @classmethod
    def of_group(cls, pid: int, group: str, path: str, there: int) -> OtherPidNamespace:
        """Return it for a member of a group whose record, at `path`, was written in another namespace.

        `there` is a process of that as it is called here, 0 if none is seen.
        """
        detail = f"that is its pid there; group {group} was recorded there"
        way = f": nsenter -t {there} -p -m -n …" if there else f". If that is gone for good: delete {path}"
        return cls(pid=pid, group=group, detail=detail, way=way)


class OtherTimeNamespace(Refused):
    """A record was written in another time namespace, where processes have other start times."""

    code = "other-time-namespace"
    template = (
        "pid {pid} of group {group} was recorded in another time namespace, where it has another start time; {way}"
    )

    @classmethod
    def of_group(cls, pid: int, group: str, path: str, there: int, resume: str) -> OtherTimeNamespace:
        """Return it for a group whose record is at `path`; `resume` brings it back without that.

        `there` is a process of that namespace, 0 if none lives: then nothing keeps the threads of the group any more.
        """
        way = f"run the command there: nsenter -t {there} -T …"
        if not there:
            way = f"no process lives there any more: delete {path}, then run `{resume}`"
        return cls(pid=pid, group=group, way=way)


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


class NoSocket(Refused):
    """A process has the shim, which found no name to listen on, or had no descriptor for its socket."""

    code = "no-socket"
    next_action = "retry"
    template = (
        "pid {pid} ({comm}) has the shim, and no socket leads to it yet: all {names} names for its pid are taken by "
        "containers on this network whose processes have the same pid, or it has no free descriptor. Its shim keeps "
        "trying; try again once one of them has ended, or it has closed a descriptor; nothing was changed"
    )


class DriverHasIt(Refused):
    """The driver has a process locked or checkpointed that belongs to no group."""

    code = "driver-state"
    template = (
        "pid {pid} ({comm}): the driver says {state}; another tool has locked or checkpointed it, and has to bring it "
        "back first"
    )


class PastTheShim(Refused):
    """A process has the shim, and uses CUDA by a way that passes it by."""

    code = "past-the-shim"
    template = (
        "pid {pid} ({comm}) has the shim and uses GPU {uuid} past it: a library of it was bound to the driver directly "
        "(dlopen with RTLD_DEEPBIND, dlmopen), and what it allocates and shares is not known"
    )


class MayShare(Refused):
    """An unshimmed process was allowed, but other processes may share memory with it."""

    code = "may-share"
    template = (
        "pid {pid} ({comm}) runs without the shim and may map memory of pid {others}; a restore would lose it. "
        "Start it with `nvsnap-gpu-suspend run -- COMMAND`{stopped}"
    )


class Headless(Refused):
    """A process goes on without its first thread."""

    code = "headless"
    template = (
        "pid {pid} ({comm}) goes on without its first thread, and without that the kernel shows none of its files "
        "and mappings. It cannot be suspended: let the first thread wait for the others"
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
    template = "pid {pid} owns what cannot be carried yet: {owned}"


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


class Integrated(Refused):
    """The memory of a GPU is the machine's, and was to be kept in it."""

    code = "integrated-gpu"
    template = (
        "pid {pid} ({comm}) uses GPU {uuid}, whose memory is this machine's RAM: to keep it there would free nothing "
        "and may freeze the machine; suspend it with --store, under the shim"
    )


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


class RingTooSmall(Refused):
    """Less host memory was named than pieces can go through."""

    code = "ring-too-small"
    template = (
        "--ring {ring}: {count} process(es) need {least} at least, {places} pieces of {size} each; "
        "give --ring {least} or more, or leave it out"
    )


class TooFewDescriptors(Refused):
    """The command itself may open too few descriptors."""

    code = "too-few-descriptors"
    template = (
        "this command may open {limit} descriptors and needs {needed} or more; allow it more (ulimit -n {enough}, or "
        "LimitNOFILE= of its service), then try again; nothing was changed"
    )


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
    template = "state directory: {path} is refused: {why}. {way_out}"


class StateNotWritten(Refused):
    """The state directory cannot be written."""

    code = "state-not-written"
    next_action = "retry"
    template = "{path} cannot be written: {detail}; {way_out}"


class Busy(Refused):
    """Another command works on the group."""

    code = "busy"
    next_action = "retry"
    template = "another command ({who}) works on these processes; wait for it"

    @classmethod
    def by(cls, pid: int, **facts: object) -> Busy:
        """Return it for the command with this pid; 0: the kernel does not show it here."""
        who = f"pid {pid}" if pid else "which is not shown here, as of another pid namespace"
        return cls(pid=pid or None, who=who, **facts)


class HolderFrozen(Refused):
    """The holder of a group cannot be ended where it is."""

    code = "holder-frozen"
    next_action = "retry"
    template = (
        "the holder of the group, pid {pid}, is frozen by cgroup {cgroup}, where nothing can be ended: thaw that, "
        "then try again; nothing was changed"
    )


class HeldElsewhere(Refused):
    """A holder that is in no record here keeps the process."""

    code = "held-elsewhere"
    template = (
        "pid {pid}: suspended, with the threads held by process {holder} of another state directory; name that by"
        " --state-dir. If it is lost: kill {holder} (the threads run, the gates hold), then try again"
    )


class Unrecorded(Refused):
    """Processes are suspended, and nothing here says by whom."""

    code = "unrecorded"
    template = (
        "pid {pid}: suspended or left half-way, and in no record here. Name the state directory of that suspend by "
        "--state-dir or, if it is lost, the processes themselves: `nvsnap-gpu-suspend recover {words}`"
    )


class MixedStates(Refused):
    """Some of the named processes are suspended and others are not."""

    code = "mixed-states"
    template = "pid {suspended} are suspended already, pid {running} are not; resume those first, or leave them out"


class NeedsRecover(Refused):
    """An earlier command was cut off half-way, or could not write down that it had ended."""

    code = "needs-recover"
    template = "pid {pid}: {how}; {way}"

    @classmethod
    def of_group(cls, pid: int, stage: str, step: str, said: str) -> NeedsRecover:
        """Return it for a group that was left in a step; `said` is what the command said that failed, if it could."""
        how = f"left in phase {stage}: {step} by an earlier command"
        return cls(pid=pid, phase=f"{stage}: {step}", how=how, way=f"that said: {said}" if said else run_recover(pid))

    @classmethod
    def of_running(cls, pid: int, stage: str) -> NeedsRecover:
        """Return it for a process that runs, of a group whose record says otherwise."""
        how = f"running, though its record says {stage}: the command that brought it back could not drop that"
        return cls(pid=pid, phase="running", how=how, way=run_recover(pid))

    @classmethod
    def of_strays(cls, pids: Sequence[int]) -> NeedsRecover:
        """Return it for processes that are in no record."""
        how = "left suspended or half-way by a command whose record is gone"
        return cls(pid=pids, how=how, way=run_recover(*pids))


def run_recover(*pids: int) -> str:
    """Return the advice to recover the groups of these processes."""
    return f"run `{COMMAND} recover {' '.join(map(str, pids))}`"


class OtherDepth(Refused):
    """A suspended group is at another depth than the command needs."""

    code = "other-depth"
    template = "pid {pid} is suspended with --depth {depth}, not {wanted}; resume its group first, then suspend it anew"


class NotForADump(Refused):
    """A group was suspended such that only a resume in place can follow."""

    code = "in-place"
    template = "pid {pid} is suspended with --in-place: no dump can be taken; resume its group, then suspend it without"


class OtherStore(Refused):
    """A group's memory lies elsewhere than where the command was told."""

    code = "other-store"
    template = "the memory of pid {pid} is kept in {kept}, not in {named}{why}"


class OtherCheckpoint(Refused):
    """A directory holds another checkpoint than a process needs."""

    code = "other-checkpoint"
    template = (
        "pid {pid} needs checkpoint {needed}, and {directory} holds {found}: memory of another suspend; "
        "name the directory of the right one with --store and --ckpt-dir"
    )


class OtherCache(Refused):
    """A cache was named that is another store's, or of a format that is not known here."""

    code = "other-cache"
    template = "{said}; nothing was changed"


class NoStoreNamed(Refused):
    """A process's memory lies in a store of which no record is left."""

    code = "no-store-named"
    template = "the memory of pid {pid} is in checkpoint {needed}, and no record says where; name --store, --ckpt-dir"


class CheckpointNeeded(Refused):
    """A checkpoint was to go that holds the only copy of living processes' memory."""

    code = "checkpoint-needed"
    template = (
        "{directory} holds the memory of pid {pid} and is its only copy: group {group} is {stage}; "
        "resume it first, or end its processes"
    )


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
    """The system does not let this user stop the threads of the process, or look into it."""

    code = "cannot-trace"
    template = "pid {pid}: {what}: {detail} ({setting})"

    @classmethod
    def of_threads(cls, pid: object, detail: object, setting: object) -> CannotTrace:
        """Return it for threads that may not be stopped."""
        return cls(pid=pid, what="its threads may not be stopped", detail=detail, setting=setting)

    @classmethod
    def of_process(cls, pid: int, comm: str, shim: bool) -> CannotTrace:
        """Return it for a process that the kernel does not show; without a shim that matters most."""
        what = f"it ({comm}) {'may' if shim else 'is not under the shim, and may'} not be looked into"
        return cls(
            pid=pid, comm=comm, what=what, detail="the kernel does not show it to this user",
            setting="CAP_SYS_PTRACE, or prctl PR_SET_DUMPABLE of that process",
        )  # fmt: skip


class LookFailed(Refused):
    """A question that had to be answered before anything may change was not answered."""

    code = "look-failed"
    next_action = "retry"
    template = "{cause}; nothing was changed"


class SystemCall(Refused):
    """The system did not do what the command asked of it, where nobody foresaw that."""

    code = "system-call"
    template = "{detail}{state}. {way_out}"


class BadFile(Refused):
    """A file that cannot be written or read."""

    code = "bad-file"
    template = "{path}: {detail}"


class NoCurrentDirectory(Refused):
    """A relative path was named where the current directory has been removed."""

    code = "no-current-directory"
    template = "'{path}' leads nowhere: the current directory was removed; name an absolute path"


class BadCommand(Refused):
    """A command that cannot be started with the shim."""

    code = "bad-command"
    template = "{detail}"
