"""Which engine probably holds the KV of which prompt prefix.

A prompt is cut into *pieces* of whole KV blocks. The key of a piece is a hash of its tokens and of
the key before it, so equal keys mean equal prefixes. The first key starts from the *scope*: what
else must be equal for KV to be shared (cache salt, adapter). vLLM hashes its blocks the same way
(`v1/core/kv_cache_utils.py::hash_block_tokens`).

The index is told what was computed where and never asks an engine, so it is an estimate: each
engine's memory is a list in the order of last use, cut at the engine's KV capacity, while vLLM
throws blocks out in the order in which streams gave them back, and counts blocks of running answers
that are not in here. A wrong entry costs time (a prompt computed once more), never an answer: the
engine compares tokens itself. For the same reason 64-bit hashes that anyone can collide are enough.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

PIECES_PER_DOUBLING = 16
"""A piece is one block near the start, and at most 1 / PIECES_PER_DOUBLING of what lies before it:
a prompt of 4,000 tokens has 79 keys instead of 250, and a hit is at most so much too short."""
PIECES_PER_ENGINE_MAX = 16_384
"""About 3 MB an engine; at least 262,144 tokens of different prefixes in blocks of 16. The least
recently used go first."""


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """The keys of one sequence of tokens."""

    tokens: int
    """Length of the sequence."""
    block_tokens: int
    """Size of the blocks that it was cut into."""
    keys: list[int]
    """One per whole piece, or the first of them."""


class PrefixHolders:
    """Which engines hold which key: a bit per engine."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, engine: int, key: int) -> None:
        """The engine has this key now."""
        self._holders[key] = self._holders.get(key, 0) | (1 << engine)

    def remove(self, engine: int, key: int) -> None:
        """The engine has it no more."""
        left = self._holders[key] & ~(1 << engine)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def leading(self, keys: Iterable[int]) -> dict[int, int]:
        """Per engine that holds any: how many of the first keys it holds without a gap."""
        return {
            engine: count
            for engines, count in self.leading_groups(keys)
            for engine in _engines_of(engines)
        }

    def leading_groups(self, keys: Iterable[int]) -> list[tuple[int, int]]:
        """The same as (engines as bits, count of first keys that they hold)."""
        groups: list[tuple[int, int]] = []
        holding, count = -1, 0
        for key in keys:
            still = holding & self._holders.get(key, 0)
            if still != holding and holding > 0:
                groups.append((holding & ~still, count))
            holding = still
            if not holding:
                return groups
            count += 1
        if holding > 0:
            groups.append((holding, count))
        return groups


class PrefixIndex:
    """See the module's docstring."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: size of the engines' KV blocks, at least 1."""
        self.block_tokens = block_tokens
        self._holders = PrefixHolders()
        self._engines: dict[int, _EngineMemory] = {}
        self._ends: list[int] = []  # tokens up to the end of each piece
        self._blocks: list[int] = []  # size of each piece
        self._pieces: list[slice] = []

    def keys(
        self, token_ids: Sequence[int], scope: Hashable, known: PrefixKeys | None = None
    ) -> PrefixKeys:
        """The keys of a sequence. `known`: the first of them, or those of its beginning."""
        done = self._usable(known)
        more = self._chain(token_ids, scope, done)
        return PrefixKeys(len(token_ids), self.block_tokens, [*done, *more])

    def find(
        self, token_ids: Sequence[int], scope: Hashable, known: PrefixKeys | None = None
    ) -> tuple[dict[int, int], PrefixKeys]:
        """`held_tokens` of a prompt, and its keys only as far as they had to be made for that:
        until nobody holds one. `keys` makes the rest when there is time."""
        done, made = self._usable(known), list[int]()
        more = _noting(self._chain(token_ids, scope, done), made)
        groups = self._holders.leading_groups(chain(done, more))
        keys = PrefixKeys(len(token_ids), self.block_tokens, [*done, *made])
        return self._tokens_of(groups, len(token_ids)), keys

    def held_tokens(self, prompt: PrefixKeys) -> dict[int, int]:
        """Per engine that holds any: the leading tokens of the prompt that it need not compute. As
        in vLLM whole blocks, and never the last token, whose output is asked for."""
        return self._tokens_of(self._holders.leading_groups(prompt.keys), prompt.tokens)

    def note(self, engine: int, computed: PrefixKeys) -> None:
        """The engine holds this sequence now; its beginning is what it used last."""
        memory = self._engines.get(engine)
        if memory is not None:
            for place in range(len(computed.keys) - 1, -1, -1):
                memory.touch(computed.keys[place], self._blocks[place])
            memory.shrink()

    def missed(self, engine: int, prompt: PrefixKeys, had_tokens: int) -> None:
        """The engine held only `had_tokens` of this prompt. It loses the least recently used first,
        so what has not been used since that piece is gone too."""
        place = bisect_right(self._ends, had_tokens)
        memory = self._engines.get(engine)
        if memory is not None and place < len(prompt.keys):
            memory.forget_up_to(prompt.keys[place])

    def emptied(self, engine: int, capacity_tokens: int = 0) -> None:
        """The engine holds nothing, and will hold so many tokens at most."""
        memory = self._engines.pop(engine, None)
        if memory is not None:
            memory.clear()
        blocks = capacity_tokens // self.block_tokens
        if blocks > 0:
            self._engines[engine] = _EngineMemory(engine, blocks, self._holders)

    def clear(self) -> None:
        """No engine holds anything; their capacities stay."""
        for memory in self._engines.values():
            memory.clear()

    @property
    def in_use(self) -> bool:
        """Whether any engine can hold a prefix."""
        return bool(self._engines)

    def pieces_of(self, engine: int) -> int:
        """Keys that the engine holds."""
        memory = self._engines.get(engine)
        return len(memory) if memory is not None else 0

    def _tokens_of(self, groups: list[tuple[int, int]], prompt_tokens: int) -> dict[int, int]:
        most = max(0, prompt_tokens - 1) // self.block_tokens * self.block_tokens
        held: dict[int, int] = {}
        for engines, count in groups:
            tokens = min(self._ends[count - 1], most)
            if tokens > 0:
                held.update(dict.fromkeys(_engines_of(engines), tokens))
        return held

    def _chain(self, token_ids: Sequence[int], scope: Hashable, done: list[int]) -> Iterator[int]:
        """The keys behind those that are done, each made when it is asked for."""
        pieces = self._pieces[len(done) : self._whole_pieces(len(token_ids))]
        hashes = (hash(tuple(token_ids[piece])) for piece in pieces)
        start = done[-1] if done else hash(scope)
        return islice(accumulate(hashes, _chained, initial=start), 1, None)

    def _usable(self, known: PrefixKeys | None) -> list[int]:
        """Keys that were made with other blocks are of no use."""
        same = known is not None and known.block_tokens == self.block_tokens
        return known.keys if known is not None and same else []

    def _whole_pieces(self, tokens: int) -> int:
        """How many whole pieces so many tokens have."""
        while not self._ends or self._ends[-1] < tokens:
            self._add_piece()
        return bisect_right(self._ends, tokens)

    def _add_piece(self) -> None:
        start = self._ends[-1] if self._ends else 0
        doubling = start // self.block_tokens // PIECES_PER_DOUBLING
        blocks = 1 << max(0, doubling.bit_length() - 1)
        self._ends.append(start + blocks * self.block_tokens)
        self._blocks.append(blocks)
        self._pieces.append(slice(start, self._ends[-1]))


class _EngineMemory:
    """Keys that one engine holds, the least recently used first. A key is never used after those
    that continue it (`touch` goes from the end of a chain to its beginning), so what is left after
    any loss is closed under prefixes."""

    def __init__(self, engine: int, capacity_blocks: int, holders: PrefixHolders) -> None:
        self._engine = engine
        self._capacity = capacity_blocks
        self._holders = holders
        self._used = 0
        self._keys: OrderedDict[int, int] = OrderedDict()  # key -> blocks

    def __len__(self) -> int:
        return len(self._keys)

    def touch(self, key: int, blocks: int) -> None:
        """The key is there, and newest."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return
        self._keys[key] = blocks
        self._used += blocks
        self._holders.add(self._engine, key)

    def shrink(self) -> None:
        """Lose the oldest until both limits hold."""
        while self._used > self._capacity or len(self._keys) > PIECES_PER_ENGINE_MAX:
            self._lose_oldest()

    def forget_up_to(self, key: int) -> None:
        """Lose this key and all older ones."""
        if key in self._keys:
            while self._lose_oldest() != key:
                pass

    def clear(self) -> None:
        """Lose all."""
        while self._keys:
            self._lose_oldest()

    def _lose_oldest(self) -> int:
        key, blocks = self._keys.popitem(last=False)
        self._used -= blocks
        self._holders.remove(self._engine, key)
        return key


def _chained(before: int, piece: int) -> int:
    return hash((before, piece))


def _noting(keys: Iterable[int], made: list[int]) -> Iterator[int]:
    for key in keys:
        made.append(key)
        yield key


def _engines_of(bits: int) -> list[int]:
    return [engine for engine, bit in enumerate(reversed(bin(bits))) if bit == "1"]
