"""nvsnap-gpu-suspend recover."""

from __future__ import annotations

import click

from gpususpend.cli import options
from gpususpend.trace import traced


@click.command("recover", short_help="Finish what a killed command or a stuck driver call left.")
@options.targets_options
@click.option(
    "--to",
    "goal",
    type=click.Choice(["recorded", "running", "suspended"]),
    default="recorded",
    show_default=True,
    help="Where to bring the groups; `recorded`: suspended where it was suspended as a whole, else running.",
)
@options.limit_options
@options.trace_option
@options.common_options
def command(
    words: options.Words, goal: str, limits: dict[str, float], trace: str | None, common: options.Common
) -> None:
    """Bring groups that something interrupted to running or to suspended, and never to anything between.

    For a command that was killed, a holder that was killed (its threads are stopped again), or a driver call that had
    not returned at its deadline.  Without a name: all groups.

    \b
    Example:
      nvsnap-gpu-suspend recover
      nvsnap-gpu-suspend recover --to running 4711
    """
    with common.reporting("recover") as report, traced(report, trace, common.apart()):
        targets = options.parse_targets(words, default_all=True)
        from gpususpend import operations
        from gpususpend.recover import Goal

        with common.working(report, limits) as context:
            operations.recover_targets(context, targets, Goal(goal), report)
