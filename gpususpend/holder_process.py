"""The holder: a process of its own that stops the threads of the workload, and outlives the command that ordered it.

Owns the stopped threads, the lease that tells each shim that its threads are held, and the holder's files in the state
directory.  Must not know phases or the driver, and never loads CUDA.  Started by `holder.Holder.start`.

Until `keep` it belongs to the command: when that hangs up, every thread goes on and the holder ends.  After `keep` it
ends by SIGTERM, or when nothing that it holds lives any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass, field

from gpususpend import control, errors, origin, processes, tracing
from gpususpend.deadline import Deadline
from gpususpend.defaults import LIMITS
from gpususpend.helpers import Inherited, Message, boot_id, let_signals_in
from gpususpend.tracing import ChildSignals, Target, Tracer

TITLE = "gpushare-holder"
# How often a kept holder looks whether its targets still live; their death also wakes it by itself.
_LOOK_S = 60.0


def record_name(pid: int, start_time: int) -> str:
    """Return the name of the file that a living holder keeps in the state directory."""
    return f"holder-{pid}-{start_time}.json"


def result_name(pid: int, start_time: int) -> str:
    """Return the name of the file that a holder leaves when it ends."""
    return f"holder-{pid}-{start_time}.result.json"


@dataclass
class _Leases:
    """Connections that tell the shims that their threads are held; a shim notices when one breaks."""

    clients: list[control.ControlClient] = field(default_factory=list)

    def take(self, pids: list[int]) -> None:
        """Take a lease from each process that has a shim and lives; raises what the control client raises."""
        deadline = Deadline(LIMITS.request_s)
        for pid in pids:
            try:
                process = processes.read_process(pid)
            except errors.NoSuchProcess:
                continue
            client = control.ControlClient(pid, process.inner_pid, process.uid)
            try:
                client.connect(deadline)
            except ConnectionRefusedError:
                continue
            self.clients.append(client)
            client.request("lease", deadline)

    def give_back(self) -> None:
        """End every lease in good order; a shim that is gone needs none."""
        deadline = Deadline(LIMITS.request_s)
        for client in self.clients:
            with contextlib.suppress(OSError, ValueError, control.ShimRefused, errors.GpushareError):
                client.request("unlease", deadline)
            client.close()
        self.clients.clear()


class HolderProcess:
    """Answers the command's requests, then keeps the threads stopped until it is told to end."""

    def __init__(self, inherited: Inherited) -> None:
        self._supervisor = inherited
        self._signals = ChildSignals()
        self._tracer = Tracer(self._signals)
        self._leases = _Leases()
        self._targets: list[Target] = []
        self._kept = False
        self._self = processes.read_process(os.getpid())
        self._record = record_name(self._self.pid, self._self.start_time)
        self._result = result_name(self._self.pid, self._self.start_time)

    def run(self) -> None:
        """Serve, hold, and let everything go at the end, whatever ends it."""
        try:
            self._serve()
            if self._kept:
                self._hold()
        finally:
            self._end()

    def _serve(self) -> None:
        while not self._kept and not self._signals.end_requested:
            self._tracer.collect()
            self._signals.wait(None, self._supervisor.channel.fileno())
            if self._supervisor.pending():
                request = self._supervisor.receive()
                if request is None:
                    return
                self._supervisor.send({"id": request["id"], **self._answer(request)})
        self._supervisor.channel.close()

    def _hold(self) -> None:
        while not self._signals.end_requested and self._living():
            self._signals.wait(_LOOK_S)
            self._tracer.collect()

    def _end(self) -> None:
        self._tracer.go(Deadline(1.0))
        self._leases.give_back()
        if self._kept:
            living = self._living()
            gone = [target.pid for target in self._targets if target.pid not in living]
            result = json.dumps({"continued": living, "gone": gone}).encode()
            with contextlib.suppress(errors.StateNotWritten):  # nobody misses it
                self._supervisor.state_dir.write(self._result, result)
            self._supervisor.state_dir.remove(self._record)

    def _answer(self, request: Message) -> Message:
        try:
            return {"ok": True, **self._do(request)}
        except tracing.TraceDenied as denied:
            return {"error": "denied", "pid": denied.pid, "detail": denied.detail, "setting": denied.setting}
        except tracing.StopLate as late:
            return {"error": "late", "threads": [[pid, names] for pid, names in late.threads.items()]}
        except (OSError, ValueError, control.ShimRefused, errors.GpushareError) as error:
            return {"error": "failed", "detail": str(error) or type(error).__name__}

    def _do(self, request: Message) -> Message:
        verb, deadline = request["do"], Deadline(request["seconds"])
        if verb == "check":
            for target in _targets(request):
                tracing.check(target, request["holders"])
            return {}
        if verb == "stop":
            self._targets = _targets(request)
            self._tracer.stop(self._targets, request["keep_names"], deadline)
            return self._report()
        if verb == "go":
            leftover = self._tracer.go(deadline)
            return {**self._report(), "leftover": leftover}
        if verb == "keep":
            return self._keep()
        raise ValueError(f"unknown request {verb!r}")

    def _report(self) -> Message:
        living = self._living()
        return {
            "threads": [[pid, count] for pid, count in self._tracer.counts().items()],
            "gone": [target.pid for target in self._targets if target.pid not in living],
        }

    def _keep(self) -> Message:
        try:
            self._leases.take(self._living())
            record = {
                "pid": self._self.pid,
                "start_time": self._self.start_time,
                "boot_id": boot_id(),
                "targets": [[target.pid, target.start_time] for target in self._targets],
                "leases": [client.pid for client in self._leases.clients],
                "origin": origin.here(),
            }
            self._supervisor.state_dir.write(self._record, json.dumps(record).encode())
        except BaseException:
            self._leases.give_back()
            raise
        self._supervisor.leave_terminal()
        self._kept = True
        return record

    def _living(self) -> list[int]:
        return [t.pid for t in self._targets if tracing.lives(t)]


def _targets(request: Message) -> list[Target]:
    return [Target(pid, start_time, frozenset(keep)) for pid, start_time, keep in request["targets"]]


def _take_precedence() -> None:
    """Come before what is to be stopped: hundreds of running threads must not keep the holder from its turn."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    # Where the kernel shares the processor among sessions first, that of this one counts.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write("-20")


def main() -> None:
    """Run the holder on what it inherited."""
    _take_precedence()
    process = HolderProcess(Inherited(TITLE))
    let_signals_in()
    process.run()
    sys.exit(0)


if __name__ == "__main__":
    main()
