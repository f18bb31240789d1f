"""nvsnap-gpu-suspend run."""

from __future__ import annotations

import os

import click

from gpususpend import errors
from gpususpend.cli import options, output


@click.command("run", short_help="Start a command under the shim.", context_settings={"ignore_unknown_options": True})
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENT]...")
@options.driver_option
@options.json_option
def command(command_line: tuple[str, ...], driver: str, as_json: bool) -> None:
    """Start COMMAND with the shim preloaded; it takes this process's place, so its output and exit status are its own.

    What is preloaded already stays.  With --json, a failure to start it is one JSON document.

    \b
    Example:
      nvsnap-gpu-suspend run -- python server.py --port 8000
    """
    with output.reporting("run", as_json, driver == "sim"):
        if not command_line or not command_line[0]:
            raise errors.UsageError(what="no command given: nvsnap-gpu-suspend run -- COMMAND")
        from gpususpend import launch

        environment = {**os.environ, **launch.variables(os.environ, driver == "sim")}
        try:
            os.execvpe(command_line[0], list(command_line), environment)
        except OSError as error:
            raise errors.BadCommand(detail=f"{command_line[0]} cannot be started: {error.strerror}") from None
