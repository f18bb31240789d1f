"""Negative controls: one flipped bit in a weight, and one in a live block of the KV cache, must change an answer.

Bits are flipped in the arena of one rank while the server is suspended. Three cycles: a weight is flipped; it is
flipped back, and a picture of a layer's cache taken; with one request alone in flight, what has changed since in that
cache was written by this request, and a bit of that is flipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.gpu.vllm.model import Model
from tests.gpu.vllm.server import Answer, Refused, Server, Traffic
from tests.gpu.vllm.ways import Failed, WithShim
from tests.programs.saved import Allocation, Saved

PROMPT = "Once upon"  # shorter than a block, so that nothing of it is found in the prefix cache
PAGE = 4096
ELEMENT = 2
# Bits of a bfloat16's upper byte: the sign, the exponent's highest, and the one that makes a number 256 times as large.
SIGN, HIGHEST, LARGER = 7, 6, 2
PART = 64 << 20


class Controls:
    """The three cycles on a server; `record` gets what was flipped and what came of it.

    Where the weights are dummies, the highest bit of the exponent is flipped: they are so small that little else is
    seen. Otherwise a weight becomes 256 times as large, and a number of the cache gets the other sign.
    """

    def __init__(self, server: Server, way: WithShim, pids: list[int], model: Model, *, dummies: bool,
                 tokens: int) -> None:
        self._server, self._way, self._pids, self._model = server, way, pids, model
        self._bits = (HIGHEST, HIGHEST) if dummies else (LARGER, SIGN)  # of a weight, of a number of the cache
        self._tokens = tokens
        self._weight = self._cache = (0, 0)  # the process, and an address in it
        self._picture = b""

    def run(self, record: dict[str, Any]) -> None:
        """Do all; raises Failed where a flipped bit was not noticed, or one that was flipped back still was."""
        alone = self._server.ask()
        in_flight = self._server.ask(PROMPT, self._tokens)
        record["weight"] = one = self._cycle(self._flip_weight)
        one["answer"] = self._differs(alone, self._answer())
        record["weight_back"] = self._cycle(self._flip_back_and_look)
        record["kv_block"] = one = self._with_one_in_flight(in_flight)
        record["afterwards"] = after = {
            "same_alone": self._server.ask() == alone,
            "same_in_flight": self._server.ask(PROMPT, self._tokens) == in_flight,
        }
        noticed = [record[name]["answer"]["differs"] for name in ("weight", "kv_block")]
        if not all(noticed):
            raise Failed("negative controls: a flipped bit was not noticed")
        if not all(after.values()):
            raise Failed("negative controls: the server does not answer as it did before")

    def _cycle(self, act: Callable[[], dict[str, Any]],
               at_work: Callable[[], None] = lambda: None) -> dict[str, Any]:
        down = self._way.suspend(at_work=at_work)
        try:
            told = act()
        finally:
            up = self._way.resume()
        return {"suspend": down, "resume": up, **told}

    def _with_one_in_flight(self, wanted: Answer) -> dict[str, Any]:
        sent: list[Traffic] = []

        def act() -> dict[str, Any]:
            return {"in_flight_while_suspended": sent[0].under_way, **self._flip_live_block()}

        one = self._cycle(act, lambda: sent.append(Traffic(self._server, [PROMPT], self._tokens)))
        try:
            [answer], _ = sent[0].end()
        except Refused as refusal:
            return {**one, "answer": self._differs(wanted, refusal)}
        return {**one, "answer": self._differs(wanted, answer)}

    def _answer(self) -> Answer | Refused:
        try:
            return self._server.ask()
        except Refused as refusal:
            return refusal

    @staticmethod
    def _differs(wanted: Answer, found: Answer | Refused) -> dict[str, Any]:
        if isinstance(found, Refused):
            return {"differs": True, "refused": str(found)}
        pairs = list(zip(zip(wanted.tokens, wanted.logprobs, strict=True),
                         zip(found.tokens, found.logprobs, strict=True), strict=True))
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        return {"differs": found != wanted, "first_token_that_differs": first,
                "tokens_that_differ": sum(one[0] != other[0] for one, other in pairs), "tokens": len(pairs)}

    # While all is suspended

    def _flip_weight(self) -> dict[str, Any]:
        saved = self._rank()
        places = self._model.weights_among(one.size for one in saved.allocations)
        one = saved.allocations[places[len(places) // 2]]
        address = next(self._numbers(saved, one.address + one.size // 2 // PAGE * PAGE))
        self._weight = saved.pid, address
        return self._flip(saved, address, one, self._bits[0])

    def _flip_back_and_look(self) -> dict[str, Any]:
        pid, address = self._weight
        saved = Saved(pid)
        cache = saved.allocations[self._model.caches_among(one.size for one in saved.allocations)[0]]
        self._cache = pid, cache.address
        self._picture = saved.read(cache.address, cache.size)
        return self._flip(saved, address, saved.allocation_at(address), self._bits[0])

    def _flip_live_block(self) -> dict[str, Any]:
        pid, address = self._cache
        saved = Saved(pid)
        cache = saved.allocation_at(address)
        if cache.address != address or cache.size != len(self._picture):
            raise Failed("negative controls: the KV cache is another one than in the cycle before")
        pages = changed_pages(self._picture, saved.read(cache.address, cache.size))
        if not pages:
            raise Failed("negative controls: the request in flight has written nothing into the KV cache")
        # Keys come first in the memory of a layer and values last. A key has a say in how much a token counts, a value
        # in what it says, which shows more.
        before = self._picture[pages[-1] : pages[-1] + PAGE]
        here = next(place for place in self._numbers(saved, address + pages[-1])
                    if saved.read(place, ELEMENT) != before[place - address - pages[-1] :][:ELEMENT])
        return {"changed_pages": len(pages), **self._flip(saved, here, cache, self._bits[1])}

    @staticmethod
    def _flip(saved: Saved, address: int, one: Allocation, bit: int) -> dict[str, Any]:
        before = saved.read(address, ELEMENT).hex()
        saved.flip(address + ELEMENT - 1, bit)
        return {"pid": saved.pid, "address": hex(address), "allocation": hex(one.address), "bytes": one.size,
                "before": before, "after": saved.read(address, ELEMENT).hex()}

    def _rank(self) -> Saved:
        """Return the first process that has the weights of a rank."""
        for pid in self._pids:
            saved = Saved(pid)
            if saved.allocations:
                return saved
        raise Failed(f"negative controls: none of {self._pids} has memory in an arena")

    @staticmethod
    def _numbers(saved: Saved, address: int) -> Iterator[int]:
        """Yield where in a page the numbers are that are not 0."""
        data = saved.read(address, PAGE)
        yield from (address + at for at in range(0, PAGE, ELEMENT) if data[at : at + ELEMENT] != bytes(ELEMENT))


def changed_pages(before: bytes, after: bytes) -> list[int]:
    """Return where the pages begin that differ."""
    found = []
    for part in range(0, len(after), PART):
        if before[part : part + PART] == after[part : part + PART]:
            continue
        found += [at for at in range(part, min(part + PART, len(after)), PAGE)
                  if before[at : at + PAGE] != after[at : at + PAGE]]
    return found
