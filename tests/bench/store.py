"""``make bench-store``: how fast the store is, each number beside a named baseline that takes turns with it.

Exits with 1 when a limit is missed. Of each side the quickest run counts: whatever else the machine does can only add.
Rates count the bytes that are not zeros, in GB/s of 10^9 bytes. Content is random and differs from chunk to chunk.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from chunkstore import CHUNK_SIZE_BYTES, Allocation, Checkpoint, Chunk, Files, Save, Store, format, fsck, gc, save
from chunkstore.chunks import chunk_of
from chunkstore.hashing import DEFAULT_HASH, hash_by_name
from gpususpend.demo import results
from gpususpend.demo.machine import describe, find_machine
from gpususpend.report import table
from tests.bench.line import Line

SCHEMA = "gpushare-store-bench/1"
SIZE = CHUNK_SIZE_BYTES
GB = 1e9
RING_SLOTS = 8
CACHE_CHUNKS = 100_000
ROUNDS = 5

Work = Callable[[int, memoryview], Any]


def at_least_ratio(what: str, value: float, baseline: str, baseline_value: float, ratio: float) -> Line:
    """Return a rate that has to be a part of another rate of the same run."""
    return Line(what, value, "GB/s", baseline, baseline_value, f"ratio >= {ratio}", value >= ratio * baseline_value)


# --- memory with content


def random_memory(count: int, seed: int) -> list[memoryview]:
    """Return that many page-aligned chunks of random bytes."""
    generator = np.random.Generator(np.random.SFC64(seed))
    chunks = []
    for _ in range(count):
        view = memoryview(mmap.mmap(-1, SIZE))
        view[:] = generator.integers(0, 1 << 64, SIZE // 8, dtype=np.uint64).view(np.uint8).data
        chunks.append(view)
    return chunks


_stamp = iter(range(1 << 62))


def renew(buffer: memoryview) -> memoryview:
    """Make a chunk another one than all before: its first bytes change."""
    buffer[:8] = (next(_stamp) * 2 + 1).to_bytes(8, "little")
    return buffer


def spread(count: int, buffers: list[memoryview], work: Work) -> float:
    """Call `work(number, buffer)` for each number, a thread for each buffer; return the seconds of it all."""
    numbers, failed = iter(range(count)), []
    guard = threading.Lock()

    def loop(buffer: memoryview) -> None:
        try:
            while True:
                with guard:
                    number = next(numbers, None)
                if number is None:
                    return
                work(number, buffer)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=loop, args=(buffer,)) for buffer in buffers]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - start


# --- the disk's own rate


def direct_write(path: Path, buffer: memoryview) -> None:
    """Write a new file with direct I/O and wait until it is on the disk."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0), 0o600)
    try:
        assert os.pwrite(fd, buffer, 0) == len(buffer)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def direct_read(path: Path, buffer: memoryview) -> None:
    """Read a file with direct I/O."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    try:
        assert os.preadv(fd, [buffer], 0) == len(buffer)
    finally:
        os.close(fd)


def disk(folder: Path, count: int, threads: int) -> Iterator[Line]:
    """Compare saving and loading with direct I/O of the same pieces by as many threads."""
    buffers = random_memory(threads, 1)
    store = Store.create(folder / "store")

    def write(turn: int) -> float:
        return spread(count, buffers, lambda item, buffer: direct_write(folder / f"{turn}-{item}", renew(buffer)))

    def read(turn: int) -> float:
        return spread(count, buffers, lambda item, buffer: direct_read(folder / f"{turn}-{item}", buffer))

    def save_all(turn: int) -> float:
        start = time.perf_counter()
        save_allocation(store, folder / f"ckpt-{turn}", count, buffers, renew)
        return time.perf_counter() - start

    def load(turn: int) -> float:
        chunks = list(Checkpoint.open(folder / f"ckpt-{turn}").all_chunks())
        return spread(count, buffers, lambda item, buffer: store.get(chunks[item], buffer))

    taken: dict[Callable[[int], float], list[float]] = {write: [], save_all: [], read: [], load: []}
    for turn in range(ROUNDS):
        for one, other in ((write, save_all), (read, load)):
            for side in (one, other) if turn % 2 else (other, one):
                taken[side].append(side(turn))
        for item in range(count):
            (folder / f"{turn}-{item}").unlink()
        save.remove(store, folder / f"ckpt-{turn}")
        gc.collect(store, grace_s=0)
    rates = {side: count * SIZE / min(seconds) / GB for side, seconds in taken.items()}
    how = f"bare direct I/O, {threads} threads"
    yield at_least_ratio("save, new bytes", rates[save_all], f"{how}, write, fdatasync", rates[write], 0.9)
    yield at_least_ratio("load, verified", rates[load], f"{how}, read", rates[read], 0.9)


def save_allocation(
    store: Store, path: Path, count: int, buffers: list[memoryview], prepare: Callable[[memoryview], memoryview]
) -> None:
    """Save a checkpoint of one allocation; each thread fills its buffer by `prepare`."""
    chunks: list[Chunk | None] = [None] * count

    def put(number: int, buffer: memoryview) -> None:
        chunks[number] = store.put(prepare(buffer)).chunk

    with Save.begin(store, path) as begun:
        spread(count, buffers, put)
        begun.add(1, Allocation(0, 0, count * SIZE, tuple(chunk for chunk in chunks if chunk is not None)))
        begun.commit()


# --- a core


def one_core(folder: Path, count: int) -> Iterator[Line]:
    """Measure zero test, hash and write on one thread, into files in memory that have their pages already."""
    files, digest = Files(), hash_by_name(DEFAULT_HASH, "")
    (buffer,) = random_memory(1, 2)
    paths = [folder / f"file-{number}" for number in range(8)]
    for path in paths:
        path.write_bytes(buffer)

    def through(path: Path) -> None:
        chunk_of(renew(buffer), digest)
        with files.opened(str(path), os.O_RDWR) as fd:
            files.write_all(fd, buffer, str(path))

    def bare(path: Path) -> None:
        with files.opened(str(path), os.O_RDWR) as fd:
            os.pwrite(fd, buffer, 0)

    taken: dict[Callable[[Path], None], list[float]] = {through: [], bare: []}
    for _ in range(ROUNDS):
        for work, samples in taken.items():
            start = time.perf_counter()
            for number in range(count):
                work(paths[number % len(paths)])
            samples.append(time.perf_counter() - start)
    ours, theirs = (count * SIZE / min(samples) / GB for samples in taken.values())
    yield Line(
        "zero test, hash, write; 1 thread, rewritten files in tmpfs", ours, "GB/s", "write alone", theirs,
        ">= 3 GB/s", ours >= 3,
    )  # fmt: skip


def hashes(count: int) -> Iterator[Line]:
    """Measure each hash on one thread."""
    (buffer,) = random_memory(1, 7)
    digests: dict[str, Callable[[Iterator[memoryview]], object]]
    digests = {name: hash_by_name(name, "").digest for name in ("xxh3-128", "blake3")}
    digests["sha256"] = lambda pieces: hashlib.sha256(next(pieces)).digest()
    taken: dict[str, list[float]] = {name: [] for name in digests}
    for _ in range(ROUNDS):
        for name, digest in digests.items():
            start = time.perf_counter()
            for _ in range(count):
                digest(iter([buffer]))
            taken[name].append(time.perf_counter() - start)
    rates = {name: count * SIZE / min(samples) / GB for name, samples in taken.items()}
    sha256 = rates.pop("sha256")
    for name, rate in rates.items():
        yield Line(f"hash alone, {name}; 1 thread", rate, "GB/s", "sha256 of hashlib", sha256)


# --- what is there already


def known_and_zero(folder: Path, count: int) -> Iterator[Line]:
    """Measure a save of what the store has, and of zeros, by two threads from memory that holds it all."""
    memory = random_memory(count, 3)
    store = Store.create(folder / "known")
    digest = hash_by_name(DEFAULT_HASH, "")
    slots = memory[:2]  # two threads; each takes the memory of its number

    def put_all(number: int, _: memoryview) -> None:
        store.put(memory[number])

    def put_in_a_save() -> float:
        with Save.begin(store, folder / "again"):
            return spread(count, slots, put_all)

    def hash_all() -> float:
        return spread(count, slots, lambda number, _: chunk_of(memory[number], digest))

    put_in_a_save()
    new, bare = zip(*((put_in_a_save(), hash_all()) for _ in range(ROUNDS)), strict=True)
    fsck.check(store)
    clean, alone = zip(*((put_in_a_save(), hash_all()) for _ in range(ROUNDS)), strict=True)
    hashing = count * SIZE / min(bare + alone) / GB
    rate = count * SIZE / min(clean) / GB
    yield Line(
        "save, known bytes, after a clean fsck; 2 threads", rate, "GB/s", "zero test and hash alone",
        hashing, ">= 10 GB/s", rate >= 10,
    )  # fmt: skip
    yield Line(
        "save, known bytes, right after the first save: compared", count * SIZE / min(new) / GB, "GB/s",
        "zero test and hash alone", hashing,
    )  # fmt: skip
    zeros = [memoryview(mmap.mmap(-1, SIZE)) for _ in range(2)]
    for view in zeros:
        view[:] = bytes(SIZE)
    seconds = min(spread(count, zeros, lambda _, buffer: store.put(buffer)) for _ in range(ROUNDS))
    yield Line("save, zeros; 2 threads", count * SIZE / seconds / GB, "GB/s", "", None)


# --- memory


def resident(folder: Path, count: int) -> Iterator[Line]:
    """Measure what a process needs that saves and loads through a ring of slots."""
    command = [sys.executable, "-m", "tests.bench.store", "--ring", str(folder / "resident"), "--mib", str(count * 64)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
    peak_mib, ring_mib = int(done.stdout) / 1024, RING_SLOTS * SIZE / (1 << 20)
    yield Line(
        f"resident memory, save and load of {count * SIZE / (1 << 30):.0f} GiB", peak_mib, "MiB",
        f"ring of {RING_SLOTS} slots", ring_mib, "<= ring + 150 MiB", peak_mib <= ring_mib + 150,
    )  # fmt: skip


def through_a_ring(folder: Path, count: int) -> None:
    """Save and load that many chunks through the ring, and print the peak of resident memory in KiB."""
    folder.mkdir()
    buffers = [memoryview(mmap.mmap(-1, SIZE)) for _ in range(RING_SLOTS)]
    for buffer in buffers:
        buffer[:] = random.randbytes(1 << 20) * (SIZE >> 20)
    store = Store.create(folder / "store")
    save_allocation(store, folder / "ckpt", count, buffers, renew)
    chunks = list(Checkpoint.open(folder / "ckpt").all_chunks())
    spread(count, buffers, lambda number, buffer: store.get(chunks[number], buffer))
    # Not ru_maxrss, which begins with the parent's.
    print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))


# --- a cache


def collection(folder: Path) -> Iterator[Line]:
    """Measure `cache-gc` over a large cache, as a command, beside a listing by find and a removal by rm."""
    path = folder / "cache"
    store = Store.create(folder / "small", cache=path)
    assert store.cache is not None
    other = Store.create(folder / "other")
    _tiny_chunks(path, CACHE_CHUNKS)
    to_remove = "\n".join(_tiny_chunks(Path(other.path), CACHE_CHUNKS // 2))
    subprocess.run(["sync", "-f", str(folder)], check=True, timeout=600)
    size = CACHE_CHUNKS * 10
    listing = ["sh", "-c", f"find '{path}/chunks' -type f -printf '%A@ %s %p\\n' | sort -n > '{folder}/listing'"]
    find_s = min(_run(listing) for _ in range(ROUNDS))
    tool = [sys.executable, "-m", "gpususpend", "cache-gc", str(path)]
    for what, left in (("nothing removed", size), ("1 % removed", size * 99 // 100)):
        seconds = _run([*tool, f"{left}B"])
        yield Line(
            f"cache-gc over {CACHE_CHUNKS} chunks, {what}", seconds, "s", "find and sort by access time", find_s,
            "<= 2 s", seconds <= 2,
        )  # fmt: skip
    rm_s = _run(["xargs", "rm"], to_remove)
    yield Line(
        f"cache-gc over {CACHE_CHUNKS} chunks, half removed", _run([*tool, f"{size // 2}B"]), "s",
        "rm of as many files", rm_s,
    )  # fmt: skip


def _tiny_chunks(root: Path, count: int) -> list[str]:
    """Put that many files where chunks lie; return their paths."""
    draw = random.Random(4)
    names = [f"{draw.getrandbits(128):032x}" for _ in range(count)]
    paths = [root / format.CHUNKS / name[:2] / name for name in names]
    for path in paths:
        path.write_bytes(b"0123456789")
    return [str(path) for path in paths]


def _run(command: list[str], text: str = "", **environment: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        command, check=True, capture_output=True, timeout=1800, env=os.environ | environment, input=text, text=True
    )
    return time.perf_counter() - start


# --- other tools


def tools(folder: Path, source: Path, count: int) -> Iterator[Line]:
    """Compare a first and a second save of the same files; between the two, 1 of 16 chunks changes.

    Each reads everything at the second save, too: memory has no times by which to pass over what did not change.
    """
    source.mkdir()
    memory = random_memory(count, 5)
    for number, view in enumerate(memory):
        (source / f"{number:04}").write_bytes(view)
    del memory
    known = {"cp and sync": _cp, "restic": _restic, "borg": _borg, "casync": _casync}
    found = {name: tool for name, tool in known.items() if shutil.which(name.split()[0])}
    for name in known.keys() - found.keys():
        yield Line(f"first and second save, {name}", 0.0, "", "", None, note="not installed")
    found |= {"chunkstore": _chunkstore, "chunkstore, fsck between": _chunkstore}
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in found}
    for number in range(2):
        for name, tool in found.items():
            target = folder / name.replace(" ", "-").replace(",", "")
            target.mkdir(exist_ok=True)
            before = _size(target)
            start = time.perf_counter()
            tool(source, target, number)
            subprocess.run(["sync", "-f", str(target)], check=True, timeout=600)
            taken[name].append((time.perf_counter() - start, _size(target) - before))
        if number == 0:
            fsck.check(Store.open(folder / "chunkstore-fsck-between" / "store"))
        generator = random.Random(6)
        for item in range(0, count, 16):
            (source / f"{item:04}").write_bytes(generator.randbytes(SIZE))
    for number, which in enumerate(("first", "second")):
        for name, samples in taken.items():
            seconds, grown = samples[number]
            yield Line(
                f"{which} save of {count * SIZE / GB:.2f} GB of files, {name}", seconds, "s", "cp and sync",
                taken["cp and sync"][number][0], note=f"{grown / GB:.2f} GB written",
            )  # fmt: skip


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _cp(source: Path, target: Path, number: int) -> None:
    _run(["cp", "-r", str(source), str(target / str(number))])


def _restic(source: Path, target: Path, number: int) -> None:
    secret = {"RESTIC_PASSWORD": "x", "RESTIC_CACHE_DIR": str(target / "cache")}
    if number == 0:
        _run(["restic", "init", "--repo", str(target / "repo")], **secret)
    _run(["restic", "backup", "--force", "--quiet", "--repo", str(target / "repo"), str(source)], **secret)


def _borg(source: Path, target: Path, number: int) -> None:
    own = {"BORG_BASE_DIR": str(target / "cache"), "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
    if number == 0:
        _run(["borg", "init", "--encryption", "none", str(target / "repo")], **own)
    plain = ["--files-cache", "disabled", "--compression", "none"]
    _run(["borg", "create", *plain, f"{target / 'repo'}::{number}", str(source)], **own)


def _casync(source: Path, target: Path, number: int) -> None:
    _run(["casync", "make", f"--store={target}/chunks.castr", str(target / f"{number}.caidx"), str(source)])


def _chunkstore(source: Path, target: Path, number: int) -> None:
    """Save each file as an allocation, from its pages as they lie."""
    store = Store.create(target / "store")
    files = sorted(source.iterdir())
    with Save.begin(store, target / f"ckpt-{number}") as begun:

        def put(item: int, _: memoryview) -> None:
            with open(files[item], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                view = memoryview(pages)
                allocation = Allocation(0, item * SIZE, SIZE, (store.put(view).chunk,))
                view.release()
            begun.add(1, allocation)

        spread(len(files), [memoryview(b"")] * 4, put)
        begun.commit()


# --- all of it


@contextmanager
def emptied(parent: Path) -> Iterator[Path]:
    """Yield an empty folder, and remove it afterwards."""
    path = Path(tempfile.mkdtemp(prefix="gpushare-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def measure(where: Path, mib: int, threads: int, only: str = "") -> Iterator[Line]:
    """Yield the lines of the parts that are wanted; `where` is on the disk that is measured."""
    count = mib // 64
    parts: dict[str, Callable[[Path, Path], Iterator[Line]]] = {
        "disk": lambda disk_folder, _: disk(disk_folder, count, threads),
        "core": lambda _, shared: one_core(shared, 32),
        "hash": lambda _, __: hashes(8),
        "known": lambda disk_folder, _: known_and_zero(disk_folder, 32),
        "resident": lambda disk_folder, _: resident(disk_folder, count * 8),
        "cache-gc": lambda disk_folder, _: collection(disk_folder),
        "tools": lambda disk_folder, shared: tools(disk_folder, shared / "source", min(32, count)),
    }
    for name, part in parts.items():
        if not re.search(only, name):
            continue
        with emptied(where) as disk_folder, emptied(Path("/dev/shm")) as shared:
            yield from part(disk_folder, shared)


def record(lines: list[Line], command: list[str], where: Path, gpus: dict[str, Any]) -> dict[str, Any]:
    """Return the measurement for machines; `gpus` is what the machine has of them, empty where none is used."""
    kinds = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    filesystem = next(kind for mount in [where, *where.parents] for _, at, kind in reversed(kinds) if at == str(mount))
    measured = [line.data() for line in lines]
    machine = {**gpus, "filesystem": filesystem, "load": round(os.getloadavg()[0], 2), "nice": os.nice(0)}
    return {**results.header(command, machine), "schema": SCHEMA, "lines": measured}


def show(lines: list[Line]) -> None:
    """Print the table."""
    heads = ("WHAT", "", "", "RATIO", "BASELINE", "", "LIMIT", "", "")
    rows = [
        (
            line.what, f"{line.value:.2f}" if line.unit else "-", line.unit,
            f"{line.ratio:.2f}" if line.ratio else "-", line.baseline,
            f"{line.baseline_value:.2f}" if line.baseline_value else "-", line.limit,
            line.verdict, line.note,
        )
        for line in lines
    ]  # fmt: skip
    click.echo("\n".join(table(rows, heads)))


@click.command()
@click.option("--dir", "where", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("."),
              show_default=True, help="A folder on the disk that is measured.")  # fmt: skip
@click.option("--mib", default=1024, show_default=True, help="New bytes a save; eight times that for resident memory.")
@click.option("--threads", default=4, show_default=True, help="Threads on each side.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--gpu", is_flag=True, help="Measure suspends into a store of ranks on GPUs instead; see --gpu-mib.")
@click.option("--gpu-mib", default=20480, show_default=True, help="Memory of the ranks, all together.")
@click.option("--driver", type=click.Choice(["real", "sim"]), default="real", show_default=True,
              help="Driver of these ranks; on the simulated one no rate is judged.")  # fmt: skip
@click.option("--only", default="", help="Parts whose name matches this regular expression.")
@click.option("--ring", type=click.Path(path_type=Path), hidden=True)
def main(
    where: Path, mib: int, threads: int, as_json: bool, gpu: bool, gpu_mib: int, driver: str, only: str,
    ring: Path | None,
) -> None:  # fmt: skip
    """Measure the store. Example: python -m tests.bench.store --dir /mnt/disk"""
    if ring is not None:
        through_a_ring(ring, mib // 64)
        return
    where = where.resolve()
    if gpu:
        from tests.bench.suspended import suspends

        source = suspends(where, gpu_mib, driver == "sim", lambda folder: disk(folder, mib // 64, threads))
    else:
        source = measure(where, mib, threads, only)
    lines = []
    for line in source:
        lines.append(line)
        print(f"{line.what}: {line.value:.2f} {line.unit}", file=sys.stderr, flush=True)
    if as_json:
        gpus: dict[str, Any] = {}
        if gpu:
            with find_machine(driver, 2, 64) as machine:
                gpus = describe(machine)
        command = ["python", "-m", "tests.bench.store", *sys.argv[1:]]
        click.echo(json.dumps(record(lines, command, where, gpus), indent=1))
    else:
        show(lines)
    sys.exit(1 if any(line.within_limit is False for line in lines) else 0)


if __name__ == "__main__":
    main()
