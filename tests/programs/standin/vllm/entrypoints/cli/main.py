"""The stand-in's front end: `python -m vllm.entrypoints.cli.main serve MODEL … --port N`, with its ranks behind it.

Understands as much of the protocol as `tests.gpu.vllm` speaks, and allocates blocks of the cache as vLLM does: the one
that has been free for the longest comes first, and what is in it stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from functools import reduce
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import xor
from pathlib import Path
from typing import Any

from vllm.rank import BLOCK_TOKENS, BLOCKS

WORDS = 4096
TOKEN_S = 0.01  # at least, so that a request lasts on any machine


def gates_will_close() -> bool:
    """Tell whether a suspend is on its way that has not closed the gates yet: what is in flight shall be so then."""
    for path in Path(os.environ.get("NVSNAP_GPU_SUSPEND_STATE_DIR", "/none")).glob("group-*.json"):
        with contextlib.suppress(FileNotFoundError):
            if json.loads(path.read_text())["step"] in ("preflight", "prepare", "quiesce"):
                return True
    return False


class Engine:
    """The ranks, and the blocks of their caches; one step at a time."""

    def __init__(self, model: Path, ranks: int) -> None:
        self._free = deque(range(1, BLOCKS))
        self._turn = threading.Lock()
        self._ranks = [self._start(number, ranks, model) for number in range(ranks)]
        handles = [json.loads(rank.readline()) for rank in self._ranks]
        if ranks > 1 and all(handles):
            for rank, handle in zip(self._ranks, reversed(handles), strict=True):
                self._ask(rank, "open", handle)

    @staticmethod
    def _start(number: int, ranks: int, model: Path) -> Any:
        near, far = socket.socketpair()
        subprocess.Popen([sys.executable, "-m", "vllm.rank", str(number), str(ranks), str(far.fileno()), str(model)],
                         pass_fds=[far.fileno()])
        far.close()
        return near.makefile("rw")

    @staticmethod
    def _ask(rank: Any, *request: Any) -> Any:
        print(json.dumps(request), file=rank, flush=True)
        return json.loads(rank.readline())

    def answer(self, prompt: str, tokens: int) -> tuple[list[int], list[float]]:
        """Return token ids and log-probabilities."""
        with self._turn:
            blocks = [self._free.popleft() for _ in range(-(-(tokens + len(prompt)) // BLOCK_TOKENS))]
        ids, logprobs = [], []
        for at in range(tokens):
            time.sleep(TOKEN_S)
            while at == tokens - 1 and gates_will_close():
                time.sleep(TOKEN_S)
            with self._turn:
                for rank in self._ranks:
                    print(json.dumps(["step", blocks, at]), file=rank, flush=True)
                found = [int(json.loads(rank.readline())) for rank in self._ranks]
            ids.append((reduce(xor, found) ^ len(prompt)) % WORDS)
            logprobs.append(-found[0] / (1 << 32))
        with self._turn:
            self._free.extend(blocks)
        return ids, logprobs


class Handler(BaseHTTPRequestHandler):
    """`/health` and `/v1/completions`."""

    engine: Engine

    def do_GET(self) -> None:
        """Say that the server is up."""
        self._send({})

    def do_POST(self) -> None:
        """Answer one request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, logprobs = self.engine.answer(body["prompt"], body["max_tokens"])
        self._send({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]})

    def _send(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Front(ThreadingHTTPServer):
    """Takes many requests at once."""

    request_queue_size = 64


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, required=True)
    given, _ = parser.parse_known_args()
    Handler.engine = Engine(given.model, given.tensor_parallel_size)
    Front(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
