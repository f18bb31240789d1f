"""`python -m tests.conformance`: see `tests.conformance`."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from gpususpend.demo import results
from gpususpend.driver_process import kernel_driver_version
from tests.conformance.case import all_cases
from tests.conformance.runner import Report, run_all
from tests.programs import setting as where
from tests.programs.setting import Setting


def gpu_text() -> str:
    """Return how many GPUs of what name the machine has, as NVML tells."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
    names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    return ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))


def head(setting: Setting) -> dict[str, Any]:
    """Return what a report begins with: who answered, and by what tree."""
    driver = {"driver": setting.driver, "driver_version": "simulated"}
    if not setting.simulated:
        driver |= {"driver_version": kernel_driver_version() or "unknown", "gpu": gpu_text()}
    return {**driver, "suite": results.commit(), "shim": setting.shim is not None, "devices": setting.devices,
            "kernel": platform.release()}


def write(out: Path, begin: dict[str, Any], reports: dict[str, Report]) -> None:
    """Write a report, one case a line, as `measured/` keeps them."""
    cases = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in reports.items())
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in begin.items()]
    out.write_text("\n".join(["{", *lines, ' "cases": {', cases, " }", "}"]) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the suite and write the report; return 1 if a case did not end as it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--driver", choices=("sim", "real"), default=where.wanted_driver())
    parser.add_argument("--shim", type=Path, help="ask through this shim")
    parser.add_argument("--devices", type=int, help="devices to use (default 2, or as many as there are)")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 2))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="*", help="names or patterns of cases (default: all)")
    given = parser.parse_args(arguments)
    devices = given.devices or (2 if given.driver == "sim" else min(2, where.real_devices()))
    if given.driver == "real" and devices < 1:
        print("no NVIDIA GPU", file=sys.stderr)
        return 1
    setting = Setting(given.driver, given.shim and given.shim.resolve(), devices=devices)
    wanted = [case for name, case in all_cases().items()
              if not given.cases or any(fnmatch.fnmatch(name, pattern) for pattern in given.cases)]
    began = time.monotonic()
    reports = run_all(wanted, setting, given.jobs)
    write(given.out, head(setting), reports)
    counts: dict[str, int] = {}
    for name, report in reports.items():
        counts[report["status"]] = counts.get(report["status"], 0) + 1
        if report["status"] not in ("ok", "skipped"):
            last = (report["detail"].strip().splitlines() or [""])[-1]
            print(f"{report['status']:8} {name}: {last}")
    print(f"{len(reports)} cases in {time.monotonic() - began:.0f} s: {counts}")
    return 0 if set(counts) <= {"ok", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
