"""The ways to take a server off its GPUs and to put it back: the tool with the shim, or the driver alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gpususpend.control import ControlClient, ShimRefused
from gpususpend.deadline import Deadline
from tests.gpu.vllm.machine import words_for_the_tool
from tests.programs.setting import ROOT

COMMAND_S = 240


class Failed(RuntimeError):
    """A step did not succeed; the message is what it said."""


def processes(pids: list[int]) -> list[dict[str, Any]]:
    """Say of each process what it has of the driver and of the shim."""
    asked = run([sys.executable, "-m", "tests.gpu.vllm.ways", "state", "thread", *map(str, pids)])["report"]
    listening = Path("/proc/net/unix").read_text()
    found = []
    for at, pid in enumerate(pids):
        folder = Path("/proc") / str(pid)
        nodes = [os.readlink(one) for one in (folder / "fd").iterdir() if one.is_symlink()]
        maps = (folder / "maps").read_text()
        found.append({"pid": pid, "comm": (folder / "comm").read_text().strip(), "shim": "nvsnap_gpushare" in maps,
                      "libcuda": "libcuda.so" in maps, "listens": f"@nvsnap-gpushare.{pid}\n" in listening,
                      "nodes": sorted({node for node in nodes if "nvidia" in node}),
                      "state": asked["state"]["codes"][at], "thread": asked["thread"]["codes"][at]})
    return found


def run(command: list[str], at_work: Callable[[], None] | None = None) -> dict[str, Any]:
    """Run a command that prints JSON; return it with the seconds that it took. Raises Failed.

    With `at_work` the command prints a line when it is about to begin, and waits for one; its seconds count from there.
    """
    began = time.monotonic()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None
        try:
            if at_work and process.stdout.readline():
                at_work()
                began = time.monotonic()
            out, said = process.communicate("\n", timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failed(f"{' '.join(command)} did not end in {COMMAND_S} s") from None
    if process.returncode != 0:
        raise Failed(f"{' '.join(command)} ended with {process.returncode}: {said[-2000:]}")
    return {"seconds": time.monotonic() - began, "report": json.loads(out)}


class WithShim:
    """nvsnap-gpu-suspend on the whole tree of processes, or on those that use a GPU."""

    def __init__(self, named: list[str], options: list[str], ranks: list[int]) -> None:
        self._named, self._options, self._ranks = named, options, ranks

    def suspend(self, *options: str, at_work: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Take the server off its GPUs.

        `at_work` is called once the arenas are there and are being page-locked, so that requests which it sends are in
        flight when the gates close: filling the arenas before takes longer than a request.
        """
        command = [*self._words("suspend"), *self._options, *options, *self._named]
        with ThreadPoolExecutor(1) as pool:
            down = pool.submit(run, command)
            while not down.done() and not any(map(self._has_arena, self._ranks)):
                time.sleep(0.01)
            at_work()
            return down.result()

    @staticmethod
    def _has_arena(pid: int) -> bool:
        with suppress(OSError, ShimRefused), ControlClient(pid, pid, os.stat(f"/proc/{pid}").st_uid) as client:
            return client.request("status", Deadline(COMMAND_S)).number("arena_bytes") > 0
        return False

    def resume(self) -> dict[str, Any]:
        """Put it back."""
        return run([*self._words("resume"), *self._named])

    @staticmethod
    def _words(verb: str) -> list[str]:
        return [sys.executable, "-m", "gpususpend", verb, "--json", *words_for_the_tool()]


class BareDriver:
    """cuCheckpointProcess* on every process that uses a GPU, all at once."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = [str(pid) for pid in pids]

    def suspend(self, at_work: Callable[[], None]) -> dict[str, Any]:
        """Lock and checkpoint; `at_work` is called when that is about to begin."""
        return run([sys.executable, "-m", "tests.gpu.vllm.ways", "lock", "checkpoint", *self._pids], at_work)

    def resume(self) -> dict[str, Any]:
        """Restore and unlock."""
        return run([sys.executable, "-m", "tests.gpu.vllm.ways", "restore", "unlock", *self._pids])


def step(name: str, pid: int) -> int:
    """Make one of the driver's checkpoint calls on a process; return its code."""
    from cuda.bindings import driver

    if name == "state":
        return int(driver.cuCheckpointProcessGetState(pid)[0])
    if name == "thread":
        return int(driver.cuCheckpointProcessGetRestoreThreadId(pid)[0])
    if name == "lock":
        arguments = driver.CUcheckpointLockArgs()
        arguments.timeoutMs = 20_000
        return int(driver.cuCheckpointProcessLock(pid, arguments)[0])
    call = {"checkpoint": driver.cuCheckpointProcessCheckpoint, "restore": driver.cuCheckpointProcessRestore,
            "unlock": driver.cuCheckpointProcessUnlock}[name]
    return int(call(pid, None)[0])


def main(arguments: list[str]) -> None:
    """Make two steps on all pids; print codes and seconds as JSON; exit with 1 as soon as a code is not 0.

    `state` and `thread` ask what the driver says of the processes, and have no wrong answer. A `lock` waits for a line
    on stdin, after a line of its own: the server may have to do until then.
    """
    from cuda.bindings import driver

    driver.cuInit(0)
    names, pids = arguments[:2], [int(word) for word in arguments[2:]]
    told: dict[str, Any] = {}
    if names[0] == "lock":
        print(flush=True)
        sys.stdin.readline()
    with ThreadPoolExecutor(len(pids)) as pool:
        for name in names:
            began = time.monotonic()
            codes = list(pool.map(partial(step, name), pids))
            told[name] = {"codes": codes, "seconds": time.monotonic() - began}
            if any(codes) and name not in ("state", "thread"):
                print(json.dumps(told), file=sys.stderr, flush=True)
                os._exit(1)  # a thread may hang in the driver
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
