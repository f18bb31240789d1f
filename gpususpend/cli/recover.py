"""nvsnap-gpu-suspend recover."""

from __future__ import annotations

import click

from gpususpend.cli import options, output


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
@options.timeout_option
@options.copy_timeout_option
@options.checkpoint_timeout_option
@options.common_options
def command(
    words: options.Words,
    goal: str,
    timeout_s: float,
    copy_timeout_s: float,
    checkpoint_timeout_s: float,
    as_json: bool,
    state_dir: str | None,
    driver: str,
    quiet: bool,
) -> None:
    """Bring groups that something interrupted to running or to suspended, and never to anything between.

    For a command that was killed, a holder that was killed (its threads are stopped again), or a driver call that had
    not returned at its deadline.  Without a name: all groups.

    \b
    Example:
      nvsnap-gpu-suspend recover
      nvsnap-gpu-suspend recover --to running 4711
    """
    with output.reporting("recover", as_json, driver == "sim") as report:
        targets = options.parse_targets(words, default_all=True)
        limits = {
            "timeout_s": timeout_s,
            "copy_timeout_s": copy_timeout_s,
            "checkpoint_timeout_s": checkpoint_timeout_s,
        }
        from gpususpend import operations
        from gpususpend.recover import Goal

        with options.working(report, state_dir, quiet, limits) as context:
            operations.recover_targets(context, targets, Goal(goal), report)
