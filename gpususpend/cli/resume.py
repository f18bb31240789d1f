"""nvsnap-gpu-suspend resume."""

from __future__ import annotations

import click

from gpususpend.cli import options, output


@click.command("resume", short_help="Bring suspended processes back.")
@options.targets_options
@options.timeout_option
@options.copy_timeout_option
@options.checkpoint_timeout_option
@click.option(
    "--gpu-map",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Restore on the GPUs of this machine instead of those listed in FILE, which `gpus FILE` wrote.",
)
@options.common_options
def command(
    words: options.Words,
    timeout_s: float,
    copy_timeout_s: float,
    checkpoint_timeout_s: float,
    gpu_map: str | None,
    as_json: bool,
    state_dir: str | None,
    driver: str,
    quiet: bool,
) -> None:
    """Resume the groups of the named processes; naming one process of a group resumes the whole group.

    Works with and without the holder (after `stop`).  A resume that failed can be repeated once the cause is removed.
    Resuming a running group changes nothing and succeeds.

    \b
    Example:
      nvsnap-gpu-suspend resume 4711
      nvsnap-gpu-suspend resume --all --json
    """
    with output.reporting("resume", as_json, driver == "sim") as report:
        targets = options.parse_targets(words)
        limits = {
            "timeout_s": timeout_s,
            "copy_timeout_s": copy_timeout_s,
            "checkpoint_timeout_s": checkpoint_timeout_s,
        }
        from gpususpend import operations

        with options.working(report, state_dir, quiet, limits) as context:
            operations.resume_targets(context, targets, gpu_map, report)
