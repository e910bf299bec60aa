"""The closed form is the definition, computed for every engine at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolayer.core.fleet_state import Bools, FleetState, Floats
from zerolayer.dispatch.entropy import (
    EntropyWeights,
    Limits,
    Squares,
    Variant,
    change,
    entropy_of,
    of_placement,
    within_limits,
)
from zerolayer.dispatch.policies import PlacementRequest
from zerolayer.dispatch.policies.entropy_source import EntropyOnly

NOBODY: frozenset[int] = frozenset()
SHARE = st.floats(0.0, 1.5, allow_subnormal=False)
ROW = st.tuples(SHARE, SHARE, SHARE, SHARE, SHARE, SHARE, st.booleans(), st.integers(0, 2))
WEIGHTS = st.builds(EntropyWeights, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
# The root of a sum that should cancel to nothing is off by the root of a rounding error.
CLOSE = 1e-7


def columns(rows: list[tuple[float, ...]]) -> tuple[Floats, Floats, Floats, Floats, Bools]:
    """(state, added, link, link added, members), as `Entropy.change` takes them."""
    table = np.array([row[:6] for row in rows]).T
    members = np.array([row[6] for row in rows], dtype=np.bool_)
    return table[:2], table[2:4], table[4], table[5], members


def by_hand(
    rows: list[tuple[float, ...]],
    engine: int,
    weights: EntropyWeights,
    members: Bools,
    sizes: Floats | None = None,
) -> float:
    """E of the fleet with the request on `engine`, minus E without it, each from its definition;
    M * Q where engines have sizes."""
    state, added, link, link_added, _ = columns(rows)
    after, link_after = state.copy(), link.copy()
    after[:, engine] += added[:, engine]
    link_after[engine] += link_added[engine]
    results = []
    for (util, mem), links in ((after, link_after), (state, link)):
        shown = util[members], mem[members], links[members]
        if sizes is None:
            results.append(entropy_of(*shown, weights))
        else:
            results.append(squares_of(*shown, sizes[members], weights))
    return results[0] - results[1]


def squares_of(
    util: Floats, mem: Floats, link: Floats, sizes: Floats, weights: EntropyWeights
) -> float:
    """M * Q of a fleet as it stands."""
    covariance = float(np.sum((link - link.mean()) * (util - util.mean())))
    total = 0.0
    for weight, values in ((weights.util, util), (weights.mem, mem)):
        mean = np.average(values, weights=sizes)
        variance = np.average((values - mean) ** 2, weights=sizes)
        total += weight * sizes.sum() * (variance + mean**2)
    return float(total + weights.link * covariance)


@given(rows=st.lists(ROW, min_size=1, max_size=12), weights=WEIGHTS)
def test_the_closed_form_equals_the_definition_for_every_member(
    rows: list[tuple[float, ...]], weights: EntropyWeights
) -> None:
    state, added, link, link_added, members = columns(rows)
    members[0] = True
    closed = change(state, added, (link, link_added), members, weights)
    for engine in np.flatnonzero(members):
        assert abs(closed[engine] - by_hand(rows, engine, weights, members)) < CLOSE


@given(rows=st.lists(ROW, min_size=1, max_size=12))
def test_a_request_without_link_traffic_is_the_same_as_one_of_zero(
    rows: list[tuple[float, ...]],
) -> None:
    state, added, link, link_added, members = columns(rows)
    members[:] = True
    expected = change(state, added, (link, np.zeros_like(link_added)), members)
    assert np.allclose(change(state, added, (link, None), members), expected, atol=1e-12)


@given(rows=st.lists(ROW, min_size=2, max_size=12), weights=WEIGHTS)
def test_each_domain_is_balanced_for_itself_by_either_form(
    rows: list[tuple[float, ...]], weights: EntropyWeights
) -> None:
    fleet = FleetState(len(rows))
    state, added, link, _, accepts = columns(rows)
    fleet.accepts[:], fleet.link_use[:] = accepts, link
    for engine, row in enumerate(rows):
        fleet.set_domain(engine, int(row[7]))
    fleet.set_places(1.0 + 50.0 * np.array([row[5] for row in rows]))
    without_link = [(*row[:5], 0.0, *row[6:]) for row in rows]
    for engine in np.flatnonzero(accepts):
        own = int(fleet.domain[engine])
        members = accepts & (fleet.domain == own)
        expected = by_hand(without_link, engine, weights, members)
        squares = by_hand(without_link, engine, weights, members, fleet.size)
        for domain in (None, own):
            closed = of_placement(fleet, state, added, domain, weights)
            assert abs(closed[engine] - expected) < CLOSE
            closed = Squares(weights).of_placement(fleet, state, added, domain)
            assert closed[engine] == pytest.approx(squares, abs=CLOSE)


@given(utils=st.lists(SHARE, min_size=2, max_size=12), added=st.floats(0.001, 1.0))
def test_what_adds_the_same_everywhere_is_ordered_alike_by_both_forms(
    utils: list[float], added: float
) -> None:
    fleet = FleetState(len(utils))
    fleet.accepts[:] = True
    state = np.array((utils, [0.5] * len(utils)))
    everywhere = np.full_like(state, added)
    squares = Squares().of_placement(fleet, state, everywhere, None)
    deviation = of_placement(fleet, state, everywhere, None)
    by_squares = int(squares.argmin())
    assert deviation[by_squares] <= deviation.min() + CLOSE


@given(rows=st.lists(ROW, min_size=1, max_size=12))
def test_the_deviation_of_equal_engines_is_zero_and_of_one_engine_too(
    rows: list[tuple[float, ...]],
) -> None:
    first = np.array(rows[0][:3])
    util, mem, link = np.repeat(first[:, None], len(rows), axis=1)
    assert abs(entropy_of(util, mem, link)) < 1e-12
    assert entropy_of(util[:0], mem[:0], link[:0]) == 0.0


@given(rows=st.lists(ROW, min_size=1, max_size=12))
def test_limits_leave_exactly_the_engines_that_keep_them(rows: list[tuple[float, ...]]) -> None:
    state, added, _, _, among = columns(rows)
    limits, after = Limits(), state + added
    kept = {
        engine
        for engine in np.flatnonzero(among)
        if after[0, engine] <= limits.util_max and after[1, engine] <= limits.mem_max
    }
    within = within_limits(among, after, limits)
    assert (set() if within is None else set(np.flatnonzero(within).tolist())) == kept


def loaded(streams: list[int]) -> FleetState:
    fleet = FleetState(len(streams))
    for slot, count in enumerate(streams):
        fleet.set_standing(slot, accepts=True)
        fleet.set_capacity(slot, requests_max=20, kv_tokens=100_000)
        for _ in range(count):
            fleet.placed(slot, 10)
            fleet.first_token(slot, 10)
    return fleet


def chosen(variant: Variant, streams: list[int]) -> int:
    decision = EntropyOnly(variant).choose(loaded(streams), PlacementRequest(10, 100), NOBODY)
    assert decision is not None
    return decision.engine


def test_the_new_value_fills_the_valley_where_the_sources_difference_avoids_it() -> None:
    streams = [12, 12, 2, 12]
    assert chosen(Variant.NEW, streams) == 2
    assert chosen(Variant.SOURCE, streams) != 2


def test_the_sources_rule_takes_the_least_full_engine_when_all_are_over_the_limit() -> None:
    assert chosen(Variant.SOURCE, [25, 23, 30]) == 1
