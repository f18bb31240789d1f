"""Parts of `tests.gpu.vllm` that need no server: what is a weight, which pages changed, the weights' file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from chunkstore import Allocation, Save, Store
from tests.gpu.vllm import weights
from tests.gpu.vllm.chunks import NoWeights, shared_with, written_into_weights
from tests.gpu.vllm.controls import PAGE, changed_pages
from tests.gpu.vllm.model import STEP, Model, NotFound

CONFIG = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16,
          "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip
MIB = 1 << 20


def model(tmp_path: Path, **changes: int) -> Model:
    """Return a model read from a folder."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    return Model.read(tmp_path, ranks=2)


def test_allocations_are_told_apart_by_size(tmp_path: Path) -> None:
    """Half of a matrix on each of two ranks: 32 and 16 MiB; what is smaller than 10 MiB shares its memory."""
    one = model(tmp_path)
    assert one.shards()["gate_up_proj"] == 32 * MIB and one.down_size() == 16 * MIB
    assert one.weights() == {32 * MIB: 2, 16 * MIB: 2} and one.own_bytes() == 96 * MIB
    sizes = [20 * MIB, 16 * MIB, 900 * MIB, 32 * MIB, 16 * MIB, 900 * MIB]
    assert one.weights_among(sizes) == [1, 4] and one.caches_among(sizes) == [2, 5]
    for wrong in ([], [16 * MIB], [16 * MIB, 32 * MIB]):
        with pytest.raises(NotFound, match="sizes and counts"):
            one.weights_among(wrong)
        with pytest.raises(NotFound, match="sizes and counts"):
            one.caches_among(wrong)
    assert all(size % STEP == 0 for size in model(tmp_path, hidden_size=2176).weights())


def test_changed_pages() -> None:
    """Where the pages begin that differ, in memory of several parts."""
    before = bytes(65 * MIB)
    after = bytearray(before)
    for place in (0, PAGE + 7, PAGE + 8, 64 * MIB - 1, 65 * MIB - 1):
        after[place] = 1
    assert changed_pages(before, bytes(after)) == [0, PAGE, 64 * MIB - PAGE, 65 * MIB - PAGE]
    assert changed_pages(before, before) == []


def numbers(data: bytes) -> list[float]:
    """Return bfloat16 numbers."""
    return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]


def test_weights_of_a_size_at_which_each_counts(tmp_path: Path) -> None:
    """Every tensor that Qwen2 has lies where the header says, as large as it should be; the last follows the first."""
    one = model(tmp_path, hidden_size=256, intermediate_size=512, vocab_size=300, num_attention_heads=2,
                num_key_value_heads=1)
    data = weights.make(tmp_path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert length % 8 == 0 and len(head) == 3 + 12 * one.layers
    ends = sorted(item["data_offsets"] for item in head.values())
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == len(body)

    def tensor(name: str) -> list[float]:
        return numbers(body[slice(*head[name]["data_offsets"])])

    [scale] = set(tensor("model.norm.weight"))
    assert 0.7 < scale < 1.5
    assert head["model.layers.1.self_attn.k_proj.weight"]["shape"] == [128, 256]
    for name, wanted in (("model.layers.0.mlp.down_proj.weight", (2 * 512) ** -0.5), ("model.embed_tokens.weight", 1),
                         ("model.layers.1.self_attn.k_proj.weight", 1 / 16)):
        found = tensor(name)
        size = (sum(value * value for value in found) / len(found)) ** 0.5
        assert wanted / 1.5 <= size <= wanted * 1.5 and abs(sum(found) / len(found)) < size / 20, name
    words, last = (
        [tuple(found[at : at + 256]) for at in range(0, len(found), 256)]
        for found in (tensor("model.embed_tokens.weight"), tensor("lm_head.weight"))
    )  # fmt: skip
    step = 2.0 ** (weights.nearest(1) - weights.nearest(weights.MARGIN / 256))
    follower = {row: number for number, row in enumerate(last)}
    order = [follower[tuple(value / step for value in row)] for row in words]
    seen, word = set(), 0
    while word not in seen:
        seen.add(word)
        word = order[word]
    assert len(seen) == 300, "the words are to follow each other in one cycle"
    assert tensor("model.layers.0.mlp.up_proj.weight") != tensor("model.layers.1.mlp.up_proj.weight")
    assert weights.make(tmp_path).read_bytes() == data


def checkpoint(folder: Path, store: Store, contents: list[bytes]) -> Path:
    """Write a checkpoint of one rank with allocations of these contents, beside a process that has none."""
    with Save.begin(store, folder) as save:
        save.add_rank(1)
        save.add_rank(2)
        for number, content in enumerate(contents, 1):
            chunks = [store.put(memoryview(content[at : at + MIB])).chunk for at in range(0, len(content), MIB)]
            save.add(1, Allocation(device="GPU-1", address=number << 30, size_bytes=len(content),
                                   chunks=tuple(chunks), properties={}, access=()))  # fmt: skip
        save.commit()
    return folder


def test_chunks_that_are_new_in_weights(tmp_path: Path) -> None:
    """By the lists alone; memory as large as a weight that is written all the time is none."""
    store = Store.create(tmp_path / "store", chunk_size_bytes=MIB)
    one = model(tmp_path, hidden_size=512, intermediate_size=4096)
    assert one.weights() == {2 * MIB: 2}
    weight, other, work, work_later = (bytes([number]) * MIB + bytes([number + 1]) * MIB for number in (1, 3, 5, 7))
    cache = [bytes([number]) * 4 * MIB for number in (10, 11)]
    before = checkpoint(tmp_path / "before", store, [weight, other, work, cache[0]])
    same = checkpoint(tmp_path / "same", store, [cache[1], work_later, other, weight])
    assert written_into_weights(before, same, one.weights()) == []
    told = shared_with(before, same, one)
    assert told["share"] == 1.0 and told["in_own_allocations"] == 4 * MIB == told["shared"]
    assert told["share_of_weights"] < 0.9 and told["reason"]["bytes_without_an_allocation_of_their_own"] > 0
    flipped = weight[:-1] + b"x"
    changed = checkpoint(tmp_path / "changed", store, [flipped, other, work_later])
    assert written_into_weights(before, changed, one.weights()) == [
        {"address": hex(1 << 30), "size": 2 * MIB, "chunk": 1}]  # fmt: skip
    told = shared_with(before, changed, one)
    assert told["share"] == 0.75 and told["reason"]["bytes_that_differ_by_size_of_allocation"] == {2 * MIB: MIB}
    with pytest.raises(NoWeights, match="1 allocations of 2097152 bytes, and 2 weights"):
        written_into_weights(before, checkpoint(tmp_path / "few", store, [weight, cache[0]]), one.weights())
    with pytest.raises(NoWeights, match="no allocation"):
        written_into_weights(before, checkpoint(tmp_path / "none", store, [cache[0]]), one.weights())
