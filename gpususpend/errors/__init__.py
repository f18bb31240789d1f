"""Every error that a user sees, under one name each: `errors.RolledBack`.

Owns the list of the modules: what errors share, what is refused, what failed and where that left the group, stores.
"""

# By modules alone: a class that is added is there at once.
from gpususpend.errors.base import *  # noqa: F403
from gpususpend.errors.outcomes import *  # noqa: F403
from gpususpend.errors.refusals import *  # noqa: F403
from gpususpend.errors.store import *  # noqa: F403
