from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zerolayer.dispatch.prefix_index import PrefixHolders
from zerolayer.sim.prefix_cache import KvMemory

BLOCK = 10
CAPACITY = 200


class KvLaws(RuleBasedStateMachine):
    """Streams come with chains of blocks, hold them and go."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixHolders()
        self.kv = KvMemory(3, CAPACITY, BLOCK, self.index)
        self.streams: list[tuple[list[int], int]] = []

    @rule(family=st.integers(0, 2), length=st.integers(0, 5), extra=st.integers(1, 30))
    def come(self, family: int, length: int, extra: int) -> None:
        chain = [100 * family + place for place in range(length)]
        held = chain[: self.kv.held(chain)]
        private = (length - len(held)) * BLOCK + extra
        if not self.kv.room_for(held, private):
            return
        self.kv.take(held, private)
        new = self.kv.share(chain[len(held) :])
        self.streams.append((held + new, private - len(new) * BLOCK))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.streams) - 1))
        self.kv.give_back(*self.streams.pop(place))

    @rule()
    def die(self) -> None:
        self.kv.clear()
        self.streams.clear()

    @invariant()
    def what_is_used_is_what_streams_hold_with_shared_blocks_counted_once(self) -> None:
        shared = {block for blocks, _ in self.streams for block in blocks}
        private = sum(tokens for _, tokens in self.streams)
        assert self.kv.used == len(shared) * BLOCK + private

    @invariant()
    def memory_is_never_over_capacity(self) -> None:
        assert self.kv.used + self.kv.cached <= CAPACITY

    @invariant()
    def the_index_knows_exactly_what_is_held(self) -> None:
        for family in range(3):
            chain = [100 * family + place for place in range(5)]
            held = self.kv.held(chain)
            assert self.index.leading(chain).get(3, 0) == held


TestKvLaws = KvLaws.TestCase


def test_each_engine_is_known_by_how_far_it_holds_a_chain() -> None:
    index = PrefixHolders()
    for engine, length in ((0, 1), (2, 3), (5, 3)):
        for block in range(length):
            index.add(engine, block)
    index.add(7, 1)  # without the first block nothing of the chain is usable
    assert index.leading([0, 1, 2, 3]) == {0: 1, 2: 3, 5: 3}
    index.remove(2, 0)
    assert index.leading([0, 1, 2]) == {0: 1, 5: 3}
