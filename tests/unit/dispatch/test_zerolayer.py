"""What ours must keep to, and that each preference changes what it decides."""

import random
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.dispatch.test_policies import EVERY, FLEETS, REQUESTS, build, idle
from zerolayer.core.errors import ConfigError
from zerolayer.core.fleet_state import EngineReport, FleetState, Floats, HardwareReport
from zerolayer.dispatch.entropy import EntropyWeights, Limits
from zerolayer.dispatch.load import Appraisal
from zerolayer.dispatch.policies import PlacementRequest, expected_wait_s
from zerolayer.dispatch.policies.base import Decision, Preference
from zerolayer.dispatch.policies.expected_wait import STEPS_TO_FIRST_TOKEN
from zerolayer.dispatch.policies.registry import POLICIES, Continuation, PolicyEntry, policy_entry
from zerolayer.dispatch.policies.zerolayer import (
    RETRY_AFTER_S_MAX,
    RETRY_AFTER_S_MIN,
    Weights,
    ZeroLayer,
)
from zerolayer.dispatch.snapshot_load import held_by_snapshot

NOBODY: frozenset[int] = frozenset()
ONLY_WAIT = Weights(ttft=1.0, entropy=0.0, stay=0.0)


def after(fleet: FleetState, request: PlacementRequest) -> Floats:
    """Utilisation and memory of each engine with the request on it."""
    case = Appraisal()
    case.take(fleet, request)
    case.state_committed(fleet)
    return case.after.copy()


def placements(
    entry: PolicyEntry,
    engines: list[dict[str, float]],
    requests: list[PlacementRequest],
    seed: int,
) -> list[Decision | None]:
    """What a fresh policy decides one after the other, each placement counted."""
    fleet, policy = build(engines), entry.make(random.Random(seed))
    decisions = []
    for request in requests:
        decisions.append(policy.choose(fleet, request, NOBODY))
        if decisions[-1] is not None:
            fleet.placed(decisions[-1].engine, request.prompt_tokens)
    return decisions


def place(fleet: FleetState, request: PlacementRequest, weights: Weights | None = None) -> int:
    decision = ZeroLayer(weights).choose(fleet, request, NOBODY)
    assert decision is not None
    return decision.engine


@given(engines=FLEETS, request=REQUESTS)
def test_no_limit_is_passed_while_an_engine_keeps_it_but_where_most_of_the_prompt_is_held(
    engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    fleet, limits = build(engines), Limits()
    decision = ZeroLayer().choose(fleet, request, NOBODY)
    if decision is None:
        return
    util, mem = after(fleet, request)
    able = fleet.accepts & ((fleet.domain == request.domain) | (request.domain is None))
    healthy = able & ~fleet.suspect
    able = healthy if healthy.any() else able
    feasible = able & (util <= limits.util_max) & (mem <= limits.mem_max)
    held = (request.held_tokens or {}).get(decision.engine, 0)
    holds = decision.engine in (request.held_tokens or {}) and 2 * held >= request.prompt_tokens
    assert feasible[decision.engine] or holds or not feasible.any()
    assert (":overload" in decision.reason) == (not feasible.any())


@given(engines=FLEETS, request=REQUESTS)
def test_one_more_engine_never_raises_the_highest_utilisation_that_is_predicted(
    engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    """By evenness of utilisation alone: the request's own wait may be worth a higher peak."""
    even = Weights(ttft=0.0, queue=0.0, stay=0.0, objective=EntropyWeights(1.0, 0.0, 0.0))
    request = PlacementRequest(request.prompt_tokens, request.expected_output_tokens)
    healthy = [{**e, "accepts": True, "suspect": False, "domain": 0, "hot": False} for e in engines]
    fresh = {**healthy[0], "streams": 0, "util": 0.0, "kv": 0.0, "link": 0.0}
    peaks = []
    for rows in (healthy, [*healthy, fresh]):
        fleet = build(rows)
        util, _ = after(fleet, request)
        engine = place(fleet, request, even)
        current = Appraisal()
        current.take(fleet, request)
        current.state_committed(fleet)
        current.util[engine] = util[engine]
        peaks.append(float(current.util.max()))
    assert peaks[1] <= peaks[0] + 1e-9


@pytest.mark.parametrize("entry", EVERY)
@given(engines=FLEETS, requests=st.lists(REQUESTS, max_size=6), seed=st.integers(0, 3))
@settings(max_examples=25)
def test_placements_are_the_same_for_the_same_seed(
    entry: PolicyEntry,
    engines: list[dict[str, float]],
    requests: list[PlacementRequest],
    seed: int,
) -> None:
    assert placements(entry, engines, requests, seed) == placements(entry, engines, requests, seed)


@given(engines=FLEETS, request=REQUESTS)
def test_with_the_wait_alone_the_score_is_the_expected_wait_without_the_steps(
    engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    fleet = build(engines)
    request = PlacementRequest(
        request.prompt_tokens, request.expected_output_tokens, held_tokens=request.held_tokens
    )
    decision = ZeroLayer(ONLY_WAIT).choose(fleet, request, NOBODY)
    if decision is not None:
        step_s = fleet.expected_step_s + fleet.running_requests * fleet.decode_s_per_request
        wait_s = expected_wait_s(fleet, request) - STEPS_TO_FIRST_TOKEN * step_s
        assert decision.score == pytest.approx(float(wait_s[decision.engine]), abs=1e-9)


@given(engines=FLEETS, request=REQUESTS)
def test_one_object_serves_fleets_of_any_size(
    engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    policy = ZeroLayer()
    policy.choose(idle(3), PlacementRequest(10), NOBODY)
    fleet = build(engines)
    decision, expected = (p.choose(fleet, request, NOBODY) for p in (policy, ZeroLayer()))
    assert (decision is None) == (expected is None)
    if decision is not None and expected is not None:
        assert decision.score == expected.score


def room_for(streams: int) -> dict[str, int]:
    return {"requests_max": streams, "kv_tokens": 100_000}


def busy_and_idle() -> FleetState:
    """Engine 0 at half of its places, engine 1 with one stream, engine 2 empty."""
    fleet = idle(3)
    for slot, streams in enumerate((8, 1, 0)):
        fleet.set_capacity(slot, requests_max=16, kv_tokens=100_000)
        for _ in range(streams):
            fleet.placed(slot, 100)
            fleet.first_token(slot, 100)
    return fleet


def test_without_a_preference_the_idle_engine_is_filled_first() -> None:
    assert place(busy_and_idle(), PlacementRequest(100, 50)) == 2


def test_cost_optimal_fills_the_busy_engine_up_to_the_target_and_then_the_next() -> None:
    fleet = busy_and_idle()
    request = PlacementRequest(10, 50, preference=Preference.COST_OPTIMAL)
    chosen = []
    for _ in range(16):
        engine = place(fleet, request)
        chosen.append(engine)
        fleet.placed(engine, 10)
        fleet.first_token(engine, 10)
    assert [engine for engine, _ in groupby(chosen)] == [0, 1, 2]
    assert 0.6 < fleet.running_requests[0] / 16 <= 0.7


def test_low_latency_avoids_the_engine_with_a_long_prefill_in_its_queue() -> None:
    fleet = idle(2)
    for _ in range(60):
        fleet.placed(0, 10)
        fleet.first_token(0, 10)
    fleet.placed(1, 100)
    plain = PlacementRequest(50, 20)
    hurried = PlacementRequest(50, 20, preference=Preference.LOW_LATENCY)
    assert place(fleet, plain) == 1
    assert place(fleet, hurried) == 0


def test_high_throughput_takes_the_prefix_hit_where_another_would_wait_less() -> None:
    fleet = idle(2)
    fleet.placed(1, 1_000)
    held = {1: 200}
    plain = PlacementRequest(1_000, 20, held_tokens=held)
    saving = PlacementRequest(1_000, 20, held_tokens=held, preference=Preference.HIGH_THROUGHPUT)
    assert place(fleet, plain) == 0
    assert place(fleet, saving) == 1


ONLY_STAY = Weights(ttft=0.0, entropy=0.0, stay=100.0)


def test_a_conversation_stays_where_most_of_its_prompt_is_held() -> None:
    fleet = idle(2)
    fleet.placed(1, 1_500)
    request = PlacementRequest(1_000, 20)
    assert place(fleet, request) == 0
    assert place(fleet, replace(request, held_tokens={1: 900})) == 1


def test_what_two_engines_hold_alike_keeps_a_request_at_neither() -> None:
    fleet = idle(3)
    for slot in (0, 1):
        fleet.placed(slot, 3_000)
    request = PlacementRequest(1_000, 20)
    assert place(fleet, replace(request, held_tokens={0: 900, 1: 100})) == 0
    assert place(fleet, replace(request, held_tokens={0: 900, 1: 896})) == 2


@given(engines=FLEETS, request=REQUESTS)
def test_only_the_engine_that_holds_most_is_worth_more_than_its_seconds(
    engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    fleet, prompt = build(engines), request.prompt_tokens
    held = {slot: n for slot, n in (request.held_tokens or {}).items() if slot < fleet.engines}
    asked = PlacementRequest(prompt, domain=request.domain, held_tokens=held)
    decision = ZeroLayer(ONLY_STAY).choose(fleet, asked, NOBODY)
    if decision is None:
        return
    most, *others = sorted(held.values(), reverse=True) or [0]
    alone = most - max(others, default=0)
    saved = alone * min(1.0, most / max(1, prompt)) * fleet.prefill_s_per_token[decision.engine]
    is_holder = held.get(decision.engine) == most and alone > 0
    expected = -ONLY_STAY.stay * saved if is_holder else 0.0
    assert decision.score == pytest.approx(expected)


def test_kv_of_streams_that_queue_counts_though_little_of_it_is_to_compute() -> None:
    """After an outage many streams go on from their snapshots at once: no engine reports their KV
    before they run."""
    fleet = idle(2)
    for slot in (0, 1):
        fleet.set_capacity(slot, requests_max=256, kv_tokens=50_000)
    for _ in range(3):
        fleet.placed(0, 1, 10_000)
    for _ in range(6):
        fleet.placed(1, 200)
    moved = PlacementRequest(10_000, 20, held_tokens={0: 9_999, 1: 9_999})
    chosen = []
    for _ in range(4):
        chosen.append(place(fleet, moved))
        fleet.placed(chosen[-1], 1, 10_000)
    assert chosen == [1, 1, 1, 0]


def going_on(fleet: FleetState, context: int) -> PlacementRequest:
    held = held_by_snapshot(fleet, context - 1)
    return PlacementRequest(context, 200, held_tokens=held, continuing=True)


def test_streams_of_a_lost_engine_do_not_all_go_to_the_least_busy_one() -> None:
    """Each would wait there for the loads of all."""
    fleet = idle(5)
    for slot in range(5):
        fleet.set_capacity(slot, requests_max=256, kv_tokens=500_000)
        fleet.report(slot, EngineReport(0.0, 0, 0.02, 2e-5, 1e-5))
        for _ in range(100 if slot else 30):
            fleet.placed(slot, 10)
            fleet.first_token(slot, 10)
    moved = going_on(fleet, 3_000)
    chosen = []
    for _ in range(20):
        chosen.append(place(fleet, moved))
        held = (moved.held_tokens or {})[chosen[-1]]
        fleet.placed(chosen[-1], 3_000 - held, 3_000, resumed=True)
    assert 2 <= chosen.count(0) <= 10
    assert set(chosen) == {0, 1, 2, 3, 4}


def test_a_stream_that_goes_on_does_not_wait_for_prompts_that_queue() -> None:
    fleet = idle(2)
    fleet.placed(0, 400)
    for _ in range(4):
        fleet.placed(1, 30, 3_000, resumed=True)
    weights = Weights(entropy=0.0, stay=0.0)
    assert place(fleet, PlacementRequest(3_000, 200), weights) == 1
    assert place(fleet, going_on(fleet, 3_000), weights) == 0


def test_a_hint_prefers_its_domain_while_that_has_room() -> None:
    fleet = idle(2)
    fleet.set_domain(1, 7)
    for _ in range(4):
        fleet.placed(1, 100)
    hinted = PlacementRequest(100, preferred_domains=frozenset({7}))
    assert place(fleet, PlacementRequest(100)) == 0
    assert place(fleet, hinted) == 1
    fleet.hardware(1, HardwareReport(foreign_util=0.96))
    assert place(fleet, hinted) == 0
    assert place(fleet, PlacementRequest(100, preferred_domains=frozenset({9}))) == 0


def test_memory_in_one_piece_is_preferred_when_asked_for() -> None:
    fleet = idle(2)
    for slot in (0, 1):
        fleet.set_capacity(slot, **room_for(16))
    fleet.free_run_tokens[:] = (50, 5_000)
    fleet.placed(1, 100)
    assert place(fleet, PlacementRequest(500)) == 0
    assert place(fleet, PlacementRequest(500, contiguous=True)) == 1


def test_hot_engines_get_work_only_when_all_are_hot() -> None:
    fleet = idle(2)
    fleet.hot[0] = True
    for _ in range(20):
        fleet.placed(1, 100)
    assert place(fleet, PlacementRequest(100)) == 1
    fleet.hot[1] = True
    decision = ZeroLayer().choose(fleet, PlacementRequest(100), NOBODY)
    assert decision is not None
    assert decision.engine == 0
    assert decision.reason == "zerolayer:hot"


def test_a_full_engine_keeps_the_conversation_that_it_holds_and_gets_no_other() -> None:
    fleet = idle(2)
    for slot, streams in enumerate((16, 13)):
        fleet.set_capacity(slot, **room_for(16))
        for _ in range(streams):
            fleet.placed(slot, 100)
            fleet.first_token(slot, 100)
    asked = PlacementRequest(100, 200)
    assert place(fleet, asked) == 1
    assert place(fleet, replace(asked, held_tokens={0: 45})) == 1
    assert place(fleet, replace(asked, held_tokens={0: 90})) == 0


def test_a_stream_that_every_engine_can_load_does_not_go_to_one_without_memory() -> None:
    """As after a fault: its snapshot is held for all."""
    fleet = idle(2)
    for slot in (0, 1):
        fleet.set_capacity(slot, **room_for(16))
    fleet.kv_used_fraction[0] = 0.97
    for _ in range(13):
        fleet.placed(1, 100)
        fleet.first_token(1, 100)
    assert place(fleet, PlacementRequest(100, 200, held_tokens={0: 99, 1: 99})) == 1


def test_only_a_request_that_may_be_refused_is_refused_and_told_when_to_come_again() -> None:
    fleet, policy = idle(2), ZeroLayer()
    refusable = PlacementRequest(100, 50, refusable=True)
    assert policy.choose(fleet, refusable, NOBODY) is not None
    assert policy.retry_after_s(fleet, refusable) is None
    fleet.forecast_util[:] = [[1.5], [2.0]]
    assert policy.choose(fleet, refusable, NOBODY) is None
    wait_s = policy.retry_after_s(fleet, refusable)
    assert wait_s is not None
    assert 2.7 < wait_s < 3.5  # (1.5 - 0.95) of a window of 5 s, and the request's own share
    assert policy.choose(fleet, PlacementRequest(100, 50), NOBODY) is not None


def test_a_choice_among_engines_over_their_limits_says_so() -> None:
    fleet = idle(2)
    fleet.kv_used_fraction[:] = (0.99, 0.97)
    for slot in (0, 1):
        fleet.set_capacity(slot, **room_for(16))
    decision = ZeroLayer().choose(fleet, PlacementRequest(100, 50), NOBODY)
    assert decision is not None
    assert decision.reason == "zerolayer:overload"


@given(engines=FLEETS, request=REQUESTS)
def test_a_place_is_promised_within_bounds_and_only_when_there_is_none_now(
    engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    fleet, policy = build(engines), ZeroLayer()
    wait_s = policy.retry_after_s(fleet, request)
    placed = policy.choose(fleet, request, NOBODY) is not None
    refused = policy.choose(fleet, replace(request, refusable=True), NOBODY) is None
    assert (wait_s is not None) == (placed and refused)
    assert wait_s is None or RETRY_AFTER_S_MIN <= wait_s <= RETRY_AFTER_S_MAX


def test_an_explained_decision_says_what_it_is_made_of() -> None:
    fleet = idle(2)
    plain = ZeroLayer().choose(fleet, PlacementRequest(100), NOBODY)
    explained = ZeroLayer().choose(fleet, PlacementRequest(100, explain=True), NOBODY)
    assert plain is not None
    assert explained is not None
    assert plain.parts is None
    assert explained.parts is not None
    assert explained.parts["computed_tokens"] == 100
    assert explained.engine == plain.engine


def test_load_is_spread_evenly_over_engines_of_unequal_speed() -> None:
    fleet = idle(2)
    for slot, factor in enumerate((1, 2)):
        fleet.set_capacity(slot, requests_max=10 * factor, kv_tokens=100_000 * factor)
        fleet.report(slot, EngineReport(0.0, 0, 0.05, 1e-4, 1e-5))
    for _ in range(18):
        engine = place(fleet, PlacementRequest(10, 400))
        fleet.placed(engine, 10)
        fleet.first_token(engine, 10)
    assert fleet.running_requests.tolist() == [6, 12]


def test_the_registry_names_every_policy_and_what_becomes_of_its_streams() -> None:
    names = (
        "round_robin random least_requests power_of_two vllm_dp smg_least_load dynamo_kv "
        "llmd_scorers weighted_round_robin entropy_source entropy expected_wait zerolayer"
    )
    assert set(POLICIES) == set(names.split())
    assert all(entry.name == name and entry.origin for name, entry in POLICIES.items())
    assert policy_entry("dynamo_kv").continuation is Continuation.REPREFILL
    assert policy_entry("vllm_dp").continuation is Continuation.RETRY
    assert policy_entry("zerolayer").continuation is Continuation.SNAPSHOT
    with pytest.raises(ConfigError, match="round_robin"):
        policy_entry("fastest")
