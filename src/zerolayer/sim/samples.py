"""How busy each engine is over time, for reports. No policy sees it."""

import numpy as np

from zerolayer.core.fleet_state import Floats
from zerolayer.sim.engine import SimEngine
from zerolayer.sim.sequence import Seq
from zerolayer.sim.traces import Trace

SAMPLES = 400
"""About so many over the arrivals of a run."""
SAMPLE_S_MIN = 0.25


class Samples:
    """Utilisation and memory of every engine in windows of equal length.

    util = p + n / n_max: p = seconds of prefill work that came in the window per second, n =
    streams decoding on average, n_max = how many the engine can decode at once = min(places, KV
    tokens / mean context). NaN while an engine is down.
    """

    def __init__(self, engines: list[SimEngine], trace: Trace) -> None:
        self.every_s = max(SAMPLE_S_MIN, trace.duration_s / SAMPLES)
        self._engines = engines
        self._context = float(np.mean(trace.prompt_tokens) + 0.5 * np.mean(trace.output_tokens))
        self._demand_s = [0.0] * len(engines)
        self._streams_s = [0.0] * len(engines)
        self._times: list[float] = []
        self._util: list[list[float]] = []
        self._mem: list[list[float]] = []

    def placed(self, engine: SimEngine, seq: Seq) -> None:
        """A stream comes to an engine, which has to compute what it does not hold."""
        held = engine.kv.held(seq.request.blocks) * engine.kv.block_tokens
        tokens = seq.context - max(held, seq.restored)
        chunk = engine.profile.batch_tokens
        per_token_s = engine.profile.work_s[chunk] / chunk
        self._demand_s[engine.slot] += engine.prefill_slow * per_token_s * tokens

    def take(self, now: float) -> None:
        """A window ends."""
        self._times.append(now)
        self._util.append([self._util_of(engine, now) for engine in self._engines])
        self._mem.append(
            [np.nan if e.dead else e.kv.used / e.kv.capacity for e in self._engines]
        )  # fmt: skip

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Times, util and mem; see RunResult."""
        shape = (-1, len(self._engines))
        return (
            np.array(self._times),
            np.array(self._util).reshape(shape),
            np.array(self._mem).reshape(shape),
        )

    def _util_of(self, engine: SimEngine, now: float) -> float:
        slot = engine.slot
        streams_s = engine.stream_seconds(now)
        streams = (streams_s - self._streams_s[slot]) / self.every_s
        prefill = self._demand_s[slot] / self.every_s
        self._streams_s[slot], self._demand_s[slot] = streams_s, 0.0
        if engine.dead:
            return np.nan
        context = engine.context / engine.decodes if engine.decodes else self._context
        return prefill + streams / min(engine.profile.requests_max, engine.kv.capacity / context)
