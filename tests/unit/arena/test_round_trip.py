import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from tests.unit.arena.fake_kv import (
    BLOCK_TOKENS,
    carry_out,
    hashes_of,
    kv_block,
    rows_are_right,
    small_geometry,
    tokens_of,
)
from zerolayer.arena.layout import PAGE_FILLED
from zerolayer.arena.ledger import ArenaLedger
from zerolayer.arena.mapping import ArenaFile, LocalMover
from zerolayer.arena.reader import ArenaReader
from zerolayer.arena.writer import ArenaWriter

FINGERPRINT = hashlib.sha256(b"layout").digest()


class WriterDied(Exception):
    pass


class DyingMover(LocalMover):
    """Stops before store number `stores_left`, as a killed process does; may look at each."""

    def __init__(self, file: ArenaFile, stores_left: int) -> None:
        super().__init__(file)
        self.stores_left = stores_left
        self.look: Callable[[], object] = lambda: None

    def _spend(self) -> None:
        self.look()
        if self.stores_left == 0:
            raise WriterDied
        self.stores_left -= 1

    def put(self, offset: int, data: NDArray[Any]) -> None:
        # A copy is torn in the middle, too.
        half = data.nbytes // 2
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._spend()
        super().put(offset, flat[:half])
        self._spend()
        super().put(offset + half, flat[half:])

    def scatter(self, offset: int, row: NDArray[Any], index: NDArray[np.intp]) -> None:
        half = len(index) // 2
        self._spend()
        super().scatter(offset, row[:, :half], index[:half])
        self._spend()
        super().scatter(offset, row[:, half:], index[half:])

    def put_word(self, offset: int, value: int) -> None:
        self._spend()
        super().put_word(offset, value)

    def put_long(self, offset: int, value: int) -> None:
        self._spend()
        super().put_long(offset, value)

    def commit(self, offset: int, value: int, width: int) -> None:
        self._spend()
        super().commit(offset, value, width)


class Engine:
    """Ledger, writer and a reader over one file, with a death after a number of stores."""

    def __init__(
        self, folder: Path, stores: int = 1 << 60, page_count: int = 10, slot_count: int = 4
    ) -> None:
        geometry = small_geometry(page_count, slot_count)
        self.file = ArenaFile.create(folder / "a.kv", geometry, FINGERPRINT)
        self.mover = DyingMover(self.file, stores)
        self.writer = ArenaWriter(self.file, self.mover, lambda: 1)
        self.ledger = ArenaLedger(self.file.geometry, 3)
        self.reader = ArenaReader(folder / "a.kv", FINGERPRINT)
        self.promised: dict[str, set[int]] = {}

    def grow(self, name: str, variant: int, count: int, *, by_row: bool = True) -> None:
        tokens = tokens_of(variant)
        plan = self.ledger.advance(name, count, hashes_of(tokens, count), tokens)
        if plan is not None:
            self.promised.setdefault(name, set()).add(plan.watermark)
            carry_out(self.writer, plan, tokens, by_row=by_row)

    def end_step(self) -> None:
        for clear in self.ledger.take_clears():
            self.writer.clear(clear)
        self.ledger.begin_step()

    def check(self, name: str, variant: int) -> int:
        """Verified tokens of a stream, after comparing each with the truth."""
        tokens = tokens_of(variant)
        slot = self.reader.find(name)
        if slot is None:
            return 0
        verified = self.reader.verified_tokens(slot, tokens)
        assert slot.watermark in self.promised.get(name, set()) | {0}
        assert verified <= slot.watermark
        for block in range(-(-verified // BLOCK_TOKENS)):
            rows = min(BLOCK_TOKENS, verified - block * BLOCK_TOKENS)
            page = self.reader.page_view(int(slot.pages[block]))
            assert rows_are_right(page, tokens, block, rows)
        return verified

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def test_every_token_that_was_committed_is_found_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ledger.open("s", 3)
    for count in (5, 6, 7, 8, 9, 12, 13):
        engine.grow("s", 0, count)
        engine.end_step()
        assert engine.check("s", 0) == count
    slot = engine.reader.find("s")
    assert slot is not None
    assert slot.epoch == 3
    assert engine.reader.unchanged(slot)


def test_a_writer_without_a_row_layout_may_copy_whole_blocks_throughout(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ledger.open("s", 0)
    for count in (5, 6, 8, 9):
        engine.grow("s", 0, count, by_row=False)
        engine.end_step()
        assert engine.check("s", 0) == count


def test_other_tokens_are_verified_only_as_far_as_they_agree(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ledger.open("s", 0)
    engine.grow("s", 0, 12)
    slot = engine.reader.find("s")
    assert slot is not None
    tokens = tokens_of(0)
    assert engine.reader.verified_tokens(slot, tokens[:6]) == 6
    assert engine.reader.verified_tokens(slot, [*tokens[:5], 999, *tokens[6:]]) == 5
    assert engine.reader.verified_tokens(slot, [999]) == 0
    assert engine.reader.verified_tokens(slot, []) == 0


def test_of_two_slots_of_one_stream_the_newer_epoch_is_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for epoch in (1, 2):
        engine.ledger.open("s", epoch)
        engine.grow("s", 0, 6)
        engine.end_step()
    slot = engine.reader.find("s")
    assert slot is not None
    assert slot.epoch == 2


def test_a_finished_stream_stays_readable_and_a_dropped_one_does_not(tmp_path: Path) -> None:
    engine = Engine(tmp_path, page_count=4)
    engine.ledger.open("finished", 0)
    engine.grow("finished", 0, 6)
    engine.ledger.close("finished")
    engine.end_step()
    assert engine.check("finished", 0) == 6
    engine.ledger.open("dropped", 0)
    for count in (12, 20):
        engine.grow("dropped", 1, count)
        engine.end_step()
    assert engine.reader.find("dropped") is None


def test_a_page_given_to_another_stream_ends_what_a_reader_may_use(tmp_path: Path) -> None:
    engine = Engine(tmp_path, page_count=3)
    engine.ledger.open("old", 0)
    engine.grow("old", 0, 10)
    slot = engine.reader.find("old")
    assert slot is not None
    assert engine.reader.unchanged(slot)
    engine.ledger.close("old")
    engine.end_step()
    engine.ledger.open("new", 0)
    engine.ledger.advance("new", 4, [], tokens_of(3))
    plan = engine.ledger.advance("new", 8, [], tokens_of(3))
    assert plan is not None
    engine.writer.put_block(plan.writes[0], kv_block(tokens_of(3), 1, 4))
    assert not engine.reader.unchanged(slot), "the page is being rewritten"
    assert engine.reader.verified_tokens(slot, tokens_of(0)) < 10


def test_a_slot_that_is_being_rewritten_or_changes_meanwhile_is_not_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ledger.open("s", 0)
    engine.grow("s", 0, 6)
    slot = engine.reader.find("s")
    assert slot is not None
    at = engine.file.geometry.slot_offset(slot.slot) // 8
    engine.file.longs[at] += 1
    assert engine.reader.find("s") is None
    engine.file.longs[at] += 1

    class Shifting:
        """Longs of which the slot's generation is another one at each look."""

        generation = 2

        def __getitem__(self, index: int) -> int:
            if index == at:
                self.generation += 2
                return self.generation
            return engine.file.longs[index]

    engine.reader.file.longs = Shifting()  # type: ignore[assignment]
    assert engine.reader.find("s") is None


def test_a_page_that_says_it_holds_fewer_rows_than_committed_is_not_believed(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path)
    engine.ledger.open("s", 0)
    engine.grow("s", 0, 10)
    slot = engine.reader.find("s")
    assert slot is not None
    header = engine.file.geometry.page_header_offset(int(slot.pages[1]))
    engine.file.words[(header + PAGE_FILLED) // 4] = 3
    assert engine.reader.verified_tokens(slot, tokens_of(0)) == BLOCK_TOKENS


def test_a_commit_without_its_data_is_a_bug_that_stops_before_the_watermark(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path)
    engine.ledger.open("s", 0)
    plan = engine.ledger.advance("s", 4, [], tokens_of(0))
    assert plan is not None
    with pytest.raises(AssertionError, match="without its put"):
        engine.writer.commit(plan)
    assert engine.check("s", 0) == 0


@settings(max_examples=150, deadline=None)
@given(
    stores=st.integers(0, 300),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=25),
)
def test_a_writer_that_dies_between_any_two_stores_leaves_only_true_tokens(
    stores: int, steps: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), stores, page_count=6)
        counts: dict[int, int] = {}
        try:
            for variant, by in steps:
                if variant not in counts:
                    engine.ledger.open(f"s{variant}", 0)
                counts[variant] = min(24, counts.get(variant, 0) + by)
                engine.grow(f"s{variant}", variant, counts[variant])
                engine.check(f"s{variant}", variant)
                engine.end_step()
        except WriterDied:
            pass
        for variant in range(4):
            engine.check(f"s{variant}", variant)
        engine.close()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=4, max_size=16),
)
def test_a_reader_that_looks_between_any_two_stores_sees_only_true_tokens(
    steps: list[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), page_count=6, slot_count=2)
        engine.mover.look = lambda: [engine.check(f"s{variant}", variant) for variant in range(4)]
        counts: dict[int, int] = {}
        for variant, by in steps:
            name = f"s{variant}"
            if not engine.ledger.open(name, 0):
                gone = min(counts)
                engine.ledger.close(f"s{gone}")
                del counts[gone]
                engine.ledger.open(name, 0)
            counts[variant] = min(24, counts.get(variant, 0) + by)
            engine.grow(name, variant, counts[variant])
            engine.end_step()
        engine.close()


class RoundTripMachine(RuleBasedStateMachine):
    """Whatever `verified_tokens` says of any stream, living or gone, its pages truly hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine = Engine(Path(self.folder.name))
        self.variants: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.opened = 0

    @rule(variant=st.integers(0, 3))
    def open_stream(self, variant: int) -> None:
        name = f"s{self.opened}"
        self.opened += 1
        self.variants[name] = variant
        if self.engine.ledger.open(name, 0):
            self.computed[name] = 0

    @rule(data=st.data(), by=st.sampled_from([1, 1, 1, 2, 5, 9]), by_row=st.booleans())
    def grow(self, data: st.DataObject, by: int, by_row: bool) -> None:
        if self.computed:
            name = data.draw(st.sampled_from(sorted(self.computed)))
            self.computed[name] = min(24, self.computed[name] + by)
            self.engine.grow(name, self.variants[name], self.computed[name], by_row=by_row)
            watermark = self.engine.ledger.watermark(name)
            if watermark is not None:
                assert self.engine.check(name, self.variants[name]) == watermark

    @rule(data=st.data())
    def close_stream(self, data: st.DataObject) -> None:
        if self.computed:
            name = data.draw(st.sampled_from(sorted(self.computed)))
            del self.computed[name]
            self.engine.ledger.close(name)

    @rule()
    def end_step(self) -> None:
        self.engine.end_step()

    @invariant()
    def no_wrong_token_is_ever_verified(self) -> None:
        for name, variant in self.variants.items():
            self.engine.check(name, variant)

    def teardown(self) -> None:
        self.engine.close()
        self.folder.cleanup()


TestRoundTripMachine = RoundTripMachine.TestCase
TestRoundTripMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
