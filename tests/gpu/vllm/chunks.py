"""What two checkpoints of a server have in common, by the chunk lists of their ranks: nothing else is read.

A weight is told by the size of its allocation, of which each rank has a known number. Where it has more of that size,
the ones with the fewest new chunks pass for the weights: others are memory that is written all the time (cuBLAS takes a
workspace as large as a matrix). A chunk never lies in two allocations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkstore import Allocation, Checkpoint
from tests.gpu.vllm.model import Model


class NoWeights(ValueError):
    """A checkpoint has fewer allocations of a size than weights were to be there."""


def weights_in(checkpoint: Path, weights: Mapping[int, int], known: set[str]) -> list[Allocation]:
    """Return the allocations that are weights: of each rank that has any, `weights[size]` of every size."""
    found: list[Allocation] = []
    for rank in Checkpoint.open(checkpoint).ranks():
        if not any(one.size_bytes in weights for one in rank.allocations):
            continue  # a process without a model
        for size, count in weights.items():
            alike = sorted((one for one in rank.allocations if one.size_bytes == size),
                           key=lambda one: len(new_chunks(one, known)))
            if len(alike) < count:
                raise NoWeights(f"{checkpoint}: rank {rank.inner_pid} has {len(alike)} allocations of {size} bytes, "
                                f"and {count} weights of that size")
            found += alike[:count]
    if not found:
        raise NoWeights(f"{checkpoint}: no allocation has one of the sizes {sorted(weights)}")
    return found


def new_chunks(allocation: Allocation, known: set[str]) -> list[int]:
    """Return the numbers of an allocation's chunks whose content is not known; zeros always are."""
    return [at for at, one in enumerate(allocation.chunks) if one.hash is not None and one.hash not in known]


def written_into_weights(before: Path, after: Path, weights: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the chunks inside weights in `after` that `before` did not have, each with its place.

    `weights` says how many allocations of a size in bytes each rank has. Raises NoWeights where there are not as many,
    since nothing would be shown then.
    """
    known = set(Checkpoint.open(before).stored_chunks())
    return [{"address": hex(one.address), "size": one.size_bytes, "chunk": at}
            for one in weights_in(after, weights, known) for at in new_chunks(one, known)]


def shared_with(before: Path, after: Path, model: Model) -> dict[str, Any]:
    """Return how much of the weights of another server with the same weights was in its checkpoint already.

    `share` is of the bytes of the weights' own allocations, `share_of_weights` of all large matrices of the model;
    where that is below 0.9, `reason` names what is not shared: matrices without an allocation of their own, whose
    chunks hold other memory, too, and allocations whose content differs.
    """
    known = set(Checkpoint.open(before).stored_chunks())
    found = weights_in(after, model.weights(), known)
    missing = Counter({one.size_bytes: 0 for one in found})
    for one in found:
        missing[one.size_bytes] += sum(one.chunks[at].size_bytes for at in new_chunks(one, known))
    own = sum(one.size_bytes for one in found)
    wanted = own // model.own_bytes() * model.weight_bytes()  # of as many ranks
    shared = own - missing.total()
    told: dict[str, Any] = {"weight_bytes": wanted, "in_own_allocations": own, "shared": shared,
                            "share": shared / own, "share_of_weights": shared / wanted}
    if told["share_of_weights"] < 0.9:
        told["reason"] = {"bytes_without_an_allocation_of_their_own": wanted - own,
                          "bytes_that_differ_by_size_of_allocation": dict(missing)}
    return told
