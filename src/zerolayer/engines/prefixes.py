"""The live fleet's knowledge of prefixes: what a request's prompt finds on each engine.

A new stream finds what its engine's prefix cache holds (`dispatch.prefix_index`, told here by each
first token and each end of a stream). A moved stream finds its own snapshot instead: its blocks are
kept under a salt of their own (`port.engine_request`), so it neither finds nor leaves blocks that
others could use.
"""

from dataclasses import dataclass, replace
from typing import Any

from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.policies import PlacementRequest
from zerolayer.dispatch.prefix_index import PrefixIndex, PrefixKeys
from zerolayer.dispatch.snapshot_load import held_by_snapshot
from zerolayer.stitch.driver import Owned

#: An engine that had less than this share of what was expected has lost more than the rounding of
#: caches whose hits come in larger units than a block.
MISSED_BELOW = 0.5


@dataclass
class PrefixHits:
    """What was expected of the engines' prefix caches and what they had, since the start."""

    prompts: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    """Leading tokens that the chosen engine was thought to hold."""
    actual_tokens: int = 0
    """Those that it did not compute."""
    error_tokens: int = 0
    """Sum of |actual - predicted|."""


class Prefixes:
    """See the module's docstring. All methods run on the fleet's event loop."""

    def __init__(self, *, snapshots: bool) -> None:
        """`snapshots`: a moved stream's KV is loaded and not computed again."""
        self.hits = PrefixHits()
        self._snapshots = snapshots
        self._index: PrefixIndex | None = None

    def engine_up(self, slot: int, cache_config: Any) -> None:
        """An engine starts with an empty cache; `cache_config` is vLLM's, as that engine has it."""
        block_tokens = cache_config.block_size
        if self._index is None or self._index.block_tokens != block_tokens:
            # Engines whose blocks differ do not share keys; a roll changes all of them in turn.
            self._index = PrefixIndex(block_tokens)
        blocks = cache_config.num_gpu_blocks or 0
        caches = bool(cache_config.enable_prefix_caching)
        self._index.emptied(slot, blocks * block_tokens if caches else 0)

    def engine_gone(self, slot: int) -> None:
        """The engine holds nothing any more."""
        if self._index is not None:
            self._index.emptied(slot)

    def all_emptied(self) -> None:
        """Every engine was told to empty its cache."""
        if self._index is not None:
            self._index.clear()

    def refined(
        self, owned: Owned, wanted: PlacementRequest, fleet: FleetState
    ) -> PlacementRequest:
        """`wanted` with the leading tokens that each of the engines need not compute."""
        if _is_salted(owned):
            if not (self._snapshots and owned.stream.delivered):
                return wanted
            # Snapshots follow each token, and every engine can load them, also one that restarts.
            loads = max(0, wanted.prompt_tokens - 1)
            return replace(wanted, held_tokens=held_by_snapshot(fleet, loads))
        if not owned.stream.delivered and _reads_no_cache(owned.request):
            return wanted
        index = self._index
        if index is None or not self._is_indexed(owned.request):
            return wanted
        request = owned.request
        held, owned.prefix = index.find(request.prompt_token_ids, _scope(request), owned.prefix)
        return replace(wanted, held_tokens=held) if held else wanted

    def noted(self, slot: int, owned: Owned, output: Any) -> None:
        """An output of this engine passed to the stream's client."""
        stream = owned.stream
        if stream.epoch or self._index is None or not self._index.in_use:
            return
        if len(stream.delivered) == len(output.new_token_ids):
            self._first_output(slot, owned, output)
        if output.finish_reason is not None:
            self.ended(slot, owned)

    def ended(self, slot: int, owned: Owned) -> None:
        """A stream that was never moved ends: its engine keeps the blocks of prompt and answer. The
        KV of the last token was not computed."""
        stream, known = owned.stream, self._keys(owned)
        if stream.epoch or self._index is None or known is None or len(stream.delivered) < 2:
            return
        tokens = [*owned.request.prompt_token_ids, *stream.delivered[:-1]]
        self._index.note(slot, self._index.keys(tokens, _scope(owned.request), known))

    def _first_output(self, slot: int, owned: Owned, output: Any) -> None:
        """The prompt is computed, and the engine says how much of it was there already."""
        keys = self._keys(owned)
        if self._index is None or keys is None:
            return
        if output.prefill_stats is not None:
            expected = owned.stream.prompt_tokens - owned.waiting_tokens
            actual = int(output.prefill_stats.num_cached_tokens)
            self._count(owned.stream.prompt_tokens, expected, actual)
            if actual < MISSED_BELOW * expected:
                self._index.missed(slot, keys, actual)
        self._index.note(slot, keys)

    def _count(self, prompt_tokens: int, predicted: int, actual: int) -> None:
        hits = self.hits
        hits.prompts += 1
        hits.prompt_tokens += prompt_tokens
        hits.predicted_tokens += predicted
        hits.actual_tokens += actual
        hits.error_tokens += abs(actual - predicted)

    def _keys(self, owned: Owned) -> PrefixKeys | None:
        """Those of its prompt, or None where it is not indexed."""
        request, index = owned.request, self._index
        if index is None or not self._is_indexed(request):
            return None
        owned.prefix = index.keys(request.prompt_token_ids, _scope(request), owned.prefix)
        return owned.prefix

    def _is_indexed(self, request: Any) -> bool:
        """Whether some engine has a cache, and the request's tokens say all that is in its KV."""
        return (
            self._index is not None
            and self._index.in_use
            and request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.mm_features
        )


def _is_salted(owned: Owned) -> bool:
    """Whether its next engine gets it with the sources of its snapshot, and so under a salt."""
    return bool(owned.sources) and not owned.by_prefill


def _scope(request: Any) -> tuple[str | None, str | None]:
    """What must be equal beside the tokens for blocks to be shared: vLLM's
    `generate_block_hash_extra_keys` for prompts that are made of tokens alone."""
    adapter = request.lora_request
    return request.cache_salt or None, adapter.lora_name if adapter is not None else None


def _reads_no_cache(request: Any) -> bool:
    """Log-probabilities of the prompt, or the client, want every token computed."""
    params = request.sampling_params or request.pooling_params
    return bool(params is not None and params.skip_reading_prefix_cache)
