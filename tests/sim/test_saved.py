"""One flipped bit of suspended memory is found at exactly that byte, and none where none was flipped.

This shows that the comparisons of the tests would see a bit that was lost, and that `tests.programs.saved`, which the
negative controls on GPUs use, flips the bit that it says.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpususpend.control import ShimRefused
from tests.programs.client import Worker
from tests.programs.content import pattern
from tests.programs.saved import NotThere, Saved
from tests.programs.tool import Tool
from tests.sim.conftest import MIB, Pair
from tests.sim.places import Places
from tests.sim.shim_control import Group

pytestmark = [pytest.mark.machine(driver="sim"), pytest.mark.usefixtures("own_network")]
Start = Callable[..., Worker]
SIZES = (256, 4864, 3 * MIB, 5 * MIB + 4)  # of slabs, and of memory of their own


@pytest.mark.parametrize("depth", ["process", "pages"])
@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_bit_is_found_where_it_was_flipped(start_worker: Start, tool: Tool, depth: str, size: int) -> None:
    """Nothing is wrong without it, one word is with it, and nothing is once it is flipped back."""
    worker = start_worker(0)
    blocks = {one: worker.alloc(one) for one in SIZES}
    for one, address in blocks.items():
        worker.fill(address, one, one)
    at = size // 8 * 4 + 2
    for wrong in (False, True, False):
        tool.suspend(worker.pid, options=("--depth", depth)).expect(0)
        saved = Saved(worker.pid)
        there = saved.read(blocks[size], size)
        if wrong:
            assert there == pattern([size], size // 4).tobytes()
        if wrong or there != pattern([size], size // 4).tobytes():
            saved.flip(blocks[size] + at, 5)
        tool.resume(worker.pid).expect(0)
        found = worker.verify()
        if not wrong:
            assert found == []
            continue
        [one] = found
        assert (int(one["address"], 0), one["words_wrong"], one["first_at"]) == (blocks[size], 1, at - 2)
        assert int(one["found"], 0) ^ int(one["wanted"], 0) == 1 << 16 + 5


def test_shared_memory_is_wrong_for_both(pair: Pair, tool: Tool) -> None:
    """The owner has it in its arena, and whoever maps it sees it, too."""
    tool.suspend(*pair.pids).expect(0)
    saved = Saved(pair.first.pid)
    [block] = [one for one in saved.allocations if one.size >= 3 * MIB]
    saved.flip(block.address + 4096, 0)
    tool.resume(*pair.pids).expect(0)
    for worker in pair.both:
        [one] = worker.verify()
        assert (one["words_wrong"], one["first_at"]) == (1, 4096)


def test_memory_that_lies_in_two_pieces(start_worker: Start, tool: Tool) -> None:
    """Pieces end where a step of the arena (1 GiB) does, and a read goes across."""
    worker = start_worker(0)
    address, size = worker.alloc((1 << 30) + 4 * MIB), (1 << 30) + 4 * MIB
    worker.write(address + (1 << 30) - 8, [1, 2, 3, 4])
    tool.suspend(worker.pid, options=("--depth", "pages")).expect(0)
    saved = Saved(worker.pid)
    one = saved.allocation_at(address)
    assert len(one.pieces) == 2 and sum(piece.size for piece in one.pieces) == one.size >= size
    for word in range(4):
        assert saved.read(address + (1 << 30) - 8 + word * 4, 4)[0] == word + 1
    saved.flip(address + (1 << 30), 7)
    tool.resume(worker.pid).expect(0)
    assert worker.read(address + (1 << 30) - 8, 4) == [1, 2, 3 ^ 128, 4]


def test_memory_that_is_in_no_arena(pair: Pair, places: Places, tool: Tool) -> None:
    """A process that runs, one that is merely quiesced, and one whose memory is in a store have none."""
    with pytest.raises(ShimRefused, match="quiesced process"):
        Saved(pair.first.pid)
    with Group(pair.both) as group:
        group.quiesce()
        with pytest.raises(ShimRefused, match="need a size"):
            Saved(pair.first.pid)
        group.all("open")
    places.suspend(*pair.pids).expect(0)
    with pytest.raises(NotThere, match="not in an arena"):
        Saved(pair.first.pid)
    tool.resume(*pair.pids).expect(0)
    pair.check()
