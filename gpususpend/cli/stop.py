"""nvsnap-gpu-suspend stop."""

from __future__ import annotations

import click

from gpususpend.cli import options


@click.command("stop", short_help="End the holder of a suspended group, so that it can be dumped.")
@options.targets_options
@options.common_options
def command(words: options.Words, common: options.Common) -> None:
    """End the holder of suspended groups.

    Their threads run again, but every CUDA call waits at the gates: the group is quiet and stays suspended, and a tool
    such as CRIU can dump it.  `resume` brings it back, here or where it was restored.

    \b
    Example:
      nvsnap-gpu-suspend stop 4711
    """
    with common.reporting("stop") as report:
        targets = options.parse_targets(words)
        from gpususpend import operations

        with common.working(report) as context:
            operations.stop_targets(context, targets, report)
