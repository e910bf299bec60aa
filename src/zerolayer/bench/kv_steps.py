"""Real KV pages, step by step: taken from a live fleet's arena while a stream decodes.

From two copies of a page, one token apart, follows which elements that token owns: the layout
index. It is derived here from the outside, so it also checks what the engine derived inside.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from zerolayer.arena.reader import ArenaReader, SlotView
from zerolayer.core.errors import EngineError

ELEMENT_BYTES = 2
"""bfloat16; the measurement starts its fleet with it."""

Page = NDArray[np.uint8]


@dataclass(frozen=True)
class StepCopy:
    """One page right after a decode step."""

    tokens: int
    """Committed tokens of the stream; the newest one lies in this page."""
    block: int
    """Which block of the stream."""
    bytes_written: int
    """What the engine has written for this stream so far."""
    page: Page


@dataclass(frozen=True)
class Step:
    """One decode step: the page before and after it."""

    row: int
    """Row of the new token in its block; 0 is the first."""
    before: Page
    after: Page
    bytes_written: int
    """What the engine itself wrote for this step, in bytes."""


def layers_of(model: str) -> int:
    """Layers of a model folder, from its config.json. Raises `EngineError`."""
    try:
        config: dict[str, Any] = msgspec.json.decode((Path(model) / "config.json").read_bytes())
        return int(config["num_hidden_layers"])
    except (OSError, KeyError, ValueError, msgspec.DecodeError) as cause:
        raise EngineError(
            f"{model} has no readable config.json with num_hidden_layers; name a model folder"
        ) from cause


def copy_newest_page(reader: ArenaReader, stream_id: str) -> StepCopy | None:
    """The page that holds a stream's newest token; None while it is being written, or is none."""
    slot = reader.find(stream_id)
    if slot is None or slot.watermark == 0:
        return None
    block = (slot.watermark - 1) // reader.geometry.block_tokens
    page = reader.page_view(int(slot.pages[block])).copy()
    after = reader.find(stream_id)
    if after is None or not _same(slot, after) or not reader.unchanged(slot, [slot.pages[block]]):
        return None
    return StepCopy(slot.watermark, block, slot.bytes_written, page)


def _same(one: SlotView, other: SlotView) -> bool:
    return one.generation == other.generation and one.watermark == other.watermark


def steps_of(copies: list[StepCopy], block_tokens: int) -> list[Step]:
    """Pairs of copies that are exactly one token apart, within one block."""
    steps = []
    for past, now in itertools.pairwise(copies):
        if now.tokens == past.tokens + 1 and now.block == past.block:
            row = (now.tokens - 1) % block_tokens
            written = now.bytes_written - past.bytes_written
            steps.append(Step(row, past.page, now.page, written))
    return steps


def derive_rows(
    steps: list[Step], layers: int, block_tokens: int
) -> dict[int, NDArray[np.int64]] | str:
    """Elements of a layer's block that each row owns, by row, or why that cannot be said.

    A layer's block is taken as elements of `ELEMENT_BYTES`. Rows without a step are left out.
    Accepted only if each row has its full share and no element belongs to two rows.
    """
    touched: dict[int, NDArray[np.bool_]] = {}
    for step in steps:
        changed = (_elements(step.before, layers) != _elements(step.after, layers)).any(axis=0)
        touched[step.row] = touched.get(step.row, np.zeros_like(changed)) | changed
    if not touched:
        return "no two copies of a page were one token apart"
    rows = {row: np.flatnonzero(mask) for row, mask in sorted(touched.items())}
    share = next(iter(touched.values())).size // block_tokens
    wrong = {row: len(found) for row, found in rows.items() if len(found) != share}
    if wrong:
        return f"rows own {wrong} elements, each should own {share}"
    if np.unique(np.concatenate(list(rows.values()))).size != share * len(rows):
        return "two rows share elements"
    return rows


def gather(page: Page, layers: int, elements: NDArray[np.int64]) -> NDArray[np.uint16]:
    """One token's elements of all layers, [layers, elements]."""
    return np.take(_elements(page, layers), elements, axis=1)


def _elements(page: Page, layers: int) -> NDArray[np.uint16]:
    return page.view(np.uint16).reshape(layers, -1)
