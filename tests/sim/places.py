"""Where the tests keep memory on disk, and the commands that bring it there and back."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chunkstore import Checkpoint, Store, fsck, roots
from tests.programs.setting import ROOT
from tests.programs.tool import Answer, Tool

CHUNK = 1 << 20


@dataclass
class Places:
    """A folder with a store and checkpoints."""

    tool: Tool
    root: Path

    @property
    def store(self) -> Path:
        """Return the store."""
        return self.root / "store"

    def directory(self, name: str = "one") -> Path:
        """Return the directory of a checkpoint."""
        return self.root / name

    def words(self, name: str = "one") -> tuple[str, ...]:
        """Return the options that name a checkpoint."""
        return "--store", str(self.store), "--ckpt-dir", str(self.directory(name))

    def suspend(self, *pids: int, name: str = "one", options: tuple[str, ...] = (), **how: Any) -> Answer:
        """Suspend processes into a checkpoint."""
        return self.tool.suspend(*pids, options=(*self.words(name), *options), **how)

    def chunks(self) -> set[str]:
        """Return the names of all chunks."""
        return {path.name for path in (self.store / "chunks").glob("*/*")}

    def seen(self) -> dict[str, tuple[int, int, int]]:
        """Return every file and directory with size and times: what a command must leave as it is."""
        return {
            str(path): (status.st_size, status.st_mtime_ns, status.st_ino)
            for path in sorted(self.root.rglob("*"))
            for status in [path.lstat()]
        }

    def require_no_checkpoint(self, name: str = "one") -> None:
        """Check that a suspend that failed has left nothing but chunks, and those intact."""
        store = Store.open(self.store)
        assert not self.directory(name).exists()
        assert not [item.root for item in roots.find_all(store) if item.root.path == str(self.directory(name))]
        assert fsck.check(store).clean

    def checkpoint(self, name: str = "one") -> Checkpoint:
        """Return a checkpoint, whose chunks are all there."""
        checkpoint = Checkpoint.open(self.directory(name))
        assert set(checkpoint.stored_chunks()) <= self.chunks()
        return checkpoint

    def program(self, module: str, *words: str | int, deadline_s: float = 120) -> Answer:
        """Run a program of tests.programs that is the tool with something wrong."""
        command = [sys.executable, "-m", f"tests.programs.{module}", *map(str, words), "--driver", "sim", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.tool.environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=deadline_s,
        )  # fmt: skip
        return Answer(command, done.returncode, done.stdout, done.stderr)


def mounted(places: Places, mounts: str, *words: str | int) -> Answer:
    """Run the tool in a mount namespace of its own, in which a shell has mounted something first."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = [
        "unshare", "--mount", "--propagation", "private", "sh", "-ec", f'{mounts}\nexec "$0" "$@"', sys.executable,
        "-m", "gpususpend", *map(str, words), "--driver", "sim", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=places.tool.environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"this system does not let us mount: {done.stderr.strip()}")
    return Answer(command, done.returncode, done.stdout, done.stderr)
