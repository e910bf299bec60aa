"""The pure parts of the replay: what is sent, what is simulated, what is compared."""

from dataclasses import replace

import numpy as np
import pytest

from zerolayer.bench.replay import (
    Latencies,
    Learned,
    ReplayOptions,
    arrivals_of,
    capped,
    differences,
    live_latencies,
    sim_latencies,
    simulate,
    table,
)
from zerolayer.bench.stream_client import ChoiceRecord, StreamRecord
from zerolayer.core.errors import ConfigError
from zerolayer.sim.results import REQUEST_ROW
from zerolayer.sim.traces import Trace

OPTIONS = ReplayOptions("m", runs=1, prompt_tokens_max=600, output_tokens_max=60)
MODEL = (0.05, 0.0015, 0.0005, 0.0, 0.0)


def trace(requests: int, every_s: float) -> Trace:
    return Trace(
        "t", every_s * np.arange(requests, dtype=np.float64), np.full(requests, 2000),
        np.full(requests, 100), None, 0,
    )  # fmt: skip


def learned(error: float = 0.0) -> Learned:
    limits = {"kv_tokens": 40_000, "requests_max": 16, "batch_tokens": 2048}
    return Learned([MODEL], [error], [0.5], limits)


def test_lengths_are_cut_and_arrivals_stay() -> None:
    cut = capped(trace(3, 2.0), OPTIONS)
    assert cut.prompt_tokens.tolist() == [600] * 3
    assert cut.output_tokens.tolist() == [60] * 3
    assert [arrival.at_s for arrival in arrivals_of(cut)] == [0.0, 2.0, 4.0]


def test_requests_that_never_meet_take_what_the_learned_model_says() -> None:
    """A prompt of 600 tokens on an idle engine, then 59 steps of one stream."""
    found = simulate(capped(trace(4, 60.0), OPTIONS), OPTIONS, learned())
    assert found.ttft_ms == pytest.approx(1e3 * (0.05 + 600 * 0.0015), rel=0.01)
    assert len(found.itl_ms) == 4 * 59
    assert found.itl_ms == pytest.approx(50.5, rel=0.01)
    assert found.answer_ms == pytest.approx(found.ttft_ms + 59 * 50.5, rel=0.01)


def test_every_gap_between_tokens_of_a_busy_fleet_is_noted_once() -> None:
    busy = capped(trace(40, 0.5), OPTIONS)
    found = simulate(busy, replace(OPTIONS, runs=2), learned(0.05))
    assert len(found.ttft_ms) == 2 * 40
    assert len(found.itl_ms) == 2 * 40 * 59
    waits = found.answer_ms - found.ttft_ms
    assert found.itl_ms.sum() == pytest.approx(waits.sum(), rel=0.01)


def test_the_engine_to_simulate_is_the_mean_of_what_was_learned() -> None:
    both = learned()
    both.models.append(tuple(3.0 * value for value in MODEL))
    assert both.engine().b == pytest.approx([2.0 * value for value in MODEL])
    assert both.engine().requests_max == 16


def test_live_and_simulated_figures_have_the_same_units() -> None:
    ms = 1_000_000
    choice = ChoiceRecord([1, 2, 3], [250 * ms, 300 * ms, 360 * ms], "", "length")
    record = StreamRecord(sent_ns=50 * ms, http_status=200, choices={0: choice}, done=True)
    live = live_latencies([record])
    row = np.zeros(1, dtype=REQUEST_ROW)
    row["ttft_s"], row["e2e_s"] = 0.2, 0.31
    simulated = sim_latencies(row, [(1, 0.05), (1, 0.06)])
    for name in ("ttft_ms", "itl_ms", "answer_ms"):
        assert getattr(live, name) == pytest.approx(getattr(simulated, name))


def test_differences_are_relative_to_the_live_fleet() -> None:
    live = Latencies(*(np.full(10, 100.0),) * 3)
    simulated = Latencies(*(np.full(10, 125.0),) * 3)
    rows = differences(live, simulated)
    assert len(rows) == 9
    assert {row["difference"] for row in rows} == {0.25}
    assert "+25%" in table(rows)[1]


@pytest.mark.parametrize("wrong", [{"utilisation": 0.0}, {"runs": 0}, {"prompt_tokens_max": 5000}])
def test_what_cannot_be_replayed_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ReplayOptions("m", **wrong).check()  # type: ignore[arg-type]
