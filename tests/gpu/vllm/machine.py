"""What is asked of the machine a server runs on: who uses its GPUs, and which driver it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.programs.setting import Setting
from tests.programs.usage import memory_by_pid

VERSION = Path("/proc/driver/nvidia/version")


def is_simulated() -> bool:
    """Tell whether the environment leads to the simulated driver."""
    return os.environ.get("GPUSHARE_DRIVER") == "sim"


def driver() -> str:
    """Return the driver's own line about itself."""
    return "simulated" if is_simulated() else VERSION.read_text().splitlines()[0]


def words_for_the_tool() -> list[str]:
    """Return what every command of the tool has to be told of the driver."""
    return ["--driver", "sim"] if is_simulated() else []


def gpu_use() -> tuple[list[int], list[int]]:
    """Return the used MiB of each GPU (of the simulated ones: together), and the pids that use any."""
    if is_simulated():
        used = memory_by_pid(Setting("sim", state=Path(os.environ["SIMCUDA_STATE"])))
        return [sum(used.values()) >> 20], sorted(used)
    return _query("gpu", "memory.used"), sorted(set(_query("compute-apps", "pid")))


def _query(kind: str, what: str) -> list[int]:
    done = subprocess.run(["nvidia-smi", f"--query-{kind}={what}", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]
