"""Laws that hold for every fleet, and the few choices that a person would name."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.fleet_state import EngineReport, FleetState
from zerolayer.dispatch.policies import (
    TIE_SECONDS_MAX,
    ExpectedWait,
    PlacementRequest,
    Policy,
    expected_wait_s,
)
from zerolayer.dispatch.policies.base import Preference
from zerolayer.dispatch.policies.registry import POLICIES, PolicyEntry

NOBODY: frozenset[int] = frozenset()
EVERY = [pytest.param(entry, id=name) for name, entry in POLICIES.items()]
UNEVEN = {"random", "power_of_two", "dynamo_kv", "llmd_scorers", "entropy_source"}
"""By chance, or (the source) because the least change of evenness is not evenness."""

ENGINE = st.fixed_dictionaries(
    {
        "accepts": st.booleans(),
        "suspect": st.booleans(),
        "domain": st.integers(0, 2),
        "streams": st.integers(0, 40),
        "prompt": st.integers(1, 4_000),
        "kv": st.floats(0.0, 1.0),
        "step_s": st.floats(0.001, 1.0),
        "hot": st.booleans(),
        "link": st.floats(0.0, 1.0),
        "util": st.floats(0.0, 2.0),
    }
)
FLEETS = st.lists(ENGINE, min_size=1, max_size=9)
REQUESTS = st.builds(
    PlacementRequest,
    prompt_tokens=st.integers(0, 10_000),
    expected_output_tokens=st.integers(0, 1_000),
    domain=st.none() | st.integers(0, 2),
    held_tokens=st.none() | st.dictionaries(st.integers(0, 8), st.integers(0, 10_000)),
    preference=st.sampled_from(Preference),
    preferred_domains=st.frozensets(st.integers(0, 2), max_size=2),
    contiguous=st.booleans(),
    explain=st.booleans(),
)
EXCLUDED = st.frozensets(st.integers(0, 8))


def build(engines: list[dict[str, float]]) -> FleetState:
    fleet = FleetState(len(engines))
    for slot, engine in enumerate(engines):
        fleet.set_standing(slot, accepts=bool(engine["accepts"]), suspect=bool(engine["suspect"]))
        fleet.set_domain(slot, int(engine["domain"]))
        fleet.set_capacity(slot, requests_max=16, kv_tokens=50_000)
        fleet.report(slot, EngineReport(engine["kv"], 0, engine["step_s"], 1e-3, 1e-3))
        for _ in range(int(engine["streams"])):
            fleet.placed(slot, int(engine["prompt"]))
        fleet.hot[slot] = bool(engine["hot"])
        fleet.link_use[slot] = engine["link"]
        fleet.forecast_util[slot] = engine["util"]
    return fleet


def fresh(entry: PolicyEntry) -> Policy:
    return entry.make(random.Random(7))


def idle(engines: int) -> FleetState:
    fleet = FleetState(engines)
    for slot in range(engines):
        fleet.set_standing(slot, accepts=True)
    return fleet


@pytest.mark.parametrize("entry", EVERY)
@given(engines=FLEETS, request=REQUESTS, exclude=EXCLUDED)
def test_a_chosen_engine_accepts_is_not_excluded_and_is_in_the_domain(
    entry: PolicyEntry,
    engines: list[dict[str, float]],
    request: PlacementRequest,
    exclude: frozenset[int],
) -> None:
    fleet = build(engines)
    decision = fresh(entry).choose(fleet, request, exclude)
    able = {
        slot
        for slot in range(fleet.engines)
        if fleet.accepts[slot]
        and slot not in exclude
        and request.domain in (None, fleet.domain[slot])
    }
    assert (decision is None) == (not able)
    if decision is not None:
        healthy = {slot for slot in able if not fleet.suspect[slot]}
        assert decision.engine in (healthy or able)
        assert (":suspect" in decision.reason) == (not healthy)
        assert decision.reason.split(":")[0] == entry.name
        assert decision.runner_up is None or decision.runner_up in able - {decision.engine}


@pytest.mark.parametrize("entry", EVERY)
@given(engines=FLEETS, requests=st.lists(REQUESTS, max_size=8))
def test_the_same_questions_get_the_same_answers(
    entry: PolicyEntry, engines: list[dict[str, float]], requests: list[PlacementRequest]
) -> None:
    first, second = fresh(entry), fresh(entry)
    fleet = build(engines)
    answers = [first.choose(fleet, request, NOBODY) for request in requests]
    assert answers == [second.choose(fleet, request, NOBODY) for request in requests]


@pytest.mark.parametrize("entry", EVERY)
@given(engines=FLEETS, request=REQUESTS)
def test_choosing_changes_nothing_in_the_fleet(
    entry: PolicyEntry, engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    fleet, untouched = build(engines), build(engines)
    fresh(entry).choose(fleet, request, frozenset({0}))
    for name, value in vars(untouched).items():
        assert np.array_equal(getattr(fleet, name), value), name


@given(engines=FLEETS, added=ENGINE, request=REQUESTS)
def test_one_more_healthy_engine_never_makes_the_predicted_wait_worse(
    engines: list[dict[str, float]], added: dict[str, float], request: PlacementRequest
) -> None:
    healthy = [{**engine, "accepts": True, "suspect": False, "domain": 0} for engine in engines]
    more = [*healthy, {**added, "accepts": True, "suspect": False, "domain": 0}]
    request = PlacementRequest(request.prompt_tokens, request.expected_output_tokens)
    before = expected_wait_s(build(healthy), request)
    after = expected_wait_s(build(more), request)
    assert after.min() <= before.min()
    assert np.array_equal(after[:-1], before)


@given(engines=FLEETS, request=REQUESTS)
def test_the_chosen_wait_is_the_shortest_one_or_within_the_error_of_it(
    engines: list[dict[str, float]], request: PlacementRequest
) -> None:
    fleet = build([{**engine, "accepts": True, "suspect": False} for engine in engines])
    decision = ExpectedWait().choose(fleet, PlacementRequest(request.prompt_tokens), NOBODY)
    assert decision is not None
    best = expected_wait_s(fleet, PlacementRequest(request.prompt_tokens)).min()
    assert best <= decision.score <= best + min(0.1 * best, TIE_SECONDS_MAX) + 1e-12


@given(engines=FLEETS, request=REQUESTS, more=st.integers(1, 5_000))
def test_waits_are_finite_positive_and_grow_with_the_prompt_and_the_queue(
    engines: list[dict[str, float]], request: PlacementRequest, more: int
) -> None:
    fleet = build(engines)
    waits = expected_wait_s(fleet, PlacementRequest(request.prompt_tokens))
    assert np.isfinite(waits).all()
    assert (waits > 0).all()
    longer = expected_wait_s(fleet, PlacementRequest(request.prompt_tokens + more))
    assert (longer >= waits).all()
    fleet.placed(0, more)
    assert expected_wait_s(fleet, PlacementRequest(request.prompt_tokens))[0] > waits[0]


@pytest.mark.parametrize("entry", [each for each in EVERY if each.id not in UNEVEN])
@given(engines=st.integers(1, 12), rounds=st.integers(1, 4))
def test_equal_engines_get_equal_shares(entry: PolicyEntry, engines: int, rounds: int) -> None:
    fleet, chooser = idle(engines), fresh(entry)
    for _ in range(engines * rounds):
        decision = chooser.choose(fleet, PlacementRequest(100), NOBODY)
        assert decision is not None
        fleet.placed(decision.engine, 100)
    assert set(fleet.running_requests) == {rounds}


def test_ties_go_round_even_when_each_stream_ends_at_once() -> None:
    fleet, policy = idle(4), ExpectedWait()
    chosen = []
    for _ in range(8):
        decision = policy.choose(fleet, PlacementRequest(10), NOBODY)
        assert decision is not None
        chosen.append(decision.engine)
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_long_prompt_in_the_queue_sends_the_next_stream_elsewhere() -> None:
    fleet, policy = idle(2), ExpectedWait()
    fleet.placed(0, 2_000)
    for _ in range(3):
        fleet.placed(1, 50)
        fleet.first_token(1, 50)
    decision = policy.choose(fleet, PlacementRequest(50), NOBODY)
    assert decision is not None
    assert decision.engine == 1


def test_an_engine_that_holds_the_context_already_is_worth_a_fuller_batch() -> None:
    fleet = idle(2)
    for _ in range(5):
        fleet.placed(1, 1)
    request = PlacementRequest(2_000, held_tokens={1: 1_999})
    decision = ExpectedWait().choose(fleet, request, NOBODY)
    assert decision is not None
    assert decision.engine == 1


@pytest.mark.parametrize("trouble", ["full batch", "full cache"])
def test_an_engine_without_room_is_avoided(trouble: str) -> None:
    fleet = idle(2)
    for slot in (0, 1):
        fleet.set_capacity(slot, requests_max=4, kv_tokens=10_000)
    for _ in range(4):
        fleet.placed(1, 50)
        fleet.first_token(1, 50)
    if trouble == "full batch":
        for _ in range(4):
            fleet.placed(0, 1)
            fleet.first_token(0, 1)
        fleet.set_capacity(0, requests_max=16, kv_tokens=10_000)
        expected = 0
    else:
        fleet.set_capacity(1, requests_max=16, kv_tokens=10_000)
        fleet.grew(0, 9_800)
        fleet.report(0, EngineReport(0.98, 0, 0.05, 1.5e-3, 5e-4))
        expected = 1
    decision = ExpectedWait().choose(fleet, PlacementRequest(100, 200), NOBODY)
    assert decision is not None
    assert decision.engine == expected
