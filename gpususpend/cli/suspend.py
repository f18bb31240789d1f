"""nvsnap-gpu-suspend suspend."""

from __future__ import annotations

import click

from gpususpend.cli import options, output


@click.command("suspend", short_help="Suspend processes: their GPU memory goes to host memory.")
@options.targets_options
@options.timeout_option
@options.copy_timeout_option
@options.checkpoint_timeout_option
@click.option(
    "--allow-unshimmed", is_flag=True, help="Also suspend a CUDA process without the shim, if it can share nothing."
)
@options.common_options
def command(
    words: options.Words,
    timeout_s: float,
    copy_timeout_s: float,
    checkpoint_timeout_s: float,
    allow_unshimmed: bool,
    as_json: bool,
    state_dir: str | None,
    driver: str,
    quiet: bool,
) -> None:
    """Suspend processes as one group: GPU memory is copied to host memory, the GPUs become empty, threads stop.

    Name every process that shares GPU memory with another.  Processes without CUDA are only stopped.  If anything
    fails, all processes run again.  Suspending a suspended group changes nothing and succeeds.

    \b
    Example:
      nvsnap-gpu-suspend suspend 4711 4712
      nvsnap-gpu-suspend suspend --tree 4700 --timeout 120 --json
    """
    with output.reporting("suspend", as_json, driver == "sim") as report:
        targets = options.parse_targets(words)
        limits = {
            "timeout_s": timeout_s,
            "copy_timeout_s": copy_timeout_s,
            "checkpoint_timeout_s": checkpoint_timeout_s,
        }
        from gpususpend import operations

        with options.working(report, state_dir, quiet, limits) as context:
            operations.suspend_targets(context, targets, allow_unshimmed, report)
