"""Skewed load, and utilisation from what a fleet counts."""

import itertools

import pytest

from zerolayer.bench.evenness import (
    LONG_PROMPT,
    SHORT_PROMPT,
    WARM_UP_S,
    Counts,
    EvennessOptions,
    Round,
    compared,
    counts_of,
    skewed_load,
    utilisation,
)
from zerolayer.core.errors import ConfigError

OPTIONS = EvennessOptions("m", seconds=300.0)


def counts(at_s: float, placed: float, decoding: tuple[int, int] = (0, 0)) -> Counts:
    """Two engines with 16 places, of which the first gets all prompts."""
    return Counts(at_s, (int(placed), 0), (0, 0), decoding, (16.0, 16.0))


def test_the_same_seed_gives_the_same_load() -> None:
    assert skewed_load(OPTIONS) == skewed_load(OPTIONS)
    assert skewed_load(OPTIONS) != skewed_load(EvennessOptions("m", seconds=300.0, seed=1))


def test_few_requests_are_long_and_they_come_at_the_rate_that_was_asked_for() -> None:
    load = skewed_load(OPTIONS)
    long = sum(arrival.prompt_tokens >= LONG_PROMPT[0] for arrival in load)
    short = sum(arrival.prompt_tokens <= SHORT_PROMPT[1] for arrival in load)
    assert long + short == len(load)
    assert long / len(load) == pytest.approx(OPTIONS.long_share, abs=0.05)
    assert len(load) / (300.0 + WARM_UP_S) == pytest.approx(OPTIONS.rate, rel=0.15)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(load))


@pytest.mark.parametrize(
    "wrong", [{"rounds": 3}, {"engines": 1}, {"rate": 0.0}, {"long_share": 1.5}]
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        EvennessOptions("m", **wrong).check()  # type: ignore[arg-type]


def test_prefill_in_demand_and_decoding_streams_add_up() -> None:
    seen = [counts(0.1 * n, 10.0 * n, decoding=(4, 8)) for n in range(21)]
    util = utilisation(seen, prefill_s_per_token=0.001)
    assert util.shape == (2, 2)
    assert util[:, 0] == pytest.approx(100 * 0.001 + 4 / 16)
    assert util[:, 1] == pytest.approx(8 / 16)


def test_what_waits_at_a_windows_begin_is_in_demand_in_it() -> None:
    waiting = [Counts(0.5 * n, (500, 0), (500, 0), (0, 0), (16.0, 16.0)) for n in range(3)]
    assert utilisation(waiting, 0.001)[0].tolist() == pytest.approx([0.5, 0.0])


def test_the_ratio_is_of_both_sides_mean_spread() -> None:
    def seen(policy: str, decoding: tuple[int, int]) -> Round:
        looks = [counts(WARM_UP_S + 0.2 * n, 0, decoding) for n in range(30)]
        return Round(policy, looks, [0.001, 0.001])

    found = compared(
        [seen("zerolayer", (7, 9)), seen("vllm_dp", (4, 12)), seen("vllm_dp", (4, 12)),
         seen("zerolayer", (7, 9))], OPTIONS,
    )  # fmt: skip
    assert found["sides"]["zerolayer"]["utilisation_std"] == pytest.approx(1 / 16, abs=1e-4)
    assert found["sides"]["vllm_dp"]["utilisation_std"] == pytest.approx(4 / 16, abs=1e-4)
    assert found["utilisation_std_ratio"] == pytest.approx(0.25)


def test_counts_come_from_what_every_policy_reports() -> None:
    demand = {"placed_tokens": 5, "waiting_tokens": 3, "decoding": 2, "places": 16.0}
    assert counts_of(1.0, {"engines": [{"demand": demand}]}) == Counts(
        1.0, (5,), (3,), (2,), (16.0,)
    )
