"""What counts in a closed-loop run, and how runs become ratios."""

import pytest

from zerolayer.bench.overhead import (
    FIGURES,
    PLAIN,
    SERVERS,
    WITH,
    CpuSpent,
    Window,
    combine,
    figures_of,
)
from zerolayer.bench.stream_client import ChoiceRecord, StreamRecord
from zerolayer.core.errors import EngineError

S = 1_000_000_000
WINDOW = Window(10 * S, 20 * S)


def stream(sent_s: float, arrivals_s: list[float]) -> StreamRecord:
    arrivals = [int(at * S) for at in arrivals_s]
    choice = ChoiceRecord([1] * len(arrivals), arrivals, "", "length")
    return StreamRecord(sent_ns=int(sent_s * S), http_status=200, choices={0: choice}, done=True)


def test_only_what_arrives_inside_the_window_counts() -> None:
    records = [stream(9, [9.5, 10.0, 10.5]), stream(19, [19.5, 20.0])]
    found = figures_of(records, WINDOW, CpuSpent(3.0, 5.0))
    assert found["tokens_per_s"] == 0.3
    assert found["ttft_ms_p50"] == 500.0
    assert found["itl_ms_p99"] == 500.0
    assert found["foreign_cores"] == 0.5
    assert found["cpu_s_per_1000_tokens"] == 1000.0


def test_a_broken_stream_makes_the_run_worthless() -> None:
    broken = stream(11, [12])
    broken.done = False
    with pytest.raises(EngineError, match="1 of 1 streams broke"):
        figures_of([broken], WINDOW, CpuSpent(1.0, 0.0))


def test_no_token_makes_the_run_worthless() -> None:
    with pytest.raises(EngineError, match="no token"):
        figures_of([stream(1, [2])], WINDOW, CpuSpent(1.0, 0.0))


def test_ratios_are_taken_inside_each_round() -> None:
    """A slow minute that hits a whole round does not move a ratio."""

    def figures(value: float) -> dict[str, float]:
        return dict.fromkeys((*FIGURES, "foreign_cores"), value)

    rounds = [
        {name: figures(speed * (0.5 if name == WITH else 1.0)) for name in SERVERS}
        for speed in (100.0, 10.0, 40.0)
    ]
    found = combine(rounds)
    assert found["ratio_to_plain_vllm"][WITH]["tokens_per_s"] == 0.5
    assert found["servers"][PLAIN]["tokens_per_s"] == 40.0
    assert found["tokens_per_s_by_round"][WITH] == [50.0, 5.0, 20.0]
