"""What the files of a store and of a checkpoint say: docs/reference/store-format.md in code.

Owns names, versions, encoding and strict decoding. Does no I/O: it turns bytes into facts and facts into bytes, and
believes nothing that it reads (a hash becomes a path, so it must be a hash).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import xxhash

from chunkstore import errors

CHUNK_SIZE_BYTES = 64 << 20

STORE = "gpushare-store/1"
CACHE = "gpushare-cache/1"
ROOT = "gpushare-root/1"
FSCK = "gpushare-fsck/1"
SAVE = "gpushare-save/1"
RANK = "gpushare-rank/1"
CHECKPOINT = "gpushare-checkpoint/1"

STORE_FILE = "store.json"
CACHE_FILE = "cache.json"
FSCK_FILE = "fsck.json"
CHUNKS = "chunks"
ROOTS = "roots"
TEMPORARY = "tmp"
SWEEP_LOCK = "sweep.lock"  # held for a moment: shared to lease a chunk, exclusive to delete some
COLLECTOR_LOCK = "gc.lock"  # held by the collector at work
MANIFEST_FILE = "manifest.json"
SAVE_FILE = "save.lock"  # in a checkpoint's directory while a save (or a removal) is under way

_ID = re.compile(r"[0-9a-f]{32}")
_HEX = re.compile(r"[0-9a-f]+")


class FormatError(ValueError):
    """The content is not what its format says."""


class VersionError(FormatError):
    """The content has another format, or another version of it."""

    def __init__(self, theirs: str) -> None:
        super().__init__(f"format {theirs}")
        self.theirs = theirs


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode(name: str, body: Mapping[str, Any]) -> bytes:
    """Return a document: its format first, then a checksum of the body, then the body, as JSON in three lines."""
    text = _canonical(body)
    return b'{"format":"%s",\n"checksum":"%s",\n"body":%s}\n' % (name.encode(), checksum(text).encode(), text)


def decode(name: str, content: bytes) -> dict[str, Any]:
    """Return the body of a document.

    Raises `VersionError` if it has another format or version, `FormatError` if it is damaged.
    """
    try:
        document = json.loads(content)
        theirs, expected, body = document["format"], document["checksum"], document["body"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FormatError("it is no complete document") from None
    if theirs != name:
        raise VersionError(str(theirs))
    if not isinstance(body, dict) or checksum(_canonical(body)) != expected:
        raise FormatError("its checksum does not match its content")
    return body


def checksum(content: bytes) -> str:
    """Return the checksum that documents use: against damage, not against forgery."""
    return xxhash.xxh3_128(content).hexdigest()


def is_checkpoint_file(name: str) -> bool:
    """Tell whether a file has the name of one that makes a directory a checkpoint's, of a save under way too."""
    return name in (MANIFEST_FILE, SAVE_FILE) or re.fullmatch(r"gpu-[0-9]+\.json", name) is not None


def now() -> str:
    """Return the time in UTC as documents say it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _is_int(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(what)


def _object(value: object, what: str) -> dict[str, Any]:
    _require(isinstance(value, dict), f"{what} is no object")
    assert isinstance(value, dict)
    return value


def _text(value: object, what: str) -> str:
    _require(isinstance(value, str), f"{what} is no text")
    return str(value)


def _number(value: object, least: int, what: str) -> int:
    _require(_is_int(value, least), f"{what} is not a number from {least}")
    assert isinstance(value, int)
    return value


def _list(value: object, what: str) -> list[Any]:
    _require(isinstance(value, list), f"{what} is no list")
    assert isinstance(value, list)
    return value


def require_id(value: object) -> str:
    """Return an id of a store or a checkpoint; raises `FormatError` if it is none."""
    _require(isinstance(value, str) and _ID.fullmatch(value) is not None, f"'{value}' is no id")
    return str(value)


# --- the store


@dataclass(frozen=True)
class StoreFacts:
    """What `store.json` says (and `cache.json` with the id of the cache's store)."""

    id: str
    chunk_size_bytes: int
    hash: str

    def encode(self, name: str = STORE) -> bytes:
        """Return the document."""
        return encode(name, self.body())

    @classmethod
    def decode(cls, content: bytes, name: str = STORE) -> StoreFacts:
        """Parse the document; raises `FormatError`."""
        return cls.from_body(decode(name, content))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> StoreFacts:
        """Take the facts from a document's entries; raises `FormatError`."""
        size = _number(body.get("chunk_size_bytes"), 1, "chunk_size_bytes")
        return cls(require_id(body.get("id")), size, _text(body.get("hash"), "hash"))

    def body(self) -> dict[str, Any]:
        """Return the facts as entries of a document."""
        return {"id": self.id, "chunk_size_bytes": self.chunk_size_bytes, "hash": self.hash}


@dataclass(frozen=True)
class Root:
    """A checkpoint that a store knows: `path` is its directory."""

    id: str
    path: str
    created: str

    def encode(self) -> bytes:
        """Return the document."""
        return encode(ROOT, {"id": self.id, "path": self.path, "created": self.created})

    @classmethod
    def decode(cls, content: bytes) -> Root:
        """Parse the document; raises `FormatError`."""
        body = decode(ROOT, content)
        return cls(require_id(body.get("id")), _text(body.get("path"), "path"), _text(body.get("created"), "created"))


# --- a checkpoint


@dataclass(frozen=True)
class Chunk:
    """A piece of an allocation: the hash that names its content, None for one of zeros, which is stored nowhere."""

    hash: str | None
    size_bytes: int


@dataclass(frozen=True)
class Allocation:
    """A piece of memory: where it was, what it was, and its content as chunks, the first at its start.

    `properties` and `access` are JSON values of the caller's, kept as they are.
    """

    device: int | str
    address: int
    size_bytes: int
    chunks: tuple[Chunk, ...]
    properties: Mapping[str, Any] = field(default_factory=dict)
    access: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Rank:
    """One process: its innermost pid, its allocations, and further JSON values of the caller's."""

    inner_pid: int
    allocations: tuple[Allocation, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, chunk_size_bytes: int) -> bytes:
        """Return the document `gpu-<inner_pid>.json`."""
        allocations = [_allocation_body(item, chunk_size_bytes) for item in self.allocations]
        return encode(RANK, {"inner_pid": self.inner_pid, "facts": dict(self.facts), "allocations": allocations})

    @classmethod
    def decode(cls, content: bytes, chunk_size_bytes: int, digits: int) -> Rank:
        """Parse the document; raises `FormatError`."""
        body = decode(RANK, content)
        items = _list(body.get("allocations"), "allocations")
        allocations = tuple(_allocation(item, chunk_size_bytes, digits) for item in items)
        return cls(_number(body.get("inner_pid"), 1, "inner_pid"), allocations, _object(body.get("facts"), "facts"))


def rank_file(inner_pid: int) -> str:
    """Return the name of a rank's file."""
    return f"gpu-{inner_pid}.json"


def piece_sizes(size_bytes: int, chunk_size_bytes: int) -> list[int]:
    """Return the sizes of the chunks of an allocation: all full but the last."""
    full, rest = divmod(size_bytes, chunk_size_bytes)
    return [chunk_size_bytes] * full + ([rest] if rest else [])


def require_whole(item: Allocation, chunk_size_bytes: int) -> None:
    """Raise ValueError unless the chunks of an allocation make up its size."""
    if [chunk.size_bytes for chunk in item.chunks] != piece_sizes(item.size_bytes, chunk_size_bytes):
        raise ValueError(f"the chunks at {item.address:#x} do not make up the {item.size_bytes} bytes there")


def _allocation_body(item: Allocation, chunk_size_bytes: int) -> dict[str, Any]:
    require_whole(item, chunk_size_bytes)
    return {
        "device": item.device,
        "address": hex(item.address),  # as text: numbers above 2**53 do not survive every reader of JSON
        "size_bytes": item.size_bytes,
        "properties": dict(item.properties),
        "access": list(item.access),
        "chunks": [chunk.hash for chunk in item.chunks],
    }


def _allocation(value: object, chunk_size_bytes: int, digits: int) -> Allocation:
    body = _object(value, "an allocation")
    device, address = body.get("device"), _text(body.get("address"), "address")
    _require(_is_int(device) or isinstance(device, str), "device is none")
    _require(re.fullmatch("0x[0-9a-f]{1,16}", address) is not None, f"'{address}' is no address")
    size_bytes = _number(body.get("size_bytes"), 1, "size_bytes")
    names, sizes = _list(body.get("chunks"), "chunks"), piece_sizes(size_bytes, chunk_size_bytes)
    _require(len(sizes) == len(names), "the chunks do not make up the allocation")
    return Allocation(
        device=device if isinstance(device, str) else int(str(device)),
        address=int(address, 16),
        size_bytes=size_bytes,
        chunks=tuple(Chunk(_chunk_name(name, digits), size) for name, size in zip(names, sizes, strict=True)),
        properties=_object(body.get("properties"), "properties"),
        access=tuple(_list(body.get("access"), "access")),
    )


def _chunk_name(value: object, digits: int) -> str | None:
    if value is None:
        return None
    _require(is_chunk_name(value, digits), f"'{value}' names no chunk")
    return str(value)


def is_chunk_name(value: object, digits: int) -> bool:
    """Tell whether a value is a hash of `digits` hexadecimal digits."""
    return isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value) is not None


@dataclass(frozen=True)
class RankFile:
    """A rank's file as the manifest knows it."""

    inner_pid: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What makes a directory a checkpoint. `kind` is `memory`; `facts` are JSON values of the caller's."""

    id: str
    created: str
    store: StoreFacts
    ranks: tuple[RankFile, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "memory"

    def encode(self) -> bytes:
        """Return the document."""
        ranks = [
            {"inner_pid": rank.inner_pid, "file": rank_file(rank.inner_pid),
             "size_bytes": rank.size_bytes, "checksum": rank.checksum}
            for rank in self.ranks
        ]  # fmt: skip
        body = {"kind": self.kind, "id": self.id, "created": self.created, "store": self.store.body()}
        return encode(CHECKPOINT, {**body, "ranks": ranks, "facts": dict(self.facts)})

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Parse the document; raises `FormatError`. Entries that are not known are passed over."""
        body = decode(CHECKPOINT, content)
        files = tuple(_rank_file(item) for item in _list(body.get("ranks"), "ranks"))
        _require(len({item.inner_pid for item in files}) == len(files), "a rank stands there twice")
        return cls(
            id=require_id(body.get("id")),
            created=_text(body.get("created"), "created"),
            store=StoreFacts.from_body(_object(body.get("store"), "store")),
            ranks=files,
            facts=_object(body.get("facts"), "facts"),
            kind=_text(body.get("kind"), "kind"),
        )


def _rank_file(value: object) -> RankFile:
    body = _object(value, "a rank")
    return RankFile(
        inner_pid=_number(body.get("inner_pid"), 1, "inner_pid"),
        size_bytes=_number(body.get("size_bytes"), 1, "size_bytes"),
        checksum=_text(body.get("checksum"), "checksum"),
    )


def not_decoded(path: str, name: str, error: FormatError) -> errors.StoreError:
    """Return the error for a document that could not be decoded."""
    if isinstance(error, VersionError):
        return errors.UnknownVersion(path=path, theirs=error.theirs, ours=name)
    return errors.DocumentDamaged(path=path, detail=str(error), advice="restore it from a copy")
