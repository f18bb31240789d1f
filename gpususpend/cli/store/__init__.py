"""nvsnap-gpu-suspend store: one file a command."""

from __future__ import annotations

import click

from gpususpend.cli import Commands

COMMANDS = ("ls", "show", "du", "copy", "rm", "adopt", "forget", "gc", "fsck")


@click.group(
    "store", cls=Commands, package=__name__, names=COMMANDS, short_help="Look after stores and their checkpoints."
)
def command() -> None:
    """Look after stores, and the checkpoints whose chunks they hold.

    \b
    Example:
      nvsnap-gpu-suspend store ls /mnt/store
      nvsnap-gpu-suspend store rm /mnt/store /mnt/ckpt/old
      nvsnap-gpu-suspend store gc /mnt/store
    """
