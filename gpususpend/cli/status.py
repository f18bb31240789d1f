"""nvsnap-gpu-suspend status."""

from __future__ import annotations

import click

from gpususpend.cli import options


@click.command("status", short_help="Show groups and processes, without touching the driver.")
@options.targets_options
@options.common_options
def command(words: options.Words, common: options.Common) -> None:
    """Show the state of groups and of processes under the shim; all of them if none is named.

    Reads the state directory, /proc and the shims.  Loads no driver and changes nothing.

    \b
    Example:
      nvsnap-gpu-suspend status
      nvsnap-gpu-suspend status --tree 4700 --json
    """
    with common.reporting("status") as report:
        targets = options.parse_targets(words, default_all=True)
        from gpususpend import status

        with common.working(report) as context:
            status.status_targets(context, targets, report)
