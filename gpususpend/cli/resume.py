"""nvsnap-gpu-suspend resume."""

from __future__ import annotations

import click

from gpususpend.cli import options


@click.command("resume", short_help="Bring suspended processes back.")
@options.targets_options
@options.limit_options
@click.option(
    "--gpu-map",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Restore on the GPUs of this machine instead of those listed in FILE, which `gpus FILE` wrote.",
)
@options.common_options
def command(words: options.Words, limits: dict[str, float], gpu_map: str | None, common: options.Common) -> None:
    """Resume the groups of the named processes; naming one process of a group resumes the whole group.

    Works with and without the holder (after `stop`).  A resume that failed can be repeated once the cause is removed.
    Resuming a running group changes nothing and succeeds.

    \b
    Example:
      nvsnap-gpu-suspend resume 4711
      nvsnap-gpu-suspend resume --all --json
    """
    with common.reporting("resume") as report:
        targets = options.parse_targets(words)
        from gpususpend import operations

        with common.working(report, limits) as context:
            operations.resume_targets(context, targets, gpu_map, report)
