"""`python -m tests.gpu.vllm --mode shim|bare|off --model DIR --out FILE`: one vLLM server, cycle after cycle.

`shim`: default flags, the shim preloaded, `nvsnap-gpu-suspend`. `bare`: default flags, no shim, the driver's checkpoint
alone. `off`: every transport between GPUs switched off, the driver's checkpoint alone. "Default flags" means that none
is set for checkpointing. Every second cycle has requests in flight. FILE gets JSON with the server's command, its
environment and every measurement; it is written again after each cycle, so that what was measured is kept. Exits with
1 where something did not hold; with `bare` that is what is expected.

The server needs vLLM on PYTHONPATH, named by --site so that the tool itself does not see it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.gpu.vllm.server import Answer, Server, ServerDied, Traffic, agreement
from tests.gpu.vllm.ways import BareDriver, Failed, WithShim, processes

STREAMS, LONG, SHORT = 16, 1500, 400
OFF_FLAGS = ["--disable-custom-all-reduce"]
OFF_ENVIRON = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def environ(given: argparse.Namespace) -> dict[str, str]:
    """Return the server's environment."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    path = ":".join(word for word in (str(given.site or ""), os.environ.get("PYTHONPATH", "")) if word)
    off = OFF_ENVIRON if given.mode == "off" else {}
    return dict(os.environ) | quiet | off | ({"PYTHONPATH": path} if path else {})


def gpu_use() -> tuple[list[int], list[int]]:
    """Return the used MiB of each GPU, and the pids that use any."""
    def query(kind: str, what: str) -> list[int]:
        done = subprocess.run(["nvidia-smi", f"--query-{kind}={what}", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=30, check=True)
        return [int(line) for line in done.stdout.split()]

    return query("gpu", "memory.used"), sorted(set(query("compute-apps", "pid")))


class Run:
    """One server and its record."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        variables = environ(given)
        launcher = [sys.executable, "-m", "gpususpend", "run", "--"] if given.mode == "shim" else []
        flags = ["--gpu-memory-utilization", str(given.util), *(OFF_FLAGS if given.mode == "off" else [])]
        self.server = Server(given.model, given.out.with_suffix(".server.log"), given.port, launcher=launcher,
                             flags=flags, environ=variables)
        shown = {name: value for name, value in sorted(variables.items())
                 if name.startswith(("NCCL_", "VLLM_", "TORCH_", "NVSHMEM_", "CUDA_VISIBLE", "GPUSHARE_"))}
        command = [Path(word).name if word == sys.executable else word for word in self.server.command]
        self.record: dict[str, Any] = {
            "schema": "gpushare-vllm/1", "mode": given.mode, "depth": given.depth,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "argv": ["python", "-m", "tests.gpu.vllm", *sys.argv[1:]], "command": command, "environment": shown,
            "commit": os.environ.get("GPUSHARE_COMMIT", ""),
            "driver": Path("/proc/driver/nvidia/version").read_text().splitlines()[0], "cycles": [],
        }

    def save(self) -> None:
        """Write what is known so far."""
        self.given.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def traffic(self, tokens: int) -> list[Answer]:
        """Let all streams run through; note the rate."""
        answers, rate = Traffic(self.server, STREAMS, tokens).end()
        self.record.setdefault("tokens_per_second_16", []).append(round(rate))
        return answers

    def before(self) -> None:
        """Start up, warm up, and measure the server as it is."""
        self.record["up_s"] = round(self.server.wait_up(self.given.start_timeout), 1)
        self.alone = self.server.ask()
        self.record["alone"] = {"tokens": self.alone.tokens, "logprobs": self.alone.logprobs,
                                "repeats": self.server.ask() == self.alone}
        self.traffic(SHORT)
        self.reference = self.traffic(LONG)
        self.record["without_suspend"] = agreement(self.reference, self.traffic(LONG))
        self.record["used_mib"], self.pids = gpu_use()
        self.record["processes"] = processes(self.server.session())
        tree = ["--tree", str(self.server.pid)]
        self.way = (WithShim(tree if self.given.tree else [str(pid) for pid in self.pids], self.given.depth)
                    if self.given.mode == "shim" else BareDriver(self.pids))
        self.save()

    def cycle(self, number: int) -> None:
        """Suspend, look, resume, compare."""
        one: dict[str, Any] = {"cycle": number}
        self.record["cycles"].append(one)
        traffic = Traffic(self.server, STREAMS, LONG) if number % 2 == 0 else None
        if traffic:
            time.sleep(0.7)  # all are being decoded
            one["in_flight"] = traffic.under_way
        one["suspend"] = self.way.suspend()
        one["suspended_mib"], one["suspended_pids"] = gpu_use()
        one["resume"] = self.way.resume()
        if traffic:
            answers, _ = traffic.end()
            one["agreement"] = agreement(self.reference, answers)
        one["same_alone"] = self.server.ask() == self.alone
        self.save()
        if not one["same_alone"]:
            raise Failed(f"cycle {number}: the same request got another answer")

    def run(self) -> None:
        """Everything."""
        self.before()
        for number in range(1, self.given.cycles + 1):
            self.cycle(number)
            last = self.record["cycles"][-1]
            print(f"{self.given.mode} cycle {number}: suspend {last['suspend']['seconds']:.2f} s, resume "
                  f"{last['resume']['seconds']:.2f} s, left {last['suspended_mib']} MiB, "
                  f"in flight {last.get('in_flight', 0)}, {last.get('agreement', '')}", flush=True)
        self.traffic(SHORT)
        self.record["ok"] = True


def main() -> int:
    """Run one mode."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.vllm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("shim", "bare", "off"), required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder with config and tokenizer; weights are dummy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path, help="folder to put on the server's PYTHONPATH")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--depth", choices=("process", "pages"), default="process")
    parser.add_argument("--tree", action="store_true", help="suspend the whole tree, not the processes on a GPU alone")
    parser.add_argument("--util", type=float, default=0.2, help="share of GPU memory that the server takes")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--start-timeout", type=float, default=240)
    given = parser.parse_args()
    run = Run(given)
    try:
        run.run()
    except (ServerDied, Failed) as error:
        run.record["error"] = str(error)
        print(f"{given.mode}: {error}", flush=True)
    finally:
        run.save()
        run.server.stop()
    print(f"{given.mode}: up after {run.record.get('up_s')} s, {run.record.get('used_mib')} MiB, tokens/s "
          f"{run.record.get('tokens_per_second_16')}, {len(run.record['cycles'])} cycles, "
          f"{'all right' if run.record.get('ok') else 'NOT all right'}", flush=True)
    return 0 if run.record.get("ok") else 1


if __name__ == "__main__":
    sys.exit(main())
