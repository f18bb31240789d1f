"""Starting a command with the shim preloaded.

Owns the environment that does it.  Must not know what the command is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpususpend import errors, processes

PACKAGE = Path(__file__).resolve().parent
SHIM = PACKAGE / processes.SHIM_LIBRARY
SIMULATED = PACKAGE / "simcuda"


def shim_path(path: Path = SHIM) -> str:
    """Return the path of the shim.  Raises BadCommand if it is missing or cannot be preloaded."""
    text = os.fspath(path)
    if not path.is_file():
        raise errors.BadCommand(detail=f"{text} is missing; build it with `make native`, or install the package")
    # The loader takes both as separators and knows no way to write them.
    if " " in text or ":" in text:
        raise errors.BadCommand(
            detail=f"{text!r} holds a space or a colon, which LD_PRELOAD cannot express; install it elsewhere"
        )
    return text


def variables(environment: Mapping[str, str], simulated: bool, shim: Path = SHIM) -> dict[str, str]:
    """Return the variables to set: the shim in front of what is preloaded already, each entry once."""
    path = shim_path(shim)
    kept = [entry for entry in environment.get("LD_PRELOAD", "").replace(":", " ").split() if entry != path]
    result = {"LD_PRELOAD": ":".join([path, *kept])}
    if simulated:
        others = [entry for entry in environment.get("LD_LIBRARY_PATH", "").split(":") if entry != str(SIMULATED)]
        result["LD_LIBRARY_PATH"] = ":".join([str(SIMULATED), *(entry for entry in others if entry)])
    return result
