"""Which page of the arena holds what: decided in the engine's scheduler process, copied elsewhere.

Pure: no clock, no file, no randomness; the same calls give the same plans. Time complexity of
`advance` is constant for a stream that grew by one token.

A page is in exactly one of three states, so free + cold + referenced == page_count:

    free        nothing in it is wanted                     reused first, oldest first
    cold        full, hashed, no stream refers to it        shareable; evicted coldest first
    referenced  in the page list of one or more streams     taken away only by dropping a stream

A page gets a new generation each time it leaves `free`. Rows are only ever added to the last page
of one stream, and only full pages are shared, so a page with two referents is never written again.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerolayer.arena.layout import FLAG_DROPPED, FLAG_FINISHED, ArenaGeometry, stream_key
from zerolayer.arena.plan import PageWrite, SavePlan, SlotClear, WriteKind

_GENERATION_LIMIT = 1 << 32


@dataclass(slots=True)
class LedgerCounters:
    """Totals since the ledger was made."""

    pages_written: int = 0
    """Whole blocks written."""
    rows_written: int = 0
    """Token rows written one by one."""
    bytes_written: int = 0
    """Bytes of both."""
    pages_shared: int = 0
    """Blocks referenced instead of written, because the arena had them."""
    pages_evicted: int = 0
    """Cold pages given to someone else."""
    streams_dropped: int = 0
    """Live streams that lost their snapshot because the arena was full."""
    opens_refused: int = 0
    """Streams without a snapshot because every slot belonged to a live one."""


@dataclass(slots=True)
class _Stream:
    key: bytes
    epoch: int
    slot: int
    slot_generation: int
    pages: list[int] = field(default_factory=list)
    watermark: int = 0
    planned: bool = False
    dropped: bool = False


class ArenaLedger:
    """Decides page by page; see the module's docstring for the states of a page.

    `full_blocks_per_step_max` bounds how many blocks one step may copy over all streams that are
    catching up, so that a long prefill does not make one step slow; what is left over follows in
    the next steps. The one-token case is outside this budget.
    """

    def __init__(self, geometry: ArenaGeometry, full_blocks_per_step_max: int) -> None:
        assert full_blocks_per_step_max >= 1
        self.geometry = geometry
        self.counters = LedgerCounters()
        self._blocks_per_step = full_blocks_per_step_max
        self._budget = full_blocks_per_step_max
        self._block_tokens = geometry.block_tokens
        self._row_bytes = geometry.page_bytes // geometry.block_tokens
        self._tokens_max = geometry.pages_per_stream_max * geometry.block_tokens
        self._streams: dict[str, _Stream] = {}
        self._clears: list[SlotClear] = []
        self._free: deque[int] = deque(range(geometry.page_count))
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._generation = [0] * geometry.page_count
        self._references = [0] * geometry.page_count
        self._hash_of: list[bytes] = [b""] * geometry.page_count
        self._page_of: dict[bytes, int] = {}
        self._slots_free: deque[int] = deque(range(geometry.slot_count))
        self._slots_finished: OrderedDict[int, None] = OrderedDict()
        self._slot_generation = [0] * geometry.slot_count

    # -- what others may look at ------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Pages in which nothing is wanted."""
        return len(self._free)

    @property
    def cold_pages(self) -> int:
        """Full pages that no stream refers to."""
        return len(self._cold)

    @property
    def referenced_pages(self) -> int:
        """Pages in at least one page list. Linear in page_count: for tests and status."""
        return sum(1 for count in self._references if count)

    def watermark(self, stream_id: str) -> int | None:
        """Tokens saved once the plans so far are carried out; None: no snapshot."""
        stream = self._streams.get(stream_id)
        return None if stream is None or stream.dropped else stream.watermark

    # -- a stream's life --------------------------------------------------------------------

    def open(self, stream_id: str, epoch: int) -> bool:
        """Gives a stream a slot. False: it has no snapshot, and `advance` returns None for it.

        Slots of finished streams are taken, oldest first, when no other is left. A stream that is
        open under an older epoch is closed first; the same epoch again changes nothing, and an
        older one is refused.
        """
        known = self._streams.get(stream_id)
        if known is not None:
            if epoch <= known.epoch:
                return epoch == known.epoch and not known.dropped
            self.close(stream_id, known.epoch)
        if self._slots_free:
            slot = self._slots_free.popleft()
        elif self._slots_finished:
            slot, _ = self._slots_finished.popitem(last=False)
        else:
            self.counters.opens_refused += 1
            return False
        self._slot_generation[slot] += 2
        self._streams[stream_id] = _Stream(
            stream_key(stream_id), epoch, slot, self._slot_generation[slot]
        )
        return True

    def begin_step(self, prefilled_blocks: int = 0) -> None:
        """Renews the budget of whole blocks. Once per engine step, before its `advance` calls.

        `prefilled_blocks`: blocks that the step itself computes. They come on top: to copy a block
        takes a small share of computing it, and what is not copied is computed again after a kill.
        """
        self._budget = self._blocks_per_step + prefilled_blocks

    def advance(
        self,
        stream_id: str,
        computed_tokens: int,
        block_hashes: Sequence[bytes],
        token_ids: Sequence[int],
        epoch: int | None = None,
    ) -> SavePlan | None:
        """What to save so that as many as possible of `computed_tokens` tokens are in the arena.

        `computed_tokens`: tokens whose KV exists after this step. `block_hashes`: one per full
        block of them, or none where hashing is off (shorter is allowed). `token_ids`: the stream's
        tokens from its first, at least `computed_tokens` of them; only the part that is written is
        read.

        `epoch`: when given and not the open one, this is a late request of a stream that came back,
        and nothing is saved for it.

        None: nothing to do, no snapshot, or no budget left. May drop streams, this one too: send
        `take_clears()` with the step.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.dropped or epoch not in (None, stream.epoch):
            return None
        computed_tokens = min(computed_tokens, self._tokens_max)
        behind = computed_tokens - stream.watermark
        if behind <= 0:
            return None
        if behind == 1:
            return self._one_row(stream, block_hashes, token_ids[stream.watermark])
        return self._catch_up(stream, computed_tokens, block_hashes, token_ids)

    def close(self, stream_id: str, epoch: int | None = None) -> None:
        """The stream has ended here: full hashed pages become cold, the others free.

        An `epoch` that is not the open one closes nothing: that request was replaced already.
        What it saved stays readable until its pages or its slot are needed. Unknown streams are
        fine.
        """
        stream = self._streams.get(stream_id)
        if stream is None or epoch not in (None, stream.epoch):
            return
        del self._streams[stream_id]
        if stream.dropped:
            return
        self._release(stream)
        if stream.planned:
            self._slots_finished[stream.slot] = None
            self._clears.append(SlotClear(stream.slot, stream.slot_generation, FLAG_FINISHED))
        else:
            self._slots_free.append(stream.slot)

    def take_clears(self) -> list[SlotClear]:
        """Slots to mark finished or dropped, once: the worker does so after the plans of the
        step."""
        clears, self._clears = self._clears, []
        return clears

    # -- plans ------------------------------------------------------------------------------

    def _one_row(self, stream: _Stream, hashes: Sequence[bytes], token: int) -> SavePlan | None:
        block, row = divmod(stream.watermark, self._block_tokens)
        new_pages: tuple[tuple[int, int], ...] = ()
        if row == 0:
            fresh = self._append_page(stream)
            if fresh is None:
                return None
            new_pages = ((fresh, self._generation[fresh]),)
        page = stream.pages[block]
        block_hash = b""
        if row == self._block_tokens - 1 and block < len(hashes):
            block_hash = hashes[block]
            self._remember(page, block_hash)
        write = PageWrite(
            WriteKind.ROWS, page, self._generation[page], block, row, 1, (token,), block_hash
        )
        self.counters.rows_written += 1
        self.counters.bytes_written += self._row_bytes
        return self._plan(stream, block, new_pages, (write,), stream.watermark + 1)

    def _catch_up(
        self, stream: _Stream, target: int, hashes: Sequence[bytes], tokens: Sequence[int]
    ) -> SavePlan | None:
        first_new = len(stream.pages)
        reached = stream.watermark
        writes: list[PageWrite] = []
        while reached < target:
            block, row = divmod(reached, self._block_tokens)
            end = min(target, (block + 1) * self._block_tokens)
            full = end == (block + 1) * self._block_tokens
            block_hash = hashes[block] if full and block < len(hashes) else b""
            if row == 0 and block_hash and self._share_page(stream, block_hash):
                reached = end
                continue
            if self._budget == 0:
                break
            if row == 0 and self._append_page(stream) is None:
                return None
            self._budget -= 1
            page = stream.pages[block]
            kind = WriteKind.BLOCK if row == 0 else WriteKind.ROWS
            rows = tuple(tokens[reached:end])
            writes.append(
                PageWrite(
                    kind, page, self._generation[page], block, row, end - reached, rows, block_hash
                )
            )
            reached = end
        if reached == stream.watermark:
            return None
        self._count_and_remember(writes)
        tail = tuple((page, self._generation[page]) for page in stream.pages[first_new:])
        return self._plan(stream, first_new, tail, tuple(writes), reached)

    def _plan(
        self,
        stream: _Stream,
        first_page: int,
        pages: tuple[tuple[int, int], ...],
        writes: tuple[PageWrite, ...],
        watermark: int,
    ) -> SavePlan:
        stream.watermark = watermark
        stream.planned = True
        return SavePlan(
            stream.slot, stream.slot_generation, stream.key, stream.epoch,
            first_page, pages, writes, watermark,
        )  # fmt: skip

    def _count_and_remember(self, writes: Sequence[PageWrite]) -> None:
        # Hashes are remembered only now: had the stream been dropped half-way, its pages would be
        # known under a hash and never written.
        for write in writes:
            if write.block_hash:
                self._remember(write.page, write.block_hash)
            if write.kind == WriteKind.BLOCK:
                self.counters.pages_written += 1
                self.counters.bytes_written += self.geometry.page_bytes
            else:
                self.counters.rows_written += write.row_count
                self.counters.bytes_written += write.row_count * self._row_bytes

    # -- pages ------------------------------------------------------------------------------

    def _remember(self, page: int, block_hash: bytes) -> None:
        # A second page with the same content keeps no hash: it goes free with its stream.
        if block_hash not in self._page_of:
            self._page_of[block_hash] = page
            self._hash_of[page] = block_hash

    def _share_page(self, stream: _Stream, block_hash: bytes) -> bool:
        page = self._page_of.get(block_hash)
        if page is None:
            return False
        self._cold.pop(page, None)
        self._references[page] += 1
        stream.pages.append(page)
        self.counters.pages_shared += 1
        return True

    def _append_page(self, stream: _Stream) -> int | None:
        """A fresh page at the end of the stream's list; None when the stream itself was dropped."""
        page = self._take_page()
        while page is None:
            longest = max(
                (other for other in self._streams.values() if not other.dropped),
                key=lambda other: len(other.pages),
            )
            self._drop(longest)
            if longest is stream:
                return None
            page = self._take_page()
        self._generation[page] = self._generation[page] % (_GENERATION_LIMIT - 1) + 1
        self._references[page] = 1
        stream.pages.append(page)
        return page

    def _take_page(self) -> int | None:
        if self._free:
            return self._free.popleft()
        if not self._cold:
            return None
        page, _ = self._cold.popitem(last=False)
        del self._page_of[self._hash_of[page]]
        self._hash_of[page] = b""
        self.counters.pages_evicted += 1
        return page

    def _drop(self, stream: _Stream) -> None:
        self._release(stream)
        stream.dropped = True
        self._slots_free.append(stream.slot)
        if stream.planned:
            self._clears.append(SlotClear(stream.slot, stream.slot_generation, FLAG_DROPPED))
        self.counters.streams_dropped += 1

    def _release(self, stream: _Stream) -> None:
        # Last page first: of a prefix, the beginning is what others most likely share.
        for page in reversed(stream.pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._hash_of[page]:
                self._cold[page] = None
            else:
                self._free.append(page)
        stream.pages.clear()
