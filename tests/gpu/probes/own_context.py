"""Whether a context can be made and given up beside kernels that wait for other threads, also after a restore.

``python -m tests.gpu.probes.own_context --driver real`` decides whether the shim may lock an arena in a context of its
own in a process that was checkpointed (docs/decisions/arena-while-quiet.md).  It prints a line for each call: how long
it took, or that it did not return, and how many rounds the kernels made meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from tests.programs.client import Worker
from tests.programs.setting import SHIM, Setting, drop_state, fresh_state
from tests.programs.tool import Tool

SIZE = 4 << 30
ROUNDS = 5
RETURNS_S = 30.0
STACK_SIZE = 0  # CU_LIMIT_STACK_SIZE


def timed(worker: Worker, what: str, loop: int, name: str, *arguments: Any) -> Any:
    """Run a call in a thread of its own, print how it went, and return its value; raises TimeoutError."""
    before, start = worker.loop_state(loop)["count"], time.monotonic()
    number = worker.job(name, *arguments)
    answer = None
    while answer is None and time.monotonic() - start < RETURNS_S:
        answer = worker.job_answer(number, 0.002)
    state = worker.loop_state(loop)
    took = f"{(time.monotonic() - start) * 1e3:9.1f} ms" if answer else "no return"
    told = f"code {answer[0]}" if answer else ""
    name = arguments[1] if name == "in_context" else name
    print(f"{what:10} {name:15} {took} {told:9} rounds {state['count'] - before:6} {state['errors']}", flush=True)
    if answer is None:
        raise TimeoutError(name)
    return answer[1]


def beside_kernels(worker: Worker, what: str, size: int) -> None:
    """Make a context, lock and unlock memory in it, and destroy it, while kernels wait for another thread's copies."""
    memory = worker.buffer(size, "shared")
    loop = worker.loop_start("fed_kernels")
    for _ in range(ROUNDS):
        context = timed(worker, what, loop, "ctx_create", 0)
        for name, *arguments in (
            ("ctx_set_limit", STACK_SIZE, 0), ("host_register", memory, size), ("host_unregister", memory),
        ):  # fmt: skip
            timed(worker, what, loop, "in_context", context, name, *arguments)
        timed(worker, what, loop, "ctx_destroy", context)
    print(what, worker.loop_stop(loop), flush=True)


def main() -> int:
    """Ask before and after a restore."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", choices=("sim", "real"), default="real")
    parser.add_argument("--mib", type=int, default=SIZE >> 20)
    options = parser.parse_args()
    state = fresh_state() if options.driver == "sim" else None
    machine = Setting(options.driver, SHIM, devices=1, state=state)
    try:
        with Tool(machine) as tool:
            worker = Worker(machine, stderr=Path("/dev/null"))
            try:
                worker.start(0)
                beside_kernels(worker, "fresh", options.mib << 20)
                tool.suspend(worker.pid).expect(0)
                tool.resume(worker.pid).expect(0)
                beside_kernels(worker, "restored", options.mib << 20)
            finally:
                worker.kill()
    except TimeoutError:
        return 1
    finally:
        if state is not None:
            drop_state(state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
