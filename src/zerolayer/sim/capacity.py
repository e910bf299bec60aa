"""How many requests per second one engine sustains: what a utilisation target is a share of."""

from random import Random

import numpy as np

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.prefix_index import PrefixHolders
from zerolayer.sim.engine import SimEngine
from zerolayer.sim.noise import NoiseLevel, StepNoise
from zerolayer.sim.prefix_cache import KvMemory
from zerolayer.sim.profiles import EngineKind, EngineProfile, FittedEngine, profile_of
from zerolayer.sim.sequence import Seq, SimRequest, request_of
from zerolayer.sim.traces import Trace

SAMPLE_REQUESTS = 2000
MIDDLE = (0.2, 0.8)
"""Share of the finished requests between which the rate is taken: neither filling nor draining."""


def fitting(trace: Trace, kind: EngineKind | FittedEngine) -> Trace:
    """Without the requests that such an engine cannot hold. Raises ConfigError if none is left."""
    limit = profile_of(kind).context_tokens_max
    kept = trace.fitting(limit)
    if len(kept) == 0:
        raise ConfigError("--trace", trace.name, f"none of its requests fits into {limit} tokens")
    return kept


def capacity(profile: EngineProfile, trace: Trace) -> float:
    """Requests per second that one engine of nominal speed ends while its queue is never empty.

    Measured by simulation, with a sample of the trace queued at time 0: evenly chosen requests, or,
    where prompts share prefixes, as many in a row from the middle (a fleet that spreads the
    prompts of one prefix finds less in its caches than this one engine).
    """
    finished = _finish_times(profile, trace)
    first, last = (int(share * (len(finished) - 1)) for share in MIDDLE)
    return (last - first) / (finished[last] - finished[first])


def _sample(trace: Trace) -> list[SimRequest]:
    count = min(SAMPLE_REQUESTS, len(trace))
    if trace.prefixes is None:
        order = np.linspace(0, len(trace) - 1, count).astype(np.int64).tolist()
        Random(0).shuffle(order)
    else:
        start = (len(trace) - count) // 2
        order = list(range(start, start + count))
    return [request_of(trace, row) for row in order]


def _finish_times(profile: EngineProfile, trace: Trace) -> list[float]:
    """When each of the sampled requests ends on one engine, in seconds, ascending."""
    kv = KvMemory(0, profile.kv_tokens, trace.block_tokens, PrefixHolders())
    engine = SimEngine(0, profile, kv, StepNoise(NoiseLevel(0.0), Random(0)))
    requests = _sample(trace)
    for number, request in enumerate(requests):
        engine.waiting.append(Seq(request, str(number), 0, 0))
    engine.start(0.0)
    times: list[float] = []
    while len(times) < len(requests):
        engine.finish()
        times += [out.at_s for out in engine.outbox if out.finish_reason is not None]
        engine.outbox.clear()
        engine.start(engine.end_s)
    return times
