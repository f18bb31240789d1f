"""The command ``python -m gpususpend.demo``."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console

from gpususpend.demo import results
from gpususpend.demo.crew import CrewError, crew
from gpususpend.demo.cycle import DemoError, Sizes, Tool, check, connect, one_cycle, step
from gpususpend.demo.machine import Machine, NoDriver, describe, find_machine

MIB = 1 << 20
STEPS_BEFORE = 3
DEFAULT_MIB = {"sim": 64, "real": 4096}


def machine_say(machine: Machine) -> Callable[[str], None]:
    """Return a function that prints a line of progress, which says so if it is about the simulated driver."""
    mark = "simulated: " if machine.simulated else ""

    def say(text: str) -> None:
        for line in text.splitlines():
            click.echo(mark + line, err=True)

    return say


def run(machine: Machine, ranks: int, mib: int, cycles: int, deadline_s: float) -> dict[str, Any]:
    """Run the demo on `machine` and return its result. Raises DemoError or CrewError at the first thing wrong."""
    say = machine_say(machine)
    result = results.header(["python", "-m", "gpususpend.demo", *sys.argv[1:]], describe(machine))
    sizes = Sizes.of(mib)
    before = machine.use()
    with own_tool(machine) as tool, crew(ranks, tool.launcher, tool.environment, deadline_s) as workers:
        devices = connect(workers, sizes)
        result["ranks"] = [{"rank": rank, "device": device} for rank, device in enumerate(devices)]
        result["rank_bytes"] = sizes.rank_bytes
        say(f"{ranks} ranks, pids {workers.pids}, devices {devices}, {mib} MiB each, sharing by fd and by CUDA IPC")
        for _ in range(STEPS_BEFORE):
            step(workers)
        say(f"{STEPS_BEFORE} steps through the peers' memory: {check(workers) / MIB:.0f} MiB compared, all right")
        result["cycles"] = [one_cycle(n, workers, tool, machine, before, say) for n in range(1, cycles + 1)]
        workers.ask("finish")
    return result


@contextmanager
def own_tool(machine: Machine) -> Iterator[Tool]:
    """Yield the tool with a state directory of its own: nothing that the user has suspended is touched."""
    with tempfile.TemporaryDirectory(prefix="gpushare-demo-state-", ignore_cleanup_errors=True) as state:
        yield Tool({**machine.environment(), "NVSNAP_GPU_SUSPEND_STATE_DIR": state}, machine.simulated)


@click.command(epilog="Example: python -m gpususpend.demo --ranks 2 --mib 64 --cycles 3")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2, 16), help="Processes that share memory.")
@click.option(
    "--mib", type=click.IntRange(8, 1 << 20), help="GPU memory of each rank. [default: 64 simulated, 4096 on a GPU]"
)
@click.option("--cycles", default=3, show_default=True, type=click.IntRange(0), help="Times to suspend and resume.")
@click.option("--driver", default="auto", show_default=True, type=click.Choice(["auto", "real", "sim"]))
@click.option("--deadline", "deadline_s", default=120.0, show_default=True, help="Seconds for one step of all ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object instead of a table.")
def main(ranks: int, mib: int | None, cycles: int, driver: str, deadline_s: float, as_json: bool) -> None:
    """Suspend and resume ranks that share GPU memory, and prove that nothing is lost.

    Uses NVIDIA GPUs where there are any, else the simulated driver. Exits with 1 at the first wrong byte or command.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks and the state folder go with us
    try:
        with find_machine(driver, ranks, mib or DEFAULT_MIB["sim"]) as machine:
            try:
                kind = "sim" if machine.simulated else "real"
                result = run(machine, ranks, mib or DEFAULT_MIB[kind], cycles, deadline_s)
            except (DemoError, CrewError) as error:
                machine_say(machine)(f"error: {error}")
                sys.exit(1)
    except NoDriver as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        results.show(result, Console())


if __name__ == "__main__":
    main()
