"""What a model's configuration says of the GPU memory of a server's ranks: which allocations are weights, which the KV
cache.

PyTorch gives a tensor of 10 MiB or more memory of its own, in steps of 2 MiB; so such a weight is an allocation of a
size that follows from the configuration, one in each layer. The KV cache is one tensor a layer, all of one size, and
nothing is larger.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OF_ITS_OWN = 10 << 20
STEP = 2 << 20
ONCE = ("embed_tokens", "lm_head")  # the others are in every layer
ELEMENT = 2  # bytes of a bfloat16


class NotFound(RuntimeError):
    """No allocation is as the configuration says; the message names the sizes that are there."""


@dataclass(frozen=True)
class Model:
    """The shapes of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    words: int
    ranks: int

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Model:
        """Read config.json, for a server with so many ranks."""
        config = json.loads((folder / "config.json").read_text())
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "vocab_size")
        return cls(*(int(config[name]) for name in names), ranks)

    def shards(self) -> dict[str, int]:
        """Return the bytes that each large matrix takes on one rank."""
        head = self.hidden // self.heads
        elements = {
            "gate_up_proj": 2 * self.intermediate * self.hidden, "down_proj": self.intermediate * self.hidden,
            "qkv_proj": (self.heads + 2 * self.kv_heads) * head * self.hidden,
            "o_proj": self.heads * head * self.hidden,
            "embed_tokens": self.words * self.hidden, "lm_head": self.words * self.hidden,
        }  # fmt: skip
        return {name: count * ELEMENT // self.ranks for name, count in elements.items()}

    def weight_bytes(self) -> int:
        """Return the bytes of the large matrices on one rank, those that share their memory with others included."""
        return sum(size * (1 if name in ONCE else self.layers) for name, size in self.shards().items())

    def weights(self) -> dict[int, int]:
        """Return how many allocations of a size, in bytes, hold one weight of a rank and nothing else."""
        found: Counter[int] = Counter()
        for name, size in self.shards().items():
            if size >= OF_ITS_OWN:
                found[-(-size // STEP) * STEP] += 1 if name in ONCE else self.layers
        return dict(found) or {self.down_size(): self.layers}

    def own_bytes(self) -> int:
        """Return the bytes of these allocations."""
        return sum(size * count for size, count in self.weights().items())

    def down_size(self) -> int:
        """Return the size of the allocations that hold a down projection each: its result is added to every token."""
        return -(-self.shards()["down_proj"] // STEP) * STEP

    def weights_among(self, sizes: Iterable[int]) -> list[int]:
        """Return the places in `sizes` of allocations that are down projections; raises NotFound."""
        listed = list(sizes)
        found = [at for at, size in enumerate(listed) if size == self.down_size()]
        if len(found) < self.layers:
            raise NotFound(f"{self.layers} allocations of {self.down_size()} bytes were to be there; sizes and counts: "
                           f"{sorted(Counter(listed).items())}")
        return found

    def caches_among(self, sizes: Iterable[int]) -> list[int]:
        """Return the places in `sizes` of the allocations that are the KV cache; raises NotFound."""
        listed = list(sizes)
        found = [at for at, size in enumerate(listed) if size == max(listed, default=0)]
        if len(found) != self.layers or listed[found[0]] <= self.down_size():
            raise NotFound(f"{self.layers} largest allocations of one size were to be there; sizes and counts: "
                           f"{sorted(Counter(listed).items())}")
        return found
