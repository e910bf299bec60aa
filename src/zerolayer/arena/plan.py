"""What the ledger tells the writer: the messages from an engine's scheduler process to its worker.

They travel inside vLLM's connector metadata once a step. The worker carries out the plans of a
step in the order in which the ledger made them, each one completely (`put` for every write, then
`commit`) before the next, and the clears after the last plan. That order is part of the format: a
page may change hands between two plans of one step.
"""

from enum import IntEnum

import msgspec


class WriteKind(IntEnum):
    """How the worker fetches the data of one write."""

    ROWS = 0
    """Token rows `first_row .. first_row + row_count - 1` of the block, by the layout index."""
    BLOCK = 1
    """The whole block as it lies in the engine."""


class PageWrite(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page to fill or to add rows to. `first_row == 0` means a fresh page."""

    kind: WriteKind
    page: int
    page_generation: int
    block_index: int
    """Which block of the stream: its tokens begin at `block_index * block_tokens`."""
    first_row: int
    row_count: int
    """Rows that hold tokens; a BLOCK write of an unfinished block has fewer than the block."""
    token_ids: tuple[int, ...]
    """The tokens of those rows, `row_count` of them."""
    block_hash: bytes
    """Set when this write completes the block and hashing is on, else empty."""


class SavePlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step adds to one stream's snapshot."""

    slot: int
    slot_generation: int
    """Even. When the slot in the file has another one, the writer takes it over for this stream."""
    key: bytes
    """16 bytes, see `layout.stream_key`."""
    epoch: int
    first_page: int
    """Where in the stream's page list `pages` begins; the list only grows."""
    pages: tuple[tuple[int, int], ...]
    """(page, page generation) of the list's new tail; empty when only rows were added."""
    writes: tuple[PageWrite, ...]
    watermark: int
    """Tokens that are saved once the writes are done."""


class SlotClear(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Marks a slot finished or dropped; ignored when the slot has another generation by now."""

    slot: int
    slot_generation: int
    flags: int
    """`layout.FLAG_FINISHED` or `layout.FLAG_DROPPED`."""
