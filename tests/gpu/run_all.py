"""Everything that a GPU machine has to answer: `python -m tests.gpu.run_all --driver real --shim LIB --out FOLDER`.

Builds nothing. Runs the demo, the conformance suite bare and through the shim, and every scenario of tests/gpu, each as
a process of its own with its own deadline; those that share a GPU well run side by side. FOLDER gets the full JSON and
the logs; a short table is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs import setting as where
from tests.programs.setting import ROOT

# Ranks of a framework take the GPUs' memory and time for themselves.
OF_FRAMEWORKS = ("checkpoint_nccl", "cupy", "cut", "ipc_events", "nccl_store", "torch")


@dataclass(frozen=True)
class Job:
    """One process: a name, a command, and how long it may take.

    `alone`: nothing runs beside it; `first`: before all others. `printed`: its output is a JSON file's content.
    """

    name: str
    command: list[str]
    timeout_s: float
    alone: bool = False
    first: bool = False
    printed: str = ""


def jobs(driver: str, shim: Path | None, out: Path, only: str) -> list[Job]:
    """List what there is to run."""
    suite = [sys.executable, "-m", "tests.conformance", "--driver", driver]
    found = [Job("conformance bare", [*suite, "--out", str(out / "conformance-bare.json")], 240, True, first=True)]
    if shim:
        # Small first: what goes wrong there says more, sooner.
        found = [Job(f"demo {mib} MiB", [sys.executable, "-m", "gpususpend.demo", "--driver", driver, "--json",
                                        "--mib", str(mib)], 150, True, first=True, printed=f"demo-{mib}.json")
                 for mib in (64, 4096 if driver == "real" else 128)] + found
        found.append(Job("conformance shim", [*suite, "--shim", str(shim), "--out", str(out / "conformance-shim.json")],
                         240, True, first=True))
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(path),
                   f"--junit-xml={out / f'{path.stem}.xml'}"]
        found.append(Job(name, command, 400, alone=name in OF_FRAMEWORKS))
    return [job for job in found if re.search(only, job.name)]


def run(job: Job, out: Path, env: dict[str, str], until: float) -> dict[str, Any]:
    """Run one job to its end or deadline, its output in a file."""
    log = out / f"{job.name.replace(' ', '-')}.log"
    printed = out / job.printed if job.printed else log
    timeout_s = min(job.timeout_s, until - time.monotonic())
    if timeout_s <= 1:
        return {"name": job.name, "status": "no time left", "seconds": 0.0, "last": ""}
    began = time.monotonic()
    with log.open("wb") as file, printed.open("ab") as result:
        process = subprocess.Popen(job.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=result, stderr=file,
                                   start_new_session=True)
        try:
            code = process.wait(timeout_s)
            status = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            # The whole session: a lost worker outlives the test that started it.
            subprocess.run(["kill", "-9", "--", f"-{process.pid}"], stderr=subprocess.DEVNULL, check=False)
            process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    return {"name": job.name, "status": status, "seconds": round(time.monotonic() - began, 1),
            "last": lines[-1] if lines else "",
            "failures": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def compared(out: Path) -> list[dict[str, Any]]:
    """Compare the conformance reports with the expectations, and bare with shim."""
    rows = []
    for first, second in (("expected", "conformance-bare.json"), ("expected", "conformance-shim.json"),
                          ("conformance-bare.json", "conformance-shim.json")):
        paths = [one if one == "expected" else str(out / one) for one in (first, second)]
        if not all(one == "expected" or Path(one).exists() for one in paths):
            continue
        name = f"{first} / {second}".replace("conformance-", "").replace(".json", "")
        done = subprocess.run([sys.executable, "-m", "tests.conformance.compare", *paths], cwd=ROOT, text=True,
                              capture_output=True, check=False)
        (out / f"compare-{name.replace(' / ', '-')}.txt").write_text(done.stdout + done.stderr)
        count = len(done.stdout.splitlines()) - 1 if done.returncode == 1 else 0
        status = "same" if done.returncode == 0 else f"{count} differ" if done.returncode == 1 else "not compared"
        rows.append({"name": f"compare {name}", "status": status, "seconds": 0.0, "last": ""})
    return rows


def main() -> int:
    """Run all jobs and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run_all", description=__doc__)
    parser.add_argument("--driver", choices=("sim", "real"), default=where.wanted_driver())
    parser.add_argument("--shim", type=Path, default=where.SHIM)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=max(1, min(6, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--only", default="", help="run jobs whose name matches this regular expression")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    shim = given.shim.resolve() if given.shim.exists() else None
    env = dict(os.environ) | {"GPUSHARE_DRIVER": given.driver, "PYTHONUNBUFFERED": "1"}
    if shim:
        env["GPUSHARE_SHIM"] = str(shim)
    if given.driver == "real":
        env["GPUSHARE_GPU_TESTS"] = str(max(1, where.real_devices()))
    until = time.monotonic() + given.budget
    wanted = jobs(given.driver, shim, given.out, given.only)
    results = [run(job, given.out, env, until) for job in wanted if job.first]
    with ThreadPoolExecutor(given.jobs) as pool:
        results += pool.map(lambda job: run(job, given.out, env, until), [job for job in wanted if not job.alone])
    results += [run(job, given.out, env, until) for job in wanted if job.alone and not job.first]
    results += compared(given.out)
    (given.out / "results.json").write_text(json.dumps({"driver": given.driver, "shim": str(shim), "jobs": results},
                                                       indent=1) + "\n")
    for one in results:
        for failure in one.get("failures", []):
            print(failure[:200])
    print(f"\n{'job':34} {'result':16} {'seconds':>8}  last line")
    for one in results:
        print(f"{one['name']:34} {one['status']:16} {one['seconds']:8.1f}  {one['last'][:100]}")
    return 0 if all(one["status"] in ("passed", "same") for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
