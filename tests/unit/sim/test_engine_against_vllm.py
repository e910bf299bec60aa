"""The engine model against 300 requests that real vLLM 0.19 served (`data/profiles`, KAIST)."""

import csv
import gzip
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from tests.unit.sim.small import Bench
from zerolayer.core.fleet_state import Floats
from zerolayer.sim.profiles import ENGINE_FACTOR, EngineKind, profile_of
from zerolayer.sim.sequence import Seq, SimRequest

GPU = "rtx-pro-6000-96gb"
PLACES = 128
HERE_FACTOR = 1.07
"""What the composed kernel times have to be multiplied by on this GPU; ENGINE_FACTOR is a round
number for all of them."""
QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.99)


def measured(model: str) -> list[dict[str, str]]:
    entry = resources.files("zerolayer.sim") / "data" / "profiles" / "vllm_request_latency.csv.gz"
    with resources.as_file(entry) as path, gzip.open(path, "rt", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["gpu"] == GPU]
    return sorted((r for r in rows if r["model"] == model), key=lambda r: float(r["arrival_s"]))


def simulated(rows: list[dict[str, str]], kind: EngineKind, slow: float) -> tuple[Floats, Floats]:
    """TTFT and end-to-end seconds of the same requests."""
    bench = Bench(replace(profile_of(kind), requests_max=PLACES))
    bench.engine.set_speed(0.0, slow, slow)
    for number, row in enumerate(rows):
        bench.run(until=float(row["arrival_s"]))
        request = SimRequest(number, int(row["prompt_tokens"]), int(row["output_tokens"]), ())
        bench.engine.submit(Seq(request, str(number), 0, 0), bench.now)
    bench.run()
    first, last = np.full(len(rows), np.nan), np.zeros(len(rows))
    for output in bench.outputs:
        place = output.request.row
        first[place] = np.fmin(first[place], output.at_s)
        last[place] = output.at_s
    arrived = column(rows, "arrival_s")
    return first - arrived, last - arrived


def column(rows: list[dict[str, str]], name: str) -> Floats:
    return np.array([float(row[name]) for row in rows])


@pytest.mark.parametrize(("model", "tensor_parallel"), [("llama-3.1-8b", 1), ("qwen3-32b", 2)])
def test_latencies_of_an_overloaded_engine_are_those_of_vllm(
    model: str, tensor_parallel: int
) -> None:
    rows, kind = measured(model), EngineKind(GPU, model, tensor_parallel)
    assert len(rows) == 300
    for slow, within in ((1.0, 0.16), (HERE_FACTOR / ENGINE_FACTOR, 0.05)):
        _, e2e_s = simulated(rows, kind, slow)
        ours, real = (np.quantile(s, QUANTILES) for s in (e2e_s, column(rows, "e2e_s")))
        assert ours == pytest.approx(real, rel=within)


def test_the_queue_before_an_overloaded_engine_is_that_of_vllm() -> None:
    rows = measured("llama-3.1-8b")
    ttft_s, _ = simulated(rows, EngineKind(GPU), HERE_FACTOR / ENGINE_FACTOR)
    ours, real = (np.quantile(s, QUANTILES[1:]) for s in (ttft_s, column(rows, "ttft_s")))
    assert ours == pytest.approx(real, rel=0.1)
