"""The command line: one file a command.

Owns option parsing, output and exit status.  Each command is loaded only when it is called: `status` stays light.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from gpususpend import __version__, errors, system
from gpususpend.cli import output
from gpususpend.defaults import COMMAND

COMMANDS = (
    "suspend", "resume", "stop", "status", "gpus", "recover", "run", "env", "store", "cache-prefetch", "cache-gc",
)  # fmt: skip


class Commands(click.Group):
    """A group of commands, each in the module of its name in the package `package`."""

    def __init__(self, *arguments: Any, package: str, names: Sequence[str], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._package = package
        self._names = names

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of use."""
        return list(self._names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command."""
        if cmd_name not in self._names:
            return None
        module = importlib.import_module(f"{self._package}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command


@click.group(
    cls=Commands,
    package=__name__,
    names=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name=COMMAND)
def group() -> None:
    """Suspend and resume processes that share GPU memory.

    \b
    Example:
      nvsnap-gpu-suspend run -- python server.py &
      nvsnap-gpu-suspend suspend --tree $!
      nvsnap-gpu-suspend resume --tree $!
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        status = group.main(args=words, prog_name=COMMAND, standalone_mode=False)
    except click.exceptions.Exit as leaving:
        status = leaving.exit_code
    except click.ClickException as problem:
        status = _malformed(problem, words)
    except errors.GpushareError as refusal:
        status = output.finish_error(words, refusal)
    except click.Abort:
        status = int(errors.ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has gone; the work itself is done.
        status = 0
    except OSError as error:
        status = output.finish_error(words, system.refusal(error, "; nothing was changed"))
    sys.exit(status if isinstance(status, int) else 0)


def _malformed(problem: click.ClickException, words: list[str]) -> int:
    """Report malformed arguments in one line, as JSON too where that was asked for; without any the help is shown."""
    if isinstance(problem, click.exceptions.NoArgsIsHelpError):
        problem.show()
        return int(errors.ExitCode.USAGE)
    context = getattr(problem, "ctx", None)
    told = " ".join(problem.format_message().split()).rstrip(".")
    told += f"; see {context.command_path} --help" if context is not None else ""
    return output.finish_error(words, errors.UsageError(what=told))
