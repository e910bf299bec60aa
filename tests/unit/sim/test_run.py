import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.unit.sim.small import small_trace, spec
from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.policies.registry import POLICIES
from zerolayer.sim.faults import Fault, FaultKind, FleetShape, plan_faults
from zerolayer.sim.offloading import Offloading
from zerolayer.sim.profiles import profile_of
from zerolayer.sim.results import Ending, RunResult
from zerolayer.sim.run import RunSpec, fleet_of, run, run_fleet

CONTINUATIONS = ("snapshot", "reprefill", "retry")


CALM = plan_faults("none", FleetShape(4, 1, (5.0, 10.0)), 1, 1.0)
BLOWS = (
    Fault(5.0, FaultKind.FREEZE, 1, 3.0),
    Fault(10.0, FaultKind.CRASH, 0, 6.0),
    Fault(12.0, FaultKind.SPELL, 3, 20.0, factor=2.0),
    Fault(14.0, FaultKind.FREEZE, 2, 0.05),
    Fault(20.0, FaultKind.HANG, 2, 5.0, found_s=40.0),
    Fault(25.0, FaultKind.FREEZE, 1, 4.0),
    Fault(26.0, FaultKind.CRASH, 1, 6.0, slow_start=1.3),
    Fault(40.0, FaultKind.OUTAGE, 0, 8.0, host_lost=True),
    Fault(40.0, FaultKind.OUTAGE, 1, 8.0, host_lost=True),
    Fault(40.0, FaultKind.OUTAGE, 3, 8.0, host_lost=True),
)
"""Every kind of fault, on four busy engines; at 40 s nearly all of them are gone."""


@cache
def struck(policy: str = "least_requests", continuation: str = "snapshot") -> RunResult:
    """A run of ten faults in a minute."""
    asked = replace(spec(policy, continuation, requests=600), requests_per_s=9.0)
    return run_fleet(fleet_of(asked, replace(CALM, faults=BLOWS)), asked.key)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_ends_every_request_once_and_without_faults_breaks_none(policy: str) -> None:
    asked = spec(policy, POLICIES[policy].continuation.value, families=3)
    result = run(replace(asked, offload=False))
    assert (result.requests["ending"] == Ending.FINISHED).all()
    assert (result.requests["moves"] == 0).all()
    assert len(result.faults) == 0


@pytest.mark.parametrize("continuation", CONTINUATIONS)
def test_under_faults_every_request_still_ends_once(continuation: str) -> None:
    result = struck(continuation=continuation)
    rows = result.requests
    assert len(result.faults) == len(BLOWS)
    assert (rows["ending"] != Ending.LOST).all()
    assert np.isfinite(rows["e2e_s"]).all()
    if continuation == "retry":
        assert (rows["ending"] == Ending.BROKEN).any()
        assert (rows["moves"] == 0).all()
    else:
        assert not (rows["ending"] == Ending.BROKEN).any()
        assert rows["moves"].sum() >= len(result.moves) > 0


@pytest.mark.parametrize("continuation", CONTINUATIONS)
def test_the_first_token_is_not_after_the_last_and_no_gap_is_longer_than_all(
    continuation: str,
) -> None:
    rows = struck(continuation=continuation).requests
    rows = rows[rows["ending"] != Ending.LOST]
    assert (rows["e2e_s"] >= rows["ttft_s"]).all()
    assert (rows["ttft_s"] > 0).all()
    assert (rows["worst_gap_s"] <= rows["e2e_s"] - rows["ttft_s"] + 1e-9).all()


def test_the_same_spec_gives_the_same_event_log_and_another_seed_another() -> None:
    asked = spec(faults="stress", policy="random")
    first, again = run(asked), run(asked)
    assert first.log_digest == again.log_digest
    assert np.array_equal(first.requests, again.requests)
    assert run(spec(faults="stress", policy="random", seed=2)).log_digest != first.log_digest


def test_a_spec_gives_the_same_after_a_way_through_a_pickle() -> None:
    asked: RunSpec = pickle.loads(pickle.dumps(spec()))
    assert run(asked).log_digest == run(spec()).log_digest


def test_all_policies_and_continuations_meet_the_same_faults() -> None:
    runs = [
        run(replace(spec(policy, continuation, "stress", requests=400), requests_per_s=1.0))
        for policy, continuation in (
            ("least_requests", "snapshot"), ("round_robin", "retry"), ("vllm_dp", "retry"),
            ("dynamo_kv", "reprefill"),
        )
    ]  # fmt: skip
    shortest = min(len(result.faults) for result in runs)
    assert shortest > 3
    for result in runs[1:]:
        assert np.array_equal(result.faults[:shortest], runs[0].faults[:shortest])


def test_no_decision_depends_on_the_length_of_an_answer_before_it_has_come() -> None:
    """From a row on, answers are much longer: nothing differs before that row's answer began."""
    changed = 70
    trace = small_trace(100)
    outputs = trace.output_tokens.copy()
    outputs[changed:] = outputs[changed:] * 4 + 500
    longer = replace(trace, output_tokens=outputs)
    for policy in POLICIES:
        asked = replace(spec(policy, requests=100), requests_per_s=2.0)
        rows = run(asked).requests
        others = run(replace(asked, trace=longer)).requests
        assert others["ttft_s"][changed] == rows["ttft_s"][changed], policy
        before = rows["arrival_s"] + rows["e2e_s"] < rows["arrival_s"][changed]
        assert np.array_equal(rows["e2e_s"][before], others["e2e_s"][before]), policy


def test_a_stream_that_goes_on_from_its_pages_computes_less_than_one_that_starts_again() -> None:
    snapshot, prefill = struck(continuation="snapshot"), struck(continuation="reprefill")
    assert snapshot.counts["restored_tokens"] > 0
    assert prefill.counts["restored_tokens"] == 0
    assert snapshot.counts["prefill_tokens"] < prefill.counts["prefill_tokens"]


def test_one_death_takes_the_whole_server_where_engines_share_their_fate() -> None:
    broken = []
    for policy in ("least_requests", "vllm_dp"):
        asked = replace(spec(policy, "retry", requests=200), requests_per_s=9.0)
        fleet = fleet_of(asked, replace(CALM, faults=(Fault(10.0, FaultKind.CRASH, 0, 6.0),)))
        broken.append(run_fleet(fleet, asked.key).requests["ending"] == Ending.BROKEN)
    assert broken[0].sum() < 0.5 * broken[1].sum()


def test_an_engine_that_hangs_while_it_is_to_prove_itself_is_ended_and_comes_back() -> None:
    asked = replace(spec(requests=600), requests_per_s=9.0)
    blows = (
        Fault(5.0, FaultKind.FREEZE, 1, 3.0),
        Fault(8.1, FaultKind.HANG, 1, 5.0, found_s=1e6),
    )
    fleet = fleet_of(asked, replace(CALM, faults=blows))
    run_fleet(fleet, asked.key)
    assert fleet.driver.lives[1].incarnation == 2
    assert fleet.driver.fleet.accepts[1]


def test_progress_grows_to_the_end() -> None:
    shares: list[float] = []
    run(spec(requests=2000), shares.append)
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] <= shares[-1] <= 1.0


def test_a_request_that_fits_into_no_engine_is_refused_before_the_run() -> None:
    asked = spec()
    prompts = asked.trace.prompt_tokens.copy()
    prompts[3] = profile_of(asked.kind).kv_tokens
    with pytest.raises(ConfigError, match="leave out"):
        run(replace(asked, trace=replace(asked.trace, prompt_tokens=prompts)))


def test_more_load_means_more_utilisation_and_longer_answers() -> None:
    asked = spec()
    low, high = (
        run(replace(asked, key=replace(asked.key, utilisation=share))) for share in (0.3, 0.9)
    )
    assert np.nanmean(low.util) < np.nanmean(high.util)
    assert np.median(low.requests["e2e_s"]) < np.median(high.requests["e2e_s"])


def test_streams_leave_a_slow_engine_before_it_fails_and_none_breaks() -> None:
    asked = replace(spec("zerolayer", requests=400), requests_per_s=9.0)
    slow = Fault(5.0, FaultKind.SPELL, 1, 60.0, factor=4.0)
    worst = {}
    for offload in (False, True):
        fleet = fleet_of(asked, replace(CALM, faults=(slow,)))
        if offload:
            Offloading(fleet)
        result = run_fleet(fleet, asked.key)
        assert (result.requests["ending"] == Ending.FINISHED).all()
        assert bool(len(result.moves)) == offload
        assert all(reason.startswith("offload") for reason in result.moves["reason"])
        worst[offload] = result.requests["e2e_s"].max()
    assert worst[True] < worst[False]
