"""The driver's calls as plain functions on numbers.

Every function here returns a `Result` of the driver's code and a value made of numbers, strings and lists, and never
raises for what the driver answers: a test asks for a refusal as often as for a success. The functions are listed in
`COMMANDS` by name, so that a worker process can offer them to its client. This module knows cuda-bindings and nothing
of the shim, the simulated driver or the tool.
"""

from tests.programs.calls.base import COMMANDS, DriverError, Result, ask, code_name, is_simulated, need  # noqa: F401
from tests.programs.calls.contexts import *  # noqa: F403
from tests.programs.calls.memory import *  # noqa: F403
from tests.programs.calls.multicast import *  # noqa: F403
from tests.programs.calls.process import *  # noqa: F403
from tests.programs.calls.vmm import *  # noqa: F403
from tests.programs.calls.work import *  # noqa: F403
