"""One server after the other on one machine: what users get side by side, within one budget."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.vllm.server import end_session
from tests.programs.setting import ROOT

PARTS = ("shim", "off", "bare", "fresh")
LEAST_S = 20  # less than that starts no server
END_S = 60  # from an interrupt until the record is written and the server gone


def record_of(part: str, given: argparse.Namespace) -> Path:
    """Return the file of one server."""
    return Path(given.out / f"vllm-{part}.json")


def words_for(part: str, given: argparse.Namespace) -> list[str]:
    """Return the options of one server, besides those that all have."""
    mode = "shim" if part == "fresh" else part
    words = ["--mode", mode, "--out", str(record_of(part, given))]
    if part == "shim":
        words += ["--cycles", str(given.cycles), "--store-cycles", str(given.store_cycles)]
        words += ["--negative-controls"] if given.negative_controls else []
    elif part == "fresh":
        words += ["--cycles", "0", "--store-cycles", "1"]
        checkpoint = first_checkpoint(record_of("shim", given))
        words += ["--like", checkpoint] if checkpoint else []
    else:
        words += ["--cycles", str(min(2, given.cycles))]
    if mode == "shim":
        words += ["--store", str(given.store)] if given.store else []
        words += ["--cache", str(given.cache)] if given.cache else []
    return words


def first_checkpoint(record: Path) -> str:
    """Return the checkpoint of the first server's last cycle through the store, if there was one."""
    stored = json.loads(record.read_text()).get("stored", []) if record.exists() else []
    return str(stored[-1]["checkpoint"]) if stored else ""


def run_all(given: argparse.Namespace, arguments: list[str]) -> int:
    """Run the parts that are wanted; return 0 if all held that should."""
    given.out.mkdir(parents=True, exist_ok=True)
    until, wrong = time.monotonic() + given.budget, []
    kept = ["model", "ranks", "weights", "site", "depth", "util", "port", "start_timeout", "long", "short", "wait"]
    common = [word for name in kept if getattr(given, name) is not None
              for word in (f"--{name.replace('_', '-')}", str(getattr(given, name)))]
    common += ["--tree"] if given.tree else []
    common += ["--in-place"] if given.in_place else []
    print("python -m tests.gpu.vllm " + " ".join(arguments), flush=True)
    for part in given.parts.split(","):
        left = until - time.monotonic()
        if part == "fresh" and not given.store:
            continue
        if left < LEAST_S + END_S:
            print(f"{part}: not begun, {left:.0f} s are left", flush=True)
            wrong.append(part)
            continue
        words = [*common, *words_for(part, given), "--budget", f"{left - END_S:.0f}"]
        code = one_server(words, record_of(part, given), left - END_S)
        if part != "bare" and code != 0:
            wrong.append(part)
    print(f"all: {'all right' if not wrong else 'NOT all right: ' + ', '.join(wrong)}", flush=True)
    return 1 if wrong else 0


def one_server(words: list[str], out: Path, timeout_s: float) -> int:
    """Run one server; past its time it is interrupted, and writes what it has."""
    process = subprocess.Popen([sys.executable, "-m", "tests.gpu.vllm", *words], cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        return process.wait(timeout_s)
    except BaseException as error:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(END_S / 2)
        except subprocess.TimeoutExpired:
            code = killed(process, out)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return code


def killed(process: subprocess.Popen[bytes], out: Path) -> int:
    """End a run that does not end by itself, and the server that its record names."""
    process.kill()
    if out.exists():
        end_session(int(json.loads(out.read_text())["session"]))
    return process.wait(END_S / 2)
