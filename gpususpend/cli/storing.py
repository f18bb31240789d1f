"""What the commands on stores and caches share: options, sizes as people write them, progress, and the end by a signal.

Owns names, help and defaults of these options.  Must not know what the commands do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpususpend import errors, openfiles
from gpususpend.cli import options, output
from gpususpend.defaults import COPY_THREADS, LIMITS
from gpususpend.interrupt import Interrupts
from gpususpend.progress import Progress, readable_bytes
from gpususpend.report import Report

if TYPE_CHECKING:
    from chunkstore import Files, Store, report, transfer

F = TypeVar("F", bound=Callable[..., Any])

def rate(text: str) -> int:
    """Return the bytes a second of a text such as 500MiB/s; raises BadParameter also for none at all."""
    bytes_a_second = options.size(text, "/s")
    if bytes_a_second == 0:
        raise click.BadParameter(f"'{text}': at that rate it never ends")
    return bytes_a_second


def path_argument(name: str, metavar: str) -> Callable[[F], F]:
    """Return the argument for a checkpoint's directory or a cache."""
    return click.argument(name, metavar=metavar, type=click.Path(), callback=options.reachable)


def place_argument(name: str, metavar: str) -> Callable[[F], F]:
    """Return the argument for a store: a path or a URL."""
    return click.argument(name, metavar=metavar, type=click.Path(), callback=options.store_place)


store_argument = place_argument("store_path", "STORE")
directory_argument = path_argument("directory", "DIR")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would go.")
threads_option = click.option(
    "--threads", type=click.IntRange(1, 256), default=COPY_THREADS, show_default=True, metavar="N",
    help="Chunks that are worked on at a time; each takes a chunk's size of memory.",
)  # fmt: skip
limit_option = click.option(
    "--limit", type=rate, metavar="RATE", help="Stay below this rate, such as 500MiB/s.  [default: none]"
)


@dataclass(frozen=True)
class Work:
    """What a command needs while it works; warnings of the store go into its report."""

    files: Files
    _progress: Progress
    _interrupts: Interrupts

    def told(self, phase: str, state: str) -> Callable[[transfer.Progress], None]:
        """Return what a transfer reports to: it shows progress, and ends the command where a signal came.

        `state` says what things are in then, and what to do next.
        """

        def tell(reached: transfer.Progress) -> None:
            if reached.done_chunks == 0:
                self._progress.begin(phase, reached.total_chunks, reached.total_bytes, "chunks")
            self._progress.update(reached.done_chunks, reached.done_bytes)
            self._check(state)

        return tell

    def limiter(self, rate: int | None, state: str) -> transfer.Limiter:
        """Return what keeps a transfer below a rate; a signal ends the wait, as in `told`."""
        from chunkstore.transfer import Limiter

        def sleep(seconds: float) -> None:
            until = time.monotonic() + seconds
            while (rest := until - time.monotonic()) > 0:
                time.sleep(min(rest, 0.1))
                self._check(state)

        return Limiter(rate, sleep=sleep)

    def _check(self, state: str) -> None:
        if self._interrupts.received is not None:
            raise errors.CutOff(signal=self._interrupts.received.name, state=state)


@dataclass(frozen=True)
class Common:
    """What every command on stores is told."""

    as_json: bool
    quiet: bool

    def reporting(self, command: str) -> AbstractContextManager[Report]:
        """Report as these options say; see `output.reporting`."""
        return output.reporting(command, self.as_json)

    @contextlib.contextmanager
    def working(self, report: Report) -> Iterator[Work]:
        """Yield what the command works with; what the store raises becomes an error of the command."""
        from chunkstore import Files
        from gpususpend.storage import translated

        openfiles.reserve()
        progress = Progress(quiet=self.quiet)
        report.changed = True  # as far as anybody can tell afterwards
        with Interrupts() as interrupts:

            def given_up() -> bool:
                return interrupts.overdue(LIMITS.store_grace_s)

            files = Files(notify=report.warnings.append, waits=lambda: not given_up())
            try:
                with translated():
                    yield Work(files, progress, interrupts)
            except errors.StoreProblem as problem:
                if interrupts.received is None or not given_up():
                    raise
                state = f"{problem}; repeat the command"
                raise errors.CutOff(signal=interrupts.received.name, state=state) from problem
            finally:
                progress.end()


def store_options(function: F) -> F:
    """Add the options that every command on stores has; the command gets them as `common`."""

    @functools.wraps(function)
    def wrapped(*, as_json: bool, quiet: bool, **rest: Any) -> Any:
        return function(common=Common(as_json, quiet), **rest)

    for option in (options.json_option, options.quiet_option):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def store_data(store: Store) -> dict[str, Any]:
    """Return which store it is, as JSON."""
    return {"path": store.path, **vars(store.facts)}


def unneeded(state_dir: str | None, directory: str, work: Work) -> Callable[[Sequence[str]], None]:
    """Return the check that no suspended group needs the checkpoints of these ids, which are to go.

    The state directory knows also of a suspend that is under way; the shims know where it is another one, or lost.
    The check raises CheckpointNeeded, NoAnswer, UnsafeStateDir.
    """
    from chunkstore import Checkpoint, StoreError
    from gpususpend import claims, needed, origin
    from gpususpend.defaults import state_directory
    from gpususpend.journal import Journal
    from gpususpend.statedir import StateDir

    path = os.path.realpath(directory)

    def check(ids: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:  # nothing was ever suspended here
            opened = stack.enter_context(StateDir.open(state_dir or state_directory(), create=False))
            for id in ids:
                claims.check_unneeded(Journal(opened, work.files.tell), path, id)
        inner_pids, of_here = None, False
        with contextlib.suppress(StoreError):  # none lies there any more, or none that says whose it is
            checkpoint = Checkpoint.open(path, files=work.files)
            if [*ids] == [checkpoint.id]:
                inner_pids = checkpoint.inner_pids
                of_here = origin.same_pids(str(checkpoint.manifest.facts.get("origin", "")))
        needed.check_unneeded(path, ids, inner_pids, of_here, work.files.tell)

    return check


def removed(dry_run: bool) -> str:
    """Return the word for what was removed, or would be."""
    return "would be removed" if dry_run else "removed"


def leftovers(size_bytes: int, dry_run: bool) -> list[str]:
    """Return the line about files of writers that died, if there are any."""
    return [f"files of dead writers {removed(dry_run)}: {readable_bytes(size_bytes)}"] if size_bytes else []


def size_cells(sizes: report.Sizes | None) -> tuple[str, str, str]:
    """Return a checkpoint's sizes as cells of a table, under `SIZE_HEADS`."""
    if sizes is None:
        return "-", "-", "-"
    return readable_bytes(sizes.memory_bytes), readable_bytes(sizes.zero_bytes), readable_bytes(sizes.stored_bytes)


SIZE_HEADS = ("MEMORY", "ZEROS", "STORED")
