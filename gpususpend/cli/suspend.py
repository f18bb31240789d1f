"""nvsnap-gpu-suspend suspend."""

from __future__ import annotations

import click

from gpususpend.cli import options
from gpususpend.journal import Depth


@click.command("suspend", short_help="Suspend processes: their GPU memory goes to host memory.")
@options.targets_options
@options.limit_options
@click.option(
    "--allow-unshimmed", is_flag=True, help="Also suspend a CUDA process without the shim, if it can share nothing."
)
@click.option(
    "--depth",
    type=click.Choice([depth.value for depth in Depth]),
    default=Depth.PROCESS.value,
    show_default=True,
    help="How much leaves the GPUs: `pages`, the memory that the shims carry, or `process`, everything.",
)
@options.common_options
def command(
    words: options.Words, limits: dict[str, float], allow_unshimmed: bool, depth: str, common: options.Common
) -> None:
    """Suspend processes as one group: GPU memory is copied to host memory, the GPUs become empty, threads stop.

    With `--depth pages` contexts, modules and streams stay on the GPUs and threads run until they come to a CUDA call:
    both ways are much quicker, but no dump can be taken.

    Name every process that shares GPU memory with another.  Processes without CUDA are only stopped.  If anything
    fails, all processes run again.  Suspending a suspended group changes nothing and succeeds.

    \b
    Example:
      nvsnap-gpu-suspend suspend 4711 4712
      nvsnap-gpu-suspend suspend --tree 4700 --timeout 120 --json
    """
    with common.reporting("suspend") as report:
        targets = options.parse_targets(words)
        from gpususpend import operations

        with common.working(report, limits) as context:
            operations.suspend_targets(context, targets, allow_unshimmed, Depth(depth), report)
