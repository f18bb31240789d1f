"""One server of one mode and its record: measured, cycled, compared."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.gpu.vllm import machine
from tests.gpu.vllm.chunks import shared_with, written_into_weights
from tests.gpu.vllm.controls import Controls
from tests.gpu.vllm.model import Model, NotFound
from tests.gpu.vllm.server import PROMPT, Answer, Server, Traffic, agreement, prompts
from tests.gpu.vllm.ways import BareDriver, Failed, WithShim, processes

STREAMS = 16
OFF_FLAGS = ["--disable-custom-all-reduce"]
OFF_ENVIRON = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
SHOWN = ("NCCL_", "VLLM_", "TORCH_", "PYTORCH_", "NVSHMEM_", "CUDA_", "GPUSHARE_", "NVSNAP_", "LD_", "HF_")
SPARE = 1.3  # of the longest cycle so far: what the next one may take


class OutOfTime(RuntimeError):
    """The next step would not end before the budget does; what was measured so far holds."""


def environ(given: argparse.Namespace, mode: str) -> dict[str, str]:
    """Return the environment of a server of a mode."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    path = ":".join(word for word in (str(given.site or ""), os.environ.get("PYTHONPATH", "")) if word)
    off = OFF_ENVIRON if mode == "off" else {}
    return dict(os.environ) | quiet | off | ({"PYTHONPATH": path} if path else {})


def differences(given: argparse.Namespace) -> list[str]:
    """Name what is set, for this mode, that a stock start of the server does not have."""
    shown = {"shim": ["started by `nvsnap-gpu-suspend run`, which preloads the shim"],
             "off": [f"{name}={value}" for name, value in OFF_ENVIRON.items()] + OFF_FLAGS}
    weights = "weights are dummies (--load-format dummy)" if given.weights == "dummy" else "weights are random numbers"
    return [*shown.get(given.mode, []), weights]


def start(given: argparse.Namespace, mode: str, log: Path, port: int) -> Server:
    """Start a server of a mode."""
    launcher = [sys.executable, "-m", "gpususpend", "run", *machine.words_for_the_tool(), "--"]
    flags = [*(["--load-format", "dummy"] if given.weights == "dummy" else []),
             "--gpu-memory-utilization", str(given.util), *(OFF_FLAGS if mode == "off" else [])]
    return Server(given.model, log, port, ranks=given.ranks, launcher=launcher if mode == "shim" else [], flags=flags,
                  environ=environ(given, mode))


def told_of(given: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Return what a record says of its run: its command, the server's and its environment."""
    shown = {name: value for name, value in sorted(environ(given, given.mode).items()) if name.startswith(SHOWN)}
    command = [Path(word).name if word == sys.executable else word for word in server.command]
    return {
        "mode": given.mode, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "ranks": given.ranks,
        "argv": ["python", "-m", "tests.gpu.vllm", *sys.argv[1:]], "command": command, "environment": shown,
        "simulated": machine.is_simulated(), "commit": os.environ.get("GPUSHARE_COMMIT", ""),
        "driver": machine.driver(),
    }


class Run:
    """One server and its record."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self._until = time.monotonic() + given.budget
        self._longest = 0.0
        self.server = start(given, given.mode, given.out.with_suffix(".server.log"), given.port)
        self.record: dict[str, Any] = {
            "schema": "gpushare-vllm/1", **told_of(given, self.server), "depth": given.depth,
            "differences": differences(given), "cycles": [], "session": self.server.pid,
        }
        self.save()

    def save(self) -> None:
        """Write what is known so far."""
        fresh = self.given.out.with_suffix(".new")
        fresh.write_text(json.dumps(self.record, indent=1) + "\n")
        fresh.rename(self.given.out)

    def traffic(self, tokens: int) -> list[Answer]:
        """Let all streams run through; note the rate."""
        answers, rate = Traffic(self.server, prompts(STREAMS), tokens).end()
        self.record.setdefault("tokens_per_second_16", []).append(round(rate))
        return answers

    def before(self) -> None:
        """Start up, warm up, and measure the server as it is."""
        up_s = min(self.given.start_timeout, self._until - time.monotonic())
        self.record["up_s"] = round(self.server.wait_up(up_s), 1)
        self.server.ask()  # from here on the beginning of the prompt comes out of the prefix cache
        self.alone = self.server.ask()
        self.record["alone"] = {"tokens": self.alone.tokens, "logprobs": self.alone.logprobs,
                                "repeats": self.server.ask() == self.alone}
        self.traffic(self.given.short)
        if self.given.cycles:
            self.long_alone = self.server.ask(PROMPT, self.given.long)
            self.record["alone"]["long_repeats"] = self.server.ask(PROMPT, self.given.long) == self.long_alone
            self.reference = self.traffic(self.given.long)
            self.record["without_suspend"] = agreement(self.reference, self.traffic(self.given.long))
        self.record["used_mib"], self.pids = machine.gpu_use()
        self.record["processes"] = processes(self.server.session())
        named = ["--tree", str(self.server.pid)] if self.given.tree else [str(pid) for pid in self.pids]
        how = ["--depth", self.given.depth, *(["--in-place"] if self.given.in_place else [])]
        self.shimmed = WithShim(named, how, self.pids)
        self.save()

    def cycle(self, number: int) -> None:
        """Suspend, look, resume, compare; in the second of four 16 requests are in flight, in the fourth one alone."""
        one: dict[str, Any] = {"cycle": number}
        self.record["cycles"].append(one)
        asked = {2: prompts(STREAMS), 0: [PROMPT]}.get(number % 4, [])
        sent: list[Traffic] = []

        def send() -> None:
            if asked:
                sent.append(Traffic(self.server, asked, self.given.long))

        one["suspend"] = self._down(send)
        one["in_flight_while_suspended"] = sum(traffic.under_way for traffic in sent)
        one["suspended_mib"], one["suspended_pids"] = machine.gpu_use()
        one["resume"] = (self.shimmed if self.given.mode == "shim" else BareDriver(self.pids)).resume()
        for traffic in sent:
            answers, _ = traffic.end()
            if len(asked) > 1:
                one["agreement"] = agreement(self.reference, answers)
            else:
                one["same_long_alone"] = answers == [self.long_alone]
        self._same(one, f"cycle {number}")
        if one["in_flight_while_suspended"] < len(asked):
            self.record.setdefault("wrong", []).append(f"cycle {number}: requests had ended before the suspend")

    def _down(self, at_work: Callable[[], None]) -> dict[str, Any]:
        if self.given.mode == "shim":
            return self.shimmed.suspend(at_work=at_work)

        def sent_for_a_while() -> None:
            at_work()
            time.sleep(self.given.wait)

        return BareDriver(self.pids).suspend(sent_for_a_while)

    def _same(self, one: dict[str, Any], name: str) -> None:
        one["same_alone"] = self.server.ask() == self.alone
        self.save()
        seen = one.get("agreement", one.get("same_long_alone", ""))
        print(f"{self.given.mode} {name}: suspend {one['suspend']['seconds']:.2f} s, resume "
              f"{one['resume']['seconds']:.2f} s, left {one.get('suspended_mib')} MiB, in flight "
              f"{one.get('in_flight_while_suspended', 0)}, {seen}", flush=True)
        if not (one["same_alone"] and one.get("same_long_alone", True)):
            raise Failed(f"{name}: the same request got another answer")

    def controls(self) -> None:
        """Flip a bit of a weight, and one of a live block, and see that both are noticed."""
        self.record["negative_controls"] = record = {}
        model = Model.read(self.given.model, self.given.ranks)
        try:
            Controls(self.server, self.shimmed, self.pids, model, dummies=self.given.weights == "dummy",
                     tokens=self.given.long).run(record)
        except (Failed, NotFound) as error:
            # The rest is worth measuring all the same.
            self.record.setdefault("wrong", []).append(str(error))
            print(error, flush=True)
            return
        finally:
            self.save()
        print("negative controls: " + ", ".join(
            f"{name} {record[name]['answer']}" for name in ("weight", "kv_block")), flush=True)

    def stored(self, number: int) -> None:
        """Suspend into a store, resume from there; what the weights wrote, against the checkpoint before."""
        store, checkpoint = self.given.store / "store", self.given.store / f"{self.given.out.stem}-{number}"
        self.given.store.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)
        words = ["--store", str(store), "--ckpt-dir", str(checkpoint)]
        if self.given.cache:
            words += ["--cache", str(self.given.cache)]
        self.traffic(self.given.long)  # fills blocks of the KV cache, others each time
        one: dict[str, Any] = {"checkpoint": str(checkpoint), "suspend": self.shimmed.suspend(*words)}
        self.record.setdefault("stored", []).append(one)
        one["suspended_mib"], _ = machine.gpu_use()
        one["resume"] = self.shimmed.resume()
        one["bytes"] = one["suspend"]["report"]["groups"][0].get("stored", {}).get("bytes")
        model = Model.read(self.given.model, self.given.ranks)
        if number > 1:
            before = Path(self.record["stored"][-2]["checkpoint"])
            one["new_chunks_in_weights"] = written_into_weights(before, checkpoint, model.weights())
        elif self.given.like:
            one["shared"] = shared_with(self.given.like, checkpoint, model)
        self._same(one, f"store {number}")
        print(f"store {number}: {one['bytes']}, {one.get('new_chunks_in_weights', one.get('shared', ''))}", flush=True)
        if one.get("new_chunks_in_weights"):
            raise Failed(f"store {number}: chunks of unchanged weights were written again")

    def _paced(self, step: Any, *arguments: Any, of_usual: float = 1) -> None:
        """Do one step unless the time left is too short for it, by the longest one so far."""
        began = time.monotonic()
        left, wanted = self._until - began, SPARE * of_usual * self._longest
        if left < wanted:
            raise OutOfTime(f"{left:.0f} s are left and the next step takes {wanted:.0f} s: {step.__name__}{arguments}")
        step(*arguments)
        self._longest = max(self._longest, (time.monotonic() - began) / of_usual)

    def run(self) -> None:
        """Everything that is asked for."""
        self.before()
        for number in range(1, self.given.cycles + 1):
            self._paced(self.cycle, number)
        if self.given.negative_controls:
            self._paced(self.controls, of_usual=3)
        for number in range(1, self.given.store_cycles + 1 if self.given.store else 1):
            self._paced(self.stored, number)
        self.traffic(self.given.short)
        self.record["ok"] = "wrong" not in self.record
