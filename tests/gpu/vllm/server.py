"""A vLLM server as a process of its own, and what is asked of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_S = 20.0  # until the memory of a killed process is free
PROMPT = "The capital of France is"


class ServerDied(RuntimeError):
    """The server ended or does not answer; the message says what it was asked."""


class Refused(RuntimeError):
    """The server answers that it cannot; the message is what it says. It lives on."""


@dataclass(frozen=True)
class Answer:
    """What one request gave: token ids, and the log-probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Server:
    """One server from its start to its end. `launcher` stands in front of its command."""

    def __init__(self, model: Path, log: Path, port: int, *, ranks: int, launcher: list[str],
                 flags: list[str], environ: dict[str, str]) -> None:
        self.command = [*launcher, sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
                        "--tensor-parallel-size", str(ranks), "--max-model-len", "2048",
                        "--max-num-seqs", "16", "--port", str(port), *flags]
        self._model, self._url = str(model), f"http://localhost:{port}"
        with log.open("wb") as file:
            self._process = subprocess.Popen(self.command, env=environ, stdin=subprocess.DEVNULL, stdout=file,
                                             stderr=subprocess.STDOUT, start_new_session=True)
        self.pid = self._process.pid

    def wait_up(self, deadline_s: float) -> float:
        """Wait for the first healthy answer; return the seconds. Raises ServerDied."""
        began = time.monotonic()
        while time.monotonic() - began < deadline_s:
            if self._process.poll() is not None:
                raise ServerDied(f"the server ended with {self._process.returncode} before it was up")
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return time.monotonic() - began
            except OSError:
                time.sleep(0.5)
        raise ServerDied(f"the server was not up after {deadline_s:.0f} s")

    def ask(self, prompt: str = PROMPT, tokens: int = 24, deadline_s: float = 60) -> Answer:
        """Ask greedily. Raises ServerDied, Refused."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "logprobs": 1, "return_token_ids": True}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=deadline_s) as reply:
                choice = json.load(reply)["choices"][0]
        except urllib.error.HTTPError as error:
            raise Refused(f"{prompt!r}: {error.code}, {error.read()[:300]!r}") from error
        except (OSError, ValueError, KeyError) as error:
            raise ServerDied(f"no answer to {prompt!r} in {deadline_s:.0f} s: {error}") from error
        return Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

    def stop(self) -> None:
        """End the server and everything of its session."""
        end_session(self.pid)
        self._process.wait(30)

    def session(self) -> list[int]:
        """Return the pids of the server's session."""
        return session(self.pid)


def session(number: int) -> list[int]:
    """Return the pids of a session, but for those that have ended and that nobody has waited for."""
    command = ["ps", "-o", "pid=,stat=", "-s", str(number)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [int(pid) for pid, state in map(str.split, listed) if not state.startswith("Z")]


def end_session(number: int) -> None:
    """Kill everything of a session and wait for its end; a worker that the driver has lost ends no other way."""
    until = time.monotonic() + END_S
    while (left := session(number)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def prompts(streams: int) -> list[str]:
    """Return different prompts, each shorter than a block of the prefix cache."""
    return [f"Story {number}:" for number in range(streams)]


class Traffic:
    """One request for each prompt, all sent at once, each long enough to be in flight for seconds."""

    def __init__(self, server: Server, asked: list[str], tokens: int) -> None:
        self._pool = ThreadPoolExecutor(len(asked))
        self._tokens, self._began = len(asked) * tokens, time.monotonic()
        self._futures = [self._pool.submit(server.ask, prompt, tokens, 180) for prompt in asked]

    @property
    def under_way(self) -> int:
        """How many requests are not answered yet."""
        return sum(not future.done() for future in self._futures)

    def end(self) -> tuple[list[Answer], float]:
        """Return all answers in order and the tokens per second. Raises ServerDied, Refused."""
        with self._pool:
            answers = [future.result() for future in self._futures]
        return answers, self._tokens / (time.monotonic() - self._began)


def agreement(first: list[Answer], second: list[Answer]) -> dict[str, Any]:
    """Count the requests and the tokens that two runs agree on, tokens up to the first that differs."""
    same = sum(a.tokens == b.tokens for a, b in zip(first, second, strict=True))
    leading = sum(next((at for at, pair in enumerate(zip(a.tokens, b.tokens, strict=False)) if pair[0] != pair[1]),
                       len(a.tokens)) for a, b in zip(first, second, strict=True))
    return {"requests": len(first), "requests_equal": same, "tokens": sum(len(a.tokens) for a in first),
            "tokens_equal_before_first_difference": leading}
