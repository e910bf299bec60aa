import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.arena.fake_kv import BLOCK_TOKENS, hashes_of, small_geometry, tokens_of
from zerolayer.arena.layout import FLAG_DROPPED, FLAG_FINISHED
from zerolayer.arena.ledger import ArenaLedger
from zerolayer.arena.plan import SavePlan, WriteKind


def advance(ledger: ArenaLedger, stream: str, count: int, variant: int = 0) -> SavePlan | None:
    tokens = tokens_of(variant)
    return ledger.advance(stream, count, hashes_of(tokens, count), tokens)


def test_a_caught_up_stream_that_grew_by_one_token_writes_one_row() -> None:
    ledger = ArenaLedger(small_geometry(), 4)
    assert ledger.open("s", 0)
    advance(ledger, "s", 6)
    plan = advance(ledger, "s", 7)
    assert plan is not None
    (write,) = plan.writes
    assert (write.kind, write.block_index, write.first_row, write.row_count) == (
        WriteKind.ROWS,
        1,
        2,
        1,
    )
    assert plan.pages == ()
    assert plan.watermark == 7
    assert write.token_ids == (tokens_of(0)[6],)


def test_a_row_that_begins_a_block_brings_a_fresh_page_and_its_list_entry() -> None:
    ledger = ArenaLedger(small_geometry(), 4)
    ledger.open("s", 0)
    advance(ledger, "s", BLOCK_TOKENS)
    plan = advance(ledger, "s", BLOCK_TOKENS + 1)
    assert plan is not None
    assert plan.first_page == 1
    assert plan.pages == ((plan.writes[0].page, plan.writes[0].page_generation),)


def test_a_prefill_writes_whole_blocks_and_its_unfinished_tail() -> None:
    ledger = ArenaLedger(small_geometry(), 4)
    ledger.open("s", 0)
    plan = advance(ledger, "s", 10)
    assert plan is not None
    assert [write.kind for write in plan.writes] == [WriteKind.BLOCK] * 3
    assert [write.row_count for write in plan.writes] == [4, 4, 2]
    assert [bool(write.block_hash) for write in plan.writes] == [True, True, False]
    assert plan.watermark == 10


def test_one_step_writes_no_more_blocks_than_its_budget_over_all_streams() -> None:
    ledger = ArenaLedger(small_geometry(), 2)
    ledger.open("a", 0)
    ledger.open("b", 0)
    first = advance(ledger, "a", 16, variant=0)
    assert first is not None
    assert first.watermark == 2 * BLOCK_TOKENS
    assert advance(ledger, "a", 16) is None
    ledger.begin_step()
    rest = advance(ledger, "a", 16)
    assert rest is not None
    assert rest.watermark == 16


def test_blocks_that_a_step_computes_are_committed_by_that_step() -> None:
    ledger = ArenaLedger(small_geometry(), 1)
    tokens = tokens_of(0)
    ledger.open("s", 0)
    ledger.begin_step(3)
    plan = ledger.advance("s", 16, hashes_of(tokens, 16), tokens)
    assert plan is not None
    assert plan.watermark == 16


def test_a_shared_prefix_is_stored_once_and_costs_no_budget() -> None:
    ledger = ArenaLedger(small_geometry(), 4)
    ledger.open("a", 0)
    ledger.open("b", 0)
    first = advance(ledger, "a", 8, variant=0)
    second = advance(ledger, "b", 8, variant=1)
    assert first is not None
    assert second is not None
    assert second.writes == ()
    assert second.pages == first.pages
    assert ledger.counters.pages_shared == 2
    assert ledger.referenced_pages == 2


def test_a_finished_prefix_stays_cold_and_is_shared_again() -> None:
    ledger = ArenaLedger(small_geometry(), 4)
    ledger.open("a", 0)
    advance(ledger, "a", 10)
    ledger.close("a")
    assert ledger.cold_pages == 2
    assert [clear.flags for clear in ledger.take_clears()] == [FLAG_FINISHED]
    ledger.begin_step()
    ledger.open("b", 0)
    plan = advance(ledger, "b", 10)
    assert plan is not None
    assert len(plan.writes) == 1
    assert ledger.cold_pages == 0


def test_without_hashes_nothing_is_shared_and_nothing_stays() -> None:
    ledger = ArenaLedger(small_geometry(), 8)
    for stream in ("a", "b"):
        ledger.open(stream, 0)
        plan = ledger.advance(stream, 8, [], tokens_of(0))
        assert plan is not None
        assert len(plan.writes) == 2
        ledger.close(stream)
    assert ledger.free_pages == ledger.geometry.page_count


def test_when_full_the_longest_stream_loses_its_snapshot_for_good() -> None:
    ledger = ArenaLedger(small_geometry(page_count=4), 16)
    ledger.open("long", 0)
    ledger.open("short", 0)
    ledger.advance("long", 12, [], tokens_of(0))
    ledger.advance("short", 4, [], tokens_of(1))
    assert ledger.free_pages == 0
    assert ledger.advance("short", 5, [], tokens_of(1)) is not None
    assert ledger.watermark("long") is None
    assert [clear.flags for clear in ledger.take_clears()] == [FLAG_DROPPED]
    assert ledger.advance("long", 13, [], tokens_of(0)) is None


def test_a_stream_longer_than_the_arena_drops_itself_and_leaves_no_unwritten_hash() -> None:
    ledger = ArenaLedger(small_geometry(page_count=2), 16)
    ledger.open("s", 0)
    assert advance(ledger, "s", 16) is None
    assert ledger.free_pages == 2
    ledger.begin_step()
    ledger.open("t", 0)
    plan = advance(ledger, "t", 8)
    assert plan is not None
    assert len(plan.writes) == 2


def test_slots_of_finished_streams_are_taken_before_a_stream_is_refused() -> None:
    ledger = ArenaLedger(small_geometry(slot_count=1), 4)
    assert ledger.open("a", 0)
    advance(ledger, "a", 4)
    assert not ledger.open("b", 0)
    ledger.close("a")
    assert ledger.open("b", 0)
    assert not ledger.open("c", 0)
    assert ledger.counters.opens_refused == 2
    assert advance(ledger, "c", 4) is None


def test_a_newer_epoch_takes_another_slot_generation() -> None:
    ledger = ArenaLedger(small_geometry(), 4)
    ledger.open("s", 0)
    first = advance(ledger, "s", 4)
    assert ledger.open("s", 1)
    ledger.begin_step()
    second = advance(ledger, "s", 4)
    assert first is not None
    assert second is not None
    assert second.epoch == 1
    assert (first.slot, first.slot_generation) != (second.slot, second.slot_generation)


def test_a_late_request_of_an_older_epoch_changes_nothing() -> None:
    ledger = ArenaLedger(small_geometry(), 4)
    ledger.open("s", 2)
    advance(ledger, "s", 4)
    assert not ledger.open("s", 1)
    ledger.close("s", epoch=1)
    assert ledger.advance("s", 8, [], tokens_of(0), epoch=1) is None
    assert ledger.watermark("s") == 4
    assert ledger.advance("s", 5, [], tokens_of(0), epoch=2) is not None
    ledger.close("s", epoch=2)
    assert ledger.watermark("s") is None


def test_past_the_longest_page_list_nothing_more_is_saved() -> None:
    ledger = ArenaLedger(small_geometry(), 16)
    ledger.open("s", 0)
    tokens = list(range(1, 40))
    plan = ledger.advance("s", 30, [], tokens)
    assert plan is not None
    assert plan.watermark == 24
    assert ledger.advance("s", 31, [], tokens) is None


def test_an_evicted_page_is_no_longer_shared_under_its_old_hash() -> None:
    ledger = ArenaLedger(small_geometry(page_count=2), 16)
    ledger.open("old", 0)
    advance(ledger, "old", 8)
    ledger.close("old")
    ledger.open("other", 0)
    ledger.advance("other", 8, [], tokens_of(3))
    assert ledger.counters.pages_evicted == 2
    ledger.close("other")
    ledger.open("again", 0)
    plan = advance(ledger, "again", 8)
    assert plan is not None
    assert len(plan.writes) == 2


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a model of what each page holds after all plans so far."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ArenaLedger(small_geometry(page_count=7), 3)
        self.live: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.lists: dict[str, list[tuple[int, int]]] = {}
        self.pages: dict[int, tuple[int, list[tuple[int, ...]]]] = {}
        self.opened = 0

    @rule(variant=st.integers(0, 3))
    def open_stream(self, variant: int) -> None:
        name = f"s{self.opened}"
        self.opened += 1
        if self.ledger.open(name, 0):
            self.live[name] = variant
            self.computed[name] = 0
            self.lists[name] = []

    @rule(
        data=st.data(),
        by=st.sampled_from([1, 1, 2, 4, 8, 12]),
        hashing=st.sampled_from([True, True, False]),
        ends_step=st.booleans(),
    )
    def grow(self, data: st.DataObject, by: int, hashing: bool, ends_step: bool) -> None:
        if not self.live:
            self.open_stream(by % 4)
        name = data.draw(st.sampled_from(sorted(self.live)))
        tokens = tokens_of(self.live[name])
        count = min(24, self.computed[name] + by)
        self.computed[name] = count
        hashes = hashes_of(tokens, count) if hashing else []
        plan = self.ledger.advance(name, count, hashes, tokens)
        if plan is not None:
            self.carry_out(name, plan, tokens)
        if ends_step:
            self.next_step()

    @rule(data=st.data())
    def close_stream(self, data: st.DataObject) -> None:
        if not self.live:
            return
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.ledger.close(name)
        self.forget(name)

    @rule()
    def next_step(self) -> None:
        self.ledger.begin_step()
        self.ledger.take_clears()

    def carry_out(self, name: str, plan: SavePlan, tokens: list[int]) -> None:
        self.forget_dropped()
        mine = self.lists[name]
        assert plan.first_page <= len(mine)
        mine[plan.first_page :] = plan.pages or mine[plan.first_page :]
        for write in plan.writes:
            holders = [n for n, pages in self.lists.items() if write.page in dict(pages)]
            assert holders == [name], "a page with another referent is never rewritten"
            if write.first_row == 0:
                old = self.pages.get(write.page, (0, []))[0]
                assert write.page_generation > old
                self.pages[write.page] = (write.page_generation, [])
            generation, rows = self.pages[write.page]
            assert generation == write.page_generation
            assert len(rows) == write.first_row, "rows follow each other without a gap"
            at = write.block_index * BLOCK_TOKENS + write.first_row
            rows += [tuple(tokens[: at + i + 1]) for i in range(write.row_count)]
        assert plan.watermark <= self.computed[name]

    def forget_dropped(self) -> None:
        for name in list(self.live):
            if self.ledger.watermark(name) is None:
                self.ledger.close(name)
                self.forget(name)

    def forget(self, name: str) -> None:
        for table in (self.live, self.computed, self.lists):
            table.pop(name, None)

    @invariant()
    def every_page_is_free_cold_or_referenced(self) -> None:
        ledger = self.ledger
        total = ledger.free_pages + ledger.cold_pages + ledger.referenced_pages
        assert total == ledger.geometry.page_count

    @invariant()
    def all_below_a_watermark_was_written_by_these_tokens(self) -> None:
        self.forget_dropped()
        for name, variant in self.live.items():
            tokens = tokens_of(variant)
            watermark = self.ledger.watermark(name)
            assert watermark is not None
            for position in range(watermark):
                block, row = divmod(position, BLOCK_TOKENS)
                page, generation = self.lists[name][block]
                held_generation, rows = self.pages[page]
                assert held_generation == generation
                assert rows[row] == tuple(tokens[: position + 1])


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
