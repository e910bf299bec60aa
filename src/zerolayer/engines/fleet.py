"""The fleet of one serving process: engines, streams, tables, and the watch over all of them."""

import asyncio
import copy
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs

from zerolayer.arena.board import EngineBoard
from zerolayer.arena.runtime_dir import RuntimeDir
from zerolayer.core.errors import EngineError
from zerolayer.core.ids import engine_name
from zerolayer.core.limits import EVENTS_KEPT
from zerolayer.core.outcome import Outcome
from zerolayer.core.ports import Clock
from zerolayer.dispatch.choices import PlacementChoices
from zerolayer.dispatch.policies import PlacementRequest
from zerolayer.engines.arena_readers import ArenaReaders
from zerolayer.engines.counters import Counters
from zerolayer.engines.gpus import NO_GPUS, Gpus
from zerolayer.engines.housekeeping import Housekeeping
from zerolayer.engines.launcher import LaunchedEngine, Launcher, LaunchOrder, kill_tree
from zerolayer.engines.offloading import Offloading
from zerolayer.engines.operations import Operations
from zerolayer.engines.picture import MemoryPicture
from zerolayer.engines.placing import Placing
from zerolayer.engines.port import (
    PROBE_STREAM,
    PortClient,
    VllmPort,
    abandoned,
    restored_tokens,
    why_not_resumable,
)
from zerolayer.engines.prefixes import Prefixes
from zerolayer.engines.settings import CONFIG_KEY
from zerolayer.engines.steering import Steering
from zerolayer.engines.supervisor import SlotSupervisor
from zerolayer.engines.watch import FleetWatch
from zerolayer.stitch.driver import DriverHooks, FleetDriver

logger = init_logger("vllm.zerolayer.fleet")

CONNECTOR = "ZeroLayerConnector"
CONNECTOR_MODULE = "zerolayer.engines.connector"
#: How often streams that wait for an engine are looked at, in seconds.
EXPIRY_EVERY_S = 0.5


@dataclass(frozen=True)
class FleetSettings:
    """What the operator chose for the fleet."""

    engines: int
    """Slots at the start, 1 to 256; `Fleet.supervisors` has those of now."""
    snapshots: bool
    """Save each step's KV, so that a moved stream goes on from it."""
    snapshot_bytes: int
    """Largest arena per engine and rank, in bytes; never more than the engine's KV cache."""
    wait_for_engine_s: float
    """How long a stream waits when no engine is left."""
    log_dir: Path
    """Where each engine writes its log."""
    environment: dict[str, str]
    """Set in each engine's process before vLLM starts."""
    arguments: tuple[str, ...] = ()
    """The operator's words for vLLM that the config was made of."""
    offload: bool = True
    """Move streams off an engine before it is too full or too slow."""
    placement: PlacementChoices = field(default_factory=PlacementChoices)
    """How engines are chosen for streams."""
    gpus: Gpus = NO_GPUS
    """Which of them each slot's engine has."""


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """One line of the fleet's log."""

    unix: float
    engine: str
    what: str


class SystemClock:
    """The real time."""

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC in ns."""
        return time.monotonic_ns()

    def unix(self) -> float:
        """Seconds since 1970."""
        return time.time()


class Fleet:
    """See the module's docstring. Make one with `running`."""

    def __init__(
        self, vllm_config: VllmConfig, runtime: RuntimeDir, settings: FleetSettings
    ) -> None:
        assert vllm_config.kv_transfer_config is not None, "make it with connector_config()"
        self.vllm_config = vllm_config
        self.runtime = runtime
        self.settings = settings
        self.clock: Clock = SystemClock()
        self.events: deque[FleetEvent] = deque(maxlen=EVENTS_KEPT)
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.boards = [
            EngineBoard.create(runtime.board_path(slot)) for slot in range(settings.engines)
        ]
        self.on_event: Callable[[FleetEvent], None] = lambda event: None
        self.on_stream_failed: Callable[[str, Outcome, str], None] = lambda *_: None
        self.on_engines: Callable[[int], None] = lambda engines: None
        """Called with the number of slots before an engine starts in a new one."""
        self.arenas = ArenaReaders()
        hooks = DriverHooks(
            failed=self._stream_failed,
            restored_tokens=restored_tokens,
            abandoned=abandoned,
            why_not_resumable=why_not_resumable,
            refined=self._refined,
        )
        self.prefixes = Prefixes(snapshots=settings.snapshots)
        self.placing = placing = Placing(settings.placement, settings.engines, self.clock)
        self.driver = FleetDriver(
            settings.engines, placing.policy, self.clock, hooks, placing.outlook
        )
        self.picture = MemoryPicture(self.driver.fleet, self.boards)
        self.counters = Counters(self)
        self.launcher = Launcher()
        self.supervisors = [
            SlotSupervisor(slot, self.launcher, self.driver, self)
            for slot in range(settings.engines)
        ]
        self.configs: list[VllmConfig] = [vllm_config] * settings.engines
        """What each slot's engine is started with."""
        self.trials: dict[int, VllmConfig] = {}
        """What a slot's next start tries instead, once."""
        self.arguments = settings.arguments
        """The words for vLLM that are in force; a roll may change them."""
        self.operations = Operations(self.note_all)
        self.steering = Steering(self, self.operations)
        self._ports: dict[int, VllmPort] = {}
        self._runs: dict[int, asyncio.Task[None]] = {}
        self.watch: FleetWatch | None = None
        self._guard: Callable[[Any], asyncio.Task[Any]]
        self._closing = False
        self._loop = asyncio.get_running_loop()

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        vllm_config: VllmConfig,
        runtime: RuntimeDir,
        settings: FleetSettings,
        on_event: Callable[[FleetEvent], None],
    ) -> AsyncIterator["Fleet"]:
        """Start all engines in parallel, and end them with everything they hold."""
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        fleet = cls(vllm_config, runtime, settings)
        fleet.on_event = on_event
        fleet.launcher.warm_up(runtime.scratch_path("serve"))
        jobs = [
            fleet._expire_waiting(), FleetWatch(fleet).run(), Housekeeping(fleet).run(),
            fleet.operations.run(), fleet.counters.run(),
        ]  # fmt: skip
        if settings.offload:
            jobs.append(Offloading(fleet).run())
        try:
            async with _guarded(jobs) as guard:
                fleet._guard = guard
                for slot in range(settings.engines):
                    fleet._run(slot)
                yield fleet
        finally:
            fleet.close()

    async def first_ready(self) -> None:
        """Wait for the first engine that serves.

        Raises `EngineError` when every engine failed its first start, with the last words of one.
        """
        tries = [asyncio.ensure_future(s.first_try_over.wait()) for s in self.supervisors]
        pending = set(tries)
        try:
            while pending:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if self.engines_ready():
                    return
        finally:
            for job in tries:
                job.cancel()
        fault = next((s.record.last_fault for s in self.supervisors if s.record.last_fault), "")
        raise EngineError(f"no engine could be started: {fault}")

    def add_slot(self) -> SlotSupervisor:
        """One more engine behind the last one; it starts at once."""
        slot = self.driver.add_engine()
        self.on_engines(slot + 1)
        self.boards.append(EngineBoard.create(self.runtime.board_path(slot)))
        self.configs.append(self.configs[0])
        if self.watch is not None:
            self.watch.resize(slot + 1)
        self.supervisors.append(SlotSupervisor(slot, self.launcher, self.driver, self))
        self._run(slot)
        return self.supervisors[slot]

    async def remove_slot(self, why: str) -> None:
        """End the last engine and take its slot away. Its streams must have been moved."""
        supervisor = self.supervisors[-1]
        run = self._runs.pop(supervisor.slot)
        if supervisor.live is not None:
            supervisor.end(why, retire=True)
        else:
            run.cancel()  # it only starts, or waits for its next start
        await asyncio.wait({run})
        self.supervisors.pop()
        self.configs.pop()
        self.trials.pop(supervisor.slot, None)
        if self.watch is not None:
            self.watch.resize(supervisor.slot)
        self._ports.pop(supervisor.slot, None)
        self.prefixes.engine_gone(supervisor.slot)
        self.driver.remove_engine()
        self.boards.pop().close()
        self.runtime.board_path(supervisor.slot).unlink(missing_ok=True)

    def engines_ready(self) -> int:
        """Engines that take new streams now."""
        return int(self.driver.fleet.accepts.sum())

    def close(self) -> None:
        """End every stream and every engine that still runs. From any thread, and even twice.

        A stream that is still open would keep the HTTP server from ending.
        """
        self._closing = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(
                self.driver.end_all, Outcome.SHUT_DOWN, "this server is shutting down"
            )
        for supervisor in self.supervisors:
            if supervisor.live is not None:
                kill_tree(supervisor.live.launched.process)
        self.launcher.close()

    # -- what the supervisors ask -----------------------------------------------------------------

    def order(self, slot: int, incarnation: int) -> LaunchOrder:
        """See `SupervisorHooks`."""
        if self._closing:
            raise EngineError("the fleet is closing")
        name = engine_name(slot)
        config = copy.deepcopy(self.trials.pop(slot, self.configs[slot]))
        self._tell_connector(config.kv_transfer_config, slot, incarnation)
        return LaunchOrder(
            name=name,
            incarnation=incarnation,
            vllm_config=config,
            log_path=self.settings.log_dir / f"{name}-{incarnation}.log",
            environment={**self.settings.environment, **self.settings.gpus.environment(slot)},
            scratch=self.runtime.scratch_path(f"{name}-{incarnation}"),
            gpus=self.settings.gpus.of(slot),
        )

    def _tell_connector(self, config: KVTransferConfig, slot: int, incarnation: int) -> None:
        """Put one engine's settings into its own copy of the connector's config."""
        name = engine_name(slot)
        config.engine_id = f"{self.runtime.instance}-{name}-{incarnation}"
        config.kv_connector_extra_config = {
            CONFIG_KEY: {
                "engine": name,
                "incarnation": incarnation,
                "runtime_dir": str(self.runtime.path),
                "board": str(self.runtime.board_path(slot)),
                "snapshots": self.settings.snapshots,
                "arena_bytes": self.settings.snapshot_bytes,
            }
        }

    def connect(self, slot: int, launched: LaunchedEngine) -> VllmPort:
        """See `SupervisorHooks`."""
        self._adopt_engine_facts(slot, launched.client)
        launched.client.lead_outputs(
            lambda outputs: self._take(slot, outputs),
            lambda: self._engine_says_dead(slot),
        )
        incarnation = launched.order.incarnation
        arena = str(self.runtime.arena_path(slot, incarnation, 0))
        self._ports[slot] = port = VllmPort(launched.client, arena)
        return port

    def note(self, slot: int, what: str) -> None:
        """See `SupervisorHooks`."""
        event = FleetEvent(time.time(), engine_name(slot), what)
        self.events.append(event)
        self.on_event(event)

    def steps(self, slot: int) -> int:
        """See `SupervisorHooks`."""
        state = self.boards[slot].read_core()
        same = state is not None and state.incarnation == self.driver.lives[slot].incarnation
        return state.step_seq if same and state is not None else 0

    def note_all(self, what: str) -> None:
        """Add an event of the whole fleet to its log."""
        event = FleetEvent(time.time(), "fleet", what)
        self.events.append(event)
        self.on_event(event)

    # -- inside -----------------------------------------------------------------------------------

    def _adopt_engine_facts(self, slot: int, client: PortClient) -> None:
        """What an engine found out at its start also holds for the serving process."""
        found, own = client.vllm_config, self.vllm_config
        own.model_config.max_model_len = found.model_config.max_model_len
        own.cache_config.num_gpu_blocks = found.cache_config.num_gpu_blocks
        own.cache_config.block_size = found.cache_config.block_size
        for fact in ("kv_cache_size_tokens", "kv_cache_max_concurrency"):
            setattr(own.cache_config, fact, getattr(found.cache_config, fact, None))
        blocks = found.cache_config.num_gpu_blocks or 0
        self.driver.fleet.set_capacity(
            slot,
            requests_max=found.scheduler_config.max_num_seqs,
            kv_tokens=float(blocks * found.cache_config.block_size) or float("inf"),
        )
        self.prefixes.engine_up(slot, found.cache_config)

    async def _take(self, slot: int, outputs: EngineCoreOutputs) -> None:
        """Fence one message of an engine and hand on what is left of it."""
        if self.watch is not None and outputs.outputs:
            self.watch.noted_output(slot)
        ours = [o for o in outputs.outputs if not o.request_id.startswith(PROBE_STREAM)]
        if len(ours) < len(outputs.outputs):
            self._note_probes(slot, outputs)
        passed = self.driver.take_outputs(slot, ours)
        outputs.outputs = [output for _, output in passed]
        for owned, output in passed:
            self.picture.generated(slot, len(output.new_token_ids))
            self.prefixes.noted(slot, owned, output)
            output.request_id = owned.stream.stream_id
            if owned.stream.epoch and len(owned.stream.delivered) > len(output.new_token_ids):
                # The client side saw these once, with the stream's real first token.
                output.prefill_stats = output.events = None
        outputs.engine_index = slot
        outputs.finished_requests = None
        if outputs.outputs or outputs.scheduler_stats:
            self.outputs.put_nowait(outputs)
        await self.driver.move_abandoned(slot)

    def _refined(self, request: Any, wanted: PlacementRequest) -> PlacementRequest:
        driver = self.driver
        owned = driver.owned[request.request_id]
        return self.prefixes.refined(owned, wanted, driver.fleet)

    def _stream_failed(self, stream_id: str, outcome: Outcome, message: str) -> None:
        self.on_stream_failed(stream_id, outcome, message)

    def _note_probes(self, slot: int, outputs: EngineCoreOutputs) -> None:
        port = self._ports.get(slot)
        for output in outputs.outputs:
            if port is not None and output.request_id.startswith(PROBE_STREAM):
                port.noted_probe(output.request_id)

    def _engine_says_dead(self, slot: int) -> None:
        live = self.supervisors[slot].live
        if live is not None:
            live.end("vLLM reported a fatal error in its core")

    def _run(self, slot: int) -> None:
        self._runs[slot] = self._guard(self.supervisors[slot].run())

    async def _expire_waiting(self) -> None:
        wait_ns = int(self.settings.wait_for_engine_s * 1e9)
        while True:
            await asyncio.sleep(EXPIRY_EVERY_S)
            await self.driver.expire_waiting(wait_ns)


def connector_config() -> KVTransferConfig:
    """Makes vLLM load our connector into every engine; each engine's settings come later.

    vLLM must see it while it builds its config, since a connector changes what it decides there.
    """
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )


@asynccontextmanager
async def _guarded(jobs: list[Any]) -> AsyncIterator[Callable[[Any], "asyncio.Task[Any]"]]:
    """Run the fleet's long-lived jobs beside the body, and what the body adds; end them with it.

    A job that fails is a bug of ours: the group cancels the body and raises it.
    """
    async with asyncio.TaskGroup() as group:
        tasks: set[asyncio.Task[Any]] = set()

        def guard(job: Any) -> "asyncio.Task[Any]":
            task = group.create_task(job)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return task

        for job in jobs:
            guard(job)
        try:
            yield guard
        finally:
            for task in tasks:
                task.cancel()
