"""vLLM's engine client over a whole fleet: the one object that vLLM's AsyncLLM talks to."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from zerolayer.core.errors import EngineError
from zerolayer.core.outcome import Outcome
from zerolayer.engines.fleet import Fleet
from zerolayer.engines.port import PortClient
from zerolayer.engines.supervisor import LiveEngine

#: Body field `vllm_xargs` with this key and the value "prefill" continues without snapshots.
RESUME_ARG = "zerolayer_resume"

#: Dispatch time of the request that the current task serves, in milliseconds.
dispatch_time_ms: ContextVar[float | None] = ContextVar("zerolayer_dispatch_ms", default=None)


class FleetClient(EngineCoreClient):
    """Requests go to the engine that the driver chooses; everything else to every ready engine.

    An engine's death never reaches AsyncLLM: it is the driver's business.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._driver = fleet.driver
        self.engine_ranks_managed = list(range(fleet.settings.engines))
        self.resources = SimpleNamespace(engine_dead=False)
        self.output_task: Callable[[], asyncio.Task[Any] | None] = lambda: None

    # -- requests ---------------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Place a request."""
        params = request.sampling_params
        extra = params.extra_args if params is not None else None
        by_prefill = bool(extra) and extra.get(RESUME_ARG) == "prefill"  # type: ignore[union-attr]
        prompt = request.prompt_token_ids
        if prompt is not None:
            tokens = len(prompt)
        else:
            tokens = request.prompt_embeds.shape[0] if request.prompt_embeds is not None else 0
        spent_ns = await self._driver.add(
            request.request_id, request, tokens, by_prefill, self._fleet.placing.wishes()
        )
        dispatch_time_ms.set(spent_ns / 1e6)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Take requests out: the client left, or a stop string ended them above us."""
        stopped_above = asyncio.current_task() is self.output_task()
        outcome = Outcome.FINISHED if stopped_above else Outcome.CLIENT_LEFT
        for stream_id in request_ids:
            owned = self._driver.owned.get(stream_id)
            if owned is not None and owned.stream.engine is not None:
                self._fleet.prefixes.ended(owned.stream.engine, owned)
        await self._driver.end_streams(request_ids, outcome)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next fenced outputs of any engine."""
        return await self._fleet.outputs.get()

    # -- everything else goes to the engines that are there ---------------------------------------

    def _serving(self) -> list[LiveEngine]:
        """The engines that serve now. Raises `EngineError` when there is none."""
        accepts = self._driver.fleet.accepts
        live = [s.live for s in self._fleet.supervisors if accepts[s.slot]]
        serving = [engine for engine in live if engine is not None]
        if not serving:
            raise EngineError("no engine is ready")
        return serving

    async def _everywhere(self, call: Callable[[PortClient], Awaitable[Any]]) -> list[Any]:
        """Call something on every serving engine; one that dies meanwhile does not count."""
        jobs = [_unless_it_ends(engine, call) for engine in self._serving()]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDeadError):
                raise result
        answers = [result for result in results if not isinstance(result, EngineDeadError)]
        if not answers:
            raise EngineError("the engines died before they answered")
        return answers

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """A utility call on every ready engine; the first engine's answer."""
        return (await self._everywhere(lambda c: c.call_utility_async(method, *args)))[0]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """A utility call on every ready engine; all answers."""
        return await self._everywhere(lambda c: c.call_utility_async(method, *args))

    async def call_utility_consensus_async(self, method: str, *args: Any) -> Any:
        """A utility call whose answer must be the same everywhere."""
        results = await self.call_utility_all_async(method, *args)
        if any(result != results[0] for result in results):
            raise RuntimeError(f"engines returned different {method} results: {results}")
        return results[0]

    def shutdown(self, timeout: float | None = None) -> None:
        """End all engines. vLLM calls this from a thread of its own."""
        self._fleet.close()

    def dp_engines_running(self) -> bool:
        """Engines are independent; there is no common wave to wait for."""
        return False

    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method in every worker of every ready engine."""
        per_engine = await self._everywhere(
            lambda c: c.collective_rpc_async(method, timeout, args, kwargs)
        )
        return [result for workers in per_engine for result in workers]

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        """What the model can do; the same on every engine."""
        tasks = await self.call_utility_async("get_supported_tasks")
        return tuple(tasks)

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset every engine's prefix cache."""
        self._fleet.prefixes.all_emptied()
        return all(
            await self._everywhere(
                lambda c: c.reset_prefix_cache_async(reset_running_requests, reset_connector)
            )
        )

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        """Wake every engine."""
        return all(await self._everywhere(lambda c: c.wake_up_async(tags)))

    async def add_lora_async(self, lora_request: Any) -> bool:
        """Load an adapter into every engine."""
        return all(await self._everywhere(lambda c: c.add_lora_async(lora_request)))

    async def get_status(self) -> dict[str, Any]:
        """vLLM's own status call."""
        return {"schema_version": 1, "total_engines": len(self.engine_ranks_managed), "engines": []}


async def _unless_it_ends(engine: LiveEngine, call: Callable[[PortClient], Awaitable[Any]]) -> Any:
    """The engine's answer; vLLM's client itself would wait for a dead engine for ever."""
    job = asyncio.ensure_future(call(engine.launched.client))
    either: set[asyncio.Future[Any]] = {job, engine.ended}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise EngineDeadError
        return job.result()
    finally:
        job.cancel()


#: Calls that simply go to every ready engine, the first answer counting.
_FORWARDED = (
    "profile_async",
    "reset_mm_cache_async",
    "reset_encoder_cache_async",
    "sleep_async",
    "release_kv_cache_memory_async",
    "is_sleeping_async",
    "pause_scheduler_async",
    "resume_scheduler_async",
    "is_scheduler_paused_async",
    "remove_lora_async",
    "list_loras_async",
    "pin_lora_async",
    "save_sharded_state_async",
    "set_weight_version_async",
    "get_weight_version_async",
    "execute_dummy_batch_async",
    "compute_weight_checksums_async",
)
#: Those of them after which an engine may hold no prefix any more.
_EMPTYING = frozenset(("sleep_async", "release_kv_cache_memory_async", "pause_scheduler_async"))


def _forward(name: str) -> Callable[..., Awaitable[Any]]:
    async def forwarded(self: FleetClient, *args: Any, **kwargs: Any) -> Any:
        if name in _EMPTYING:
            self._fleet.prefixes.all_emptied()
        return (await self._everywhere(lambda c: getattr(c, name)(*args, **kwargs)))[0]

    forwarded.__name__ = name
    forwarded.__doc__ = f"`{name}` on every ready engine; the first engine's answer."
    return forwarded


for _name in _FORWARDED:
    setattr(FleetClient, _name, _forward(_name))
