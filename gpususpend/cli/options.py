"""Options that several commands share, and the context that they make.

Owns names, help and defaults of these options.  Must not know what the commands do.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpususpend import errors, openfiles
from gpususpend.cli import output
from gpususpend.defaults import LIMITS, limits_with, state_directory
from gpususpend.discover import Targets, parse_pids
from gpususpend.interrupt import Interrupts
from gpususpend.journal import StorePlaces
from gpususpend.progress import Progress
from gpususpend.report import Report
from gpususpend.session import Context, StoreOptions
from gpususpend.statedir import StateDir
from gpususpend.tools import Tools

if TYPE_CHECKING:
    from gpususpend.gpus import Gpus

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.FloatRange):
    """A time: a number from zero, or above it, that the clocks can still add up."""

    def __init__(self, above_zero: bool) -> None:
        super().__init__(min=0, min_open=above_zero, max=365 * 86400)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds, or refuse the argument."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is no time", param, ctx)
        return seconds


SECONDS = Seconds(above_zero=True)

_UNITS = {"": 1 << 30, "b": 1}
_UNITS |= {f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}


def size(text: str, suffix: str = "") -> int:
    """Return the bytes of a text such as 200GiB, 1.5TB or 200, which are GiB; it may end in `suffix`.

    Raises BadParameter for any other text.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([a-z]*)", text.strip().lower().removesuffix(suffix), re.ASCII)
    if found is None or found[2] not in _UNITS:
        raise click.BadParameter(f"'{text}': write 200GiB{suffix} or 500MB{suffix}, or a number of GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _scheme(path: str) -> str:
    """Return the scheme of a URL, nothing for a path; what may be one is looked at by the store, which loads slowly."""
    if "://" not in path:
        return ""
    from chunkstore.place import scheme

    return scheme(path)


def reachable(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Return the path that an option or an argument names.

    Raises BadParameter for an empty one, as a variable leaves it that is not set, and for a URL, and NoCurrentDirectory
    for one that leads nowhere from here.
    """
    if path == "":
        raise click.BadParameter("it is empty; name a path", ctx, param)
    if path and _scheme(path):
        raise click.BadParameter(f"'{path}' is a URL, which only a store may be; name a path", ctx, param)
    if path and not os.path.isabs(path):
        try:
            os.getcwd()
        except FileNotFoundError:
            raise errors.NoCurrentDirectory(path=path) from None
    return path


def store_place(ctx: click.Context, param: click.Parameter, place: str | None) -> str | None:
    """Return the path or the URL of a store; raises BadParameter for a URL of another kind, and as `reachable`."""
    if place is None or not _scheme(place):
        return reachable(ctx, param, place)
    from chunkstore.place import is_url

    if not is_url(place):
        raise click.BadParameter(f"'{place}': a store is a directory, or a URL of s3, gs or az", ctx, param)
    return place


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
state_dir_option = click.option(
    "--state-dir",
    envvar="NVSNAP_GPU_SUSPEND_STATE_DIR",
    metavar="DIR",
    callback=reachable,
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
trace_option = click.option(
    "--trace", metavar="FILE", callback=reachable, help="Write there what happened when, for Perfetto or chrome://tracing.",
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


def places_options(function: F) -> F:
    """Add what names a store, and the ring to it; the command gets them as `places`."""

    @click.option(
        "--store", metavar="STORE", callback=store_place,
        help="Store in which the memory is kept: a directory, or a URL.",
    )
    @click.option("--ckpt-dir", "directory", metavar="DIR", callback=reachable, help="Directory of the checkpoint.")
    @click.option("--cache", metavar="CACHE", callback=reachable, help="Cache in front of the store: a directory.")
    @click.option(
        "--ring", "ring_bytes", type=size, metavar="SIZE",
        help="Host memory through which it passes, for all processes together.  [default: 2GiB]",
    )  # fmt: skip
    @functools.wraps(function)
    def wrapped(
        *, store: str | None, directory: str | None, cache: str | None, ring_bytes: int | None, **rest: Any
    ) -> Any:
        return function(places=(store, directory, cache, ring_bytes), **rest)

    return wrapped  # type: ignore[return-value]


Places = tuple["str | None", "str | None", "str | None", "int | None"]


def parse_places(places: Places) -> StoreOptions:
    """Return the store options of what was named.  Raises UsageError."""
    store, directory, cache, ring_bytes = places
    options = StoreOptions(ring_bytes=ring_bytes)
    if (store is None) != (directory is None):
        raise errors.UsageError(what="--store and --ckpt-dir are named together, or neither")
    if store is None and cache is None:
        return options
    named = StorePlaces(
        (store if _scheme(store) else os.path.abspath(store)) if store else "",
        os.path.realpath(directory) if directory else "",
        os.path.abspath(cache) if cache else "",
    )  # fmt: skip
    return replace(options, named=named)


def parse_store(places: Places, given: Mapping[str, Any]) -> StoreOptions:
    """Return the store options of a suspend; what is None in `given` was not named.  Raises UsageError."""
    store = parse_places(places)
    given = {name: value for name, value in given.items() if value is not None}
    named = given or any(place is not None for place in places)
    if named and (store.named is None or not store.named.store):
        raise errors.UsageError(what="the options of a store need --store and --ckpt-dir")
    return replace(store, **given)


@dataclass(frozen=True)
class Common:
    """What every command on processes is told."""

    as_json: bool
    state_dir: str | None
    simulated: bool
    quiet: bool

    def apart(self, places: Places = (None, None, None, None)) -> dict[str, str]:
        """Return the places of the command in which no file may be put that it is to write, path by kind."""
        store, directory, cache, _ = places
        named = {"store": store, "checkpoint": directory, "cache": cache}
        named["state directory"] = self.state_dir or state_directory()
        return {kind: path for kind, path in named.items() if path and not _scheme(path)}

    def reporting(self, command: str) -> AbstractContextManager[Report]:
        """Report as these options say; see `output.reporting`."""
        return output.reporting(command, self.as_json, self.simulated)

    @contextlib.contextmanager
    def working(
        self, report: Report, limits: Mapping[str, float] | None = None, store: StoreOptions | None = None
    ) -> Iterator[Context]:
        """Open the state directory and yield the command's context; its warnings go into the report."""
        openfiles.reserve()
        path = self.state_dir or state_directory()
        with StateDir.open(path) as directory, Interrupts() as interrupts:
            context = Context(
                directory, Tools(path, self.simulated), Progress(quiet=self.quiet), interrupts, self.simulated,
                limits_with(**(limits or {})), report.warnings, store or StoreOptions(),
            )  # fmt: skip
            for name, why in directory.odd().items():
                context.warn(f"{path}/{name} is passed over: {why}; see who made it, and move it away")
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
