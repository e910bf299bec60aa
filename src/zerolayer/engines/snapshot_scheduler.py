"""The connector's scheduler side: what to save after each step, what to load for a moved stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from zerolayer.arena.ledger import ArenaLedger
from zerolayer.arena.reader import ArenaReader, SlotView
from zerolayer.core.ids import RequestId, split_request_id
from zerolayer.engines.messages import LoadOrder, SaveOrder, StepOrders
from zerolayer.engines.resume import ResumeMarker, split_scheduler_request
from zerolayer.engines.settings import ConnectorSettings, arena_geometry, unsupported_reason

logger = init_logger("vllm.zerolayer.snapshot_scheduler")


@dataclass
class _Tracked:
    """A request that lives in this engine."""

    request: Any
    stream_id: str
    epoch: int
    marker: ResumeMarker | None
    blocks: list[int] = field(default_factory=list)
    opened: bool = False  # the ledger was asked for a slot, once
    has_slot: bool = False


@dataclass(frozen=True)
class _Found:
    """A verified snapshot of a moved stream in another engine's arena."""

    source: str
    slot: SlotView
    tokens: int


class SnapshotScheduler:
    """Turns vLLM's scheduling decisions into orders for the worker side. Copies nothing itself."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        self._settings = settings
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._found: dict[str, _Found] = {}
        self._own_fingerprint: bytes | None = None
        self._ledger: ArenaLedger | None = None
        if settings.snapshots and unsupported_reason(kv_cache_config) is None:
            geometry = arena_geometry(vllm_config, kv_cache_config, settings)
            self._ledger = ArenaLedger(geometry, settings.full_blocks_per_step)

    # -- a request's way through the scheduler --------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request enters the engine; a moved one is split into prompt and output."""
        stream_id, epoch = split_request_id(request.request_id) or RequestId(request.request_id, 0)
        marker = split_scheduler_request(request)
        self._requests[request.request_id] = _Tracked(request, stream_id, epoch, marker)

    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """How many tokens beyond `computed_tokens` can be loaded from an arena.

        At most all but the last token: its logits must be computed here.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.marker is None or not tracked.marker.sources:
            return 0
        found = self._find(tracked)
        if found is None:
            return 0
        tokens = min(found.tokens, int(request.num_tokens) - 1)
        if tokens <= computed_tokens:
            return 0
        self._found[request.request_id] = found
        return tokens - computed_tokens

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """Blocks were allocated; order the load when tokens come from an arena."""
        found = self._found.pop(request.request_id, None)
        if found is None or external_tokens == 0:
            return
        assert self._ledger is not None
        block_tokens = self._ledger.geometry.block_tokens
        end = min(found.tokens, request.num_tokens - 1)
        if request.prefill_stats is not None:
            # The serving process reads from it how much was restored; clients never see it.
            request.prefill_stats.set(
                num_prompt_tokens=request.num_tokens,
                num_local_cached_tokens=end - external_tokens,
                num_external_cached_tokens=external_tokens,
            )
        first, last = (end - external_tokens) // block_tokens, -(-end // block_tokens)
        self._loads.append(
            LoadOrder(
                request_id=request.request_id,
                source=found.source,
                slot=found.slot.slot,
                slot_generation=found.slot.generation,
                block_ids=tuple(block_ids[first:last]),
                pages=tuple(found.slot.pages[first:last].tolist()),
                page_generations=tuple(found.slot.page_generations[first:last].tolist()),
            )
        )

    def finished(self, request: Any) -> None:
        """The request ended or was aborted here: its pages may be shared or reused."""
        tracked = self._requests.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        if tracked is not None and tracked.has_slot and self._ledger is not None:
            self._ledger.close(tracked.stream_id, tracked.epoch)

    def step_orders(self, scheduled: Any) -> StepOrders:
        """The orders for one step, from vLLM's `SchedulerOutput`."""
        self._note_blocks(scheduled)
        orders = StepOrders(loads=self._loads)
        self._loads = []
        if self._ledger is not None:
            counts = scheduled.num_scheduled_tokens
            block_tokens = self._ledger.geometry.block_tokens
            self._ledger.begin_step(sum(count // block_tokens for count in counts.values()))
            for request_id, count in counts.items():
                order = self._save_order(request_id, self._computed_before(request_id), count)
                if order is not None:
                    orders.saves.append(order)
            orders.clears = self._ledger.take_clears()
        return orders

    # -- inside ---------------------------------------------------------------------------------

    def _computed_before(self, request_id: str) -> int:
        return self._computed.get(request_id, 0)

    def _note_blocks(self, scheduled: Any) -> None:
        self._computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            if (tracked := self._requests.get(new.req_id)) is not None:
                tracked.blocks = list(new.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            self._computed[request_id] = cached.num_computed_tokens[index]
            tracked = self._requests.get(request_id)
            blocks = cached.new_block_ids[index]
            if tracked is None or not blocks:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.blocks = list(blocks[0])
            else:
                tracked.blocks.extend(blocks[0])

    def _save_order(self, request_id: str, computed: int, count: int) -> SaveOrder | None:
        tracked = self._requests.get(request_id)
        if tracked is None or self._ledger is None:
            return None
        if not tracked.opened:
            tracked.opened = True
            tracked.has_slot = self._ledger.open(tracked.stream_id, tracked.epoch)
        if not tracked.has_slot:
            return None
        tokens = tracked.request._all_token_ids
        # Tokens that the scheduler does not know yet (async scheduling) follow in the next step.
        target = min(computed + count, len(tokens))
        keys = _SharingKeys(tracked.request.block_hashes, tracked.blocks)
        plan = self._ledger.advance(tracked.stream_id, target, keys, tokens, tracked.epoch)
        if plan is None:
            return None
        return SaveOrder(plan, tuple(tracked.blocks[w.block_index] for w in plan.writes))

    def _find(self, tracked: _Tracked) -> _Found | None:
        """The source with the most verified tokens of this stream."""
        fingerprint = self._fingerprint()
        assert tracked.marker is not None
        if fingerprint is None:
            return None
        best: _Found | None = None
        for source in tracked.marker.sources:
            reader = ArenaReader.open_or_none(Path(source), fingerprint)
            slot = reader.find(tracked.stream_id) if reader is not None else None
            if reader is None or slot is None:
                continue
            tokens = reader.verified_tokens(slot, tracked.request._all_token_ids)
            if tokens > (best.tokens if best else 0):
                best = _Found(source, slot, tokens)
        return best

    def _fingerprint(self) -> bytes | None:
        """That of this engine's own arena; None when it keeps none, then nothing is loaded."""
        if self._own_fingerprint is None and self._ledger is not None:
            own = ArenaReader.open_or_none(self._settings.arena_path(0))
            if own is not None:
                self._own_fingerprint = own.header.fingerprint
                own.close()
        return self._own_fingerprint


class _SharingKeys(Sequence[bytes]):
    """A key per full block, under which the arena shares pages between streams.

    vLLM's block hash says that two blocks hold the same tokens, and the physical block that they
    are the same memory: two streams that computed one prefix separately may differ in rounding,
    and a resumed stream must find the very bits that it had.
    """

    def __init__(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        self._hashes = hashes
        self._blocks = blocks

    def __len__(self) -> int:
        return min(len(self._hashes), len(self._blocks))

    def __getitem__(self, index: Any) -> Any:
        return bytes(self._hashes[index])[:28] + self._blocks[index].to_bytes(4, "little")
