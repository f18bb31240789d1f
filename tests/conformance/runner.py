"""Runs cases, each in a process of its own with a deadline, and collects what was seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.conformance.case import Case
from tests.programs import setting as where
from tests.programs.setting import ROOT, Setting

Report = dict[str, Any]
"""Of one case: `status` (ok, failed, timeout, died, skipped), `seen`, `seconds`, and `detail` of a failure."""

SIMULATED_PATIENCE = 1.8
"""A simulated GPU shares the processor with everything else that a small machine does."""


def run_case(case: Case, setting: Setting) -> Report:
    """Run one case on a machine of its own if it is simulated, on the real one otherwise."""
    if case.devices > setting.devices:
        return {"status": "skipped", "detail": f"needs {case.devices} devices", "seen": {}}
    if case.bare and setting.shim:
        return {"status": "skipped", "detail": "is about what the shim replaces", "seen": {}}
    if not setting.simulated:
        if case.crashes:
            return {"status": "skipped", "detail": "the real driver does not survive it", "seen": {}}
        return _run(case, setting)
    state = where.fresh_state()
    try:
        return _run(case, replace(setting, state=state))
    finally:
        where.drop_state(state)


def _run(case: Case, setting: Setting) -> Report:
    with tempfile.TemporaryDirectory(prefix="gpushare-conformance-", ignore_cleanup_errors=True) as folder:
        out, log = Path(folder) / "seen", Path(folder) / "log"
        out.touch()
        patience = SIMULATED_PATIENCE if setting.simulated else 1
        command = [sys.executable, "-m", "tests.conformance.child", case.name, str(out), setting.driver,
                   str(setting.devices), *([str(setting.shim)] if setting.shim else [])]
        began = time.monotonic()
        with log.open("wb") as errors:
            # A session of its own: at the deadline the case and all its workers are killed together.
            env = setting.environ(with_shim=setting.shim is not None) | {"TMPDIR": folder}
            child = subprocess.Popen(command, cwd=ROOT, env=env,
                                     stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True)
            try:
                status = {0: "ok", 1: "failed"}.get(child.wait(case.timeout_s * patience), "died")
            except subprocess.TimeoutExpired:
                status = "timeout"
            finally:
                _kill_session(child)
        report: Report = {"status": status, "seconds": round(time.monotonic() - began, 2)}
        if status != "ok":
            report["detail"] = f"exit {child.returncode}\n{log.read_text(errors='replace')[-2500:]}"
        report["seen"] = dict(json.loads(line) for line in out.read_text().splitlines())
        return report


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def run_all(cases: list[Case], setting: Setting, jobs: int) -> dict[str, Report]:
    """Run cases side by side, those that want the device for themselves at the end, one after the other."""
    reports: dict[str, Report] = {}
    together = [case for case in cases if not case.alone or setting.simulated]
    with ThreadPoolExecutor(jobs) as pool:
        for case, report in zip(together, pool.map(lambda one: run_case(one, setting), together), strict=True):
            reports[case.name] = report
    for case in cases:
        if case.name not in reports:
            reports[case.name] = run_case(case, setting)
    return dict(sorted(reports.items()))
