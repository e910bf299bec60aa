"""A made-up model whose KV of a token follows from all tokens up to it, as a real one's does."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerolayer.arena.layout import ArenaGeometry
from zerolayer.arena.plan import SavePlan, WriteKind
from zerolayer.arena.writer import ArenaWriter

LAYERS = 2
ELEMENTS = 6
BLOCK_TOKENS = 4
BLOCK_ELEMENTS = ELEMENTS * BLOCK_TOKENS
PAGE_BYTES = LAYERS * BLOCK_ELEMENTS * 2

# Rows lie scattered in a block, as vLLM's AMX layout has it.
INDEX: NDArray[np.intp] = (
    np.random.default_rng(7).permutation(BLOCK_ELEMENTS).reshape(BLOCK_TOKENS, ELEMENTS)
)


def small_geometry(page_count: int = 10, slot_count: int = 4) -> ArenaGeometry:
    return ArenaGeometry(PAGE_BYTES, page_count, slot_count, 6, BLOCK_TOKENS)


def tokens_of(variant: int) -> list[int]:
    """24 tokens; variants agree on the first 8, and on 16 when they are equal modulo 2."""
    common = [11, 12, 13, 14, 15, 16, 17, 18]
    middle = [100 + variant % 2] * 8
    return common + middle + [200 + variant] * 8


def hashes_of(tokens: Sequence[int], count: int) -> list[bytes]:
    """Hash of each full block within the first `count` tokens, over all tokens up to its end."""
    ends = range(BLOCK_TOKENS, count + 1, BLOCK_TOKENS)
    return [hashlib.blake2b(repr(tokens[:end]).encode(), digest_size=32).digest() for end in ends]


def kv_row(tokens: Sequence[int], position: int) -> NDArray[np.uint16]:
    """[LAYERS, ELEMENTS]: what the model leaves for the token at `position`."""
    prefix = np.array(tokens[: position + 1], dtype=np.int64).tobytes()
    raw = hashlib.blake2b(prefix, digest_size=LAYERS * ELEMENTS * 2).digest()
    return np.frombuffer(raw, dtype=np.uint16).reshape(LAYERS, ELEMENTS)


def kv_block(tokens: Sequence[int], block: int, rows: int) -> NDArray[np.uint16]:
    """[LAYERS, BLOCK_ELEMENTS]: a block in the engine with its first `rows` rows computed."""
    data = np.full((LAYERS, BLOCK_ELEMENTS), 0xDEAD, dtype=np.uint16)
    for row in range(rows):
        data[:, INDEX[row]] = kv_row(tokens, block * BLOCK_TOKENS + row)
    return data


def carry_out(
    writer: ArenaWriter, plan: SavePlan, tokens: Sequence[int], *, by_row: bool = True
) -> None:
    """What the connector's worker side does with one plan."""
    for write in plan.writes:
        if write.kind == WriteKind.ROWS and by_row:
            first = write.block_index * BLOCK_TOKENS + write.first_row
            rows = [kv_row(tokens, first + i) for i in range(write.row_count)]
            index = INDEX[write.first_row : write.first_row + write.row_count].reshape(-1)
            writer.put_rows(write, np.concatenate(rows, axis=1), index)
        else:
            rows_now = write.first_row + write.row_count
            writer.put_block(write, kv_block(tokens, write.block_index, rows_now))
    writer.commit(plan)


def rows_are_right(page: NDArray[np.uint8], tokens: Sequence[int], block: int, rows: int) -> bool:
    """Whether a page holds the true KV of the first `rows` tokens of a block."""
    data = page.view(np.uint16).reshape(LAYERS, BLOCK_ELEMENTS)
    return all(
        np.array_equal(data[:, INDEX[row]], kv_row(tokens, block * BLOCK_TOKENS + row))
        for row in range(rows)
    )
