"""Weights for a model folder that has none: random numbers of a size at which every one has a say in the answers.

vLLM's dummy weights are so small that a layer's result vanishes in the rounding of what it is added to: answers then
depend on the embeddings alone, and a lost bit anywhere else is not seen. Here the layers together add about as much as
there is. The last matrix makes each token follow from the one before by a wide margin, so that the order in which a GPU
adds up a batch does not decide which token comes next; the log-probabilities show the rest.
"""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.vllm.model import ELEMENT, Model

NAME = "model.safetensors"
MARGIN = 10.0  # the next token's logit, were there no layers; others are around 0
BIAS = 127  # of an exponent
SPREAD = (7 / 3) ** 0.5  # root mean square of numbers from 1 to 2


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file: name, shape and begin in the data.

    Its numbers are random, of either sign, from 2^exponent to twice that; or, without an exponent, all `value`.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    exponent: int | None
    value: float = 0.0

    @property
    def count(self) -> int:
        """Return how many numbers it has."""
        return math.prod(self.shape)


def nearest(size: float) -> int:
    """Return the exponent with which random numbers are nearest to a root mean square."""
    return round(math.log2(size / SPREAD))


def correction(size: float) -> float:
    """Return by what random numbers are too small for a root mean square, since exponents are whole numbers."""
    return size / (SPREAD * 2.0 ** nearest(size))


def tensors(model: Model) -> list[Tensor]:
    """List the tensors of a Qwen2 model under the names of its files."""
    found: list[Tensor] = []
    hidden, head = model.hidden, model.hidden // model.heads
    usual, last = hidden**-0.5, MARGIN / hidden
    share = model.layers**-0.5  # of what a layer adds

    def place() -> int:
        return found[-1].begin + found[-1].count * ELEMENT if found else 0

    def add(name: str, *shape: int, size: float = usual) -> None:
        found.append(Tensor(name, shape, place(), nearest(size)))

    def norm(name: str, size: float = usual) -> None:
        """What follows multiplies by numbers that ought to be of this size."""
        found.append(Tensor(name, (hidden,), place(), None, correction(size)))

    add("model.embed_tokens.weight", model.words, hidden, size=1)
    for number in range(model.layers):
        layer = f"model.layers.{number}"
        norm(f"{layer}.input_layernorm.weight")
        for name, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
            add(f"{layer}.self_attn.{name}_proj.weight", heads * head, hidden)
            add(f"{layer}.self_attn.{name}_proj.bias", heads * head, size=0.02)
        add(f"{layer}.self_attn.o_proj.weight", hidden, hidden, size=share * usual)
        norm(f"{layer}.post_attention_layernorm.weight")
        add(f"{layer}.mlp.gate_proj.weight", model.intermediate, hidden)
        add(f"{layer}.mlp.up_proj.weight", model.intermediate, hidden)
        add(f"{layer}.mlp.down_proj.weight", hidden, model.intermediate, size=share * model.intermediate**-0.5)
    norm("model.norm.weight", last)
    add("lm_head.weight", model.words, hidden, size=last)
    return found


def make(folder: Path) -> Path:
    """Write the weights that belong to a folder's config.json, unless they are there; return the file."""
    path = folder / NAME
    if path.exists():
        return path
    parts = tensors(Model.read(folder, ranks=1))
    head = json.dumps({one.name: {"dtype": "BF16", "shape": one.shape, "data_offsets": [
        one.begin, one.begin + one.count * ELEMENT]} for one in parts}).encode()
    head += b" " * (-len(head) % 8)
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + parts[-1].begin + parts[-1].count * ELEMENT)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_write, [(fresh, 8 + len(head), one, parts[0]) for one in parts]))
    fresh.rename(path)
    return path


def _write(job: tuple[Path, int, Tensor, Tensor]) -> None:
    """Write one tensor to its place in the file."""
    path, data, one, embeddings = job
    with path.open("r+b") as file:
        file.seek(data + one.begin)
        for part in _numbers(one, embeddings):
            file.write(part)


def _numbers(one: Tensor, embeddings: Tensor) -> Iterator[bytes]:
    """Yield a tensor's bytes, row by row or many rows at once."""
    if one.exponent is None:
        yield struct.pack("<f", one.value)[ELEMENT:] * one.count
    elif one.name == "lm_head.weight":
        # Row n is the embedding of the word before it in a cycle of all: after a word, its follower stands out.
        rows = b"".join(_random(embeddings, one.exponent))
        row = one.shape[1] * ELEMENT
        order = list(range(one.shape[0]))
        random.Random("order").shuffle(order)
        before = {word: order[at - 1] for at, word in enumerate(order)}
        yield from (rows[before[word] * row : (before[word] + 1) * row] for word in range(one.shape[0]))
    else:
        yield from _random(one, one.exponent)


def _random(one: Tensor, exponent: int) -> Iterator[bytes]:
    """Yield numbers that depend on the tensor's name, of a size that does not.

    The upper byte of a bfloat16 is its sign and the exponent but for its last bit, which begins the lower byte.
    """
    source, left, step = random.Random(one.name), one.count, 1 << 22
    upper, lower = divmod(BIAS + exponent, 2)
    uppers = bytes(byte & 0x80 | upper for byte in range(256))
    lowers = bytes(lower << 7 | byte & 0x7F for byte in range(256))
    while left:
        count = min(step, left)
        part = bytearray(ELEMENT * count)
        part[0::2] = source.randbytes(count).translate(lowers)
        part[1::2] = source.randbytes(count).translate(uppers)
        yield bytes(part)
        left -= count
