"""nvsnap-gpu-suspend suspend."""

from __future__ import annotations

import click

from gpususpend.cli import options
from gpususpend.journal import Depth, Manner
from gpususpend.trace import traced


@click.command("suspend", short_help="Suspend processes: their GPU memory goes to host memory.")
@options.targets_options
@options.limit_options
@click.option(
    "--allow-unshimmed", is_flag=True, help="Also suspend a CUDA process without the shim, if it can share nothing."
)
@click.option(
    "--depth",
    type=click.Choice([depth.value for depth in Depth]),
    default=Depth.PROCESS.value,
    show_default=True,
    help="How much leaves the GPUs: `pages`, the memory that the shims carry, or `process`, everything.",
)
@click.option("--in-place", is_flag=True, help="They will be resumed as they are: no dump is to be taken.")
@options.places_options
@click.option(
    "--hash", "hash", type=click.Choice(["xxh3-128", "blake3"]),
    help="Hash that STORE has to have; if it is made, it gets it.  [default for a new one: xxh3-128]",
)  # fmt: skip
@click.option(
    "--verify-existing", type=click.Choice(["all", "new", "none"]),
    help="Chunks of STORE that are compared before the checkpoint relies on them; `new`: since its last clean fsck."
    "  [default: new]",
)  # fmt: skip
@click.option("--require-room", is_flag=True, help="Refuse a STORE without room for all of the memory, zeros included.")
@options.trace_option
@options.common_options
def command(
    words: options.Words, limits: dict[str, float], allow_unshimmed: bool, depth: str, in_place: bool,
    places: options.Places, hash: str | None, verify_existing: str | None, require_room: bool, trace: str | None,
    common: options.Common,
) -> None:  # fmt: skip
    """Suspend processes as one group: GPU memory is copied to host memory, the GPUs become empty, threads stop.

    With `--store` and `--ckpt-dir` the memory goes to a checkpoint on disk instead, each content once.  The checkpoint
    exists once everything is saved; `resume` finds it by itself, and leaves it there.

    With `--depth pages` contexts, modules and streams stay on the GPUs and threads run until they come to a CUDA call:
    both ways are much quicker, but no dump can be taken.

    With `--in-place` the memory may lie in host memory that no dump can take, where that is quicker to fill: `stop`
    is refused.

    Name every process that shares GPU memory with another.  Processes without CUDA are only stopped.  If anything
    fails, all processes run again.  Suspending a suspended group changes nothing and succeeds.

    \b
    Example:
      nvsnap-gpu-suspend suspend 4711 4712
      nvsnap-gpu-suspend suspend --tree 4700 --timeout 120 --json --trace down.json
      nvsnap-gpu-suspend suspend --tree 4700 --store /mnt/store --ckpt-dir /mnt/ckpt/llama
    """
    with common.reporting("suspend") as report, traced(report, trace, common.apart(places)):
        targets = options.parse_targets(words)
        given = {"hash": hash, "verify_existing": verify_existing, "require_room": require_room or None}
        store = options.parse_store(places, given)
        manner = Manner(Depth(depth), in_place, store.named)
        from gpususpend import operations

        with common.working(report, limits, store) as context:
            operations.suspend_targets(context, targets, allow_unshimmed, manner, report)
