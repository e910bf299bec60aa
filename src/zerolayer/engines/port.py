"""One live engine: what goes in, what comes out, and how it is asked to prove itself."""

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from zmq import ZMQError

from zerolayer.core.errors import EngineError
from zerolayer.engines.resume import MARKER, ResumeMarker
from zerolayer.stitch.driver import SubmitOrder

#: A round trip through an engine's queue that takes longer proves nothing.
PROBE_TIMEOUT_S = 2.0
#: Prompt length of a probe: long enough that its first run warms up the prefill kernels.
PROBE_TOKENS = 8
#: Stream id of the one-token requests that let a stalled engine show a step.
PROBE_STREAM = "zerolayer-probe"


class PortClient(AsyncMPClient):
    """vLLM's client with its outputs led to the fleet, in the task that reads the socket."""

    def lead_outputs(
        self, take: Callable[[EngineCoreOutputs], Awaitable[None]], ended: Callable[[], None]
    ) -> None:
        """Call `take` for each step's outputs and `ended` when the engine says it is dead.

        Called once, before the reading task starts.
        """
        self.take = take
        self.outputs_queue = _EndOnly(ended)
        self._ensure_output_queue_task()

    async def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """vLLM calls this hook for each message, before it queues the message."""
        await self.take(outputs)


class _EndOnly:
    """Stands where vLLM's client queues outputs: those were taken already, only the end counts."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def put_nowait(self, item: object) -> None:
        if isinstance(item, Exception):
            self._ended()


class VllmPort:
    """The driver's `EnginePort` over one engine incarnation."""

    def __init__(self, client: PortClient, arena: str) -> None:
        self.client = client
        self.arena = arena
        self._generates = True
        self._probes = itertools.count()
        self._answered: dict[str, asyncio.Future[None]] = {}

    async def submit(self, order: SubmitOrder) -> None:
        """See `EnginePort`."""
        try:
            await self.client.add_request_async(engine_request(order))
        except (EngineDeadError, ZMQError) as cause:
            raise EngineError("the engine's queue is closed") from cause

    async def abort(self, request_ids: list[str]) -> None:
        """See `EnginePort`."""
        try:
            await self.client.abort_requests_async(request_ids)
        except (EngineDeadError, ZMQError) as cause:
            raise EngineError("the engine's queue is closed") from cause

    async def answers(self) -> bool:
        """Whether a call through the engine's own loop comes back in time."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                tasks = await self.client.call_utility_async("get_supported_tasks")
        except (TimeoutError, EngineDeadError, ZMQError):
            return False
        self._generates = "generate" in tasks
        return True

    async def computes(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Whether the engine computes a token in time (a model that generates none passes).

        The token belongs to no stream of ours, so the fence drops it.
        """
        if not self._generates:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._compute_one_token()
        except (TimeoutError, EngineDeadError, ZMQError):
            return False
        return True

    async def _compute_one_token(self) -> None:
        request = _probe_request(next(self._probes))
        answered = asyncio.get_running_loop().create_future()
        self._answered[request.request_id] = answered
        try:
            await self.client.add_request_async(request)
            await answered
        finally:
            del self._answered[request.request_id]

    def noted_probe(self, request_id: str) -> None:
        """Output of a probe has come."""
        answered = self._answered.get(request_id)
        if answered is not None and not answered.done():
            answered.set_result(None)


def engine_request(order: SubmitOrder) -> EngineCoreRequest:
    """The request as one engine gets it: fenced id, and for a moved stream the resume marker."""
    request: EngineCoreRequest = copy.copy(order.request)
    request.request_id = order.request_id
    params = request.sampling_params
    if params is None or not (order.delivered or order.sources):
        return request
    params = params.clone()
    marker = ResumeMarker(output=list(order.delivered), sources=list(order.sources))
    params.extra_args = {**(params.extra_args or {}), MARKER: msgspec.to_builtins(marker)}
    if order.delivered:
        # They went out with the first token; asking again would forbid loading the snapshot.
        params.prompt_logprobs = None
        params.skip_reading_prefix_cache = False
        assert request.prompt_token_ids is not None
        request.prompt_token_ids = [*request.prompt_token_ids, *order.delivered]
    request.sampling_params = params
    request.cache_salt = _salt(request.cache_salt, order.sources)
    return request


def _salt(salt: str | None, sources: Sequence[str]) -> str | None:
    """A prefix-cache salt under which only streams from the same engine share blocks.

    Another engine's prefix cache holds the same tokens with its own rounding; a resumed stream
    must go on from the bits that it had.
    """
    if not sources:
        return salt
    return f"{salt or ''}|{sources[0]}"


def why_not_resumable(request: EngineCoreRequest, delivered: int) -> str | None:
    """Why a request cannot be continued on another engine, or None when it can.

    Before its first token every request can simply be sent again.
    """
    if request.resumable:
        return "its input is a live session that only that engine has"
    if delivered == 0:
        return None
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "its prompt is made of embeddings, behind which output tokens cannot be placed"
    return None


def abandoned(output: Any) -> bool:
    """Whether the engine ended a stream that we still want: it does so when it is told to end.

    What a client or a stop string aborts has left the ledger before, and is fenced.
    """
    return bool(output.finish_reason == FinishReason.ABORT)


def restored_tokens(output: Any) -> int:
    """Tokens that the engine did not compute again, by its first output after a move.

    0 unless some came from a snapshot; beside those, its prefix cache may hold blocks that another
    stream of the same lost engine brought along.
    """
    stats = output.prefill_stats
    from_snapshot = stats is not None and stats.num_external_cached_tokens > 0
    return int(stats.num_cached_tokens) if from_snapshot else 0


def _probe_request(number: int) -> EngineCoreRequest:
    import time

    from vllm.sampling_params import SamplingParams

    return EngineCoreRequest(
        request_id=f"{PROBE_STREAM}-{number}",
        prompt_token_ids=[1] * PROBE_TOKENS,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
