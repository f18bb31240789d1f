"""Any sequence of operations, checked against a model that holds contents in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from chunkstore import Checkpoint, How, Save, Store, errors, fsck, gc, report, roots
from chunkstore.cache import collect as collect_cache
from chunkstore.roots import State
from chunkstore.save import remove
from chunkstore.transfer import copy_checkpoint, prefetch
from tests.store.conftest import SHM
from tests.store.test_gc import age
from tests.store.tools import SIZE, chunk_file, content, load, memory, save

NUMBERS = st.lists(st.integers(0, 5), max_size=5)


class Model(RuleBasedStateMachine):
    """A store with a cache, a mirror to repair from, and what each checkpoint must give back."""

    checkpoints = Bundle("checkpoints")

    def __init__(self) -> None:
        super().__init__()
        where = SHM if os.access(SHM, os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix="gpushare-test-store-", dir=where))
        self.store = Store.create(self.path / "store", chunk_size_bytes=SIZE, cache=self.path / "cache")
        self.mirror = Store.create(self.path / "mirror", chunk_size_bytes=SIZE)
        for number in range(1, 6):
            self.mirror.put(memory(content(number)))
        self.whole: dict[str, list[int]] = {}
        self.moved: set[str] = set()
        self.bad: set[int] = set()
        self.saved = 0

    def teardown(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path)

    def there(self) -> dict[str, list[int]]:
        """Return the checkpoints that lie where the store knows them."""
        return {name: numbers for name, numbers in self.whole.items() if name not in self.moved}

    def needed(self) -> set[int]:
        """Return the numbers of the contents that checkpoints need."""
        return {number for numbers in self.whole.values() for number in numbers if number}

    @rule(target=checkpoints, numbers=NUMBERS)
    def save(self, numbers: list[int]) -> str:
        """Save, which repairs every damaged chunk that it meets."""
        self.saved += 1
        name = f"ckpt{self.saved}"
        save(Store.open(self.store.path, cache=self.path / "cache"), self.path / name, numbers)
        self.whole[name] = numbers
        self.bad -= set(numbers)
        return name

    @rule(numbers=NUMBERS)
    def give_up(self, numbers: list[int]) -> None:
        """Begin a save and abort it."""
        with Save.begin(self.store, self.path / "given-up") as begun:
            for number in numbers:
                assert begun.store.put(memory(content(number))).chunk.size_bytes == SIZE
        self.bad -= set(numbers)

    @rule(name=consumes(checkpoints))
    def remove(self, name: str) -> None:
        """Remove a checkpoint, or forget one that is gone."""
        if name in self.moved:
            roots.forget(self.store, self.path / name)
            shutil.rmtree(self.path / f"{name}-moved")
            self.moved.remove(name)
        else:
            remove(self.store, self.path / name)
        del self.whole[name]

    @rule(name=checkpoints)
    def move(self, name: str) -> None:
        """Move a checkpoint's directory away, or back."""
        here, there = self.path / name, self.path / f"{name}-moved"
        if name in self.moved:
            there.rename(here)
            self.moved.remove(name)
        else:
            here.rename(there)
            self.moved.add(name)

    @rule(old=st.booleans())
    def collect(self, old: bool) -> None:
        """Collect, with everything older than the grace or not."""
        if old:
            age(Path(self.store.path))
        if self.moved:
            before = list(self.store.chunks.entries())
            try:
                gc.collect(self.store)
            except errors.UnreachableRoots:
                assert sorted(map(str, self.store.chunks.entries())) == sorted(map(str, before))
                return
            raise AssertionError("collected though a checkpoint could not be read")
        gc.collect(self.store)
        if old:
            chunks = {self.chunk(number).hash for number in self.needed()}
            assert {entry.hash for entry in self.store.chunks.entries()} <= chunks
            self.bad &= self.needed()

    def chunk(self, number: int):  # type: ignore[no-untyped-def]
        """Return the chunk that a content is."""
        return self.mirror.put(memory(content(number))).chunk

    @rule(number=st.integers(1, 5), how=st.sampled_from(["lost", "changed", "cut"]))
    def damage(self, number: int, how: str) -> None:
        """Damage a chunk that is there; a lost one that nobody needs is no damage."""
        path = chunk_file(self.store, self.chunk(number))
        if not path.exists() or number in self.bad:
            return
        if how == "lost":
            path.unlink()
        else:
            path.write_bytes(content(9, SIZE if how == "changed" else 100))
        if how != "lost" or number in self.needed():
            self.bad.add(number)
        # Damage by hand does not change what the store holds for certain.
        (Path(self.store.path) / "fsck.json").unlink(missing_ok=True)

    @rule(repair=st.booleans())
    def check(self, repair: bool) -> None:
        """Check: exactly what was damaged is found."""
        checked = fsck.check(self.store, repair_from=self.mirror if repair else None, threads=1)
        reachable = {number for numbers in self.there().values() for number in numbers}
        lost = {number for number in self.bad if not chunk_file(self.store, self.chunk(number)).exists()}
        expected = self.bad if repair else self.bad - (lost - reachable)
        found = {bad.hash for bad in checked.bad}
        assert {self.chunk(number).hash for number in expected if number in reachable} <= found
        assert found <= {self.chunk(number).hash for number in self.bad}
        assert len(checked.unreachable) == len(self.moved)
        if repair:
            assert all(bad.repaired for bad in checked.bad)
            self.bad = {number for number in self.bad if self.chunk(number).hash not in found}

    @rule(size=st.integers(0, 6))
    def collect_cache(self, size: int) -> None:
        """Make the cache smaller."""
        assert self.store.cache is not None
        assert collect_cache(self.store.cache, size * SIZE).kept_bytes <= size * SIZE

    @precondition(lambda self: not self.bad)
    @rule(name=checkpoints)
    def copy_and_prefetch(self, name: str) -> None:
        """Copy a checkpoint to the mirror, and bring it to the cache."""
        if name in self.moved:
            return
        checkpoint = Checkpoint.open(self.path / name)
        prefetch(self.store, checkpoint, threads=1)
        copied = copy_checkpoint(self.store, checkpoint, self.mirror, self.path / "copy", threads=1)
        assert copied.new_bytes == 0
        assert load(self.mirror, self.path / "copy") == [content(number) for number in self.whole[name]]
        remove(self.mirror, self.path / "copy")

    @invariant()
    def every_checkpoint_loads_or_says_what_is_bad(self) -> None:
        """Through the cache, a bad chunk may still come; a wrong byte never does."""
        for name, numbers in self.there().items():
            bad = self.bad & set(numbers)
            assert self.loads(Store.open(self.store.path), name) is not bool(bad)
            if not bad:
                assert self.loads(self.store, name)

    def loads(self, store: Store, name: str) -> bool:
        """Tell whether a checkpoint loads; what comes is right."""
        try:
            loaded = load(store, self.path / name)
        except errors.Damaged:
            return False
        assert loaded == [content(number) for number in self.whole[name]]
        return True

    @invariant()
    def reports_agree(self) -> None:
        """What is listed is what was saved."""
        listed = {Path(item.path).name: item for item in report.list_checkpoints(self.store)}
        assert listed.keys() == self.whole.keys()
        for name, item in listed.items():
            assert item.state is (State.UNREACHABLE if name in self.moved else State.COMPLETE)
        assert not (self.path / "given-up").exists()
        used = report.usage(self.store)
        for item in used.checkpoints:
            stored = len(set(self.whole[Path(item.path).name]) - {0}) * SIZE
            assert item.unique_bytes + item.shared_bytes == stored

    @rule(number=st.integers(1, 5))
    def put(self, number: int) -> None:
        """Put a chunk for nobody."""
        how = Store.open(self.store.path).put(memory(content(number))).how
        assert how is not How.ZERO
        self.bad.discard(number)


Model.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes: every step is many files
)
TestModel = Model.TestCase
