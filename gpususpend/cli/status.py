"""nvsnap-gpu-suspend status."""

from __future__ import annotations

import click

from gpususpend.cli import options, output


@click.command("status", short_help="Show groups and processes, without touching the driver.")
@options.targets_options
@options.common_options
def command(words: options.Words, as_json: bool, state_dir: str | None, driver: str, quiet: bool) -> None:
    """Show the state of groups and of processes under the shim; all of them if none is named.

    Reads the state directory, /proc and the shims.  Loads no driver and changes nothing.

    \b
    Example:
      nvsnap-gpu-suspend status
      nvsnap-gpu-suspend status --tree 4700 --json
    """
    with output.reporting("status", as_json, driver == "sim") as report:
        targets = options.parse_targets(words, default_all=True)
        from gpususpend import status

        with options.working(report, state_dir, quiet) as context:
            status.status_targets(context, targets, report)
