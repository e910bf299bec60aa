"""The part of the status that explains placement: heat, forecast, memory picture, its errors."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zerolayer.arena.tables import LoadRow
from zerolayer.core.fleet_state import FleetState
from zerolayer.core.ids import engine_name
from zerolayer.dispatch.heat import Heat, heat_of

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet


def placement_status(fleet: "Fleet", heat: Heat) -> dict[str, Any]:
    """Of the whole fleet, as plain JSON values."""
    placing = fleet.placing
    choices, errors = placing.choices, placing.outlook.ttft_errors.percentiles()
    return {
        "policy": choices.policy,
        "device": str(fleet.vllm_config.device_config.device_type),
        "batch_tokens": int(fleet.vllm_config.scheduler_config.max_num_batched_tokens),
        "admission": choices.admission.value,
        "objective": _rounded(heat.objective),
        "utilisation_std": _rounded(float(heat.util.std())),
        "drain_rule": {
            "gpu_percent": round(100.0 * choices.drain.util_over, 2),
            "memory_percent": round(100.0 * choices.drain.mem_over, 2),
            "samples": choices.drain.samples,
        },
        "expected_output_tokens": round(placing.outlook.expected_output(), 1),
        "ttft_error": {
            "count": errors.count,
            "p50": _rounded(errors.p50),
            "p90": _rounded(errors.p90),
        },
        "prefix_hits": asdict(fleet.prefixes.hits),
    }


def engine_placement(fleet: "Fleet", slot: int, heat: Heat) -> dict[str, Any]:
    """Of one engine. Shares are 0 to 1 (utilisation above 1: a queue grows)."""
    load, run = fleet.driver.fleet, float(fleet.driver.fleet.free_run_tokens[slot])
    return {
        "domain": int(load.domain[slot]),
        "labels": list(fleet.placing.choices.labels_of(slot)),
        "hot": bool(load.hot[slot]),
        "utilisation": _rounded(float(heat.util[slot])),
        "forecast_util": [_rounded(float(value)) for value in load.forecast_util[slot]],
        "forecast_mem": [_rounded(float(value)) for value in load.forecast_mem[slot]],
        "entropy_share": _rounded(float(heat.share[slot])),
        "tokens_per_s": round(float(load.tokens_per_s[slot]), 1),
        "free_run_tokens": int(run) if math.isfinite(run) else None,
        "fragmentation": _rounded(float(load.fragmentation[slot])),
        "link_use": _rounded(float(load.link_use[slot])),
        "hardware": fleet.counters.shown(slot),
        "step_error": _step_error(fleet, slot),
        "reference_step_ms": _reference_step_ms(fleet, slot),
        "step_model_s": _step_model(fleet, slot),
        "demand": _demand(load, slot),
    }


def load_rows(fleet: "Fleet", updated: float) -> list[LoadRow]:
    """The rows of `load_heatmap`, by slot."""
    load, heat = fleet.driver.fleet, heat_of(fleet.driver.fleet)
    return [
        LoadRow(
            engine=engine_name(slot),
            entropy_score=float(heat.share[slot]),
            active_requests=int(load.running_requests[slot]),
            memory_percent=100.0 * float(load.kv_used_fraction[slot]),
            updated=updated,
            util_percent_next_5s=tuple((100.0 * load.forecast_util[slot]).tolist()),
            memory_percent_next_5s=tuple((100.0 * load.forecast_mem[slot]).tolist()),
        )
        for slot in range(load.engines)
    ]


def _step_error(fleet: "Fleet", slot: int) -> dict[str, Any] | None:
    if fleet.watch is None:
        return None
    errors = fleet.watch.step_errors(slot)
    return {"steps": errors.steps, "p50": _rounded(errors.p50), "p90": _rounded(errors.p90)}


def _demand(load: FleetState, slot: int) -> dict[str, Any]:
    """What utilisation is made of, as counts: prompt tokens that were ever placed there and that
    wait now, streams that decode now, and how many can at once."""
    kv_tokens = float(load.kv_tokens[slot])
    return {
        "placed_tokens": int(load.placed_tokens[slot]),
        "waiting_tokens": int(load.waiting_tokens[slot]),
        "decoding": int(load.running_requests[slot] - load.waiting_requests[slot]),
        "places": round(float(load.places[slot]), 2),
        "requests_max": int(load.requests_max[slot]),
        "kv_tokens": int(kv_tokens) if math.isfinite(kv_tokens) else None,
    }


def _step_model(fleet: "Fleet", slot: int) -> list[float] | None:
    """`StepCostModel.coefficients`; None before the watch runs."""
    if fleet.watch is None:
        return None
    return [float(f"{value:.4g}") for value in fleet.watch.step_model(slot)]


def _reference_step_ms(fleet: "Fleet", slot: int) -> float | None:
    """Of a live engine: the same step on each, for comparing their speed."""
    alive = fleet.supervisors[slot].live is not None
    seconds = fleet.watch.reference_step_s(slot) if fleet.watch is not None and alive else None
    return None if seconds is None else round(1e3 * seconds, 3)


def _rounded(value: float) -> float:
    return round(value, 4)
