"""What the dispatcher sees of all engines: one array per quantity, one element per slot.

A structure of arrays, so that a decision over 256 engines is a handful of array operations. The
serving process is the only door to its engines, so the stream counts in here are exact and change
at the moment of a placement; what only the engine knows (KV use, step time) comes from its board.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zerolayer.core.limits import ENGINES_MAX

HORIZON_S = 5
"""Seconds that a forecast looks ahead, one column each."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine's board and cost model say about it now."""

    kv_used_fraction: float
    """Share of its KV blocks in use, 0 to 1."""
    in_flight_prefill_tokens: int
    """Prompt tokens in the step that runs now. They are part of `waiting_tokens` until their
    stream's first token comes, so a policy does not add them again."""
    expected_step_s: float
    """What a step costs now with the streams that it has, in seconds."""
    prefill_s_per_token: float
    """What each prompt token adds to a step, in seconds."""
    decode_s_per_request: float
    """What each decoding stream adds to a step, in seconds."""
    context_s_per_token: float = 0.0
    """What each token of their contexts adds to a step, in seconds."""
    admitted_requests: int = 0
    """Streams that have their KV blocks; what came later queues, and its KV is not in use yet."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What an engine's board says about its KV memory and its traffic, every 50 ms."""

    free_tokens: int
    """In free KV blocks."""
    free_run_tokens: int
    """In the longest run of free KV blocks."""
    link_use: float
    """Snapshot bytes per second as a share of what their path can do."""
    tokens_per_s: float
    """Tokens generated per second lately."""


@dataclass(frozen=True, slots=True)
class HardwareReport:
    """What counters say of an engine's GPUs; without an argument: there are no counters."""

    gpu_busy: float = -1.0
    """Share of time in which any kernel ran, 0 to 1; negative where it is not counted."""
    foreign_util: float = 0.0
    """Share of time that other programs can take from the engine, 0 to 1."""
    pcie_use: float = 0.0
    """Bytes per second over PCIe as a share of what the link can do, 0 to 1."""


NO_COUNTERS = HardwareReport()


class FleetState:
    """Load of N engines. Public arrays are for reading; change them through the methods."""

    def __init__(self, engines: int) -> None:
        """All engines closed, idle, in domain 0. Raises ValueError outside 1..ENGINES_MAX."""
        if not 1 <= engines <= ENGINES_MAX:
            raise ValueError(f"a fleet has 1 to {ENGINES_MAX} engines, not {engines}")
        self.engines = engines
        self.accepts: Bools = np.zeros(engines, dtype=np.bool_)
        """May get new streams."""
        self.suspect: Bools = np.zeros(engines, dtype=np.bool_)
        """A step of it is late."""
        self.domain: Ints = np.zeros(engines, dtype=np.int64)
        """Engines of equal hardware share a number."""
        self.one_domain = True
        """Whether all have the same number."""
        self.running_requests = np.zeros(engines)
        """Streams placed and not released."""
        self.waiting_requests = np.zeros(engines)
        """Those of them whose first token has not come."""
        self.waiting_tokens = np.zeros(engines)
        """Prompt tokens to compute of streams whose first token has not come."""
        self.waiting_context = np.zeros(engines)
        """Their context tokens, held ones too."""
        self.queued_context = np.zeros(engines)
        """Those without KV blocks yet, about: in no `kv_used_fraction`."""
        self.resuming_tokens = np.zeros(engines)
        """Part of `waiting_tokens`: of streams that go on here, which engines take in first."""
        self.placed_tokens = np.zeros(engines)
        """Prompt tokens to compute that were ever placed here; never falls."""
        self.running_tokens = np.zeros(engines)
        """Context tokens of streams past their first token."""
        self.kv_used_fraction = np.zeros(engines)
        self.in_flight_prefill_tokens = np.zeros(engines)
        self.expected_step_s = np.full(engines, 0.05)
        self.prefill_s_per_token = np.full(engines, 0.0015)
        self.decode_s_per_request = np.full(engines, 0.0005)
        self.context_s_per_token = np.zeros(engines)
        self.requests_max = np.full(engines, 256.0)
        """Streams that one step can hold (`max_num_seqs`)."""
        self.kv_tokens = np.full(engines, np.inf)
        """KV capacity in tokens; infinite where it is not known yet."""
        self.places = np.full(engines, 256.0)
        """Streams that it can decode at once, 1 or more: see `request_cost.decode_places`."""
        self.size = np.ones(engines)
        """Its places as a multiple of the fleet's mean."""
        self.stream_stay = np.ones(engines)
        """Share of the next HORIZON_S seconds in which its streams will decode, expected mean."""
        self.weight = np.ones(engines)
        """Static share that an operator gives an engine, relative to the others."""
        self.tokens_per_s = np.zeros(engines)
        """Tokens generated per second lately; 0 where it is not known."""
        self.link_use = np.zeros(engines)
        """Share in use of the path that snapshots take, or of PCIe where that is more."""
        self.gpu_busy = np.full(engines, NO_COUNTERS.gpu_busy)
        """Share of time in which any kernel ran on its GPUs: one stream makes it 1. Negative where
        it is not counted."""
        self.foreign_util = np.zeros(engines)
        """Share of its GPUs' time that other programs can take from it; 0 also if not counted."""
        self.has_neighbours = False
        """Whether any `foreign_util` is not 0."""
        self.pcie_use = np.zeros(engines)
        """Share of PCIe in use, 0 to 1; 0 also where it is not counted."""
        self.free_run_tokens = np.full(engines, np.inf)
        """Tokens in the largest contiguous run of free KV blocks; infinite where not known."""
        self.fragmentation = np.zeros(engines)
        """1 - largest free run / all free blocks: 0 contiguous, near 1 shattered."""
        self.hot = np.zeros(engines, dtype=np.bool_)
        """The drain rule says: send new work elsewhere while there is an elsewhere."""
        self.forecast_util = np.zeros((engines, HORIZON_S))
        """Expected utilisation in each of the next HORIZON_S seconds, 0 to 1 (above 1: a queue)."""
        self.forecast_mem = np.zeros((engines, HORIZON_S))
        """Expected share of KV in use in each of the next HORIZON_S seconds."""

    def resize(self, engines: int) -> None:
        """Add closed, idle engines behind the last one, or take the last ones away.

        Raises ValueError outside 1..ENGINES_MAX. Whoever keeps an array of this object for itself
        has the old one afterwards.
        """
        fresh = FleetState(engines)
        kept = min(engines, self.engines)
        for name, values in vars(fresh).items():
            if isinstance(values, np.ndarray):
                values[:kept] = getattr(self, name)[:kept]
                setattr(self, name, values)
        self.engines = engines
        self.one_domain = self._one_domain()
        self.has_neighbours = bool(self.foreign_util.any())
        self.set_places(self.places)

    def set_capacity(self, engine: int, *, requests_max: int, kv_tokens: float) -> None:
        """What the engine said of itself when it came up."""
        self.requests_max[engine] = self.places[engine] = max(1, requests_max)
        self.kv_tokens[engine] = max(1.0, kv_tokens)
        self.set_places(self.places)

    def set_places(self, places: Floats) -> None:
        """Streams that each engine can decode at once, 1 or more. Shape (engines,)."""
        self.places[:] = places
        self.size[:] = places / places.mean()

    def set_standing(self, engine: int, *, accepts: bool, suspect: bool = False) -> None:
        """Whether the engine takes new streams, and whether it is only the last choice."""
        self.accepts[engine] = accepts
        self.suspect[engine] = suspect

    def set_domain(self, engine: int, domain: int) -> None:
        """Which engines count as equal to this one."""
        self.domain[engine] = domain
        self.one_domain = self._one_domain()

    def report(self, engine: int, report: EngineReport) -> None:
        """Take over what the engine's board says."""
        self.kv_used_fraction[engine] = min(1.0, max(0.0, report.kv_used_fraction))
        self.queued_context[engine] = self._queued(engine, report.admitted_requests)
        self.in_flight_prefill_tokens[engine] = max(0, report.in_flight_prefill_tokens)
        self.expected_step_s[engine] = max(0.0, report.expected_step_s)
        self.prefill_s_per_token[engine] = max(0.0, report.prefill_s_per_token)
        self.decode_s_per_request[engine] = max(0.0, report.decode_s_per_request)
        self.context_s_per_token[engine] = max(0.0, report.context_s_per_token)

    def picture(self, engine: int, report: MemoryReport) -> None:
        """Take over the memory picture. Without a free block there is nothing to be shattered."""
        free, run = report.free_tokens, report.free_run_tokens
        self.free_run_tokens[engine] = run
        self.fragmentation[engine] = 1.0 - min(run, free) / free if free > 0 else 0.0
        link_use = max(report.link_use, float(self.pcie_use[engine]))
        self.link_use[engine] = min(1.0, max(0.0, link_use))
        self.tokens_per_s[engine] = max(0.0, report.tokens_per_s)

    def hardware(self, engine: int, report: HardwareReport) -> None:
        """Take over what counters say of its GPUs."""
        self.gpu_busy[engine] = min(1.0, report.gpu_busy)
        self.foreign_util[engine] = min(1.0, max(0.0, report.foreign_util))
        self.pcie_use[engine] = min(1.0, max(0.0, report.pcie_use))
        self.has_neighbours = bool(self.foreign_util.any())

    def placed(
        self,
        engine: int,
        waiting_tokens: int,
        context_tokens: int | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """A stream was sent here with this many prompt tokens to compute: those whose KV the engine
        neither holds nor can load; and with so much context in all (None: nothing is held).
        `resumed`: it had tokens already, so the engine takes it in first."""
        self.running_requests[engine] += 1
        self.waiting_requests[engine] += 1
        self.waiting_tokens[engine] += waiting_tokens
        context = waiting_tokens if context_tokens is None else context_tokens
        self.waiting_context[engine] += context
        self.queued_context[engine] += context
        self.resuming_tokens[engine] += waiting_tokens if resumed else 0
        self.placed_tokens[engine] += waiting_tokens

    def first_token(
        self,
        engine: int,
        waiting_tokens: int,
        context_tokens: int | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """The first token of a stream came: nothing of it waits any more (all as in `placed`), and
        its whole prompt is context now (None: it was computed whole)."""
        context = waiting_tokens if context_tokens is None else context_tokens
        self._waits_no_more(engine, waiting_tokens, context, resumed=resumed)
        self.running_tokens[engine] += context

    def grew(self, engine: int, tokens: int) -> None:
        """Streams here got this many tokens longer."""
        self.running_tokens[engine] += tokens

    def released(
        self,
        engine: int,
        *,
        waiting_tokens: int,
        running_tokens: int,
        context_tokens: int | None = None,
        resumed: bool = False,
    ) -> None:
        """A stream left, with what it still had in either count (one of the two is 0);
        `context_tokens` and `resumed` of one that still waited as in `placed`."""
        self._take(self.running_requests, engine, 1)
        if running_tokens:
            self._take(self.running_tokens, engine, running_tokens)
        else:
            context = waiting_tokens if context_tokens is None else context_tokens
            self._waits_no_more(engine, waiting_tokens, context, resumed=resumed)

    def emptied(self, engine: int) -> None:
        """The engine is gone or new: it holds nothing."""
        for counts in (
            self.running_requests, self.waiting_requests, self.waiting_tokens, self.waiting_context,
            self.queued_context, self.resuming_tokens, self.running_tokens, self.kv_used_fraction,
            self.in_flight_prefill_tokens, self.tokens_per_s, self.link_use, self.forecast_util,
            self.forecast_mem,
        ):  # fmt: skip
            counts[engine] = 0.0
        self.free_run_tokens[engine], self.fragmentation[engine] = np.inf, 0.0
        self.stream_stay[engine] = 1.0
        self.hardware(engine, NO_COUNTERS)

    def _waits_no_more(self, engine: int, tokens: int, context: int, *, resumed: bool) -> None:
        """Undo what `placed` counted as waiting. What queues is among what waits."""
        self._take(self.waiting_requests, engine, 1)
        self._take(self.waiting_tokens, engine, tokens)
        self._take(self.waiting_context, engine, context)
        if resumed:
            self._take(self.resuming_tokens, engine, tokens)
        waiting = self.waiting_context.item(engine)
        if self.queued_context.item(engine) > waiting:
            self.queued_context[engine] = waiting

    def _queued(self, engine: int, admitted: int) -> float:
        """Context tokens of the streams that came after the first `admitted`: their share of all
        that wait."""
        waiting = self.waiting_requests.item(engine)
        queued = min(waiting, self.running_requests.item(engine) - admitted)
        return self.waiting_context.item(engine) * queued / waiting if queued > 0.0 else 0.0

    def _one_domain(self) -> bool:
        return bool((self.domain == self.domain[0]).all())

    @staticmethod
    def _take(counts: Floats, engine: int, amount: int) -> None:
        """Subtract, but never below zero: after `emptied`, late releases are no news."""
        left = counts[engine] - amount
        counts[engine] = left if left > 0.0 else 0.0
