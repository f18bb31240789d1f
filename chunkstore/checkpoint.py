"""Checkpoints: a directory whose manifest says which ranks there are, and which chunks make up their memory.

Owns reading a checkpoint (`Checkpoint`) and the ways of naming what is in one. A checkpoint exists when its manifest
does. Saving one is `save.py`; reading writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from chunkstore import errors, format
from chunkstore.format import Chunk, FormatError, Manifest, Rank
from chunkstore.hashing import hash_by_name
from chunkstore.io import Files
from chunkstore.store import Store


def read_save_id(files: Files, path: str) -> str:
    """Return the id of the checkpoint that a `save.lock` is about; raises OSError, `FormatError`."""
    return format.require_id(format.decode(format.SAVE, files.read_document(path)).get("id"))


class Checkpoint:
    """A checkpoint that exists. Ranks are read from their files when they are first asked for, and checked."""

    def __init__(self, path: str, manifest: Manifest, files: Files) -> None:
        self.path = path
        self.manifest = manifest
        self._files = files
        self._digits = hash_by_name(manifest.store.hash, path).digits
        self._ranks: dict[int, Rank] = {}

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, files: Files | None = None) -> Checkpoint:
        """Open the checkpoint in a directory.

        Raises `NotAStore` if there is none (a save that did not end leaves none), `Damaged`, `UnknownVersion`.
        """
        files = files or Files()
        path = os.path.realpath(directory)
        document = os.path.join(path, format.MANIFEST_FILE)
        try:
            return cls(path, Manifest.decode(files.read_document(document)), files)
        except (FileNotFoundError, NotADirectoryError):
            detail = f"there is no {format.MANIFEST_FILE}"
            advice = "name the directory of a finished checkpoint"
            raise errors.NotAStore(path=path, detail=detail, advice=advice) from None
        except OSError as error:
            raise errors.unreadable("cannot read", document, error) from error
        except FormatError as error:
            raise format.not_decoded(document, format.CHECKPOINT, error) from None

    @property
    def id(self) -> str:
        """Return the checkpoint's id."""
        return self.manifest.id

    @property
    def inner_pids(self) -> list[int]:
        """Return the ranks, by their innermost pids."""
        return [rank.inner_pid for rank in self.manifest.ranks]

    def require_store(self, store: Store) -> None:
        """Raise `WrongStore` if the checkpoint was not made with this store."""
        if self.manifest.store.id != store.id:
            raise errors.WrongStore(
                path=self.path, theirs=self.manifest.store.id, store=store.path, ours=store.id,
                advice="name the store that it was made with",
            )  # fmt: skip

    def load(self) -> None:
        """Read and check every rank's file; raises `Damaged`."""
        for inner_pid in self.inner_pids:
            self.rank(inner_pid)

    def rank(self, inner_pid: int) -> Rank:
        """Return a rank; raises KeyError if there is none with this pid, `Damaged` if its file is."""
        if inner_pid not in self._ranks:
            self._ranks[inner_pid] = self._read_rank(inner_pid)
        return self._ranks[inner_pid]

    def _read_rank(self, inner_pid: int) -> Rank:
        known = {rank.inner_pid: rank for rank in self.manifest.ranks}[inner_pid]
        path = os.path.join(self.path, format.rank_file(inner_pid))
        try:
            content = self._files.read_document(path)
            if len(content) != known.size_bytes or format.checksum(content) != known.checksum:
                raise FormatError("it is not the file that the manifest names")
            rank = Rank.decode(content, self.manifest.store.chunk_size_bytes, self._digits)
            if rank.inner_pid != inner_pid:
                raise FormatError(f"it is the file of rank {rank.inner_pid}")
        except FormatError as error:
            raise format.not_decoded(path, format.RANK, error) from None
        except OSError as error:
            raise errors.unreadable("cannot read", path, error) from error
        return rank

    def ranks(self) -> Iterator[Rank]:
        """Yield the ranks."""
        for inner_pid in self.inner_pids:
            yield self.rank(inner_pid)

    def all_chunks(self) -> Iterator[Chunk]:
        """Yield every chunk of every allocation, those of zeros and repeated ones too."""
        for rank in self.ranks():
            for allocation in rank.allocations:
                yield from allocation.chunks

    def stored_chunks(self) -> dict[str, Chunk]:
        """Return by hash, once each, the chunks that the store must have."""
        return {chunk.hash: chunk for chunk in self.all_chunks() if chunk.hash is not None}
