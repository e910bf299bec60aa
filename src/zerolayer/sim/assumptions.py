"""What a simulation rests on, in words and tables for the end of a report."""

from collections.abc import Sequence

from zerolayer.dispatch.policies.registry import POLICIES
from zerolayer.sim.faults import HANG_FOUND_S, HOST_LOST_SHARE, LEVELS, FaultLevel
from zerolayer.sim.plan import OWN, Plan
from zerolayer.sim.profiles import ENGINE_FACTOR, EngineProfile, profile_of
from zerolayer.sim.recovery import REACTIONS
from zerolayer.sim.report import Section
from zerolayer.sim.svg import duration

LICENCES = {
    "azure_2023": "recorded; Azure/AzurePublicDataset, CC BY 4.0; Patel et al., ISCA 2024",
    "mooncake_conversation": "recorded; kvcache-ai/Mooncake, Apache-2.0; Qin et al., FAST 2025",
    "mooncake_synthetic": "built from public data sets by kvcache-ai/Mooncake, Apache-2.0; Qin et "
    "al., FAST 2025",
    "agentic_coding": "recorded sessions, composed arrivals; callanjfox/kv-cache-tester, "
    "Apache-2.0",
    "servegen": "generated from production fits; alibaba/ServeGen, Apache-2.0; arXiv 2505.09999",
}
"""By the beginning of a trace's name; the whole story is in `data/traces/README.md`."""
_HOUR_S = 3600.0


def assumptions(plan: Plan) -> tuple[Section, ...]:
    """The sections for the cells of this plan."""
    return (
        _engines(profile_of(plan.kind)),
        _traces(plan.traces),
        _faults(plan.faults),
        _continuation(plan.continuation),
        _policies(plan.policies),
        Section(
            "Not modelled",
            "Tokenising and HTTP; speculative decoding; links between nodes; requests that fail "
            "for reasons of their own; clients that give up, or that send less when answers come "
            "late (arrivals are those of the trace, whatever happens to earlier requests).",
        ),
    )


def _engines(profile: EngineProfile) -> Section:
    median, largest = profile.fit_error
    one_s = profile.step_s(0, 0, 1, 1024)
    many_s = profile.step_s(0, 0, 64, 64 * 1024)
    return Section(
        f"Engines: {profile.name}",
        "Step times come from tables composed of NVIDIA's kernel measurements "
        f"(ai-dynamo/aiconfigurator, Apache-2.0), times {ENGINE_FACTOR:g} for what those leave "
        f"out. The formula fits the table within {median:.1%} (median), {largest:.0%} (worst). "
        "Continuous batching, chunked prefill, prefix cache and preemption by recomputation are as "
        "in vLLM.",
        (
            ("figure", "value"),
            ("KV cache", f"{profile.kv_tokens:,} tokens"),
            ("streams in a step, at most", f"{profile.requests_max:,}"),
            ("tokens in a step, at most", f"{profile.batch_tokens:,}"),
            ("step, 1 stream at 1,024 tokens", duration(one_s)),
            ("step, 64 streams at 1,024 tokens", duration(many_s)),
            ("prefill of 1,000 tokens", duration(profile.prefill_s(1000))),
            (
                "restoring 1,000 tokens from a snapshot",
                duration(1000 * profile.restore_s_per_token),
            ),
            ("restart, median and P99", " and ".join(map(duration, profile.restart_s))),
        ),
    )


def _traces(names: Sequence[str]) -> Section:
    rows = []
    for name in names:
        origin = next((text for start, text in LICENCES.items() if name.startswith(start)), None)
        rows.append((name, origin or "a file of yours"))
    return Section(
        "Traces",
        "Arrivals are squeezed to a rate of utilisation × engines × what one engine sustains of "
        "the trace when its queue is never empty. Requests too long for an engine are left out.",
        (("trace", "origin, licence"), *rows),
    )


def _faults(levels: Sequence[str]) -> Section:
    rows = [("fault, per engine", *levels)]
    for name, show in _FAULT_ROWS:
        rows.append((name, *(show(LEVELS[level]) for level in levels)))
    return Section(
        "Faults",
        "Drawn before a run, from the seed alone: every policy meets the same faults at the same "
        "times. Rates per engine are multiplied by a hazard of its own (gamma, shape 0.3, mean 1): "
        "a few engines cause most faults. “base” is a decent datacentre, “stress” is accelerated "
        "on purpose; several rates are assumptions, as there are hardly any public ones.",
        tuple(rows),
    )


def _every(rate: float) -> str:
    if rate == 0.0:
        return "never"
    hours = 1.0 / rate / _HOUR_S
    if hours < 1.0:
        return f"1 per {hours * 60:.3g} min"
    return f"1 per {hours:.3g} h" if hours < 72.0 else f"1 per {hours / 24:,.0f} days"


def _freeze(level: FaultLevel) -> str:
    low, high = level.freeze_s
    return f"{_every(level.freeze_rate)}, {low:g} to {high:g} s" if level.freeze_rate else "never"


def _spell(level: FaultLevel) -> str:
    low, high = level.spell_factor
    if not level.spell_rate:
        return "never"
    return f"{_every(level.spell_rate)}, × {low:g} to {high:g}, 10 min on average"


_FAULT_ROWS = (
    ("freeze", _freeze),
    ("slow spell", _spell),
    ("software crash (a third are hangs)", lambda level: _every(level.software_rate)),
    (
        f"hardware crash, per GPU ({HOST_LOST_SHARE:.0%} with the host's memory)",
        lambda level: _every(level.hardware_per_gpu),
    ),
    ("outage of 5 to 25 % of the fleet", lambda level: _every(level.outage_rate)),
    (
        "spread of speed, prefill and decode",
        lambda level: f"{level.prefill_deviation:.0%}, {level.decode_deviation:.0%}",
    ),
    ("one engine slower by", lambda level: f"× {level.one_slow_engine:g}"),
    ("noise of a step", lambda level: f"{level.noise.deviation:.0%}"),
)


def _continuation(continuation: str) -> Section:
    def after(seconds: float | None) -> str:
        return "not seen" if seconds is None else duration(seconds)

    rows = tuple(
        (name, after(seen.crash_s), after(seen.freeze_s), after(seen.hang_s), _STREAMS[name])
        for name, seen in REACTIONS.items()
    )
    who = (
        "Each policy with what its own system does."
        if continuation == OWN
        else f"All policies with “{continuation}”, so that placement alone differs."
    )
    low, high = HANG_FOUND_S
    return Section(
        "A stream whose engine fails",
        f"{who} Figures of “snapshot” are those measured on the real fleet (docs/figures.md) with "
        "some room; the others were measured with the systems themselves. A hang that nobody sees "
        f"ends with a progress check after {low:g} to {high:g} s.",
        (("continuation", "crash seen after", "freeze", "hang", "streams then"), *rows),
    )


_STREAMS = {
    "snapshot": "go on elsewhere from their KV pages",
    "reprefill": "go on elsewhere, context computed again",
    "retry": "break; the client asks again at once, from the start",
}


def _policies(names: Sequence[str]) -> Section:
    entries = [POLICIES[name] for name in names]
    rows = tuple((e.name, e.formula, e.origin, e.continuation.value) for e in entries)
    return Section(
        "Policies",
        "All through the same dispatcher code as the live fleet; none sees a true output length.",
        (("policy", "formula", "origin", "its system's continuation"), *rows),
    )
