"""Helper processes: how the supervisor starts one, talks to it, and lets go of it.

Owns the exec, the socket pair and the inherited state directory.  Must not know what a helper does.  The helpers import
it too, so it loads nothing slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpususpend import errors, processes, system
from gpususpend.deadline import Deadline
from gpususpend.statedir import StateDir

# The numbers under which a helper finds what it inherits.
SOCKET_FD = 3
STATE_DIR_FD = 4

# What makes the driver load a profiler or tracer into a process.
INJECTION_VARIABLES = ("CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH", "NVTX_INJECTION64_PATH")
DATAGRAM_BYTES = 1 << 18
# Until a helper has said what becomes of them: the interpreter that loads it would end with a trace.
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Message = dict[str, Any]


class HelperFailed(errors.GpushareError):
    """A helper could not be started, or broke."""

    code = "helper-failed"
    next_action = "retry"
    template = "the {helper} process failed: {detail}"


class HelperGone(Exception):
    """The helper hung up or ended."""


class HelperLate(Exception):
    """The helper did not answer within the deadline."""


def let_signals_in() -> None:
    """In a helper: take the signals that were held back while it was loaded, and from now on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def helper_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the shim and without tools that the driver would load into a helper."""
    result = {name: value for name, value in environment.items() if name not in INJECTION_VARIABLES}
    preload = result.pop("LD_PRELOAD", "").replace(":", " ").split()
    kept = [entry for entry in preload if os.path.basename(entry) != processes.SHIM_LIBRARY]
    if kept:
        result["LD_PRELOAD"] = ":".join(kept)
    return result


class Helper:
    """A started helper: its pid and the socket to it.  It sees by the socket's end that nobody needs it any more."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        # The child cannot be collected before `close`, so its pid is safe until then.
        self._pidfd = system.pidfd_open(pid)

    @classmethod
    def start(cls, name: str, module: str, state_dir: Path, environment: Mapping[str, str]) -> Helper:
        """Start `module`'s main() in a process of its own; `name` is what messages call it.

        Raises UnsafeStateDir, and when no process can be made, with nothing left behind then, OSError for a system call
        that is denied and HelperFailed for all that may pass.
        The interpreter runs isolated (no site, no variables) on this process's own module path: fast, and nothing in
        a user's environment or current directory gets into a process that traces others.
        """
        try:
            return cls._start(module, state_dir, environment)
        except OSError as error:
            if system.denied(error):
                raise
            raise HelperFailed(helper=name, detail=f"it cannot be started: {error.strerror}") from None

    @classmethod
    def _start(cls, module: str, state_dir: Path, environment: Mapping[str, str]) -> Helper:
        # Without relative entries: what lies in the current directory is not ours.
        path = [*(entry for entry in sys.path if os.path.isabs(entry)), str(Path(__file__).resolve().parent.parent)]
        # What is loaded stays: to look for garbage among it would take a while of the start.
        code = f"import gc, sys; gc.disable(); sys.path[:] = {path!r}; from {module} import main; "
        code += "gc.freeze(); gc.enable(); main()"
        with contextlib.ExitStack() as undo:
            directory = undo.enter_context(StateDir.open(os.fspath(state_dir)))
            ours, theirs = system.socket_pair()
            undo.callback(theirs.close)
            # Away from the numbers that they shall get, lest one overwrites the other.
            moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (theirs.fileno(), directory.fd)]
            for fd in moved:
                undo.callback(os.close, fd)
            try:
                with system.named("clone3 or execve"):
                    pid = os.posix_spawn(
                        sys.executable,
                        [sys.executable, "-I", "-S", "-c", code],
                        helper_environment(environment),
                        file_actions=[
                            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                            # Whatever a library prints must not get among the command's results.
                            (os.POSIX_SPAWN_DUP2, 2, 1),
                            (os.POSIX_SPAWN_DUP2, moved[0], SOCKET_FD),
                            (os.POSIX_SPAWN_DUP2, moved[1], STATE_DIR_FD),
                        ],
                        # A Ctrl-C at the terminal is for the command, which then ends its helpers in good order.
                        setsid=True,
                        setsigmask=HELD_BACK,
                        setsigdef=(signal.SIGPIPE, signal.SIGCHLD, *HELD_BACK),
                    )
            except BaseException:
                ours.close()
                raise
        return cls(pid, ours)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message waits."""
        return self._channel.fileno()

    def send(self, message: Message) -> None:
        """Send one message; raises HelperGone when nobody is there any more."""
        try:
            self._channel.send(json.dumps(message).encode())
        except OSError as error:
            raise HelperGone(f"helper {self.pid} ended: {error.strerror}") from None

    def receive(self, deadline: Deadline) -> Message:
        """Return the next message; raises HelperLate at the deadline, HelperGone when there will be none."""
        if not _wait_readable(self._channel.fileno(), deadline):
            raise HelperLate(f"helper {self.pid} does not answer")
        try:
            data = self._channel.recv(DATAGRAM_BYTES)
        except OSError as error:
            raise HelperGone(f"helper {self.pid} ended: {error.strerror}") from None
        if not data:
            raise HelperGone(f"helper {self.pid} ended")
        message: Message = json.loads(data)
        return message

    def hang_up(self) -> None:
        """Tell the helper that no more requests come; what it still sends can be received."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def ended(self, deadline: Deadline) -> bool:
        """Wait until the process has ended; False if it still runs at the deadline."""
        return _wait_readable(self._pidfd, deadline)

    def kill(self) -> None:
        """Kill the process, by its pidfd."""
        with contextlib.suppress(ProcessLookupError):
            system.send_signal(self._pidfd, signal.SIGKILL)

    @property
    def closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._pidfd < 0

    def close(self) -> None:
        """Let go of the helper, which goes on as it sees fit, and collect it if it has ended."""
        if self._pidfd >= 0:
            self._channel.close()
            os.close(self._pidfd)
            self._pidfd = -1
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)


def boot_id() -> str:
    """Return the id of this boot: the start times of processes count from it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def wait_ended(pidfd: int, deadline: Deadline) -> bool:
    """Wait until the process of a pidfd has ended; False if it still runs at the deadline."""
    return _wait_readable(pidfd, deadline)


def _wait_readable(fd: int, deadline: Deadline) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        if poller.poll(deadline.left() * 1000):
            return True
        if deadline.passed():
            return False


class Inherited:
    """In a helper: the socket to the supervisor and the state directory; closes what else came along."""

    def __init__(self, title: str) -> None:
        for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
            if fd > STATE_DIR_FD:
                # Someone may wait for the end of a pipe that came along.
                with contextlib.suppress(OSError):
                    os.close(fd)
        for fd in (SOCKET_FD, STATE_DIR_FD):
            os.set_inheritable(fd, False)
        Path("/proc/self/comm").write_text(title)
        # Named in full: else the kernel is asked what it is, by a call that may be denied.
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, SOCKET_FD)
        self.state_dir = StateDir(os.readlink(f"/proc/self/fd/{STATE_DIR_FD}"), STATE_DIR_FD)

    def send(self, message: Message) -> None:
        """Send one message; a supervisor that is gone is seen at the next receive."""
        with contextlib.suppress(OSError):
            self.channel.send(json.dumps(message).encode())

    def pending(self) -> bool:
        """Tell whether `receive` would return at once."""
        return _wait_readable(self.channel.fileno(), Deadline(0))

    def receive(self) -> Message | None:
        """Return the next message, None when the supervisor has hung up."""
        try:
            data = self.channel.recv(DATAGRAM_BYTES)
        except OSError:
            return None
        message: Message | None = json.loads(data) if data else None
        return message

    def leave_terminal(self) -> None:
        """Let go of the standard streams and the directory: nobody must wait for a helper that outlives the command."""
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
