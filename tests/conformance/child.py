"""Runs one case: `python -m tests.conformance.child CASE OUT DRIVER DEVICES [SHIM]`. The runner starts it."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.conformance.case import Seen, all_cases
from tests.programs.client import Worker
from tests.programs.setting import Setting


def main(name: str, out: str, driver: str, devices: str, shim: str = "") -> int:
    """Run a case and return 0, or 1 if it raised; the answers go to `out` line by line."""
    faulthandler.enable()
    state = os.environ.get("SIMCUDA_STATE")
    setting = Setting(driver, Path(shim) if shim else None, devices=int(devices), state=Path(state) if state else None)
    started: list[Worker] = []
    folder = Path(tempfile.mkdtemp(prefix="gpushare-case-"))

    def start(ordinal: int | None = 0, **options: Any) -> Worker:
        worker = Worker(setting, shim=bool(shim), stderr=folder / f"worker-{len(started)}", **options)
        started.append(worker)
        if ordinal is not None:
            worker.start(ordinal)
        return worker

    with open(out, "a") as file:
        try:
            all_cases()[name].function(Seen(file), start)
            return 0
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            for worker in started:
                worker.kill()
            sys.stderr.flush()


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    # A thread may still be inside the driver for ever.
    os._exit(status)
