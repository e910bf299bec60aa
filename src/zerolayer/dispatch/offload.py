"""Which running streams to move, and where, before an engine is too full or its streams crawl (P4).

An engine gives streams away when one of these holds:
- *hot*: the streams that decode there will need more than `limit` of its KV within the horizon, so
  that it would push some out, or they are more than it has places for. What waits for its prefill
  is no reason: it gets KV when there is some, and is over sooner than a move pays;
- *slow*: for `slow_for_s` a step has taken `slow_factor` times longer there than it would, with one
  stream more, on the median of the other engines (a slow card, a throttled core). What makes all
  slower together is no reason. Nor is what an engine waits for cores, as who has them may change
  at any moment: it is left out where streams would leave, and counts where they would come to.

What a stream weighs, as in `request_cost`:
    utilisation: 1 / n_max, `request_cost.decode_places`
    memory:      context / kv_tokens where it leaves, (context + expected rest) / kv_tokens where it
                 comes to
The cheapest streams go first: the largest (expected rest) / (context + FIXED_COST_TOKENS), as the
context is what has to be loaded, and the rest is what is gained by it.

A stream that would end sooner than a move is silent stays, and one that leaves a slow engine must
gain more than that silence (`silence_s`, of the moves that were made).

Nothing moves to where it lifts an engine over the limit, nor nearer than `margin` to what its
source has: where the whole fleet is full, a move relieves nobody. A stream
that was moved stays for `hold_s`, and for as long nothing moves back along a pair of engines: so
streams never go to and fro. The number of moves per minute is bounded.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, Bools, FleetState, Floats
from zerolayer.dispatch.request_cost import STEP_S_MIN, decode_places
from zerolayer.dispatch.snapshot_load import LOAD_S_PER_TOKEN

FIXED_COST_TOKENS = 64.0
"""What a move costs beside loading the context, in tokens loaded: a queue, one step, one order."""
SILENCE_S = 0.3
"""How long a moved stream is silent, in seconds, until moves were made that tell."""
SILENCES = 8
"""Moves whose median tells."""
_MINUTE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """When to move, and how much at most."""

    limit: float = 0.95
    """Forecast utilisation or memory share from which an engine is hot; no target passes it."""
    relief: float = 0.05
    """A hot engine gives away until it is this far below the limit."""
    margin: float = 0.15
    """By so much a target must be emptier with the stream than a hot source is now."""
    slow_factor: float = 1.4
    """A step must take this many times longer here, without waits for cores, than elsewhere with
    them. Where nothing was slow, two engines on two busy cores were above it for 1.5 s at most."""
    slow_for_s: float = 2.0
    """For so long without a break."""
    gain_s_min: float = 0.5
    """A slow engine's stream must be expected to gain this much until its end, beside what loading
    costs."""
    gain_per_silence: float = 2.0
    """And as many times the silence of a move: gain is a forecast, silence is certain."""
    rest_tokens_min: int = 16
    """Streams that are expected to end before so many tokens stay."""
    moves_per_minute_max: int = 60
    moves_per_plan_max: int = 4
    """At a time: each loads its pages inside a step of the target."""
    hold_s: float = 20.0
    """A stream that was moved stays, and a pair of engines does not swap, for so long."""


@dataclass(frozen=True, slots=True)
class RunningStream:
    """A stream past its first token, as the planner sees it. Never its true length."""

    stream_id: str
    engine: int
    context_tokens: int
    rest_tokens: float
    """Expected output that is still to come."""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One stream to move, and why."""

    stream_id: str
    source: int
    target: int
    reason: str
    """`offload: hot` or `offload: slow`."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What is known of speed: of the engines, one number each, and of moves."""

    step_s: Floats
    """Seconds of a step with the streams that the engine has, without prefill, as streams see it.
    """
    own_s: Floats
    """The same without waiting for cores that others have."""
    silence_s: float = SILENCE_S
    """How long a moved stream is silent, in seconds."""


@dataclass(slots=True)
class _Load:
    """What is expected of each engine; changed as moves are planned."""

    util: Floats
    """Of everything that is in demand there."""
    decoding: Floats
    """Share of its places that decoding streams take."""
    growing: Floats
    """Share of its KV that they will take at the horizon."""
    mem: Floats
    step_s: Floats
    own_s: Floats
    util_each: Floats
    """What one stream adds to `util`."""
    kv_tokens: Floats
    decode_s: Floats
    context_s: Floats
    streams: Floats
    usual_context: Floats
    """Mean context of the streams that decode there."""
    silence_s: float
    """Of a stream that moves."""

    @classmethod
    def of(cls, fleet: FleetState, pace: Pace) -> "_Load":
        util_each = 1.0 / decode_places(fleet)
        return cls(
            util=fleet.forecast_util.max(axis=1),
            decoding=(fleet.running_requests - fleet.waiting_requests) * util_each,
            growing=_growing(fleet, pace.step_s),
            mem=fleet.forecast_mem.max(axis=1),
            step_s=pace.step_s.copy(),
            own_s=pace.own_s.copy(),
            util_each=util_each,
            kv_tokens=fleet.kv_tokens,
            decode_s=fleet.decode_s_per_request,
            context_s=fleet.context_s_per_token,
            streams=fleet.running_requests,
            usual_context=fleet.running_tokens
            / np.maximum(1.0, fleet.running_requests - fleet.waiting_requests),
            silence_s=pace.silence_s,
        )

    def after(self, stream: RunningStream) -> tuple[Floats, Floats, Floats]:
        """(util, mem, step_s) of each engine if the stream came to it."""
        tokens = stream.context_tokens + stream.rest_tokens
        return (
            self.util + self.util_each,
            self.mem + tokens / self.kv_tokens,
            self.step_s + self.decode_s + stream.context_tokens * self.context_s,
        )

    def peak(self, engine: int) -> float:
        """What a move can relieve there."""
        return max(float(self.decoding[engine]), float(self.growing[engine]))

    def move(self, stream: RunningStream, target: int) -> None:
        source = stream.engine
        self.decoding[source] -= self.util_each[source]
        self.decoding[target] += self.util_each[target]
        self.util[source] -= self.util_each[source]
        self.util[target] += self.util_each[target]
        self.mem[source] -= stream.context_tokens / self.kv_tokens[source]
        self.growing[source] -= stream.context_tokens / self.kv_tokens[source]
        tokens = stream.context_tokens + stream.rest_tokens
        self.mem[target] += tokens / self.kv_tokens[target]
        self.growing[target] += tokens / self.kv_tokens[target]
        lighter_s = self.decode_s[source] + stream.context_tokens * self.context_s[source]
        heavier_s = self.decode_s[target] + stream.context_tokens * self.context_s[target]
        for seconds in (self.step_s, self.own_s):
            seconds[source] -= min(lighter_s, seconds[source] / 2)
            seconds[target] += heavier_s


@dataclass
class OffloadPlanner:
    """Plans moves; remembers its own, for the budget and the holds. Time comes as a parameter."""

    settings: OffloadSettings = field(default_factory=OffloadSettings)
    _moved_ns: deque[int] = field(default_factory=deque)
    _streams_ns: dict[str, int] = field(default_factory=dict)
    _pairs_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    _slow_since_ns: dict[int, int] = field(default_factory=dict)

    def sources(self, now_ns: int, fleet: FleetState, pace: Pace) -> list[int]:
        """Engines that give streams away now, the fullest first. Call it at every look: it is how
        the planner knows for how long an engine has been slow."""
        self._forget(now_ns)
        load = _Load.of(fleet, pace)
        slow = self._slow(now_ns, fleet, load, _open(fleet))
        return [e for e in _fullest_first(fleet, load) if self._reason(load, e, e in slow)]

    def plan(
        self, now_ns: int, fleet: FleetState, pace: Pace, streams: Sequence[RunningStream]
    ) -> list[PlannedMove]:
        """The moves to make now, in order; they count as made. The same input, the same plan.

        `streams`: at least those of `sources`.
        """
        self._forget(now_ns)
        load, targets = _Load.of(fleet, pace), _open(fleet)
        slow = self._slow(now_ns, fleet, load, targets)
        moves: list[PlannedMove] = []
        for source in _fullest_first(fleet, load):
            own = sorted((s for s in streams if s.engine == source), key=_worth_first)
            for stream in own:
                reason = self._reason(load, source, source in slow)
                if not reason or not self._may_plan(moves):
                    break
                target = self._target(stream, fleet, load, targets, reason)
                if target is not None:
                    load.move(stream, target)
                    moves.append(self._note(now_ns, stream, target, reason))
        return moves

    def _forget(self, now_ns: int) -> None:
        while self._moved_ns and now_ns - self._moved_ns[0] >= _MINUTE_NS:
            self._moved_ns.popleft()
        over_ns = now_ns - int(self.settings.hold_s * 1e9)
        self._streams_ns = {k: at for k, at in self._streams_ns.items() if at > over_ns}
        self._pairs_ns = {k: at for k, at in self._pairs_ns.items() if at > over_ns}

    def _slow(self, now_ns: int, fleet: FleetState, load: _Load, targets: Bools) -> frozenset[int]:
        """Engines that have been slow for long enough."""
        slow = set()
        for engine in range(fleet.engines):
            others = _peers(fleet, engine, targets)
            after_s = load.step_s + load.decode_s + load.usual_context[engine] * load.context_s
            usual_s = float(np.median(after_s[others])) if others.any() else np.inf
            if load.own_s[engine] <= self.settings.slow_factor * usual_s:
                self._slow_since_ns.pop(engine, None)
                continue
            since_ns = self._slow_since_ns.setdefault(engine, now_ns)
            if now_ns - since_ns >= self.settings.slow_for_s * 1e9:
                slow.add(engine)
        return frozenset(slow)

    def _reason(self, load: _Load, source: int, slow: bool) -> str:
        """Why the engine still gives streams away; empty when it does not."""
        peak = load.peak(source)
        gave = any(s == source for s, _ in self._pairs_ns)
        if peak > self.settings.limit - (self.settings.relief if gave else 0.0):
            return "offload: hot"
        return "offload: slow" if slow else ""

    def _may_plan(self, moves: list[PlannedMove]) -> bool:
        budget = self.settings.moves_per_minute_max - len(self._moved_ns)
        return budget > 0 and len(moves) < self.settings.moves_per_plan_max

    def _target(
        self, stream: RunningStream, fleet: FleetState, load: _Load, targets: Bools, reason: str
    ) -> int | None:
        """The engine that is best off with the stream, or None when it should stay."""
        settings, source = self.settings, stream.engine
        if stream.stream_id in self._streams_ns or stream.rest_tokens < settings.rest_tokens_min:
            return None
        if stream.rest_tokens * load.step_s[source] < load.silence_s:
            return None
        util, mem, step_s = load.after(stream)
        fits = _peers(fleet, source, targets) & (util <= settings.limit) & (mem <= settings.limit)
        for back, there in self._pairs_ns:
            if there == source:
                fits[back] = False
        if reason == "offload: hot":
            badness = np.maximum(util, mem)
            fits &= badness < load.peak(source) - settings.margin
        else:
            badness = step_s
            fits &= settings.slow_factor * step_s < load.own_s[source]
            cost_s = LOAD_S_PER_TOKEN * stream.context_tokens * (1.0 + load.streams)
            gain_s = stream.rest_tokens * (load.own_s[source] - step_s)
            least_s = max(settings.gain_s_min, settings.gain_per_silence * load.silence_s)
            fits &= gain_s >= least_s + cost_s
        if not fits.any():
            return None
        return int(np.where(fits, badness, np.inf).argmin())

    def _note(self, now_ns: int, stream: RunningStream, target: int, reason: str) -> PlannedMove:
        self._moved_ns.append(now_ns)
        self._streams_ns[stream.stream_id] = now_ns
        self._pairs_ns[stream.engine, target] = now_ns
        return PlannedMove(stream.stream_id, stream.engine, target, reason)


def usual_silence_s(gaps_s: Sequence[float]) -> float:
    """How long a moved stream is silent: the median of the last moves, the newest last."""
    last = sorted(gaps_s[-SILENCES:])
    return last[len(last) // 2] if last else SILENCE_S


def _growing(fleet: FleetState, step_s: Floats) -> Floats:
    """Their context, at most what is in use (streams may share a prefix), and a token a step."""
    held: Floats = np.minimum(fleet.running_tokens / fleet.kv_tokens, fleet.kv_used_fraction)
    streams = fleet.running_requests - fleet.waiting_requests
    held += streams * (HORIZON_S / np.maximum(step_s, STEP_S_MIN)) / fleet.kv_tokens
    return held


def _open(fleet: FleetState) -> Bools:
    """Engines that may get streams on purpose."""
    return fleet.accepts & ~fleet.suspect & ~fleet.hot


def _fullest_first(fleet: FleetState, load: _Load) -> list[int]:
    """Engines that serve; equal ones by slot. A draining or stalled one is emptied by others."""
    peaks = np.maximum(load.decoding, load.growing)
    serving = np.flatnonzero(fleet.accepts).tolist()
    return sorted(serving, key=lambda engine: (-float(peaks[engine]), engine))


def _peers(fleet: FleetState, engine: int, targets: Bools) -> Bools:
    """The other engines of its domain that may get streams; a new array."""
    others: Bools = targets & (fleet.domain == fleet.domain[engine])
    others[engine] = False
    return others


def _worth_first(stream: RunningStream) -> tuple[float, str]:
    worth = stream.rest_tokens / (stream.context_tokens + FIXED_COST_TOKENS)
    return -worth, stream.stream_id
