"""nvsnap-gpu-suspend resume."""

from __future__ import annotations

from dataclasses import replace

import click

from gpususpend.cli import options
from gpususpend.trace import traced


@click.command("resume", short_help="Bring suspended processes back.")
@options.targets_options
@options.limit_options
@click.option(
    "--gpu-map",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    callback=options.reachable,
    help="Restore on the GPUs of this machine instead of those listed in FILE, which `gpus FILE` wrote.",
)
@options.places_options
@click.option("--no-verify", is_flag=True, help="Do not hash what is read from the store.")
@options.trace_option
@options.common_options
def command(
    words: options.Words, limits: dict[str, float], gpu_map: str | None, places: options.Places, no_verify: bool,
    trace: str | None, common: options.Common,
) -> None:  # fmt: skip
    """Resume the groups of the named processes; naming one process of a group resumes the whole group.

    Works with and without the holder (after `stop`).  A resume that failed can be repeated once the cause is removed.
    Resuming a running group changes nothing and succeeds.

    Memory in a store is found by itself; nothing is written there.  `--cache` may name a cache that was filled since.
    `--store` and `--ckpt-dir` are needed only where these have moved, or the state directory was lost.

    \b
    Example:
      nvsnap-gpu-suspend resume 4711
      nvsnap-gpu-suspend resume --all --json
    """
    with common.reporting("resume") as report, traced(report, trace, common.apart(places)):
        targets = options.parse_targets(words)
        store = replace(options.parse_places(places), verify=not no_verify)
        from gpususpend import operations

        with common.working(report, limits, store) as context:
            operations.resume_targets(context, targets, gpu_map, report)
