"""Reads the arena of another process, which may be writing, dead, damaged or not ours at all.

Nothing here raises after the file was opened, and no number from the file is used before it was
checked: what does not fit is "no match". The caller copies pages and then asks `unchanged`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zerolayer.arena import layout
from zerolayer.arena.mapping import ArenaFile, Bytes, full_fence
from zerolayer.core.errors import ArenaError

_SLOT_TRIES: Final = 4


@dataclass(frozen=True, slots=True)
class SlotView:
    """A copy of one stream's slot, taken while it did not change hands."""

    slot: int
    generation: int
    epoch: int
    flags: int
    """`layout.FLAG_LIVE`, `FLAG_FINISHED`; a dropped slot is never returned."""
    watermark: int
    """Tokens that the writer committed, at most what `pages` can hold. Verify before use."""
    updated_ns: int
    """CLOCK_MONOTONIC of the last commit."""
    bytes_written: int
    pages: NDArray[np.uint32]
    """Page of each block, [blocks]; every number is below page_count."""
    page_generations: NDArray[np.uint32]
    """The generation that each page must have, [blocks]."""


class ArenaReader:
    """Read-only view of one arena file. The constructor raises `ArenaError`; nothing else does."""

    def __init__(self, path: Path, fingerprint: bytes | None = None) -> None:
        self.file = ArenaFile.open(path)
        self.geometry = self.file.geometry
        self.header = self.file.header
        if fingerprint is not None and self.header.fingerprint != fingerprint:
            self.file.close()
            raise ArenaError(f"refusing {path}: written under another layout fingerprint")
        g, memory = self.geometry, self.file.memory
        slots = memory[g.slots_offset : g.page_headers_offset].reshape(g.slot_count, g.slot_bytes)
        self._keys = slots[:, layout.SLOT_KEY : layout.SLOT_KEY + layout.KEY_BYTES].view(np.uint64)
        lists = slots[:, layout.SLOT_LISTS : layout.SLOT_LISTS + 8 * g.pages_per_stream_max]
        self._lists = lists.view(np.uint32).reshape(g.slot_count, 2, g.pages_per_stream_max)
        end = g.page_headers_offset + g.page_count * g.page_header_bytes
        headers = memory[g.page_headers_offset : end].view(np.uint32)
        headers = headers.reshape(g.page_count, g.page_header_bytes // 4)
        self._generations = headers[:, layout.PAGE_GENERATION // 4]
        self._filled = headers[:, layout.PAGE_FILLED // 4]
        first = layout.PAGE_TOKENS // 4
        self._tokens = headers[:, first : first + g.block_tokens]

    @classmethod
    def open_or_none(cls, path: Path, fingerprint: bytes | None = None) -> "ArenaReader | None":
        """As the constructor, with None for whatever cannot be used: for the serving path."""
        try:
            return cls(path, fingerprint)
        except ArenaError:
            return None

    def find(self, stream_id: str) -> SlotView | None:
        """The slot of a stream, that of the highest epoch if there are several; else None."""
        if not self.file.whole():
            return None
        low, high = np.frombuffer(layout.stream_key(stream_id), dtype=np.uint64)
        hits = np.flatnonzero((self._keys[:, 0] == low) & (self._keys[:, 1] == high))
        found = [
            view for slot in hits.tolist() if (view := self._slot(slot, stream_id)) is not None
        ]
        return max(found, key=lambda view: view.epoch, default=None)

    def verified_tokens(self, slot: SlotView, token_ids: Sequence[int]) -> int:
        """How many leading tokens of `token_ids` have their KV in this slot's pages, as of now.

        At most the watermark. Whole pages are compared token by token under their generation; the
        count ends where a page is no longer this stream's or holds other tokens.
        """
        most = min(slot.watermark, len(token_ids))
        if most <= 0 or not self.file.whole():
            return 0
        block_tokens = self.geometry.block_tokens
        blocks = -(-most // block_tokens)
        pages = slot.pages[:blocks]
        wanted = np.zeros((blocks, block_tokens), dtype=np.int64)
        wanted.reshape(-1)[:most] = token_ids[:most]
        rows = np.full(blocks, block_tokens)
        rows[-1] = most - (blocks - 1) * block_tokens
        equal = self._tokens[pages] == wanted
        filled = self._filled[pages] >= rows
        full_fence()
        # Checked last: a generation never comes back, so what was read before it belonged to it.
        alive = self._generations[pages] == slot.page_generations[:blocks]
        leading = np.where(equal.all(axis=1), block_tokens, equal.argmin(axis=1))
        good = np.where(alive & filled, np.minimum(leading, rows), 0)
        short = np.flatnonzero(good < rows)
        if short.size == 0:
            return most
        return int(short[0]) * block_tokens + int(good[short[0]])

    def page_view(self, page: int) -> Bytes:
        """The bytes of one page of a `SlotView`, [page_bytes] uint8, read-only."""
        return self.file.page_view(page)

    def read_page(self, page: int, parts: Sequence[Any]) -> bool:
        """Fill contiguous arrays, together as long as a page, with one page of a `SlotView`.

        Spares the page faults of a new mapping. False when the file is shorter than it was.
        """
        return self.file.read_page(page, parts)

    def unchanged(self, slot: SlotView, pages: Sequence[int] | None = None) -> bool:
        """Whether these pages of the slot (default: all) still are what the slot means by them.

        Asked after copying: True makes every byte copied before it valid up to `verified_tokens`.
        """
        if not self.file.whole():
            return False
        full_fence()
        same = self._generations[slot.pages] == slot.page_generations
        if pages is not None:
            same = same[np.isin(slot.pages, pages)]
        return bool(same.all())

    def close(self) -> None:
        """Unmaps the file once the last page view is gone."""
        del self._keys, self._lists, self._generations, self._filled, self._tokens
        self.file.close()

    def _slot(self, slot: int, stream_id: str) -> SlotView | None:
        base = self.geometry.slot_offset(slot)
        longs, words, raw = self.file.longs, self.file.words, self.file.raw
        key = layout.stream_key(stream_id)
        for _ in range(_SLOT_TRIES):
            generation = longs[base >> 3]
            if generation == 0 or generation % 2:
                continue
            full_fence()
            # The watermark comes first: what it covers is in the list already.
            watermark = longs[(base + layout.SLOT_WATERMARK) >> 3]
            full_fence()
            count = words[(base + layout.SLOT_PAGE_COUNT) >> 2]
            epoch = words[(base + layout.SLOT_EPOCH) >> 2]
            flags = words[(base + layout.SLOT_FLAGS) >> 2]
            updated_ns = longs[(base + layout.SLOT_UPDATED_NS) >> 3]
            bytes_written = longs[(base + layout.SLOT_BYTES_WRITTEN) >> 3]
            kept = bytes(raw[base + layout.SLOT_KEY : base + layout.SLOT_KEY + layout.KEY_BYTES])
            pages, generations = self._lists[slot, :, :count].copy()
            full_fence()
            if longs[base >> 3] != generation:
                continue
            if kept != key or flags not in (layout.FLAG_LIVE, layout.FLAG_FINISHED):
                return None
            beyond = np.flatnonzero(pages >= self.geometry.page_count)
            if beyond.size:
                pages, generations = pages[: beyond[0]], generations[: beyond[0]]
            watermark = min(watermark, len(pages) * self.geometry.block_tokens)
            return SlotView(
                slot, generation, epoch, flags, watermark, updated_ns, bytes_written,
                pages, generations,
            )  # fmt: skip
        return None
