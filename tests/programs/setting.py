"""Where the tests run: which driver, which shim, and the environment that a process under test gets.

`GPUSHARE_DRIVER` picks `sim` (the default) or `real`; `GPUSHARE_GPU_TESTS=1` turns a missing GPU into a failure, `=2`
a missing second one too. `GPUSHARE_SIMCUDA` names another simulated driver than the one in the tree.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMCUDA = Path(os.environ.get("GPUSHARE_SIMCUDA", ROOT / "gpususpend" / "simcuda" / "libcuda.so.1"))
SHIM = ROOT / "gpususpend" / "libnvsnap_gpushare.so"

SCRUBBED = (
    "LD_PRELOAD", "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "SIMCUDA_INJECT", "SIMCUDA_TRACE",
    "GPUSHARE_MULTICAST", "GPUSHARE_FABRIC", "NVSNAP_GPUSHARE_FABRIC", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
"""Variables of the caller that would change what a process under test does, or have each compile the tree anew."""


class NotBuilt(RuntimeError):
    """A native library that the tests need is not there."""


def wanted_driver() -> str:
    """Return `sim` or `real`, as the environment asks."""
    driver = os.environ.get("GPUSHARE_DRIVER", "sim")
    if driver not in ("sim", "real"):
        raise ValueError(f"GPUSHARE_DRIVER is {driver!r}, neither sim nor real")
    return driver


def gpus_required() -> int:
    """Return how many GPUs this run has to find; a test that wants more may be skipped."""
    return int(os.environ.get("GPUSHARE_GPU_TESTS") or 0)


@functools.cache
def _simcuda_names() -> frozenset[str]:
    words = re.findall(rb"(?<=\0)(cu[A-Z]\w+)(?=\0)", SIMCUDA.read_bytes())
    return frozenset(re.sub(r"(_v\d+)?(_ptds|_ptsz)?$", "", name) for word in words for name in [word.decode()])


def is_simulated(function: str) -> bool:
    """Tell whether the simulated driver has a function: a rule about another one would never do anything."""
    return re.sub(r"(_v\d+)?(_ptds|_ptsz)?$", "", function) in _simcuda_names()


@dataclass(frozen=True)
class Setting:
    """One machine for one test. A simulated one has a state folder of its own, so tests may run side by side."""

    driver: str = "sim"
    shim: Path | None = None
    devices: int = 2
    memory_bytes: int = 4 << 30
    state: Path | None = None
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Tell whether the driver is simulated."""
        return self.driver == "sim"

    def environ(self, *, with_shim: bool = False) -> dict[str, str]:
        """Return the environment of a process on this machine."""
        env = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
        env["PYTHONPATH"] = _joined(str(ROOT), env.get("PYTHONPATH", ""))
        env["PYTHONUNBUFFERED"] = "1"
        if self.simulated:
            if not SIMCUDA.exists():
                raise NotBuilt(f"{SIMCUDA} is missing: run `python setup.py build_native`")
            env["LD_LIBRARY_PATH"] = _joined(str(SIMCUDA.parent), env.get("LD_LIBRARY_PATH", ""))
            env["SIMCUDA_STATE"] = str(self.state)
            env["SIMCUDA_DEVICES"] = str(self.devices)
            env["SIMCUDA_MEMORY"] = str(self.memory_bytes)
        if with_shim:
            if self.shim is None or not self.shim.exists():
                raise NotBuilt(f"{self.shim or SHIM} is missing: run `python setup.py build_native`")
            env["LD_PRELOAD"] = str(self.shim)
        return env | self.extra

    def inject(self, text: str, pid: int | None = None) -> None:
        """Make simulated driver calls fail: lines `FUNC NTH CODE|hang|hold|delay MS|kill`, for one pid or for all."""
        assert self.state is not None, "failures are injected into the simulated driver only"
        for rule in filter(None, re.split("[\n;]", text)):
            assert is_simulated(rule.split()[0]), f"the simulated driver has no {rule.split()[0]} that could fail"
        target = self.state / ("inject" if pid is None else f"inject-{pid}")
        # The last process that leaves a simulated machine takes the folder away, also while others are checkpointed.
        self.state.mkdir(mode=0o700, exist_ok=True)
        # Written aside and renamed: a process may look at any moment.
        fresh = target.with_name(f".{target.name}.new")
        fresh.write_text(text if text.endswith("\n") or not text else text + "\n")
        fresh.rename(target)

    def wait_until_held(self, timeout_s: float = 60) -> None:
        """Wait until a rule holds a call of the simulated driver; it goes on when the rule is replaced."""
        assert self.state is not None
        until = time.monotonic() + timeout_s
        while not any(self.state.glob("held-*")):
            assert time.monotonic() < until, f"no call is held in {timeout_s} s"
            time.sleep(0.005)


def _joined(*parts: str) -> str:
    return os.pathsep.join(part for part in parts if part)


def fresh_state() -> Path:
    """Make the state folder of a new simulated machine, in memory where there is room."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="gpushare-test-", dir=parent))


def drop_state(state: Path) -> None:
    """Remove a state folder; memory that a process still maps goes when that process does."""
    shutil.rmtree(state, ignore_errors=True)


def real_devices() -> int:
    """Return the number of NVIDIA GPUs, counted without starting the driver in this process."""
    with contextlib.suppress(OSError):
        return sum(name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev"))
    return 0
