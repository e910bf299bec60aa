"""The KV connector that vLLM loads into every engine (`KVConnectorBase_V1`).

One class, two lives: in the engine core it follows the scheduler, in each worker it copies pages.
Both are thin shells here; the work is in `snapshot_scheduler` and `snapshot_worker`.
"""

import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from zerolayer.engines.lifetime import die_with_parent
from zerolayer.engines.messages import StepOrders
from zerolayer.engines.progress import ProgressBoard
from zerolayer.engines.resume import install_grammar_resume, install_moved_first
from zerolayer.engines.settings import settings_of
from zerolayer.engines.snapshot_scheduler import SnapshotScheduler
from zerolayer.engines.snapshot_worker import SnapshotWorker

if TYPE_CHECKING:
    import torch


class ZeroLayerConnector(KVConnectorBase_V1):
    """Saves what each step adds to the arena, loads moved streams from it, shows step progress."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            install_grammar_resume()
            install_moved_first()
            self._scheduler = SnapshotScheduler(vllm_config, kv_cache_config, settings)
            self._board = ProgressBoard(settings)
        else:
            if vllm_config.parallel_config.distributed_executor_backend == "mp":
                # vLLM's own watch over the parent does not reach a worker that is stopped.
                die_with_parent(os.getppid())
            self._worker = SnapshotWorker(vllm_config, kv_cache_config, settings)

    # -- worker side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """The KV caches exist now: make the arena."""
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.step_began()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load moved streams before the forward pass of this step."""
        self._worker.before_step(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are done when `start_load_kv` returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing per layer: a step is saved at once in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """The step's keys and values are in the cache: copy them out."""
        self._worker.after_step(self._orders())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed; vLLM computes them again."""
        return self._worker.take_failed_blocks()

    def shutdown(self) -> None:
        """The engine ends."""

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders

    # -- scheduler side -------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's free-block list, for the board."""
        self._board.bind_blocks(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """A request enters the engine."""
        self._scheduler.on_new_request(request)
        self._board.added(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that an arena holds beyond the computed ones; loads are synchronous."""
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated for a request."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Called once per step, before it runs: the step's orders, and its start on the board."""
        orders = self._scheduler.step_orders(scheduler_output)
        self._board.step_started(scheduler_output)
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        """Called once per step, after it ran."""
        self._board.step_ended()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """A request ended; its blocks can be freed at once."""
        self._scheduler.finished(request)
        self._board.removed(request)
        return False, None
