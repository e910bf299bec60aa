"""Reads and writes an engine's KV blocks as plain arrays, on the CPU or on a device."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Elements = NDArray[Any]  # unsigned integers as wide as the cache's dtype

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class KvAccess(Protocol):
    """The KV blocks of all layers of one rank."""

    layers: int
    block_elements: int
    itemsize: int

    def read_block(self, block: int) -> Elements:
        """[layers, block elements] of one block."""

    def read_rows(self, block: int, elements: NDArray[np.int64]) -> Elements:
        """[layers, len(elements)]: the given elements of one block."""

    def write_block(self, block: int, data: Elements) -> None:
        """Overwrite a block with [layers, block elements]."""

    def block_memory(self, block: int) -> list[Elements]:
        """The block's own memory, layer by layer; empty where it is not in this process."""


class CpuKvAccess:
    """KV caches that live in this process's memory: views, no copies but the wanted one."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        self.layers = len(caches)
        self.itemsize = caches[0].element_size()
        self.block_elements = caches[0][0].numel()
        self._views = [
            cache.view(_SIGNED[self.itemsize])
            .view(cache.shape[0], -1)
            .numpy()
            .view(_UNSIGNED[self.itemsize])
            for cache in caches
        ]

    def read_block(self, block: int) -> Elements:
        """See `KvAccess`."""
        return np.stack([view[block] for view in self._views])

    def read_rows(self, block: int, elements: NDArray[np.int64]) -> Elements:
        """See `KvAccess`."""
        rows = np.empty((self.layers, len(elements)), dtype=_UNSIGNED[self.itemsize])
        for view, row in zip(self._views, rows, strict=True):
            view[block].take(elements, out=row, mode="clip")
        return rows

    def write_block(self, block: int, data: Elements) -> None:
        """See `KvAccess`."""
        for view, layer in zip(self._views, data, strict=True):
            view[block] = layer

    def block_memory(self, block: int) -> list[Elements]:
        """See `KvAccess`."""
        return [view[block] for view in self._views]


class DeviceKvAccess:
    """KV caches on an accelerator: the wanted elements are gathered there, then copied over."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        self.layers = len(caches)
        self.itemsize = caches[0].element_size()
        self.block_elements = caches[0][0].numel()
        self._device = caches[0].device
        self._views = [c.view(_SIGNED[self.itemsize]).view(c.shape[0], -1) for c in caches]
        self._indices: dict[bytes, torch.Tensor] = {}

    def read_block(self, block: int) -> Elements:
        """See `KvAccess`."""
        return self._fetch(torch.stack([view[block] for view in self._views]))

    def read_rows(self, block: int, elements: NDArray[np.int64]) -> Elements:
        """See `KvAccess`."""
        index = self._indices.setdefault(
            elements.tobytes(), torch.from_numpy(elements).to(self._device)
        )
        return self._fetch(torch.stack([view[block][index] for view in self._views]))

    def write_block(self, block: int, data: Elements) -> None:
        """See `KvAccess`."""
        source = torch.from_numpy(data.view(f"i{self.itemsize}").copy()).to(self._device)
        for view, layer in zip(self._views, source, strict=True):
            view[block].copy_(layer)

    def block_memory(self, block: int) -> list[Elements]:
        """See `KvAccess`."""
        return []

    def _fetch(self, gathered: torch.Tensor) -> Elements:
        fetched: Elements = gathered.cpu().numpy().view(_UNSIGNED[self.itemsize])
        return fetched


def access(caches: list[torch.Tensor]) -> KvAccess:
    """The access for these caches: one tensor per layer, equal shapes, first axis the blocks.

    Raises `ValueError` when they are not that (hybrid and state-space models): then the caller
    goes without snapshots.
    """
    shapes = {(tuple(cache.shape), cache.dtype) for cache in caches}
    if len(shapes) != 1:
        raise ValueError(f"layers have different KV shapes: {sorted(map(str, shapes))}")
    if not caches[0].is_contiguous() or caches[0].element_size() not in _SIGNED:
        raise ValueError(f"KV blocks are not contiguous ({caches[0].dtype})")
    return CpuKvAccess(caches) if caches[0].device.type == "cpu" else DeviceKvAccess(caches)
