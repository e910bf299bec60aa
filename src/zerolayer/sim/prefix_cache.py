"""KV memory of one engine: tokens in use, and blocks that stay because their prefix may come
again."""

from collections.abc import Sequence

from zerolayer.dispatch.prefix_index import PrefixHolders


class KvMemory:
    """KV tokens of one engine. Shared blocks are counted once; those that nobody uses are kept,
    least recently used first out, as long as the room is not needed (vLLM's prefix cache)."""

    __slots__ = ("_engine", "_idle", "_index", "_uses", "block_tokens", "capacity", "used")

    def __init__(self, engine: int, capacity: int, block_tokens: int, index: PrefixHolders) -> None:
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.used = 0
        """Tokens that running streams hold."""
        self._engine = engine
        self._index = index
        self._uses: dict[int, int] = {}  # block -> streams that hold it, at least 1
        self._idle: dict[int, None] = {}  # blocks that nobody uses, oldest first

    @property
    def cached(self) -> int:
        """Tokens in blocks that no stream uses now."""
        return len(self._idle) * self.block_tokens

    def held(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here."""
        count = 0
        for block in blocks:
            if block not in self._uses and block not in self._idle:
                break
            count += 1
        return count

    def room_for(self, blocks: Sequence[int], private: int) -> bool:
        """Whether these blocks, which are here, and so many tokens more can be held now."""
        woken = sum(block in self._idle for block in blocks) * self.block_tokens
        return self.used + woken + private <= self.capacity

    def take(self, blocks: Sequence[int], private: int) -> None:
        """Hold blocks that are here, and private tokens. The caller asked `room_for` before."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self._uses[block] = 1
                self.used += self.block_tokens
            else:
                self._uses[block] += 1
        self.grow(private)

    def grow(self, tokens: int) -> None:
        """Streams hold this many tokens more; idle blocks make room for them."""
        self.used += tokens
        excess = self.used + self.cached - self.capacity
        while excess > 0 and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._index.remove(self._engine, oldest)
            excess -= self.block_tokens

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Blocks that were just computed become findable; returns those that were new (a block
        that another stream computed meanwhile stays private)."""
        new = [block for block in blocks if block not in self._uses and block not in self._idle]
        for block in new:
            self._uses[block] = 1
            self._index.add(self._engine, block)
        return new

    def give_back(self, blocks: Sequence[int], private: int) -> None:
        """A stream left. Its last blocks are the first to go when room is needed."""
        self.used -= private
        for block in reversed(blocks):
            uses = self._uses[block] - 1
            if uses:
                self._uses[block] = uses
            else:
                del self._uses[block]
                self._idle[block] = None
                self.used -= self.block_tokens

    def clear(self) -> None:
        """The engine is gone with everything that it held."""
        for block in (*self._uses, *self._idle):
            self._index.remove(self._engine, block)
        self._uses.clear()
        self._idle.clear()
        self.used = 0
