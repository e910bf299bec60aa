"""What the scheduler side of the connector tells the worker side, once per step."""

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from zerolayer.arena.plan import SavePlan, SlotClear


class LoadOrder(msgspec.Struct, frozen=True, array_like=True):
    """Fill KV blocks of a resumed request from another engine's arena before the forward pass."""

    request_id: str
    source: str  # arena file of rank 0; a worker reads the one of its own rank
    slot: int
    slot_generation: int
    block_ids: tuple[int, ...]  # where to, in this engine
    pages: tuple[int, ...]  # where from, in the source; as long as block_ids
    page_generations: tuple[int, ...]


class SaveOrder(msgspec.Struct, frozen=True, array_like=True):
    """A ledger's plan, and the engine's KV block for each of its writes."""

    plan: SavePlan
    block_ids: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """All orders of one step. vLLM carries it with the step's scheduler output."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    clears: list[SlotClear] = field(default_factory=list)
