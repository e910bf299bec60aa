"""The fleet of a run: the product's `FleetDriver` and policy, modelled engines behind its ports, a
virtual clock, and the event loop.

Events at one time are taken in the order of their kind, engine and number. The driver's coroutines
never suspend, as no port here does, and are run to their end on the spot.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeVar

from zerolayer.core.engine_state import EngineEvent
from zerolayer.core.outcome import Outcome
from zerolayer.dispatch.policies import PlacementRequest, Policy
from zerolayer.dispatch.prefix_index import PrefixHolders
from zerolayer.dispatch.snapshot_load import held_by_snapshot
from zerolayer.sim.clients import Clients, EventLog
from zerolayer.sim.engine import SimEngine
from zerolayer.sim.faults import FaultPlan
from zerolayer.sim.noise import StepNoise
from zerolayer.sim.prefix_cache import KvMemory
from zerolayer.sim.profiles import EngineProfile
from zerolayer.sim.reports import Reports
from zerolayer.sim.samples import Samples
from zerolayer.sim.sequence import Seq, SimOutput, SimRequest, request_of
from zerolayer.sim.traces import Trace
from zerolayer.stitch.driver import DriverHooks, FleetDriver, SubmitOrder

CLOCK_START_S = 1.0
"""The driver takes a time of 0 for "never"."""
GIVE_UP_S = 4 * 3600.0
"""What has not ended so long after the last arrival counts as lost."""
EVENTS_PER_PROGRESS = 4096
T = TypeVar("T")


class EventKind(IntEnum):
    """Order of events at one time."""

    STEP = 0
    FAULT = 1
    REPAIR = 2
    TICK = 3
    SAMPLE = 4
    ARRIVAL = 5


class VirtualClock:
    """A Clock that stands still until the event loop moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_ns(self) -> int:
        """See Clock."""
        return int((self.now_s + CLOCK_START_S) * 1e9)

    def unix(self) -> float:
        """See Clock."""
        return self.now_s


@dataclass(frozen=True)
class FleetSetup:
    """What a fleet is made of."""

    trace: Trace
    engines: int
    profile: EngineProfile
    policy: Policy
    plan: FaultPlan
    seed: int
    by_prefill: bool
    """A stream that moves is computed again from its start."""
    watch: bool
    """Late steps make an engine suspect."""


class SimPort:
    """An EnginePort in front of a modelled engine."""

    def __init__(self, fleet: "SimFleet", slot: int, life: int) -> None:
        self.arena = f"e{slot}.{life}"
        self._fleet = fleet
        self._slot = slot

    async def submit(self, order: SubmitOrder) -> None:
        """See EnginePort."""
        self._fleet.submitted(self._slot, order)

    async def abort(self, request_ids: list[str]) -> None:
        """See EnginePort."""
        self._fleet.aborted(self._slot, request_ids)


class SimFleet:
    """See the module's docstring."""

    def __init__(self, setup: FleetSetup) -> None:
        self.setup = setup
        self.clock = VirtualClock()
        self.log = EventLog()
        self.clients = Clients(setup.trace, self.log)
        self.index = PrefixHolders()
        self.engines = [self._engine(slot) for slot in range(setup.engines)]
        hooks = DriverHooks(
            failed=self._failed,
            restored_tokens=_restored,
            abandoned=_never_abandoned,
            why_not_resumable=_always_resumable,
            refined=self._refined,
        )
        self.driver = FleetDriver(setup.engines, setup.policy, self.clock, hooks)
        self.reports = Reports(self.driver, self.engines, setup.profile, watch=setup.watch)
        self.samples = Samples(self.engines, setup.trace)
        self.moves: list[tuple[float, int, int, int, str]] = []
        self.decisions = self.events = 0
        self._requests: dict[int, SimRequest] = {}
        self._give_up_s = setup.trace.duration_s + GIVE_UP_S
        self._heap: list[tuple[float, int, int, int, Any]] = []
        self._number = 0
        self._watched = [0] * setup.engines
        for engine in self.engines:
            self.serve(engine.slot, life=1)
        self._schedule_arrival(0)
        self.at(self.samples.every_s, EventKind.SAMPLE, 0, self._sample)

    # -- the event loop ---------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds of virtual time."""
        return self.clock.now_s

    def at(self, at_s: float, kind: EventKind, engine: int, call: Callable[[], None]) -> None:
        """Call this at that time."""
        self._push(at_s, kind, engine, call)

    def run(self, progress: Callable[[float], None] | None) -> None:
        """Until every request has ended."""
        heap, total = self._heap, len(self.setup.trace)
        while self.clients.left:
            at_s, kind, slot, _, payload = heappop(heap)
            assert at_s >= self.clock.now_s, "time goes back"
            self.clock.now_s = at_s
            if kind == EventKind.STEP:
                if payload == self.engines[slot].version:
                    self._step(slot, at_s)
            else:
                payload()
            self.events += 1
            if progress is not None and self.events % EVENTS_PER_PROGRESS == 0:
                progress(1.0 - self.clients.left / total)

    def _push(self, at_s: float, kind: EventKind, engine: int, payload: Any) -> None:
        self._number += 1
        heappush(self._heap, (at_s, kind, engine, self._number, payload))

    def _step(self, slot: int, now: float) -> None:
        engine = self.engines[slot]
        engine.finish()
        self.reports.learn(slot, now)
        if engine.outbox:
            self.hand_over(slot)
        engine.start(now)
        self.follow(engine)

    def follow(self, engine: SimEngine) -> None:
        """Something may have changed when the engine's stretch ends."""
        if engine.version != self._watched[engine.slot]:
            self._watched[engine.slot] = engine.version
            if engine.end_s < float("inf"):
                self._push(engine.end_s, EventKind.STEP, engine.slot, engine.version)

    # -- requests ---------------------------------------------------------------------------------

    def add(self, stream_id: str, request: SimRequest) -> None:
        """A client asks."""
        self.refresh()
        by_prefill = self.setup.by_prefill
        run_now(self.driver.add(stream_id, request, request.prompt_tokens, by_prefill))

    def hand_over(self, slot: int) -> None:
        """What the engine generated goes to the driver, and what that lets pass to the clients."""
        engine = self.engines[slot]
        outputs, engine.outbox = engine.outbox, []
        for _, output in self.driver.take_outputs(slot, outputs):
            self.clients.take(output)
            if output.finish_reason is not None:
                del self._requests[output.request.row]

    def refresh(self) -> None:
        """A decision is near: reports and forecasts are brought up to date."""
        self.reports.refresh(self.clock.now_s, self.clock.monotonic_ns())

    def submitted(self, slot: int, order: SubmitOrder) -> None:
        """The driver has placed a stream."""
        request: SimRequest = order.request
        owned = self.driver.owned[order.request_id.rpartition("@")[0]]
        delivered = len(order.delivered)
        restored = min(request.committed, request.prompt_tokens + delivered - 1)
        seq = Seq(request, order.request_id, delivered, restored if order.sources else 0)
        seq.first = delivered > 0 and not self.setup.by_prefill  # as engines/resume.py does
        self.decisions += 1
        self.log.note(self.now, b"p", slot, request.row)
        if owned.move is not None:
            request.moves += 1
            move = owned.move
            self.moves.append((self.now, move.source, slot, seq.context, move.reason))
        engine = self.engines[slot]
        self.samples.placed(engine, seq)
        engine.submit(seq, self.now)
        self.follow(engine)

    def aborted(self, slot: int, request_ids: list[str]) -> None:
        """The driver takes streams from an engine."""
        engine = self.engines[slot]
        engine.abort(request_ids, self.now)
        self.follow(engine)

    def serve(self, slot: int, life: int) -> None:
        """A process serves in this slot from now on."""
        profile = self.setup.profile
        self.driver.fleet.set_capacity(
            slot, requests_max=profile.requests_max, kv_tokens=profile.kv_tokens
        )
        if life > 1:
            self.driver.apply(slot, EngineEvent.RESTARTED)
            self.engines[slot].revive()
        self.refresh()
        run_now(self.driver.engine_up(slot, SimPort(self, slot, life)))

    def _engine(self, slot: int) -> SimEngine:
        setup = self.setup
        kv = KvMemory(slot, setup.profile.kv_tokens, setup.trace.block_tokens, self.index)
        noise = StepNoise(setup.plan.noise, Random(f"{setup.seed}/steps/{slot}"))
        return SimEngine(slot, setup.profile, kv, noise)

    def _schedule_arrival(self, row: int) -> None:
        if row < len(self.setup.trace):
            at_s = float(self.setup.trace.arrival_s[row])
            self.at(at_s, EventKind.ARRIVAL, 0, lambda: self._arrive(row))

    def _arrive(self, row: int) -> None:
        request = request_of(self.setup.trace, row)
        self._requests[row] = request
        self._schedule_arrival(row + 1)
        self.add(str(row), request)

    def _failed(self, stream_id: str, outcome: Outcome, message: str) -> None:
        row = int(stream_id.partition("r")[0])
        self.clients.lost(self._requests.pop(row), self.now)

    def _refined(self, request: SimRequest, wanted: PlacementRequest) -> PlacementRequest:
        """With the leading tokens that engines hold of the prompt, or can load from snapshots: what
        a router knows from the engines' KV events."""
        if request.committed and not self.setup.by_prefill:
            held = held_by_snapshot(self.driver.fleet, request.committed)
            return replace(wanted, held_tokens=held)
        if not request.blocks:
            return wanted
        tokens = self.setup.trace.block_tokens
        blocks = self.index.leading(request.blocks)
        return replace(wanted, held_tokens={slot: n * tokens for slot, n in blocks.items()})

    def _sample(self) -> None:
        self.samples.take(self.now)
        if self.now > self._give_up_s:
            self.driver.end_all(Outcome.SHUT_DOWN, "the simulation ends here")
        self.at(self.now + self.samples.every_s, EventKind.SAMPLE, 0, self._sample)


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a coroutine of the driver waits for something in simulation")


def _restored(output: SimOutput) -> int:
    return output.restored


def _never_abandoned(output: SimOutput) -> bool:
    return False


def _always_resumable(request: Any, delivered: int) -> str | None:
    return None
