"""One rank of the stand-in: `python -m vllm.rank RANK RANKS FD MODEL`, with weights and a KV cache in GPU memory.

A token comes out of all weights and of what the blocks of its request hold, so that one wrong bit in either makes
another answer, and in no other memory. The ranks share a mailbox by CUDA IPC unless NCCL_P2P_DISABLE is set, as ranks
of a server share buffers. Requests come as lines of JSON over a socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.programs import calls, content
from tests.programs.calls import need

BLOCK_BYTES = 4096
TOKEN_BYTES = 256
BLOCK_TOKENS = BLOCK_BYTES // TOKEN_BYTES
BLOCKS = 1024
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def weights_of(layer: int, rank: int, size: int) -> Bytes:
    """Return the weights of a rank's shard: the same in every process."""
    return np.random.default_rng([layer, rank]).integers(0, 256, size, dtype=np.uint8)


class Rank:
    """The memory of one rank, and what it can do with it."""

    def __init__(self, number: int, ranks: int, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        self._layers = int(config["num_hidden_layers"])
        self._shard = int(config["hidden_size"]) * int(config["intermediate_size"]) * 2 // ranks  # in two bytes each
        need(calls.init(), "cuInit")
        need(calls.ctx_set(need(calls.primary_retain(number), "context")), "set the context")
        self._weights = [need(calls.alloc(self._shard), "weights") for _ in range(self._layers)]
        self._cache = [need(calls.alloc(2 * BLOCKS * BLOCK_BYTES), "cache") for _ in range(self._layers)]
        self._mailbox = need(calls.alloc(4096), "mailbox")
        for layer, address in enumerate(self._weights):
            self._put(address, weights_of(layer, number, self._shard))
        for address in self._cache:
            need(calls.memset_d8(address, 0, 2 * BLOCKS * BLOCK_BYTES), "clear the cache")
        content.write(self._mailbox, content.pattern([number], 1024))
        self._theirs = 0

    def share(self) -> str:
        """Return the handle of the mailbox."""
        return str(need(calls.ipc_get(self._mailbox), "share the mailbox"))

    def open(self, handle: str) -> None:
        """Open the other rank's."""
        self._theirs = need(calls.ipc_open(handle), "open the other mailbox")

    def step(self, blocks: list[int], count: int) -> int:
        """Return a number that depends on all weights and on `count` tokens of these blocks; write the next one."""
        found = 0
        for address in self._weights:
            weights = self._get(address, self._shard).view(np.uint64)
            found = zlib.crc32(np.bitwise_xor.reduce(weights).tobytes(), found)
        if self._theirs:
            content.read(self._theirs, 1024)
        for address in self._cache:
            for half in range(2):
                for at in range(-(-count // BLOCK_TOKENS)):
                    size = min(BLOCK_TOKENS, count - at * BLOCK_TOKENS) * TOKEN_BYTES
                    found = zlib.crc32(self._get(address + self._place(half, blocks[at]), size), found)
        fresh = np.random.default_rng(found).integers(1, 256, TOKEN_BYTES, dtype=np.uint8)
        place = self._place(0, blocks[count // BLOCK_TOKENS]) + count % BLOCK_TOKENS * TOKEN_BYTES
        for address in self._cache:
            for half in range(2):
                self._put(address + half * BLOCKS * BLOCK_BYTES + place, fresh)
        return found

    @staticmethod
    def _place(half: int, block: int) -> int:
        return (half * BLOCKS + block) * BLOCK_BYTES

    def _put(self, address: int, data: Bytes) -> None:
        need(calls.copy_htod(address, int(data.ctypes.data), data.nbytes), "copy to the device")

    def _get(self, address: int, size: int) -> Bytes:
        data = np.empty(size, dtype=np.uint8)
        need(calls.copy_dtoh(int(data.ctypes.data), address, size), "copy from the device")
        return data


def main() -> None:
    """Answer requests until the server hangs up."""
    link = socket.socket(fileno=int(sys.argv[3])).makefile("rw")
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]))
    print(json.dumps(rank.share() if os.environ.get("NCCL_P2P_DISABLE") != "1" else ""), file=link, flush=True)
    for line in link:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(rank, name)(*arguments)), file=link, flush=True)


if __name__ == "__main__":
    main()
