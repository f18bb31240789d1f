"""The ranks as the demo sees them: started, told what to do all together, and ended by pid.

A message to the crew is a barrier: it returns when every rank has answered, and raises when one answers an error, dies,
or takes longer than the deadline.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gpususpend.demo import wire

END_S = 10.0


class CrewError(Exception):
    """A rank failed; the message names it."""


class Crew:
    """N rank processes and the channels to them.

    `launcher` is the command that starts another one with the shim preloaded and takes its place.
    """

    def __init__(
        self, ranks: int, launcher: Sequence[str], environment: Mapping[str, str], deadline_s: float
    ) -> None:
        self.ranks = ranks
        self._launcher = launcher
        self.deadline_s = deadline_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        self._environment = environment

    def start(self) -> None:
        """Start the processes, with the shim preloaded."""
        for rank in range(self.ranks):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fd = theirs.fileno()
            program = [sys.executable, "-m", "gpususpend.demo.rank", str(fd), str(rank), str(self.ranks)]
            with theirs:
                process = subprocess.Popen(
                    [*self._launcher, *program], env=self._environment, pass_fds=[fd], stdin=subprocess.DEVNULL
                )
            self.processes.append(process)
            self._channels.append(ours)

    @property
    def pids(self) -> list[int]:
        """The pids of all ranks."""
        return [process.pid for process in self.processes]

    def ask(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send the same message to all and return their answers by rank. Raises CrewError."""
        return [answer for answer, _ in self.exchange(verb, [(arguments, [])] * self.ranks)]

    def exchange(
        self, verb: str, messages: Sequence[tuple[dict[str, Any], Sequence[int]]]
    ) -> list[tuple[dict[str, Any], list[int]]]:
        """Send each rank its arguments and descriptors, and return answers and descriptors, which the caller owns."""
        for rank, (arguments, fds) in enumerate(messages):
            try:
                wire.send(self._channels[rank], {"do": verb, **arguments}, fds)
            except wire.Closed:
                raise self._died(rank, verb) from None
        until = time.monotonic() + self.deadline_s
        return [self._answer(rank, verb, until) for rank in range(self.ranks)]

    def _answer(self, rank: int, verb: str, until: float) -> tuple[dict[str, Any], list[int]]:
        channel, pid = self._channels[rank], self.pids[rank]
        channel.settimeout(max(0.01, until - time.monotonic()))
        try:
            answer, fds = wire.receive(channel)
        except TimeoutError:
            raise CrewError(f"rank {rank} (pid {pid}) did not finish '{verb}' in {self.deadline_s:.0f} s") from None
        except wire.Closed:
            raise self._died(rank, verb) from None
        if "error" in answer:
            raise CrewError(f"rank {rank} (pid {pid}): {answer['error']}")
        return answer, fds

    def _died(self, rank: int, verb: str) -> CrewError:
        try:
            status = self.processes[rank].wait(timeout=1)
        except subprocess.TimeoutExpired:
            return CrewError(f"rank {rank} (pid {self.pids[rank]}) closed its channel in '{verb}'")
        return CrewError(f"rank {rank} (pid {self.pids[rank]}) ended with status {status} in '{verb}'")

    def end(self, patience_s: float = END_S) -> None:
        """Close the channels, which ends the ranks, and kill by pid those that do not end in time."""
        for channel in self._channels:
            channel.close()
        until = time.monotonic() + patience_s
        for process in self.processes:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self.processes:
            process.wait(timeout=END_S)


@contextmanager
def crew(
    ranks: int, launcher: Sequence[str], environment: Mapping[str, str], deadline_s: float
) -> Iterator[Crew]:
    """Run `ranks` rank processes; whatever happens, none is left."""
    started = Crew(ranks, launcher, environment, deadline_s)
    try:
        started.start()
        yield started
    except BaseException:
        started.end(patience_s=0)  # a rank may be frozen, and would not see its channel close
        raise
    started.end()
