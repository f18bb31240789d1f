"""Options that several commands share, and the context that they make.

Owns names, help and defaults of these options.  Must not know what the commands do.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpususpend import errors
from gpususpend.cli import output
from gpususpend.defaults import LIMITS, limits_with, state_directory
from gpususpend.discover import Targets, parse_pids
from gpususpend.interrupt import Interrupts
from gpususpend.progress import Progress
from gpususpend.report import Report
from gpususpend.session import Context
from gpususpend.statedir import StateDir
from gpususpend.tools import Tools

if TYPE_CHECKING:
    from gpususpend.gpus import Gpus

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.FloatRange):
    """A time limit: a finite number above zero."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds, or refuse the argument."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is no time limit", param, ctx)
        return seconds


SECONDS = Seconds(min=0, min_open=True)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
state_dir_option = click.option(
    "--state-dir",
    envvar="NVSNAP_GPU_SUSPEND_STATE_DIR",
    metavar="DIR",
    help="State directory; must be yours alone (mode 0700).  [default: /tmp/nvsnap-gpu-suspend, with -UID for ordinary"
    " users]",
)
driver_option = click.option(
    "--driver",
    type=click.Choice(["nvidia", "sim"]),
    default="nvidia",
    show_default=True,
    envvar="NVSNAP_GPU_SUSPEND_DRIVER",
    help="Driver that the processes run on; `sim` is the simulated one.",
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
_LIMITS = {
    "timeout_s": "Time limit for quiesce, and for the driver's lock.",
    "copy_timeout_s": "Time limit for release and for load.",
    "checkpoint_timeout_s": "Time limit for the driver's checkpoint, and for its restore.",
}


def limit_options(function: F) -> F:
    """Add the time limits that can be chosen; the command gets them as `limits`."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        limits = {name: given.pop(name) for name in _LIMITS}
        return function(limits=limits, **given)

    for name, text in reversed(_LIMITS.items()):
        option = "--" + name.removesuffix("_s").replace("_", "-")
        wrapped = click.option(
            option, name, type=SECONDS, default=getattr(LIMITS, name), show_default=True, metavar="SECONDS", help=text
        )(wrapped)
    return wrapped  # type: ignore[return-value]


def targets_options(function: F) -> F:
    """Add PID..., --tree and --all; the command gets them as `targets`."""

    @click.argument("pids", nargs=-1, metavar="[PID]...")
    @click.option("--tree", "trees", multiple=True, metavar="PID", help="This process and all below it; repeatable.")
    @click.option("--all", "everything", is_flag=True, help="Every process of yours that runs under the shim here.")
    @functools.wraps(function)
    def wrapped(*, pids: tuple[str, ...], trees: tuple[str, ...], everything: bool, **rest: Any) -> Any:
        return function(words=(pids, trees, everything), **rest)

    return wrapped  # type: ignore[return-value]


@dataclass(frozen=True)
class Common:
    """What every command on processes is told."""

    as_json: bool
    state_dir: str | None
    simulated: bool
    quiet: bool

    def reporting(self, command: str) -> AbstractContextManager[Report]:
        """Report as these options say; see `output.reporting`."""
        return output.reporting(command, self.as_json, self.simulated)

    @contextlib.contextmanager
    def working(self, report: Report, limits: Mapping[str, float] | None = None) -> Iterator[Context]:
        """Open the state directory and yield the command's context; its warnings go into the report."""
        path = self.state_dir or state_directory()
        with StateDir.open(path) as directory, Interrupts() as interrupts:
            context = Context(
                directory, Tools(path, self.simulated), Progress(quiet=self.quiet), interrupts, self.simulated,
                limits_with(**(limits or {})), report.warnings,
            )  # fmt: skip
            for name, why in directory.odd().items():
                context.warn(f"{path}/{name} is passed over: {why}")
            yield context


def common_options(function: F) -> F:
    """Add the options that every command on processes has; the command gets them as `common`."""

    @functools.wraps(function)
    def wrapped(*, as_json: bool, state_dir: str | None, driver: str, quiet: bool, **rest: Any) -> Any:
        return function(common=Common(as_json, state_dir, driver == "sim", quiet), **rest)

    for option in (json_option, state_dir_option, driver_option, quiet_option):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


Words = tuple[tuple[str, ...], tuple[str, ...], bool]


def parse_targets(words: Words, default_all: bool = False) -> Targets:
    """Return the targets that were named.  Raises NotANumber, NoTarget, UsageError."""
    pids, trees, everything = words
    targets = Targets(parse_pids(pids), parse_pids(trees), everything)
    if everything and (pids or trees):
        raise errors.UsageError(what="--all names every process; give no process ids beside it")
    if not targets:
        if not default_all:
            raise errors.NoTarget()
        return Targets(everything=True, implied=True)
    return targets


@contextlib.contextmanager
def listing(context: Context) -> Iterator[Gpus]:
    """Yield the source of GPU facts; the simulated driver needs a driver process for it, NVML none."""
    from gpususpend import gpus

    if not context.simulated:
        yield gpus.NvmlGpus()
        return
    with context.tools.start_driver() as process:
        yield gpus.SimulatedGpus(process)
