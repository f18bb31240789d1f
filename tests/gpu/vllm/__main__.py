"""`python -m tests.gpu.vllm --mode shim|bare|off|load --model DIR --out FILE`: one vLLM server, cycle after cycle.

`shim`: default flags, the shim preloaded, `nvsnap-gpu-suspend`. `bare`: default flags, no shim, the driver's checkpoint
alone. `off`: every transport between GPUs switched off, the driver's checkpoint alone. "Default flags" means that none
is set for checkpointing. Of four cycles the second has 16 requests in flight, the fourth a single one. With `shim`,
`--negative-controls` adds three cycles in which a bit of a weight and one of a live KV block are flipped, and
`--store FOLDER` two that go through a store there. FILE gets JSON with the server's command, its environment, every
difference from a stock start and every measurement; it is written again after each cycle and at an interrupt, so that
what was measured is kept. `load`: three servers at once, asked in turns, without the shim, with it, without: what it
costs (load.py).

`--all` runs one server after the other, each as above, into the folder --out: shim with its extras, off, bare, and
once more shim (`fresh`), whose weights are looked for in the first one's checkpoint. `--parts` picks some of them.

Exits with 1 where something did not hold; with `bare` that is what is expected. The server needs vLLM on PYTHONPATH,
named by --site so that the tool itself does not see it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from tests.gpu.vllm import machine, weights
from tests.gpu.vllm.load import run_load
from tests.gpu.vllm.model import NotFound
from tests.gpu.vllm.run import OutOfTime, Run
from tests.gpu.vllm.server import Refused, ServerDied
from tests.gpu.vllm.three import PARTS, run_all
from tests.gpu.vllm.ways import Failed


def one(given: argparse.Namespace) -> int:
    """Run one mode."""
    given.out.parent.mkdir(parents=True, exist_ok=True)
    run = Run(given)

    def interrupted(*_: object) -> NoReturn:
        """End the server, or its requests would be waited for; the record is written on the way out."""
        run.server.stop()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        run.run()
    except OutOfTime as told:
        run.record["cut"] = str(told)
        run.record["ok"] = "wrong" not in run.record
        print(f"{given.mode}: {told}", flush=True)
    except (ServerDied, Refused, Failed, NotFound, ValueError) as error:
        run.record["error"] = str(error)
        print(f"{given.mode}: {error}", flush=True)
    except KeyboardInterrupt:
        run.record["error"] = "interrupted"
    finally:
        run.save()
        run.server.stop()
    print(f"{given.mode}: up after {run.record.get('up_s')} s, {run.record.get('used_mib')} MiB, tokens/s "
          f"{run.record.get('tokens_per_second_16')}, {len(run.record['cycles'])} cycles, "
          f"{'all right' if run.record.get('ok') else 'NOT all right'}", flush=True)
    return 0 if run.record.get("ok") else 1


def options() -> argparse.ArgumentParser:
    """Return what can be given."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.vllm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--mode", choices=("shim", "bare", "off", "load"))
    which.add_argument("--all", action="store_true", help="one server after the other")
    parser.add_argument("--parts", default=",".join(PARTS), help="which servers of --all, comma between [%(default)s]")
    parser.add_argument("--model", type=Path, required=True, help="folder with config and tokenizer")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel size; each rank has a GPU [%(default)s]")
    parser.add_argument("--weights", choices=("dummy", "random"), default="dummy",
                        help="random: a file that is made in MODEL, so that answers depend on every weight")
    parser.add_argument("--out", type=Path, required=True, help="a file; with --all a folder")
    parser.add_argument("--site", type=Path, help="folder to put on the server's PYTHONPATH")
    parser.add_argument("--budget", type=float, default=1e6, metavar="S",
                        help="seconds for everything; no step begins that is too long")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--depth", choices=("process", "pages"), default="process")
    parser.add_argument("--in-place", action="store_true", help="suspend with --in-place")
    parser.add_argument("--tree", action="store_true", help="suspend the whole tree, not the processes on a GPU alone")
    parser.add_argument("--negative-controls", action="store_true", help="three more cycles, with flipped bits")
    parser.add_argument("--store", type=Path, help="folder for a store and checkpoints; more cycles go through it")
    parser.add_argument("--cache", type=Path, help="a cache for it")
    parser.add_argument("--store-cycles", type=int, default=2)
    parser.add_argument("--like", type=Path, help="checkpoint of another server in which the weights are looked for")
    parser.add_argument("--util", type=float, default=0.2, help="share of GPU memory that the server takes")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--start-timeout", type=float, default=240)
    parser.add_argument("--long", type=int, default=1500, help="tokens of a request in flight")
    parser.add_argument("--short", type=int, default=400, help="tokens of a request that only warms up")
    parser.add_argument("--rounds", type=int, default=11, help="of --mode load: how often each server is asked")
    parser.add_argument("--wait", type=float, default=0.7, metavar="S",
                        help="how long requests are in flight before the bare driver is called")
    return parser


def main() -> int:
    """Run one mode, or all."""
    given = options().parse_args()
    if given.mode not in (None, "shim") and (given.negative_controls or given.store):
        options().error("--negative-controls and --store are for --mode shim")
    if machine.is_simulated():
        print("simulated: times say nothing about a GPU", flush=True)
    if given.weights == "random":
        weights.make(given.model)
    if given.mode == "load":
        return run_load(given)
    return run_all(given, sys.argv[1:]) if given.all else one(given)


if __name__ == "__main__":
    sys.exit(main())
