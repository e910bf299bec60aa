"""Which KV blocks of an engine are free, block by block: the memory picture on its board.

vLLM keeps its free blocks in a linked list, in the order in which they are to be used again; where
they lie in memory cannot be read from it. This map follows each change of that list, at the price
of the blocks that changed and not of all that there are.

Contiguity decides nothing about whether a request fits: a paged cache takes any free block. A long
run makes copies cheaper (a restored stream's pages go into neighbouring blocks, which one transfer
can fill), and the length of the runs tells how shattered a cache has become.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

#: Methods of vLLM's `FreeKVCacheBlockQueue` by which blocks stop being free: they return them.
TAKING = ("popleft", "popleft_n")
#: Methods by which given blocks stop being free.
REMOVING = ("remove",)
#: Methods by which given blocks become free.
GIVING = ("append", "append_n", "prepend_n")

Free = npt.NDArray[np.bool_]


class FreeMap:
    """A mirror of vLLM's list of free blocks. Lives in the engine core, on its one thread."""

    def __init__(self, pool: Any, freed: Callable[[], None]) -> None:
        """`pool`: vLLM's `BlockPool`; `freed` is called each time after blocks became free."""
        self._pool = pool
        self._freed = freed
        self._free: Free = self._read()
        self.changes = 0
        """Changes of the list so far."""
        for name in (*TAKING, *REMOVING, *GIVING):
            self._follow(name)

    @property
    def free_blocks(self) -> int:
        """Free blocks now."""
        return int(self._pool.get_num_free_blocks())

    @property
    def total_blocks(self) -> int:
        """All blocks, with the one that vLLM never gives out."""
        return int(self._pool.num_gpu_blocks)

    def longest_run(self) -> int:
        """Largest number of free blocks side by side."""
        if int(np.count_nonzero(self._free)) != self.free_blocks:
            self._free = self._read()  # vLLM changed its list in a way that we do not follow
        return longest_run(self._free)

    def _read(self) -> Free:
        """From the blocks themselves: each free one has no user, and the null block is none."""
        blocks = self._pool.blocks
        users = (block.ref_cnt == 0 and not block.is_null for block in blocks)
        return np.fromiter(users, dtype=np.bool_, count=len(blocks))

    def _follow(self, name: str) -> None:
        queue = self._pool.free_block_queue
        original = getattr(queue, name)
        gives, takes = name in GIVING, name in TAKING

        def followed(argument: Any = None) -> Any:
            result = original() if argument is None else original(argument)
            self._note(result if takes else argument, free=gives)
            return result

        setattr(queue, name, followed)

    def _note(self, blocks: Any, *, free: bool) -> None:
        many: Iterable[Any] = blocks if isinstance(blocks, list) else (blocks,)
        ids = [block.block_id for block in many]
        if not ids:
            return
        self._free[ids] = free
        self.changes += 1
        if free:
            self._freed()


def longest_run(free: Free) -> int:
    """Length of the longest run of True."""
    edges = np.flatnonzero(free[1:] != free[:-1]) + 1
    bounds = np.concatenate(([0], edges, [len(free)]))
    first = 0 if len(free) and free[0] else 1  # runs of True are every other stretch
    return int(np.diff(bounds)[first::2].max(initial=0))
