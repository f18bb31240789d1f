"""How many descriptors a command may have open: enough for its work, or a refusal before it begins.

Owns the limit of this process, which its helpers inherit.  Must not know what is opened.
"""

from __future__ import annotations

import resource

from gpususpend import errors, system
from gpususpend.defaults import DESCRIPTORS, DESCRIPTORS_A_RANK


def reserve(ranks: int = 0) -> None:
    """Allow this process what it takes to work on so many ranks; raises TooFewDescriptors where that is not to be had.

    The limit that was set for it is raised no further than needed, and no more than the system permits it.
    """
    needed = DESCRIPTORS + DESCRIPTORS_A_RANK * ranks
    soft, hard = system.descriptor_limits()
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise errors.TooFewDescriptors(limit=hard, needed=needed)
    system.limit_descriptors(needed, hard)
