"""Laws of the prefix index, against a model that remembers everything."""

from bisect import bisect_right
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from zerolayer.dispatch.prefix_index import (
    PIECES_PER_DOUBLING,
    PIECES_PER_ENGINE_MAX,
    PrefixIndex,
    PrefixKeys,
)

BLOCK = 4
ENGINES = 3
PROMPTS = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=4),  # families share their beginnings
    st.integers(0, 40 * BLOCK),
    st.sampled_from([None, "salt"]),
)


def prompt_of(family: Sequence[int], tokens: int) -> list[int]:
    """`family` says what each quarter of it is made of."""
    return [1000 * family[min(place // (10 * BLOCK), len(family) - 1)] for place in range(tokens)]


class Memory:
    """Everything that an engine ever computed, whole pieces only."""

    def __init__(self) -> None:
        self.prefixes: set[tuple[str | None, tuple[int, ...]]] = set()

    def held(self, scope: str | None, tokens: list[int], ends: list[int]) -> int:
        held = 0
        for end in ends:
            if (scope, tuple(tokens[:end])) not in self.prefixes:
                break
            held = end
        return min(held, max(0, len(tokens) - 1) // BLOCK * BLOCK)


class IndexLaws(RuleBasedStateMachine):
    """Engines compute prompts, lose some, and come anew."""

    @initialize(capacities=st.tuples(*[st.sampled_from([0, 7, 60, 100_000])] * ENGINES))
    def begin(self, capacities: tuple[int, ...]) -> None:
        self.capacities = capacities
        self.index = PrefixIndex(BLOCK)
        self.memories = [Memory() for _ in capacities]
        self.seen: list[tuple[str | None, list[int], PrefixKeys]] = []
        for engine in range(ENGINES):
            self.index.emptied(engine, capacities[engine] * BLOCK)

    @rule(engine=st.integers(0, ENGINES - 1), prompt=PROMPTS)
    def computes(self, engine: int, prompt: tuple[list[int], int, str | None]) -> None:
        family, count, scope = prompt
        tokens = prompt_of(family, count)
        keys = self.index.keys(tokens, scope)
        self.index.note(engine, keys)
        self.seen.append((scope, tokens, keys))
        for end in ends_of(keys):
            self.memories[engine].prefixes.add((scope, tuple(tokens[:end])))

    @rule(engine=st.integers(0, ENGINES - 1), data=st.data())
    def had_less(self, engine: int, data: st.DataObject) -> None:
        if not self.seen:
            return
        _, tokens, keys = data.draw(st.sampled_from(self.seen))
        had = data.draw(st.integers(0, len(tokens)))
        self.index.missed(engine, keys, had)
        assert self.index.held_tokens(keys).get(engine, 0) <= had
        self.memories[engine] = self._what_is_left(engine)

    @rule(engine=st.integers(0, ENGINES - 1))
    def comes_anew(self, engine: int) -> None:
        self.index.emptied(engine, self.capacities[engine] * BLOCK)
        self.memories[engine] = Memory()
        assert self.index.pieces_of(engine) == 0
        assert all(engine not in self.index.held_tokens(keys) for *_, keys in self.seen)

    @invariant()
    def it_never_says_more_than_was_computed_nor_more_than_all_but_one_token(self) -> None:
        for scope, tokens, keys in self.seen:
            held = self.index.held_tokens(keys)
            assert self.index.find(tokens, scope)[0] == held
            for engine, memory in enumerate(self.memories):
                true = memory.held(scope, tokens, ends_of(keys))
                assert held.get(engine, 0) <= min(true, len(tokens) - 1 if tokens else 0)
                if self.capacities[engine] == 100_000:
                    assert held.get(engine, 0) == true

    @invariant()
    def what_is_held_is_closed_under_prefixes(self) -> None:
        for _, tokens, keys in self.seen:
            held = self.index.held_tokens(keys)
            for shorter in range(0, len(tokens), 3 * BLOCK):
                part = self.index.keys(tokens[: shorter + 1], self._scope_of(keys))
                for engine, of_part in self.index.held_tokens(part).items():
                    assert of_part <= shorter
                    assert min(held.get(engine, 0), ends_of(part)[-1]) >= of_part

    @invariant()
    def memory_is_bounded_by_the_engine_s_blocks(self) -> None:
        for engine in range(ENGINES):
            assert self.index.pieces_of(engine) <= self.capacities[engine]

    def _scope_of(self, wanted: PrefixKeys) -> str | None:
        return next(scope for scope, _, keys in self.seen if keys is wanted)

    def _what_is_left(self, engine: int) -> Memory:
        left = Memory()
        for scope, tokens, keys in self.seen:
            held = self.index._holders.leading(keys.keys).get(engine, 0)
            for end in ends_of(keys)[:held]:
                left.prefixes.add((scope, tuple(tokens[:end])))
        return left


def ends_of(keys: PrefixKeys) -> list[int]:
    """Tokens up to the end of each whole piece: one block each up to 2 * PIECES_PER_DOUBLING."""
    ends, at = [], 0
    for _ in keys.keys:
        at += BLOCK * max(1, 2 ** ((at // BLOCK // PIECES_PER_DOUBLING).bit_length() - 1))
        ends.append(at)
    return ends


TestIndexLaws = IndexLaws.TestCase
TestIndexLaws.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


@pytest.fixture
def index() -> PrefixIndex:
    made = PrefixIndex(16)
    for engine in (0, 5):
        made.emptied(engine, 1_000_000)
    return made


def test_a_hit_is_at_most_a_sixteenth_too_short_and_long_prompts_have_few_keys(
    index: PrefixIndex,
) -> None:
    shared = list(range(100_000))
    index.note(5, index.keys(shared, None))
    for count in range(17, 100_000, 3_001):
        held = index.held_tokens(index.keys([*shared[:count], -7], None)).get(5, 0)
        assert count * (1 - 1 / PIECES_PER_DOUBLING) - 16 <= held <= count
    assert len(index.keys(shared[:4_000], None).keys) == 79


def test_each_engine_is_known_by_how_far_it_holds_a_prompt(index: PrefixIndex) -> None:
    index.note(0, index.keys([1] * 32, None))
    index.note(5, index.keys([1] * 64, None))
    assert index.held_tokens(index.keys([1] * 100, None)) == {0: 32, 5: 64}
    assert index.held_tokens(index.keys([1] * 64, None)) == {0: 32, 5: 48}  # not its last token


def test_another_salt_or_adapter_shares_nothing(index: PrefixIndex) -> None:
    index.note(0, index.keys([1] * 32, (None, None)))
    for scope in (("salt", None), (None, "adapter")):
        assert index.held_tokens(index.keys([1] * 33, scope)) == {}


def test_a_longer_sequence_goes_on_from_the_keys_of_its_beginning(index: PrefixIndex) -> None:
    tokens = list(range(3_000))
    beginning = index.keys(tokens[:1_000], "scope")
    assert index.keys(tokens, "scope", beginning) == index.keys(tokens, "scope")
    assert index.keys(tokens[:1_003], "scope", beginning).keys == beginning.keys


def test_a_prompt_is_hashed_only_as_far_as_somebody_holds_it(index: PrefixIndex) -> None:
    tokens = list(range(1_000))
    index.note(5, index.keys(tokens[:320], "scope"))
    held, keys = index.find(tokens, "scope")
    whole = index.keys(tokens, "scope")
    assert held == index.held_tokens(whole) == {5: 320}
    assert keys.keys == whole.keys[: 320 // 16 + 1]
    assert index.keys(tokens, "scope", keys) == whole
    index.emptied(5)
    assert index.find(tokens, "scope", keys) == ({}, keys)  # what was made once is kept


def test_the_least_recently_used_prompt_goes_first_and_its_end_before_its_beginning() -> None:
    index = PrefixIndex(1)
    index.emptied(0, 10)
    old, new = index.keys([1] * 6, None), index.keys([2] * 6, None)
    index.note(0, old)
    index.note(0, new)
    assert index.held_tokens(index.keys([1] * 7, None)) == {0: 4}
    assert index.held_tokens(index.keys([2] * 7, None)) == {0: 6}


def test_what_was_not_used_since_a_lost_prefix_is_lost_too(index: PrefixIndex) -> None:
    older, lost, newer = (index.keys([fill] * 64, None) for fill in (1, 2, 3))
    for keys in (older, lost, newer):
        index.note(0, keys)
    index.missed(0, lost, 0)
    held = [index.held_tokens(keys).get(0, 0) for keys in (older, lost, newer)]
    assert held == [0, 0, 48]


def test_an_engine_keeps_a_limited_number_of_pieces_whatever_its_capacity(
    index: PrefixIndex,
) -> None:
    index.emptied(0, 10**12)
    for number in range(PIECES_PER_ENGINE_MAX // 16 + 10):
        index.note(0, index.keys([number] * 256, None))
    assert index.pieces_of(0) == PIECES_PER_ENGINE_MAX
    assert bisect_right(index._ends, 256) == 16


def test_an_engine_without_capacity_holds_nothing(index: PrefixIndex) -> None:
    index.emptied(0)
    index.note(0, index.keys([1] * 64, None))
    assert index.held_tokens(index.keys([1] * 64, None)) == {}
