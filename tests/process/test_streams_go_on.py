"""What happens to running streams when engines die, freeze, hang or crawl, and clients leave."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.asking import ANSWER_TIMEOUT_S, COMPLETIONS, Answer, Ask, Fault, ask
from tests.same_answers import assert_same
from tests.waiting import until
from zerolayer.arena.tables import StallDetectCfg, StallSettings
from zerolayer.bench import chaos_signals
from zerolayer.bench.fleet_process import FleetProcess

TOKENS = 40
MID = 15
STORY = Ask(
    COMPLETIONS,
    {
        "prompt": "In the harbour the fishermen spoke of a storm that", "max_tokens": TOKENS,
        "temperature": 0.8, "seed": 99, "ignore_eos": True,
    },
)  # fmt: skip
ENDLESS = STORY.but(max_tokens=3000)


@pytest.fixture(scope="module")
def story(shared_fleet: FleetProcess) -> Answer:
    """The undisturbed answer."""
    shared_fleet.wait_all_ready()
    answer = ask(shared_fleet, STORY)
    assert not answer.moves
    return answer


class Blow(Fault):
    """A fault that is something else than a signal to the whole tree."""

    def __init__(self, fleet: FleetProcess, act: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(fleet, signal.SIGKILL, MID)
        self._act = act

    def strike(self) -> None:
        if self.victim is not None and not self.struck:
            self.struck = True
            self._act(self.victim)


def engine(fleet: FleetProcess, name: str) -> dict[str, Any]:
    return chaos_signals.engine_row(fleet.status(), name)


@contextlib.contextmanager
def streaming(fleet: FleetProcess, request: Ask) -> Iterator[Iterator[str]]:
    """The lines of a stream that is left on purpose at the block's end."""
    with (
        httpx.Client(base_url=fleet.base_url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as http,
        http.stream("POST", request.path, json=request.sent()) as response,
    ):
        yield (line for line in response.iter_lines() if line.startswith("data:"))


def test_engines_have_process_groups_of_their_own_in_the_session_of_the_serving_process(
    fleet: FleetProcess,
) -> None:
    """A group keeps Ctrl-C away; sessions are weighed against each other (sched_autogroup)."""
    for row in fleet.status()["engines"]:
        pids = chaos_signals.engine_pids(row)
        assert {os.getpgid(pid) for pid in pids} == {row["core_pid"]}
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}


def test_a_client_that_leaves_ends_its_work_at_once(fleet: FleetProcess) -> None:
    before = fleet.status()["totals"]["outcomes"].get("client_left", 0)
    with streaming(fleet, ENDLESS.but(n=2)) as lines:
        for _ in range(6):
            next(lines)
        assert fleet.status()["streams"]["active"] == 2

    def at_rest(status: dict[str, Any]) -> bool:
        load = [row["streams"] + row["running"] + row["waiting"] for row in status["engines"]]
        return status["streams"]["active"] == 0 and not any(load)

    status = until(lambda: status if at_rest(status := fleet.status()) else None, seconds=1.0)
    assert status["totals"]["outcomes"]["client_left"] == before + 2


def test_an_engine_that_dies_before_the_first_token_costs_nothing_but_time(
    fleet: FleetProcess,
) -> None:
    prompt = " ".join(str(number) for number in range(800))
    request = Ask(COMPLETIONS, STORY.but(prompt=prompt, max_tokens=8).body, stream=False)
    reference = ask(fleet, request)
    got = ask(fleet, request, fault := Fault(fleet, signal.SIGKILL, after_tokens=0))
    assert_same(got, reference)
    assert fault.victim is not None
    assert [(m["from"], m["delivered_tokens"]) for m in got.moves] == [(fault.victim["id"], 0)]


@pytest.mark.parametrize("which", ["worker", "core"])
def test_a_stream_leaves_an_engine_of_which_one_process_is_frozen(
    fleet: FleetProcess, story: Answer, which: str
) -> None:
    def freeze(victim: dict[str, Any]) -> None:
        pids = victim["worker_pids"] if which == "worker" else [victim["core_pid"]]
        chaos_signals.send({**victim, "core_pid": None, "worker_pids": pids}, signal.SIGSTOP)

    got = ask(fleet, STORY, Blow(fleet, freeze))
    assert_same(got, story)
    assert [move["reason"] for move in got.moves] == ["stalled: stopped"]


def test_a_killed_engine_comes_back_by_itself_and_says_what_it_died_of(
    fleet: FleetProcess, story: Answer
) -> None:
    before = {row["id"]: row for row in fleet.status()["engines"]}
    got = ask(fleet, STORY, fault := Fault(fleet, signal.SIGKILL, MID))
    assert_same(got, story)
    assert fault.victim is not None
    name = fault.victim["id"]
    fleet.wait_all_ready()
    row = engine(fleet, name)
    assert row["restarts"] == before[name]["restarts"] + 1
    assert row["incarnation"] == before[name]["incarnation"] + 1
    assert row["core_pid"] not in (None, before[name]["core_pid"])
    assert "SIGKILL" in row["last_fault"] or "ended" in row["last_fault"]
    assert not any(psutil.pid_exists(pid) for pid in chaos_signals.engine_pids(before[name]))
    labels = fleet.get("/metrics").text
    assert 'engine="0"' in labels
    assert 'engine="1"' in labels


@pytest.mark.parametrize(("mode", "factor"), [("hang", 1.0), ("slow", 20.0)])
def test_a_stream_leaves_an_engine_that_spins_or_crawls(
    fleet: FleetProcess, story: Answer, mode: str, factor: float
) -> None:
    got = ask(fleet, STORY, Blow(fleet, lambda row: fleet.order(row["id"], mode, factor)))
    assert_same(got, story)
    assert got.moves, "the stream stayed where it was"


def test_a_stream_without_any_engine_waits_and_goes_on_from_the_arena(
    fleet: FleetProcess, story: Answer
) -> None:
    def kill_all(_victim: dict[str, Any]) -> None:
        for row in fleet.status()["engines"]:
            chaos_signals.send(row, signal.SIGKILL)

    got = ask(fleet, STORY, Blow(fleet, kill_all))
    assert_same(got, story)
    assert got.moves
    assert all(move["restored_tokens"] > 0 for move in got.moves), got.moves


def test_a_woken_engine_adds_nothing_and_is_taken_back(fleet: FleetProcess, story: Answer) -> None:
    """It is woken while the stream goes on elsewhere, so its late tokens meet a live stream."""
    frozen: list[str] = []

    class FreezeAndWake(Fault):
        def tokens_came(self, tokens: int) -> None:
            super().tokens_came(tokens)
            if tokens >= MID + 8 and self.victim is not None and frozen == []:
                frozen.append(self.victim["id"])
                self.fleet.cont(frozen[0])

    got = ask(fleet, STORY, FreezeAndWake(fleet, signal.SIGSTOP, MID))
    assert_same(got, story)
    assert len(got.moves) == 1
    assert frozen == [got.moves[0]["from"]]
    incarnation = engine(fleet, frozen[0])["incarnation"]
    fleet.wait_all_ready()
    row = engine(fleet, frozen[0])
    assert (row["incarnation"], row["streams"]) == (incarnation, 0)


def test_an_engine_that_stays_frozen_is_replaced_when_the_operator_says_so(
    fleet: FleetProcess,
) -> None:
    config = StallDetectCfg.open_writer(fleet.runtime().table_path("stall_detect_cfg"))
    before = engine(fleet, "e1")
    try:
        config.write(StallSettings(restart_after_s=1.0))
        with streaming(fleet, ENDLESS.but(n=2)) as lines:
            next(lines)
            fleet.stop("e1")
            until(lambda: engine(fleet, "e1")["restarts"] > before["restarts"], seconds=30.0)
        fleet.wait_all_ready()
    finally:
        config.write(StallSettings())
        config.close()
    assert engine(fleet, "e1")["incarnation"] == before["incarnation"] + 1
