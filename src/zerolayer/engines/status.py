"""The fleet as plain JSON values: what `GET /zerolayer/status` answers."""

import re
import time
from typing import TYPE_CHECKING, Any

from zerolayer.arena.board import CoreState
from zerolayer.core.ids import engine_name
from zerolayer.dispatch.heat import heat_of
from zerolayer.engines.shown_words import without_secrets
from zerolayer.engines.status_placement import engine_placement, placement_status
from zerolayer.stitch.moves import MoveRecord

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet
    from zerolayer.engines.supervisor import SlotSupervisor

#: An engine's reason for having no snapshots is cut to this many characters.
_REASON_CHARS_MAX = 400
#: vLLM gives a request an id of its own: the number among n > 1 answers before it, 8 random hex
#: digits behind it.
_INTERNAL_ID = re.compile(r"(?:\d+_)?(?P<external>.+)-[0-9a-f]{8}")


def status_of(fleet: "Fleet") -> dict[str, Any]:
    """Everything that an operator sees of a fleet. Call it on the fleet's event loop."""
    info, driver = fleet.runtime.info, fleet.driver
    totals, heat = driver.totals, heat_of(driver.fleet)
    return {
        "instance": fleet.runtime.instance,
        "pid": info.pid,
        "url": info.url,
        "model": info.model,
        "started": info.started,
        "snapshots": fleet.settings.snapshots,
        "log_dir": str(fleet.settings.log_dir),
        "vllm_args": without_secrets(fleet.arguments),
        "operation": _operation(fleet),
        "engines": [
            {
                **_engine(fleet, supervisor),
                **engine_placement(fleet, supervisor.slot, heat),
            }
            for supervisor in fleet.supervisors
        ],
        "placement": placement_status(fleet, heat),
        "streams": {"active": len(driver.owned), "waiting_for_engine": len(driver.waiting)},
        "totals": {
            "streams": totals.streams,
            "tokens_delivered": totals.tokens_delivered,
            "outputs_fenced": totals.outputs_fenced,
            "moves": totals.moves,
            "moves_on_purpose": totals.moves_on_purpose,
            "resumed_from_snapshot": totals.resumed_from_snapshot,
            "resumed_by_prefill": totals.resumed_by_prefill,
            "outcomes": dict(totals.outcomes),
        },
        "dispatch": _dispatch(totals.streams, list(driver.dispatch_ns)),
        "recent_moves": [_move(record) for record in driver.recent_moves],
        "events": [
            {"unix": event.unix, "engine": event.engine, "what": event.what}
            for event in fleet.events
        ],
    }


def _engine(fleet: "Fleet", supervisor: "SlotSupervisor") -> dict[str, Any]:
    slot, record, live = supervisor.slot, supervisor.record, supervisor.live
    load = fleet.driver.fleet
    pids = live.launched.pids if live is not None else ()
    board = (fleet.boards[slot].read_core() if live is not None else None) or CoreState()
    return {
        "id": engine_name(slot),
        "slot": slot,
        "state": supervisor.state.value,
        "incarnation": fleet.driver.lives[slot].incarnation,
        "core_pid": pids[0] if pids else None,
        "worker_pids": list(pids[1:]),
        "held": slot in fleet.driver.held,
        "streams": len(fleet.driver.on_engine[slot]),
        "running": board.running_requests,
        "waiting": board.waiting_requests,
        "kv_used_percent": round(100.0 * float(load.kv_used_fraction[slot]), 2),
        "expected_step_ms": _expected_step_ms(fleet, slot) if live is not None else None,
        "restarts": record.restarts,
        "last_fault": record.last_fault,
        "up_since": record.up_since or None,
        "start_seconds": round(record.start_seconds, 2),
        "missing_capacity_s": round(record.missing_capacity_s + _down_s(supervisor), 2),
        "snapshots": _snapshots(fleet, slot),
        "gpus": list(fleet.settings.gpus.of(slot)),
    }


def _operation(fleet: "Fleet") -> dict[str, Any] | None:
    """What an operator ordered last, without its lines; those are at `/zerolayer/operation`."""
    newest = fleet.operations.newest
    if newest is None:
        return None
    return {"what": newest.what, "state": newest.state, "error": newest.error}


def _expected_step_ms(fleet: "Fleet", slot: int) -> float | None:
    if fleet.watch is None:
        return None
    return round(1e3 * fleet.watch.expected_step_s(slot), 2)


def _down_s(supervisor: "SlotSupervisor") -> float:
    """Seconds of the outage that lasts now; 0 while the engine is up."""
    since_ns = supervisor.record.down_since_ns
    return (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0


def _snapshots(fleet: "Fleet", slot: int) -> str:
    """`on`, `off` (as the operator chose), or why this engine keeps none."""
    if not fleet.settings.snapshots:
        return "off"
    incarnation = fleet.driver.lives[slot].incarnation
    note = fleet.runtime.path / f"arena-{engine_name(slot)}-{incarnation}.off"
    try:
        return note.read_text(errors="replace").strip()[:_REASON_CHARS_MAX] or "off"
    except OSError:
        return "on"


def _dispatch(count: int, spent_ns: list[int]) -> dict[str, Any]:
    """Nanoseconds from a stream's arrival until it was in an engine's queue, as percentiles of
    the newest ones; None before the first."""
    spent_ns.sort()
    return {
        "count": count,
        "p50_us": _percentile_us(spent_ns, 0.5),
        "p99_us": _percentile_us(spent_ns, 0.99),
    }


def _percentile_us(sorted_ns: list[int], share: float) -> float | None:
    """Nearest rank, in microseconds."""
    if not sorted_ns:
        return None
    return round(sorted_ns[min(len(sorted_ns) - 1, int(share * len(sorted_ns)))] / 1e3, 1)


def _move(record: MoveRecord) -> dict[str, Any]:
    internal = _INTERNAL_ID.fullmatch(record.stream)
    return {
        "stream": record.stream,
        "external_id": internal["external"] if internal else record.stream,
        "from": record.source,
        "to": record.target,
        "reason": record.reason,
        "delivered_tokens": record.delivered_tokens,
        "context_tokens": record.context_tokens,
        "restored_tokens": record.restored_tokens,
        "declared_unix": record.declared_unix,
        "after_declared_ms": round(record.after_declared_ms, 2),
        "gap_ms": round(record.gap_ms, 2),
        "on_purpose": record.on_purpose,
    }
