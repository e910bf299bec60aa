"""The one writer of an arena file: carries out the ledger's plans, data first and watermark last.

Lives in an engine's worker process. Every store goes through a `Mover`, so the same calls can feed
a neighbour's arena on another host.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerolayer.arena import layout
from zerolayer.arena.mapping import ArenaFile, Bytes, LocalMover, Mover
from zerolayer.arena.plan import PageWrite, SavePlan, SlotClear


class ArenaWriter:
    """Writes one arena file.

    For each plan, in the ledger's order: `put_rows` or `put_block` for each of its writes, then
    `commit`, then the next plan; after the last plan of a step, `clear` for each clear. Calls out
    of that order are a bug and stop at an assertion before a reader could see a wrong byte.
    """

    def __init__(
        self,
        file: ArenaFile,
        mover: Mover | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.file = file
        self._mover: Mover = LocalMover(file) if mover is None else mover
        self._clock_ns = clock_ns
        self._geometry = file.geometry
        self._put: dict[int, int] = {}
        self._page_generation = [0] * file.geometry.page_count
        self._slot_generation = [0] * file.geometry.slot_count
        self._slot_bytes = [0] * file.geometry.slot_count
        self._plan_bytes = 0

    def put_rows(self, write: PageWrite, row: NDArray[Any], index: NDArray[np.intp]) -> None:
        """Scatters token rows into the page's raw block layout.

        `row`: [layers, elements] of any dtype whose size divides a layer's block; `index`:
        [elements], where each element lies in one layer's block, in elements of that dtype. For a
        write of several rows, both hold the rows one after the other along the last axis.
        """
        self._begin(write)
        self._mover.scatter(self._geometry.page_offset(write.page), row, index)
        self._plan_bytes += row.nbytes

    def put_block(self, write: PageWrite, data: NDArray[Any]) -> None:
        """Copies a whole block: [layers, block elements] or any shape of `page_bytes` bytes.

        Right for ROWS writes too where the layout of rows is not known, as long as the block in the
        engine still holds the rows that were saved before.
        """
        assert data.nbytes == self._geometry.page_bytes
        self._begin(write)
        self._mover.put(self._geometry.page_offset(write.page), data)
        self._plan_bytes += data.nbytes

    def commit(self, plan: SavePlan) -> None:
        """Makes what was put for this plan visible: page headers, page list, then the watermark."""
        for write in plan.writes:
            self._finish(write)
        put_word = self._mover.put_word
        base = self._geometry.slot_offset(plan.slot)
        if self._slot_generation[plan.slot] != plan.slot_generation:
            self._take_slot(base, plan)
        if plan.pages:
            index_at = base + layout.SLOT_LISTS + 4 * plan.first_page
            generations = 4 * self._geometry.pages_per_stream_max
            for page, generation in plan.pages:
                put_word(index_at, page)
                put_word(index_at + generations, generation)
                index_at += 4
            put_word(base + layout.SLOT_PAGE_COUNT, plan.first_page + len(plan.pages))
        self._slot_bytes[plan.slot] += self._plan_bytes
        self._plan_bytes = 0
        self._mover.put_long(base + layout.SLOT_UPDATED_NS, self._clock_ns())
        self._mover.put_long(base + layout.SLOT_BYTES_WRITTEN, self._slot_bytes[plan.slot])
        self._mover.commit(base + layout.SLOT_WATERMARK, plan.watermark, 8)

    def clear(self, clear: SlotClear) -> None:
        """Marks a slot finished or dropped, unless it belongs to another stream by now."""
        if self._slot_generation[clear.slot] == clear.slot_generation:
            flags_at = self._geometry.slot_offset(clear.slot) + layout.SLOT_FLAGS
            self._mover.commit(flags_at, clear.flags, 4)

    def page_view(self, page: int) -> Bytes:
        """The bytes of one page, [page_bytes] uint8."""
        return self.file.page_view(page)

    def close(self) -> None:
        """Unmaps the file; it stays in place for readers until the runtime directory removes it."""
        self.file.close()

    def _begin(self, write: PageWrite) -> None:
        if write.first_row == 0:
            at = self._geometry.page_header_offset(write.page) + layout.PAGE_GENERATION
            self._mover.commit(at, 0, 4)
            self._page_generation[write.page] = write.page_generation
        else:
            assert self._page_generation[write.page] == write.page_generation
        self._put[write.page] = write.page_generation

    def _finish(self, write: PageWrite) -> None:
        assert self._put.pop(write.page, None) == write.page_generation, "commit without its put"
        assert len(write.token_ids) == write.row_count
        mover = self._mover
        base = self._geometry.page_header_offset(write.page)
        token_at = base + layout.PAGE_TOKENS + 4 * write.first_row
        if write.row_count == 1:
            mover.put_word(token_at, write.token_ids[0])
        else:
            mover.put(token_at, np.array(write.token_ids, dtype=np.uint32))
        mover.put_word(base + layout.PAGE_FILLED, write.first_row + write.row_count)
        if write.first_row == 0 or write.block_hash:
            digest = write.block_hash[: layout.HASH_BYTES].ljust(layout.HASH_BYTES, b"\0")
            mover.put(base + layout.PAGE_HASH, np.frombuffer(digest, dtype=np.uint8))
        if write.first_row == 0:
            mover.commit(base + layout.PAGE_GENERATION, write.page_generation, 4)

    def _take_slot(self, base: int, plan: SavePlan) -> None:
        assert plan.first_page == 0
        assert plan.slot_generation % 2 == 0
        mover = self._mover
        mover.commit(base + layout.SLOT_GENERATION, plan.slot_generation - 1, 8)
        mover.put(base + layout.SLOT_KEY, np.frombuffer(plan.key, dtype=np.uint8))
        mover.put_word(base + layout.SLOT_EPOCH, plan.epoch)
        mover.put_word(base + layout.SLOT_FLAGS, layout.FLAG_LIVE)
        mover.put_word(base + layout.SLOT_PAGE_COUNT, 0)
        mover.put_long(base + layout.SLOT_WATERMARK, 0)
        mover.commit(base + layout.SLOT_GENERATION, plan.slot_generation, 8)
        self._slot_generation[plan.slot] = plan.slot_generation
        self._slot_bytes[plan.slot] = 0
