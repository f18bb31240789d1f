"""nvsnap-gpu-suspend env."""

from __future__ import annotations

import os
import shlex

import click

from gpususpend.cli import options, output


@click.command("env", short_help="Print the variables that put a command under the shim.")
@options.driver_option
@options.json_option
def command(driver: str, as_json: bool) -> None:
    """Print shell lines that preload the shim into whatever is started afterwards.

    \b
    Example:
      eval "$(nvsnap-gpu-suspend env)"
      exec python server.py
    """
    with output.reporting("env", as_json) as report:
        from gpususpend import launch

        found = launch.variables(os.environ, driver == "sim")
        report.extra |= {"variables": found, "simulated": driver == "sim"}
        report.lines += [f"export {name}={shlex.quote(value)}" for name, value in found.items()]
