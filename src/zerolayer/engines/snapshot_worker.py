"""The connector's worker side: copies KV blocks into this engine's arena and out of others'."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from zerolayer.arena.layout import FLAG_LIVE
from zerolayer.arena.mapping import ArenaFile
from zerolayer.arena.plan import PageWrite, WriteKind
from zerolayer.arena.reader import ArenaReader, SlotView
from zerolayer.arena.writer import ArenaWriter
from zerolayer.core.errors import ZeroLayerError
from zerolayer.engines import kv_layout
from zerolayer.engines.faults import FaultPoint
from zerolayer.engines.kv_access import KvAccess, access
from zerolayer.engines.messages import LoadOrder, SaveOrder, StepOrders
from zerolayer.engines.resume import install_worker_resume
from zerolayer.engines.settings import (
    ConnectorSettings,
    arena_geometry,
    fingerprint,
    rank_path,
    unsupported_reason,
)
from zerolayer.engines.traffic import SnapshotTraffic, path_bytes_per_s

#: Threads that load a moved stream's pages: two copy 79 MB in 15 ms, one in 22 to 28.
LOAD_THREADS = 2

logger = init_logger("vllm.zerolayer.snapshot_worker")


class SnapshotWorker:
    """Owns one rank's arena. A failure here costs snapshots, never a stream or the engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._faults = FaultPoint(Path(settings.board))
        self._kv: KvAccess | None = None
        self._writer: ArenaWriter | None = None
        self._rows: kv_layout.LayoutIndex | None = None
        self._fingerprint = b""
        self._rank = 0
        self._failed_blocks: set[int] = set()
        self._traffic: SnapshotTraffic | None = None
        install_worker_resume(vllm_config.model_config.get_vocab_size())
        _compile_nothing_when_eager(vllm_config)

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """The caches exist (still empty): derive the layout and create the arena."""
        if not self._settings.snapshots:
            return
        from vllm.distributed import get_tensor_model_parallel_rank

        self._rank = get_tensor_model_parallel_rank()
        reason = unsupported_reason(self._kv_cache_config)
        try:
            if reason is None:
                self._open_arena(caches)
        except (ZeroLayerError, ValueError, OSError) as cause:
            reason = str(cause)
        if reason is not None:
            self._switch_off(reason)

    def _open_arena(self, caches: dict[str, torch.Tensor]) -> None:
        geometry = arena_geometry(self._vllm_config, self._kv_cache_config, self._settings)
        kv = access(list(caches.values()))
        if kv.layers * kv.block_elements * kv.itemsize != geometry.page_bytes:
            raise ValueError(
                f"a KV block has {kv.layers * kv.block_elements * kv.itemsize} bytes, "
                f"vLLM's config says {geometry.page_bytes}"
            )
        backend = self._derive_rows(caches, geometry.block_tokens)
        self._fingerprint = fingerprint(
            self._vllm_config, self._kv_cache_config, self._rank, backend
        )
        path = self._settings.arena_path(self._rank)
        file = ArenaFile.create(path, geometry, self._fingerprint)
        file.prefault()
        self._kv, self._writer = kv, ArenaWriter(file)
        speed = path_bytes_per_s(kv, self._kv_cache_config.num_blocks)
        self._traffic = SnapshotTraffic(Path(self._settings.board), self._rank, speed)
        logger.info("Snapshots: %d pages of %d bytes", geometry.page_count, geometry.page_bytes)

    def _derive_rows(self, caches: dict[str, torch.Tensor], block_tokens: int) -> str:
        """Derive the layout index from the first layer; returns the backend's name."""
        context = self._vllm_config.compilation_config.static_forward_context
        name, cache = next(iter(caches.items()))
        layer = context[name]
        index = kv_layout.derive(layer, cache, block_tokens)
        if isinstance(index, kv_layout.LayoutIndex):
            self._rows = index
        else:
            logger.warning("Snapshots copy whole blocks, not token rows: %s", index.why)
        return f"{type(layer.impl).__name__}/{getattr(layer, 'isa', '')}"

    def _switch_off(self, reason: str) -> None:
        """Go on without snapshots and leave a note that says why."""
        logger.warning("Snapshots are off for engine %s: %s", self._settings.engine, reason)
        self._writer = None
        self._settings.arena_path(self._rank).unlink(missing_ok=True)
        self._settings.off_note().write_text(reason + "\n")

    # -- each step ------------------------------------------------------------------------------

    def step_began(self) -> None:
        """The orders of a step are here."""
        self._faults.step_began()

    def before_step(self, orders: StepOrders) -> None:
        """Load moved streams; also where an injected hang takes hold."""
        self._faults.hang()
        for order in orders.loads:
            if not self._load(order):
                self._failed_blocks.update(order.block_ids)

    def after_step(self, orders: StepOrders) -> None:
        """Copy out what the step added: data first, watermark last."""
        if self._writer is not None:
            try:
                for save in orders.saves:
                    self._save(save)
                for clear in orders.clears:
                    self._writer.clear(clear)
            # Whatever is wrong with a snapshot, the streams of this engine go on without one.
            except Exception as cause:
                logger.exception("Saving a snapshot failed")
                self._switch_off(f"saving failed: {cause!r}")
        if self._traffic is not None:
            self._traffic.show()
        self._faults.slow()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that could not be loaded in this step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _save(self, order: SaveOrder) -> None:
        assert self._writer is not None
        assert self._traffic is not None
        for write, block in zip(order.plan.writes, order.block_ids, strict=True):
            self._traffic.saved(self._put(write, block))
        self._writer.commit(order.plan)

    def _put(self, write: PageWrite, block: int) -> int:
        """Copy one page's share of a step; returns its bytes."""
        assert self._writer is not None
        assert self._kv is not None
        if write.kind is WriteKind.BLOCK or self._rows is None:
            data = self._kv.read_block(block)
            self._writer.put_block(write, data)
            return data.nbytes
        last_row = write.first_row + write.row_count
        elements = self._rows.elements[write.first_row : last_row].reshape(-1)
        rows = self._kv.read_rows(block, elements)
        self._writer.put_rows(write, rows, elements)
        return rows.nbytes

    def _load(self, order: LoadOrder) -> bool:
        """Copy a stream's pages into this engine's blocks; False when they changed meanwhile."""
        began = time.perf_counter()
        path = rank_path(order.source, self._rank)
        reader = ArenaReader.open_or_none(path, self._fingerprint)
        if reader is None or self._kv is None:
            return False
        pairs = list(zip(order.block_ids, order.pages, strict=True))
        shares = [pairs[first::LOAD_THREADS] for first in range(LOAD_THREADS)]
        copy = partial(_copy_pages, reader, self._kv)
        with ThreadPoolExecutor(LOAD_THREADS) as pool:
            complete = all(pool.map(copy, shares))
        if self._traffic is not None:
            self._traffic.loaded(len(pairs) * reader.geometry.page_bytes)
        intact = complete and reader.unchanged(_slot_of(order))
        logger.info(
            "Loaded %d blocks of %s from %s in %.1f ms%s", len(order.pages), order.request_id,
            path.name, 1e3 * (time.perf_counter() - began), "" if intact else ", but they changed",
        )  # fmt: skip
        return intact


def _copy_pages(reader: ArenaReader, kv: KvAccess, pairs: Sequence[tuple[int, int]]) -> bool:
    """Copy (block, page) pairs; False when the file has become shorter."""
    dtype = np.dtype(f"u{kv.itemsize}")
    for block, page in pairs:
        memory = kv.block_memory(block)
        if memory:
            if not reader.read_page(page, memory):
                return False
        else:
            data = reader.page_view(page).view(dtype).reshape(kv.layers, kv.block_elements)
            kv.write_block(block, data)
    return True


def _compile_nothing_when_eager(vllm_config: Any) -> None:
    """Make `--enforce-eager` hold for vLLM's sampler too, on a CPU.

    The sampler compiles a one-line function at an engine's first request for log-probabilities,
    eager or not: 2 to 25 s without a step on two cores, in which every stream of the engine waits.
    """
    if vllm_config.model_config.enforce_eager and vllm_config.device_config.device_type == "cpu":
        torch.compiler.set_stance("force_eager")


def _slot_of(order: LoadOrder) -> SlotView:
    """The part of the source's slot that was loaded, as the scheduler side saw it."""
    return SlotView(
        slot=order.slot,
        generation=order.slot_generation,
        epoch=0,
        flags=FLAG_LIVE,
        watermark=0,
        updated_ns=0,
        bytes_written=0,
        pages=np.array(order.pages, dtype=np.uint32),
        page_generations=np.array(order.page_generations, dtype=np.uint32),
    )
