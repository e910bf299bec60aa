"""Streams move because the operator says so: drain, roll, scale. None of them may notice."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.asking import COMPLETIONS, Answer, Ask, Fault, ask
from tests.same_answers import assert_same
from tests.waiting import until
from zerolayer.bench import chaos_signals
from zerolayer.bench.compare import compare
from zerolayer.bench.fleet_process import FleetProcess
from zerolayer.bench.orders import carry_out
from zerolayer.core.errors import EngineError

TOKENS = 48
MID = 12
STREAMS = 8
STORY = Ask(
    COMPLETIONS,
    {
        "prompt": "The lighthouse keeper wrote into his log that", "max_tokens": TOKENS,
        "temperature": 0.8, "seed": 77, "ignore_eos": True,
    },
)  # fmt: skip


def order(fleet: FleetProcess, kind: str, **fields: Any) -> dict[str, Any]:
    return carry_out(fleet.base_url, kind, fields)


class OrderUnder(Fault):
    """Gives an order about the engine that has the stream, once `after_tokens` have come."""

    def __init__(self, fleet: FleetProcess, kind: str, **fields: Any) -> None:
        super().__init__(fleet, signal.SIGCONT, MID)
        self.kind, self.fields = kind, fields
        self.result: dict[str, Any] = {}
        self._job: threading.Thread | None = None

    def strike(self) -> None:
        if self.victim is not None and not self.struck:
            self.struck = True
            self._job = threading.Thread(target=self._give, args=(self.victim["id"],))
            self._job.start()

    def _give(self, engine: str) -> None:
        self.result = order(self.fleet, self.kind, engine=engine, **self.fields)

    def end(self) -> None:
        super().end()
        if self._job is not None:
            self._job.join()


def test_a_drained_engine_gives_its_stream_away_and_gets_none_until_it_is_undrained(
    fleet: FleetProcess,
) -> None:
    reference = ask(fleet, STORY)
    got = ask(fleet, STORY, drain := OrderUnder(fleet, "drain"))
    assert_same(got, reference)
    assert drain.victim is not None
    name = drain.victim["id"]
    try:
        assert (drain.result["moved"], drain.result["stayed"]) == (1, 0)
        assert [(m["from"], m["on_purpose"], m["reason"]) for m in got.moves] == [
            (name, True, "drain")
        ]
        assert got.moves[0]["restored_tokens"] > 0
        for _ in range(3):
            ask(fleet, STORY.but(max_tokens=2))
            row = chaos_signals.engine_row(fleet.status(), name)
            assert (row["state"], row["streams"]) == ("draining", 0)
        other = {"e0": "e1", "e1": "e0"}[name]
        with pytest.raises(EngineError, match="no other engine"):
            order(fleet, "drain", engine=other)
    finally:
        order(fleet, "undrain", engine=name)
    assert chaos_signals.engine_row(fleet.status(), name)["state"] == "ready"


def test_a_roll_with_new_arguments_under_concurrent_streams_breaks_loses_and_repeats_nothing(
    fleet: FleetProcess,
) -> None:
    before = fleet.status()
    asks = [STORY.but(prompt=f"Story {n}: the sea", seed=n) for n in range(STREAMS)]
    references = [answer.token_ids for answer in side_by_side(fleet, asks)]
    over = threading.Event()

    def stream_on(number: int) -> list[Answer]:
        answers = []
        while not over.is_set():
            answers.append(ask(fleet, asks[number]))
        return answers

    with ThreadPoolExecutor(STREAMS) as pool:
        jobs = [pool.submit(stream_on, number) for number in range(STREAMS)]
        try:
            until(lambda: fleet.status()["streams"]["active"] == STREAMS, seconds=30.0)
            result = order(fleet, "roll", vllm_args=["--max-num-seqs", "17"])
        finally:
            over.set()
        answers = [job.result() for job in jobs]
    assert list(result["seconds_per_engine"]) == ["e0", "e1"]
    assert result["changed"] == ["max_num_seqs"]
    assert result["moved"] > 0
    for reference, own in zip(references, answers, strict=True):
        for answer in own:
            assert not answer.errors
            assert answer.done
            found = compare(reference, answer.token_ids)
            assert (found.lost, found.repeated) == (0, 0)
            assert len(answer.token_ids) == TOKENS
    after = fleet.status()
    for old, new in zip(before["engines"], after["engines"], strict=True):
        assert new["incarnation"] == old["incarnation"] + 1
        assert new["last_fault"] == old["last_fault"]
    assert after["vllm_args"][-2:] == ["--max-num-seqs", "17"]
    assert after["totals"]["outcomes"].keys() == before["totals"]["outcomes"].keys()


def side_by_side(fleet: FleetProcess, asks: list[Ask]) -> list[Answer]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda each: ask(fleet, each), asks))


def test_a_roll_with_arguments_that_cannot_be_is_refused_and_changes_nothing(
    fleet: FleetProcess,
) -> None:
    before = fleet.status()
    for words, said in (
        (["--no-such-word"], "no-such-word"),
        (["--max-num-seqs", "many"], "max-num-seqs"),
        (["--max-model-len", "512"], "the server itself reads this one"),
    ):
        with pytest.raises(EngineError, match=said):
            order(fleet, "roll", vllm_args=words)
    after = fleet.status()
    assert [row["incarnation"] for row in after["engines"]] == [
        row["incarnation"] for row in before["engines"]
    ]
    assert after["vllm_args"] == before["vllm_args"]


def test_a_fleet_grows_by_an_engine_and_shrinks_again_under_a_stream(fleet: FleetProcess) -> None:
    reference = ask(fleet, STORY)
    try:
        grown = order(fleet, "scale", engines=3)
        assert (grown["engines_before"], grown["engines"]) == (2, 3)
        assert fleet.get("/health").json()["engines_total"] == 3
        for name in ("e0", "e1"):  # so that the stream can only be on the new one
            order(fleet, "drain", engine=name)
        try:
            on_new = ask(fleet, STORY, shrink := Shrink(fleet))
        finally:
            shrink.end()
        assert_same(on_new, reference)
        assert [(m["from"], m["reason"]) for m in on_new.moves] == [("e2", "scale")]
        assert 'engine="2"' in fleet.get("/metrics").text
    finally:
        for row in fleet.status()["engines"]:
            if row["held"]:
                order(fleet, "undrain", engine=row["id"])
        order(fleet, "scale", engines=2)
    assert [row["id"] for row in fleet.status()["engines"]] == ["e0", "e1"]
    assert not [path for path in fleet.runtime().files() if "-e2" in path.name]


class Shrink(OrderUnder):
    """Takes the new engine away while it has the stream."""

    def __init__(self, fleet: FleetProcess) -> None:
        super().__init__(fleet, "scale", engines=2)

    def _give(self, engine: str) -> None:
        assert engine == "e2"
        for name in ("e0", "e1"):
            order(self.fleet, "undrain", engine=name)
        self.result = order(self.fleet, "scale", engines=2)
