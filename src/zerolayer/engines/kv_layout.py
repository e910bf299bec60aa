"""Where one token's keys and values lie inside a KV block, found by asking the backend itself.

Attention backends are free to pack a block as they like (AMX interleaves tokens), so a token's
bytes are not a slice. `derive` writes one token after the other through the backend's own
cache-update call into an empty block and notes which elements change: that set, per slot, is the
layout index. The index is accepted only if it is complete, without overlap, equal in length for
each slot, and if a second, different pattern lands on the same elements. Otherwise whole blocks
are copied, which is right on every backend.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: A block that is written and cleared again while the cache is still empty. Block 0 is vLLM's
#: null block, so the first usable one is taken.
SCRATCH_BLOCK = 1


@dataclass(frozen=True)
class LayoutIndex:
    """`elements[slot]` = sorted element offsets of the slot's token in a layer's block.

    Shape [block_tokens, elements per token], int64; offsets count elements of the cache's dtype.
    """

    elements: npt.NDArray[np.int64]


@dataclass(frozen=True)
class UnknownLayout:
    """Token rows cannot be used; whole blocks are copied instead. `why` is for the operator."""

    why: str


def derive(layer: Any, cache: torch.Tensor, block_tokens: int) -> LayoutIndex | UnknownLayout:
    """Derive and verify the index for one attention layer.

    `layer` is vLLM's attention layer (`layer.impl` is the backend), `cache` its KV tensor
    `[blocks, kv heads, block_tokens, 2 * head size]`, still empty.
    """
    if cache.dim() != 4 or cache.shape[2] != block_tokens or not cache[0].is_contiguous():
        return UnknownLayout(f"the cache has shape {tuple(cache.shape)}")
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return UnknownLayout(f"{type(layer.impl).__name__} has no separate cache update")
    try:
        first = [_touched(update, layer, cache, slot, value=1.0) for slot in range(block_tokens)]
        second = [_touched(update, layer, cache, slot, value=-3.5) for slot in range(block_tokens)]
    # The backend is foreign code on unknown hardware; whatever it raises, whole blocks still work.
    except Exception as cause:  # noqa: BLE001
        return UnknownLayout(f"{type(layer.impl).__name__} refused the pattern: {cause!r}")
    finally:
        cache[SCRATCH_BLOCK].zero_()
    return _verified(first, second, cache[SCRATCH_BLOCK].numel())


def _touched(
    update: Any, layer: Any, cache: torch.Tensor, slot: int, value: float
) -> npt.NDArray[np.int64]:
    """Element offsets that change when one token is written to `slot` of the scratch block."""
    block = cache[SCRATCH_BLOCK]
    block.zero_()
    _, heads, block_tokens, width = cache.shape
    shape = (1, heads, width // 2)
    key = torch.full(shape, value, dtype=layer_dtype(layer, cache), device=cache.device)
    mapping = torch.tensor([SCRATCH_BLOCK * block_tokens + slot], dtype=torch.int64)
    update(layer, key, key.clone(), cache, mapping.to(cache.device))
    changed: npt.NDArray[np.int64] = block.reshape(-1).nonzero().reshape(-1).cpu().numpy()
    return changed


def layer_dtype(layer: Any, cache: torch.Tensor) -> torch.dtype:
    """The dtype in which keys arrive (the cache's own unless it is quantised)."""
    return cache.dtype if cache.dtype.is_floating_point else torch.get_default_dtype()


def _verified(
    first: list[npt.NDArray[np.int64]], second: list[npt.NDArray[np.int64]], block_elements: int
) -> LayoutIndex | UnknownLayout:
    tokens = len(first)
    if any(len(rows) != block_elements // tokens for rows in first):
        sizes = sorted({len(rows) for rows in first})
        return UnknownLayout(f"a token touches {sizes} of {block_elements // tokens} elements")
    if any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True)):
        return UnknownLayout("two patterns for one token touch different elements")
    elements = np.stack(first)
    if np.unique(elements).size != block_elements:
        return UnknownLayout("tokens share elements of a block")
    return LayoutIndex(elements=elements)
