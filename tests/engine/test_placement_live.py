"""What a client asks of placement and what can be seen of it, on real engines."""

from typing import Any

import httpx
import pytest

from tests.asking import ANSWER_TIMEOUT_S, CHAT, COMPLETIONS, Ask
from zerolayer.bench.fleet_process import FleetProcess

SAY: dict[str, Any] = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}
TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "temperature": 0,
}  # fmt: skip


def post(fleet: FleetProcess, ask: Ask, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(
        fleet.base_url + ask.path, json=ask.sent(), headers=named, timeout=ANSWER_TIMEOUT_S
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, SAY), (CHAT, TALK)])
def test_an_answer_says_on_request_which_engine_it_came_from_and_why(
    fleet: FleetProcess, path: str, body: dict[str, Any], stream: bool
) -> None:
    ask = Ask(path, body, stream=stream)
    told = post(fleet, ask, x_zerolayer_explain="1")
    assert told.status_code == 200, told.text
    line = told.headers["x-zerolayer-decision"]
    assert line.startswith(("engine=e0; score=", "engine=e1; score=")), line
    assert "reason=zerolayer" in line
    assert "x-zerolayer-decision" not in post(fleet, ask).headers


@pytest.mark.parametrize("wanted", ["low-latency", "high-throughput", "cost-optimal"])
def test_every_preference_is_taken(fleet: FleetProcess, wanted: str) -> None:
    answer = post(fleet, Ask(COMPLETIONS, SAY, stream=False), x_zero_layer_preference=wanted)
    assert answer.status_code == 200, answer.text


def test_a_preference_that_there_is_not_is_answered_with_400_and_those_that_there_are(
    fleet: FleetProcess,
) -> None:
    answer = post(fleet, Ask(COMPLETIONS, SAY), x_zero_layer_preference="fastest")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "X-Zero-Layer-Preference"
    assert "cost-optimal" in error["message"]


def test_the_memory_picture_and_the_forecast_are_there_after_an_answer(fleet: FleetProcess) -> None:
    post(fleet, Ask(COMPLETIONS, {**SAY, "max_tokens": 64}))
    status = fleet.status()
    for engine in status["engines"]:
        assert engine["free_run_tokens"] > 0
        assert 0.0 <= engine["fragmentation"] < 1.0
        assert len(engine["forecast_util"]) == 5
    assert sum(engine["step_error"]["steps"] for engine in status["engines"]) > 0
    assert sum(engine["tokens_per_s"] for engine in status["engines"]) > 0.0
    assert status["placement"]["policy"] == "zerolayer"
