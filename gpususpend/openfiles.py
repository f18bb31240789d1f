"""How many descriptors a command may have open: enough for its work, or a refusal before it begins.

Owns the limit of this process, which its helpers inherit.  Must not know what is opened.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Sequence
from typing import TypeVar

from gpususpend import errors, system
from gpususpend.defaults import DESCRIPTORS, DESCRIPTORS_A_RANK

T = TypeVar("T")
ENOUGH = 1024  # what is advised where fewer will not do for all that a command may turn out to need


def portions(others: Sequence[T], ranks: int = 0) -> Iterator[Sequence[T]]:
    """Yield processes that are to be asked beside so many ranks: all at once or, with too few descriptors, some."""
    count = reserve(ranks, len(others))
    for start in range(0, len(others), count):
        yield others[start : start + count]


def reserve(ranks: int = 0, others: int = 0) -> int:
    """Allow this process what it takes to work on so many ranks; raises TooFewDescriptors where that is not to be had.

    And what it takes to ask so many other processes, or some of them: returns how many can be asked at a time.  The
    limit that was set for it is raised no further than needed, and no more than the system permits it.
    """
    least = DESCRIPTORS + DESCRIPTORS_A_RANK * ranks
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in system.descriptor_limits())
    if hard < least:
        # More may be needed once more is known: the advice is to do for that, too.
        raise errors.TooFewDescriptors(limit=hard, needed=least, enough=max(ENOUGH, 2 * least))
    wanted = int(min(least + others, hard))
    if soft < wanted:
        system.limit_descriptors(wanted, resource.RLIM_INFINITY if hard == math.inf else int(hard))
    # What was reserved for ranks is not in use to the last one.
    return max(DESCRIPTORS_A_RANK, wanted - least)
