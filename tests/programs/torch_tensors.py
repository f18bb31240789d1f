"""One of two processes that share tensors as torch.multiprocessing does: `-m tests.programs.torch_tensors FOLDER`.

RANK 0 sends a tensor of the first GPU through a connection in every step, by memory handle and event, and changes one
that it sent at the beginning; RANK 1 answers with the sums of both. The step goes to FOLDER/rank<N>; FOLDER/stop ends
the loop.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
import torch.multiprocessing  # it teaches connections to send tensors

from tests.programs.stepping import note

WORDS = 1 << 20
KEY = b"torch_tensors"


def produce(link: Connection, folder: Path) -> None:
    """Send tensors and compare the answers until told to stop."""
    kept = torch.zeros(WORDS, dtype=torch.int64, device="cuda")
    weights = torch.randint(-8, 8, (2048, 2048), device="cuda").to(torch.float32)
    link.send(kept)
    step = 0
    while not (folder / "stop").exists():
        step += 1
        for _ in range(8):  # work that the consumer's stream has to wait for
            torch.mm(weights, weights)
        fresh = torch.full((WORDS,), step, dtype=torch.int64, device="cuda")
        kept += 1
        torch.cuda.current_stream().synchronize()  # of the kept tensor no event tells: it was sent long ago
        fresh *= 3
        link.send(fresh)
        answer = link.recv()
        if answer != [3 * step * WORDS, step * WORDS]:
            raise SystemExit(f"step {step}: the consumer saw {answer}")
        note(folder, 0, step)
    link.send(None)


def consume(link: Connection, folder: Path) -> None:
    """Answer with sums until told to stop."""
    kept = link.recv()
    step = 0
    while (fresh := link.recv()) is not None:
        step += 1
        link.send([int(fresh.sum().item()), int(kept.sum().item())])
        del fresh  # the producer may use the memory again
        note(folder, 1, step)


def connected(address: str) -> Connection:
    """Connect to the producer, which may not be there yet."""
    until = time.monotonic() + 60
    while True:
        try:
            return Client(address, "AF_UNIX", authkey=KEY)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def main(folder: Path) -> None:
    """Play the part that RANK says."""
    rank, address = int(os.environ["RANK"]), str(folder / "link")
    torch.cuda.init()
    if rank == 0:
        with Listener(address, "AF_UNIX", authkey=KEY) as listener, listener.accept() as link:
            produce(link, folder)
    else:
        with connected(address) as link:
            consume(link, folder)
    (folder / f"done{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
