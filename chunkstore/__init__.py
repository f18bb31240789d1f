"""A store of content-addressed chunks on disk: memory saved once, however many checkpoints hold it.

Owns the store's format (docs/reference/store-format.md), direct I/O, hashing, deduplication, cache, collection and
repair. Must not know CUDA, processes or the shim; usable on its own, as docs/reference/chunkstore.md says:

    store = Store.create("/data/store")
    with Save.begin(store, "/data/checkpoint") as save:
        put = store.put(memory)                         # a page-aligned memoryview of at most store.chunk_size_bytes
        save.add(1, Allocation(0, address, len(memory), (put.chunk,)))
        save.commit()
    for allocation in Checkpoint.open("/data/checkpoint").rank(1).allocations:
        for chunk in allocation.chunks:
            store.get(chunk, memory)

A path may be the URL of an object store, such as s3://bucket/prefix: `objects` has what differs there.

What is done less often stands in modules: `gc.collect`, `cache.collect`, `fsck.check` and `check_checkpoint`,
`transfer.prefetch` and `copy_checkpoint`, `save.remove`, `roots.forget` and `adopt`, `report`. Errors are in `errors`,
in four kinds. `System` (module `system`) and `Files` are passed in where a caller wants notices or other system calls.
"""

from chunkstore.cache import Cache
from chunkstore.checkpoint import Checkpoint
from chunkstore.errors import Busy, Damaged, Refused, StoreError, WriteFailed
from chunkstore.format import CHUNK_SIZE_BYTES, Allocation, Chunk, Rank
from chunkstore.io import Files, Room
from chunkstore.save import Save
from chunkstore.store import How, Put, Source, Store, Verify

__all__ = [
    "CHUNK_SIZE_BYTES",
    "Allocation",
    "Busy",
    "Cache",
    "Checkpoint",
    "Chunk",
    "Damaged",
    "Files",
    "How",
    "Put",
    "Rank",
    "Refused",
    "Room",
    "Save",
    "Source",
    "Store",
    "StoreError",
    "Verify",
    "WriteFailed",
]
