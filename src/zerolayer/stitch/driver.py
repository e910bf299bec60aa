"""Owns every stream of the serving process: places it, fences it, moves it, ends it.

Decisions are synchronous and happen on one event loop; only the sending to engines is awaited. The
driver knows engines as ports and requests as opaque objects, so the simulator runs the same code.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from zerolayer.core.engine_state import EngineEvent, EngineLife
from zerolayer.core.errors import EngineError
from zerolayer.core.fleet_state import FleetState
from zerolayer.core.ids import engine_name, split_request_id
from zerolayer.core.limits import (
    DEATHS_WITHOUT_TOKEN_MAX,
    MOVES_PER_STREAM_MAX,
    RECENT_MOVES_KEPT,
    STREAMS_MAX,
)
from zerolayer.core.outcome import Outcome
from zerolayer.core.ports import Clock
from zerolayer.dispatch.asked import Asked
from zerolayer.dispatch.outlook import Outlook, Streams
from zerolayer.dispatch.policies import PlacementRequest, Policy, expected_wait_s
from zerolayer.dispatch.prefix_index import PrefixKeys
from zerolayer.stitch.moves import MoveRecord, MoveReply, PendingMove
from zerolayer.stitch.stream import Phase, Stream

NO_ENGINES: frozenset[int] = frozenset()
#: One in so many new streams has its TTFT predicted, to know how good the predictions are.
TTFT_PREDICTED_EVERY = 8
#: Dispatch times kept for the percentiles in the status.
DISPATCH_TIMES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class SubmitOrder:
    """What an engine gets: the original request, and what the client already has of it."""

    request: Any
    request_id: str
    delivered: Sequence[int]
    sources: Sequence[str]  # arena files that may hold the stream's pages, newest first


class EnginePort(Protocol):
    """One live engine as the driver sees it. `EngineError` means that it cannot be reached."""

    arena: str  # path of its rank 0 arena file

    async def submit(self, order: SubmitOrder) -> None:
        """Put a request into the engine's queue."""

    async def abort(self, request_ids: list[str]) -> None:
        """Take requests out of the engine."""


class EngineOutput(Protocol):
    """What comes out of an engine for one stream and step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


@dataclass(slots=True)
class Owned:
    """A stream and what the driver needs beside its state machine."""

    stream: Stream
    request: Any
    by_prefill: bool = False  # continue without the snapshot (for comparison)
    asked: Asked | None = None  # its placement wishes, which hold for each of its placements
    sources: list[str] = field(default_factory=list)
    arrived_ns: int = 0
    waiting_since_ns: int = 0
    last_token_ns: int = 0  # 0 before the first
    move: PendingMove | None = None
    moves: int = 0  # off lost engines; moves on purpose do not count
    deaths_without_token: int = 0  # in a row
    decoding: bool = False  # its first token on the current engine has come
    placed_tokens: int = 0  # its context tokens on the current engine
    waiting_tokens: int = 0  # those that this engine had to compute before the first token
    resumed: bool = False  # it had tokens when it came to the current engine
    predicted_ttft_s: float = 0.0  # when it was first placed; 0 where not predicted
    prefix: PrefixKeys | None = None  # keys of its prompt so far, kept by who refines placements


def _nothing_more(request: Any, wanted: PlacementRequest) -> PlacementRequest:
    return wanted


@dataclass(frozen=True, slots=True)
class DriverHooks:
    """What the driver asks of those who know what requests and outputs are made of."""

    failed: Callable[[str, Outcome, str], None]
    """(stream id, outcome, message): the client must be told that its stream is lost."""
    restored_tokens: Callable[[Any], int]
    """Tokens that an engine took from a snapshot, as its first output after a move says."""
    abandoned: Callable[[Any], bool]
    """Whether an output says that the engine gave the stream up by itself (it is shutting down)."""
    why_not_resumable: Callable[[Any, int], str | None]
    """(request, delivered tokens): why it cannot be continued elsewhere, or None if it can."""
    refined: Callable[[Any, PlacementRequest], PlacementRequest] = _nothing_more
    """(request, what the driver wants for it): the same with what else is known of the request,
    such as the prefix that engines hold of it."""


@dataclass
class Totals:
    """Counters since the start of the process."""

    streams: int = 0
    tokens_delivered: int = 0
    outputs_fenced: int = 0
    moves: int = 0
    moves_on_purpose: int = 0
    """Those of `moves` that no fault asked for."""
    resumed_from_snapshot: int = 0
    resumed_by_prefill: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)


class FleetDriver:
    """See the module's docstring. All methods must run on one event loop."""

    def __init__(
        self,
        engines: int,
        policy: Policy,
        clock: Clock,
        hooks: "DriverHooks",
        outlook: Outlook | None = None,
    ) -> None:
        self.outlook = outlook or Outlook(engines)
        self.fleet = FleetState(engines)
        self.lives = [EngineLife() for _ in range(engines)]
        self.ports: list[EnginePort | None] = [None] * engines
        self.owned: dict[str, Owned] = {}
        self.on_engine: list[dict[str, Owned]] = [{} for _ in range(engines)]
        self.waiting: dict[str, None] = {}
        self.held: set[int] = set()
        self.totals = Totals()
        self.recent_moves: deque[MoveRecord] = deque(maxlen=RECENT_MOVES_KEPT)
        self.dispatch_ns: deque[int] = deque(maxlen=DISPATCH_TIMES_KEPT)
        self._policy = policy
        self._clock = clock
        self._hooks = hooks
        self._abandoned: list[Owned] = []
        self._incarnations: dict[int, int] = {}

    # -- streams come and go --------------------------------------------------------------------

    async def add(
        self, stream_id: str, request: Any, prompt_tokens: int, by_prefill: bool,
        asked: Asked | None = None,
    ) -> int:  # fmt: skip
        """Take a new stream and send it to an engine, or let it wait for one.

        Returns the nanoseconds from here until the engine's queue had it. Raises `EngineError`
        when the process is full.
        """
        if len(self.owned) >= STREAMS_MAX:
            raise EngineError(f"{STREAMS_MAX} streams are in flight; this one is refused")
        began = self._clock.monotonic_ns()
        owned = Owned(Stream(stream_id, prompt_tokens), request, by_prefill, asked)
        owned.arrived_ns = began
        self.owned[stream_id] = owned
        self.totals.streams += 1
        self.outlook.arrived(began, prompt_tokens)
        await self._place(owned, NO_ENGINES)
        spent = self._clock.monotonic_ns() - began
        self.dispatch_ns.append(spent)
        return spent

    async def end_streams(self, stream_ids: Sequence[str], outcome: Outcome) -> None:
        """Streams end from above (client gone, stop string): abort their work at once."""
        by_engine: dict[int, list[str]] = {}
        for stream_id in stream_ids:
            owned = self.owned.get(stream_id)
            if owned is None:
                continue
            owner = self._end(owned, outcome)
            if owner is not None:
                by_engine.setdefault(owner[0], []).append(owner[1])
        for engine, request_ids in by_engine.items():
            await self._abort(engine, request_ids)

    def take_outputs(self, engine: int, outputs: Sequence[Any]) -> list[tuple[Owned, Any]]:
        """Fence an engine's outputs; returns those that may go to clients, with their streams.

        Call `move_abandoned` afterwards.
        """
        passed = []
        for output in outputs:
            owned = self._current(output.request_id)
            if owned is None or owned.stream.engine != engine:
                self.totals.outputs_fenced += 1
                continue
            if self._hooks.abandoned(output):
                self._abandoned.append(owned)
                continue
            self._deliver(owned, engine, output)
            passed.append((owned, output))
            if output.finish_reason is not None:
                self.outlook.finished(len(owned.stream.delivered))
                self._end(owned, Outcome.FINISHED)
        return passed

    async def expire_waiting(self, wait_ns: int) -> None:
        """End streams that have waited for an engine longer than `wait_ns`."""
        now = self._clock.monotonic_ns()
        for stream_id in list(self.waiting):
            owned = self.owned[stream_id]
            if now - owned.waiting_since_ns < wait_ns:
                continue
            waited = (now - owned.waiting_since_ns) / 1e9
            self._fail(owned, f"no engine came back within {waited:.0f} s; the answer ends here")

    def end_all(self, outcome: Outcome, message: str) -> None:
        """End every stream with one error: this process is about to stop."""
        for owned in list(self.owned.values()):
            self._fail(owned, message, outcome)

    def placed_streams(self) -> Streams:
        """Every placed stream, for `Outlook.refresh`."""
        placed = [owned for streams in self.on_engine for owned in streams.values()]
        return Streams(
            np.repeat(np.arange(len(self.on_engine)), [len(ids) for ids in self.on_engine]),
            np.array([owned.placed_tokens for owned in placed], dtype=np.float64),
            np.array([len(owned.stream.delivered) for owned in placed], dtype=np.float64),
            np.array(
                [0 if owned.decoding else owned.waiting_tokens for owned in placed],
                dtype=np.float64,
            ),
        )

    # -- engines come and go --------------------------------------------------------------------

    async def engine_up(self, engine: int, port: EnginePort) -> None:
        """An engine is ready; streams that waited go there."""
        self.ports[engine] = port
        self.fleet.emptied(engine)
        self.apply(engine, EngineEvent.CAME_UP)
        await self.place_waiting()

    async def place_waiting(self) -> None:
        """Try again for every stream that waits for an engine."""
        for stream_id in list(self.waiting):
            owned = self.owned.get(stream_id)
            if owned is not None and owned.stream.phase is Phase.WAITING:
                await self._place(owned, NO_ENGINES)

    async def move_all(self, engine: int, reason: str, *, reachable: bool) -> int:
        """Take every stream off an engine and continue it elsewhere; returns how many.

        `reachable`: the process is there, so its copies of the streams are aborted.
        """
        moving = list(self.on_engine[engine].values())
        left = [owned.stream.request_id for owned in moving]
        if not reachable:
            self._note_deaths(moving)
        await self._move(moving, engine, reason)
        if reachable and left:
            await self._abort(engine, left)
        return len(moving)

    async def move_abandoned(self, engine: int) -> None:
        """Continue elsewhere what an engine gave up by itself."""
        if self._abandoned:
            moving, self._abandoned = self._abandoned, []
            self._note_deaths(moving)
            await self._move(moving, engine, "the engine gave it up")

    def engine_gone(self, engine: int) -> None:
        """The engine's process has ended: nothing can be sent there any more."""
        self.ports[engine] = None
        self.apply(engine, EngineEvent.DIED)

    async def move_streams(
        self, engine: int, stream_ids: Sequence[str], reason: str, target: int | None = None
    ) -> MoveReply:
        """Move streams off a healthy engine, on purpose; what nobody can take stays untouched.

        Decided for each stream before anything of it changes: it can be continued, and `target` (or
        the policy's choice) takes it. If its submission then fails, it goes back where it was.
        """
        moved, left, stayed = [], [], {}
        for stream_id in stream_ids:
            owned = self.owned.get(stream_id)
            if owned is None or owned.stream.engine != engine:
                continue  # it ended or left meanwhile
            goes_to, why = self._elsewhere(owned, engine, target)
            if goes_to is None:
                stayed[stream_id] = why
                continue
            left.append(owned.stream.request_id)
            if await self._relocate(owned, goes_to, reason):
                moved.append(stream_id)
            else:
                stayed[stream_id] = f"{engine_name(goes_to)} could not be reached"
        if left:
            await self._abort(engine, left)
        return MoveReply(tuple(moved), stayed)

    def hold(self, engine: int) -> None:
        """The engine gets no new streams, also after a restart, until `let_go`."""
        self.held.add(engine)
        self._drain_held(engine)

    async def let_go(self, engine: int) -> None:
        """End `hold`; streams that waited for an engine go there."""
        self.held.discard(engine)
        if self.lives[engine].can(EngineEvent.UNDRAIN):
            self.apply(engine, EngineEvent.UNDRAIN)
            await self.place_waiting()

    def add_engine(self) -> int:
        """One more slot behind the last one, for an engine that is about to start."""
        slot = self.fleet.engines
        self.fleet.resize(slot + 1)
        self.outlook.resize(self.fleet)
        # Files of an engine that was in this slot before may still be read: their names stay taken.
        self.lives.append(EngineLife(self._incarnations.get(slot, 0) + 1))
        self.ports.append(None)
        self.on_engine.append({})
        return slot

    def remove_engine(self) -> None:
        """Take the last slot away; its engine has ended and owns no stream."""
        slot = self.fleet.engines - 1
        assert self.ports[slot] is None, "an engine that is there is not removed"
        assert not self.on_engine[slot], "an engine with streams is not removed"
        self._incarnations[slot] = self.lives[slot].incarnation
        self.held.discard(slot)
        for per_engine in (self.lives, self.ports, self.on_engine):
            per_engine.pop()
        self.fleet.resize(slot)
        self.outlook.resize(self.fleet)

    def apply(self, engine: int, event: EngineEvent) -> None:
        """Apply an event to an engine's life and to what the dispatcher may choose."""
        state = self.lives[engine].apply(event)
        if engine in self.held and state.accepts and event is not EngineEvent.DRAIN:
            self._drain_held(engine)
            return
        self.fleet.set_standing(
            engine, accepts=state.accepts, suspect=event is EngineEvent.SUSPECTED
        )

    # -- inside ---------------------------------------------------------------------------------

    def _drain_held(self, engine: int) -> None:
        # A stalled engine has no streams and accepts none; it drains when it is back.
        if self.lives[engine].state.accepts:
            self.apply(engine, EngineEvent.DRAIN)

    def _elsewhere(
        self, owned: Owned, engine: int, target: int | None
    ) -> tuple[int, str] | tuple[None, str]:
        """(the engine that takes a stream of `engine`, or None; why none does)."""
        why = self._hooks.why_not_resumable(owned.request, len(owned.stream.delivered))
        if why is not None:
            return None, why
        if target is None:
            decision = self._policy.choose(self.fleet, self._wanted(owned), frozenset((engine,)))
            target = decision.engine if decision is not None else None
        elif not self.fleet.accepts[target] or target == engine:
            target = None
        if target is None or self.ports[target] is None:
            return None, "no other engine takes streams now"
        return target, ""

    async def _relocate(self, owned: Owned, target: int, reason: str) -> bool:
        """Fence a healthy stream and submit it elsewhere; False: it had to go back."""
        source = owned.stream.engine
        assert source is not None
        now, unix = self._clock.monotonic_ns(), self._clock.unix()
        self._leave(owned)
        owned.move = owned.move or PendingMove(source, reason, now, unix, on_purpose=True)
        wanted = self._wanted(owned)
        if await self._send(owned, target, wanted):
            return True
        if self.ports[source] is None or not await self._send(owned, source, wanted):
            await self._place(owned, frozenset((target,)))
        return False

    def _current(self, request_id: str) -> Owned | None:
        """The stream that an engine's request id means, if that epoch is still current."""
        split = split_request_id(request_id)
        owned = self.owned.get(split.stream_id) if split is not None else None
        if split is None or owned is None or not owned.stream.accepts(split.epoch):
            return None
        return owned

    async def _place(self, owned: Owned, exclude: frozenset[int]) -> None:
        """Send a waiting stream to the best engine; where none can have it, it waits."""
        stream = owned.stream
        while stream.phase is Phase.WAITING:
            if owned.moves > MOVES_PER_STREAM_MAX:
                self._fail(owned, f"this stream lost {owned.moves} engines; it is given up")
                return
            if owned.deaths_without_token >= DEATHS_WITHOUT_TOKEN_MAX:
                died = f"{owned.deaths_without_token} engines in a row died of this request"
                self._fail(owned, f"{died}, or beside it; it is given up")
                return
            wanted = self._wanted(owned)
            decision = self._policy.choose(self.fleet, wanted, exclude)
            port = self.ports[decision.engine] if decision is not None else None
            if decision is None or port is None:
                self._wait(owned)
                return
            if owned.asked is not None:
                owned.asked.decision = owned.asked.decision or decision
            if await self._send(owned, decision.engine, wanted):
                return
            exclude |= {decision.engine}

    async def _send(self, owned: Owned, engine: int, wanted: PlacementRequest) -> bool:
        """Give a waiting stream to an engine; False when that cannot be reached, and it waits."""
        port = self.ports[engine]
        assert port is not None
        order = self._assign(owned, engine, wanted)
        try:
            await port.submit(order)
        except EngineError:
            if not owned.stream.is_owned_as(order.request_id):
                return True  # somebody moved or ended it meanwhile
            self._leave(owned)
            return False
        return True

    @staticmethod
    def _note_deaths(moving: Sequence[Owned]) -> None:
        for owned in moving:
            owned.deaths_without_token = 0 if owned.decoding else owned.deaths_without_token + 1

    async def _move(self, moving: Sequence[Owned], engine: int, reason: str) -> None:
        """Fence all of them first, then place one after the other."""
        now, unix = self._clock.monotonic_ns(), self._clock.unix()
        for owned in moving:
            self._leave(owned)
            # Of two moves in a row, the client has waited since the first was declared.
            owned.move = owned.move or PendingMove(engine, reason, now, unix)
            owned.moves += 1
        for owned in moving:
            if owned.stream.phase is Phase.WAITING:
                await self._place_again(owned, engine)

    async def _place_again(self, owned: Owned, left: int) -> None:
        """Continue a stream that has left an engine, unless it cannot be continued at all."""
        why = self._hooks.why_not_resumable(owned.request, len(owned.stream.delivered))
        if why is not None:
            self._fail(owned, f"its engine was lost and {why}", Outcome.NOT_RESUMABLE)
            return
        await self._place(owned, frozenset((left,)))

    def _wanted(self, owned: Owned) -> PlacementRequest:
        remaining = int(self.outlook.expected_output(len(owned.stream.delivered)))
        begun = bool(owned.stream.delivered)
        wanted = PlacementRequest(owned.stream.context_tokens, remaining, continuing=begun)
        wanted = self._hooks.refined(owned.request, wanted)
        return wanted if owned.asked is None else owned.asked.wanted(wanted)

    def _assign(self, owned: Owned, engine: int, wanted: PlacementRequest) -> SubmitOrder:
        stream = owned.stream
        request_id = stream.place(engine)
        self.waiting.pop(stream.stream_id, None)
        self.on_engine[engine][stream.stream_id] = owned
        owned.decoding, owned.placed_tokens = False, stream.context_tokens
        held = (wanted.held_tokens or {}).get(engine, 0)
        owned.waiting_tokens = max(1, owned.placed_tokens - held)
        if self.totals.streams % TTFT_PREDICTED_EVERY == 0 and not stream.delivered:
            owned.predicted_ttft_s = float(expected_wait_s(self.fleet, wanted)[engine])
        owned.resumed = wanted.continuing
        self.fleet.placed(engine, owned.waiting_tokens, owned.placed_tokens, resumed=owned.resumed)
        self.outlook.placed(self.fleet, engine, wanted)
        sources = [] if owned.by_prefill else list(owned.sources)
        port = self.ports[engine]
        assert port is not None
        if port.arena in owned.sources:
            owned.sources.remove(port.arena)
        owned.sources.insert(0, port.arena)
        return SubmitOrder(owned.request, request_id, list(stream.delivered), sources)

    def _leave(self, owned: Owned) -> None:
        engine, _ = owned.stream.leave()
        self._release(owned, engine)

    def _release(self, owned: Owned, engine: int) -> None:
        """The one place where what a stream holds on an engine is given back."""
        self.on_engine[engine].pop(owned.stream.stream_id, None)
        waiting = 0 if owned.decoding else owned.waiting_tokens
        running = owned.placed_tokens if owned.decoding else 0
        self.fleet.released(
            engine, waiting_tokens=waiting, running_tokens=running,
            context_tokens=owned.placed_tokens, resumed=owned.resumed,
        )  # fmt: skip

    def _wait(self, owned: Owned) -> None:
        if owned.stream.stream_id not in self.waiting:
            self.waiting[owned.stream.stream_id] = None
            owned.waiting_since_ns = self._clock.monotonic_ns()

    def _deliver(self, owned: Owned, engine: int, output: Any) -> None:
        tokens = output.new_token_ids
        before_ns, owned.last_token_ns = owned.last_token_ns, self._clock.monotonic_ns()
        if not owned.decoding:
            owned.decoding = True
            self.fleet.first_token(
                engine, owned.waiting_tokens, owned.placed_tokens, resumed=owned.resumed
            )
            self._note_ttft(owned)
        if owned.move is not None:
            silent_ns = owned.last_token_ns - (before_ns or owned.arrived_ns)
            self._finish_move(owned, engine, self._hooks.restored_tokens(output), silent_ns)
        owned.stream.deliver(tokens)
        owned.placed_tokens += len(tokens)
        self.fleet.grew(engine, len(tokens))
        self.totals.tokens_delivered += len(tokens)

    def _note_ttft(self, owned: Owned) -> None:
        if owned.predicted_ttft_s > 0.0 and not owned.stream.delivered:
            actual_s = (self._clock.monotonic_ns() - owned.arrived_ns) / 1e9
            self.outlook.ttft_errors.observe(owned.predicted_ttft_s, actual_s)

    def silences_s(self) -> list[float]:
        """How long streams were silent that were moved on purpose, in seconds; the newest last."""
        return [move.gap_ms / 1e3 for move in self.recent_moves if move.on_purpose]

    def _finish_move(self, owned: Owned, engine: int, restored_tokens: int, silent_ns: int) -> None:
        """The first output after a move is here: note what the move cost."""
        move, stream = owned.move, owned.stream
        assert move is not None
        owned.move = None
        self.totals.moves += 1
        self.totals.moves_on_purpose += move.on_purpose
        if restored_tokens:
            self.totals.resumed_from_snapshot += 1
        else:
            self.totals.resumed_by_prefill += 1
        self.recent_moves.append(
            MoveRecord(
                stream=stream.stream_id,
                source=engine_name(move.source),
                target=engine_name(engine),
                reason=move.reason,
                delivered_tokens=len(stream.delivered),
                context_tokens=stream.context_tokens,
                restored_tokens=restored_tokens,
                declared_unix=move.declared_unix,
                after_declared_ms=(owned.last_token_ns - move.declared_ns) / 1e6,
                gap_ms=silent_ns / 1e6,
                on_purpose=move.on_purpose,
            )
        )

    def _end(self, owned: Owned, outcome: Outcome) -> tuple[int, str] | None:
        owner = owned.stream.end(outcome)
        if owner is not None:
            self._release(owned, owner[0])
        self.waiting.pop(owned.stream.stream_id, None)
        del self.owned[owned.stream.stream_id]
        outcomes = self.totals.outcomes
        outcomes[outcome.label] = outcomes.get(outcome.label, 0) + 1
        return owner

    def _fail(self, owned: Owned, message: str, outcome: Outcome = Outcome.ENGINES_LOST) -> None:
        self._end(owned, outcome)
        self._hooks.failed(owned.stream.stream_id, outcome, message)

    async def _abort(self, engine: int, request_ids: list[str]) -> None:
        port = self.ports[engine]
        if port is None:
            return
        try:
            await port.abort(request_ids)
        except EngineError:
            return  # a gone engine has nothing to abort
